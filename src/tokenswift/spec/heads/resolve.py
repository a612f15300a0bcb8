"""Which heads a name means: those beside a model, shipped ones, or those of a file."""

from __future__ import annotations

import copy
import json
import logging
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tokenswift.config import HEAD_KINDS, shown
from tokenswift.loader.identity import TOLERANCE, BaseIdentity
from tokenswift.loader.shipped import weights, where
from tokenswift.spec.heads.checkpoint import (
    METADATA_KEY,
    HeadsHost,
    fitted,
    host_of,
    load_heads,
    read_heads,
)
from tokenswift.spec.heads.modules import Heads
from tokenswift.spec.heads.published import cached_folder, holds_heads, import_checkpoint
from tokenswift.types import InputError

#: greatest distance of a model from the one that shipped heads were made for: that one's weights are those of
#: a Q4_1 file, rounding to which moves weights by .08 of their size; the model before it gets them, too
ROUNDED = 0.15

logger = logging.getLogger("tokenswift")


def packaged_kinds(model: Any) -> dict[str, Traversable]:
    """The files of the shipped heads that were made for this model, or for its weights quantized,
    by kind, in the order of their names.

    Only headers and samples are read, and those only where the sizes fit.
    """
    identity = host_of(model).base
    found: dict[str, Traversable] = {}
    for entry, header in _of_sizes(identity.hidden_size, identity.vocab_size):
        with resources.as_file(entry) as path, safe_open(path, framework="pt") as file:
            sample = file.get_tensor("base.sample").float()
        base = BaseIdentity(str(header.get("base")), identity.hidden_size, identity.vocab_size, sample)
        if base.distance(identity) <= ROUNDED:
            found.setdefault(header["heads"]["kind"], entry)
    return found


def may_have_heads(hidden: int, vocab: int) -> bool:
    """Whether shipped heads are of a model's sizes, D and V; only headers are read."""
    return bool(_of_sizes(hidden, vocab))


def _of_sizes(hidden: int, vocab: int) -> list[tuple[Traversable, dict[str, Any]]]:
    """The files of shipped heads for a model of these sizes, and their headers."""
    found = []
    for entry in weights(".heads.safetensors"):
        with resources.as_file(entry) as path, safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(METADATA_KEY, "{}"))
        config = header.get("heads", {})
        if (config.get("hidden_size"), config.get("vocab_size")) == (hidden, vocab):
            found.append((entry, header))
    return found


def packaged_heads(model: Any, kind: str | None = None) -> Heads | None:
    """The shipped heads that were made for this model, if there are any: the first file by name, or
    the first of a ``kind``."""
    host = host_of(model)
    found = packaged_kinds(host)
    entry = next(iter(found.values()), None) if kind is None else found.get(kind)
    if entry is None:
        return None
    with resources.as_file(entry) as path:
        heads, base, _ = read_heads(path)
    if (far := base.distance(host.base)) > TOLERANCE:
        logger.info(
            "the shipped heads were made for %s, whose weights differ from this model's by %.0f%%, as "
            "quantization does; they may guess less well here, and cannot change the text",
            base.name,
            100 * far,
        )
    return fitted(_shipped(heads, entry), host)


def read_packaged(entry: Traversable) -> Heads:
    """Shipped heads from :func:`packaged_kinds`, which has seen that they fit; float32 on the CPU."""
    with resources.as_file(entry) as path:
        heads, _, _ = read_heads(path)
    return _shipped(heads, entry)


def _shipped(heads: Heads, entry: Traversable) -> Heads:
    heads.source = f"{entry.name} (shipped)"
    return heads


def resolve_heads(spec: str | Path | Heads | None, model: Any) -> Heads | None:
    """The heads that a ``heads=`` argument or ``--heads`` names.

    Args:
        spec: "auto" (heads in the model's own folder, shipped heads that fit the model, else none),
            "none" or None, a kind of shipped heads, the path of a heads file, or the heads themselves.
        model: the loaded transformers causal LM, or its :class:`HeadsHost`.
    Raises:
        InputError: a file that holds no heads for this model, or no heads of that kind are shipped for it.
    """
    if spec is None or spec == "none":
        return None
    host = host_of(model)
    if isinstance(spec, Heads):
        width = host.base.hidden_size
        if spec.config.hidden_size != width:
            raise InputError(f"heads have hidden size {spec.config.hidden_size}, the model has {width}")
        same = (spec.dtype, next(spec.parameters()).device) == (host.dtype, host.device)
        return spec if same else copy.deepcopy(spec).to(dtype=host.dtype, device=host.device)
    if not isinstance(spec, str | Path):
        raise InputError(f"heads is {shown(spec)}; valid: auto, none, a kind, an adapter file, or Heads")
    if spec == "auto":
        return _heads_beside(host) or packaged_heads(host)
    if spec in HEAD_KINDS:
        shipped = packaged_heads(host, str(spec))
        if shipped is None:
            raise InputError(
                f"heads is {shown(spec)}, and no {spec} heads are shipped for {host.base.name}{where()}; "
                "valid: auto, none, or an adapter file",
                "heads",
            )
        return shipped
    return load_heads(spec, host)


def _heads_beside(host: HeadsHost) -> Heads | None:
    """The heads inside a checkpoint of the published layout that the model was loaded from, a folder's or
    a hub id's."""
    folder = cached_folder(host.place) if host.place else None
    if folder is None or host.model is None or not holds_heads(folder):
        return None
    heads, _ = import_checkpoint(folder, host.model)
    heads.source = str(folder)
    return fitted(heads, host)
