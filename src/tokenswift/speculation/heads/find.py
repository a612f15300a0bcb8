"""Which draft heads a name means, and which ones were made for a model."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from tokenswift.checks import shown
from tokenswift.config.loading import HEAD_KINDS
from tokenswift.loader.default_model import left_out, rivals_note, shipped_files, trained_files
from tokenswift.loader.find import HEADS, HUB_ID, cached, fetch
from tokenswift.loader.host import HeadsHost, holds_heads
from tokenswift.loader.identity import TOLERANCE, BaseIdentity
from tokenswift.speculation.heads.files import kind_for, read_heads
from tokenswift.speculation.heads.modules import Heads
from tokenswift.types import InputError


def load_heads(path: str | Path, host: HeadsHost) -> Heads:
    """Heads from a file, or from a folder or hub id of a published checkpoint, in the model's type
    and on its device.

    Args:
        path: where the heads are.
        host: the model that they are to draft for.
    Raises:
        InputError: they cannot be read, or were made for another model.
    """
    name = str(path)
    place = Path(path).expanduser()
    is_hub_id = HUB_ID.fullmatch(name) is not None and ".." not in name
    if not place.exists() and place.suffix != ".safetensors" and is_hub_id:
        place = fetch(name)
    heads, base, _ = read_heads(place)
    if not base.distance(host.base) <= TOLERANCE:
        raise InputError(
            f"heads {path} were made for {_described(base)}, "
            f"the model is {_described(host.base)}: their weights differ"
        )
    return in_type_of(host, heads, str(path))


def _described(base: BaseIdentity) -> str:
    return f"{base.name} (hidden size {base.hidden_size}, vocabulary {base.vocab_size})"


def in_type_of(host: HeadsHost, heads: Heads, name: str) -> Heads:
    """Heads in the model's type, on its device.

    Raises:
        InputError: a weight is beyond the type's range.
    """
    heads = heads.to(dtype=host.dtype, device=host.device)
    for parameter_name, parameter in heads.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            kind = str(host.dtype).removeprefix("torch.")
            raise InputError(
                f"heads {name}: {parameter_name} is not finite in {kind}; valid: heads whose "
                "weights are in the range of the model's type, or another dtype"
            )
    return heads


def is_default(host: HeadsHost) -> bool:
    """Whether shipped heads were made for this model. Files that cannot be used are left out."""
    for path in shipped_files(HEADS):
        with left_out(path):
            if kind_for(path, host) is not None:
                return True
    return False


def shipped_heads(host: HeadsHost, kind: str | None = None) -> Heads | None:
    """The heads of a kind that were trained for this model, by the user or as they are shipped, or
    the first ones of any kind; None without. Files that cannot be used are left out."""
    shipped = shipped_files(HEADS)
    for path in (*trained_files(HEADS), *shipped):
        with left_out(path):
            file_kind = kind_for(path, host)
            if file_kind is not None and kind in (None, file_kind):
                heads = in_type_of(host, read_heads(path)[0], path.name)
                heads.source = f"{path.name} (shipped)" if path in shipped else heads.source
                return heads
    return None


def resolve_heads(spec: str | Path | Heads | None, host: HeadsHost) -> Heads | None:
    """The heads that a ``heads=`` argument or ``--heads`` names.

    Args:
        spec: "auto" (heads in the model's own folder, shipped heads that fit the model, else none),
            "none" or None, a kind of shipped heads, a heads file, the folder or hub id of a
            published checkpoint with heads, or the heads themselves.
        host: the model.
    Raises:
        InputError: what holds no heads for this model, or no heads of that kind are shipped for it.
    """
    if spec is None or spec == "none":
        return None
    if isinstance(spec, Heads):
        width = host.base.hidden_size
        if spec.config.hidden_size != width:
            raise InputError(
                f"heads have hidden size {spec.config.hidden_size}, the model has {width}"
            )
        return in_type_of(host, copy.deepcopy(spec), "given")
    if spec == "auto":
        return _heads_beside(host) or shipped_heads(host)
    if isinstance(spec, str | Path) and spec not in HEAD_KINDS:
        return load_heads(spec, host)
    shipped = shipped_heads(host, str(spec))
    if shipped is None:
        raise InputError(
            f"heads is {shown(spec)}; valid: auto, none, a kind whose heads are shipped for "
            f"{host.base.name}"
            f"{rivals_note()}, a heads file, a folder or hub id with heads, or Heads",
            "heads",
        )
    return shipped


def _heads_beside(host: HeadsHost) -> Heads | None:
    """The heads inside a checkpoint of the published layout that the model was loaded from, a
    folder's or a hub id's; None where there are none, or none that can be used."""
    place = Path(host.place) if Path(host.place).exists() else cached(host.place)
    if not (host.place and place and holds_heads(place)):
        return None
    with left_out(place):
        return load_heads(place, host)
    return None
