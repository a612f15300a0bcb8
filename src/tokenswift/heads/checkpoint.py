"""The file format of draft heads, and the check that heads and base model belong together.

A heads file is one safetensors file: the tensors of :class:`Heads` under ``heads.``, a sample of
the base model's weights under ``base.sample``, and a JSON object under ``tokenswift_heads`` in the
header's metadata. The sample is the base's identity. It is compared with a tolerance, so a base
model cast to another dtype still matches, and a fine-tuned one does not.
"""

from __future__ import annotations

import copy
import json
import math
import os
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tokenswift.config import shown
from tokenswift.files import replacing
from tokenswift.heads.modules import Heads, HeadsConfig
from tokenswift.identity import SAMPLE_SIZE, TOLERANCE, distance, sample_of
from tokenswift.types import InputError

FORMAT_VERSION = 1
METADATA_KEY = "tokenswift_heads"


@dataclass(frozen=True, slots=True)
class HeadsBase:
    """The identity of a base model.

    Attributes:
        name: its name, for messages only.
        hidden_size, vocab_size: D and V.
        sample: values of its input embedding, then of a weight of its middle layer, float32.
    """

    name: str
    hidden_size: int
    vocab_size: int
    sample: Tensor

    def distance(self, other: HeadsBase) -> float:
        """Relative distance of the two samples; infinite when the shapes differ."""
        if (self.hidden_size, self.vocab_size) != (other.hidden_size, other.vocab_size):
            return float("inf")
        if self.sample.shape != other.sample.shape:
            return float("inf")
        parts = zip(self.sample.split(SAMPLE_SIZE), other.sample.split(SAMPLE_SIZE), strict=True)
        return max(distance(a, b) for a, b in parts)


def base_of(model: Any, name: str | None = None) -> HeadsBase:
    """The identity of a loaded transformers causal LM."""
    embedding = model.get_input_embeddings().weight
    layers = model.base_model.layers
    middle = next(p for p in layers[len(layers) // 2].parameters() if p.ndim == 2)
    known = name or getattr(model.config, "_name_or_path", "") or model.config.model_type
    return HeadsBase(
        name=os.path.basename(str(known).rstrip("/")) or str(known),
        hidden_size=embedding.shape[1],
        vocab_size=embedding.shape[0],
        sample=torch.cat((sample_of(embedding), sample_of(middle))),
    )


def check_base(heads: str, wanted: HeadsBase, model: HeadsBase) -> None:
    """Raise :class:`InputError` unless heads made for ``wanted`` fit ``model``."""
    mine = f"hidden size {wanted.hidden_size}, vocabulary {wanted.vocab_size}"
    theirs = f"hidden size {model.hidden_size}, vocabulary {model.vocab_size}"
    if mine != theirs:
        raise InputError(
            f"heads {heads} were made for {wanted.name} ({mine}), the model is {model.name} ({theirs})"
        )
    far = wanted.distance(model)
    if not far <= TOLERANCE:
        raise InputError(
            f"heads {heads} were made for {wanted.name}, the model is {model.name}: "
            f"their weights differ by {far:.0%}"
        )


def save_heads(
    heads: Heads,
    path: str | Path,
    base: HeadsBase,
    dtype: torch.dtype = torch.bfloat16,
    notes: dict[str, Any] | None = None,
) -> None:
    """Write a heads file; a failure leaves no half-written file behind.

    Args:
        heads: the heads.
        path: the file; by custom it ends in ``.heads.safetensors``.
        base: the identity of their base model, from :func:`base_of`.
        dtype: type of the stored weights.
        notes: JSON values kept in the header (how the heads were trained).
    """
    path = Path(path)
    tensors = {f"heads.{k}": v.detach().to("cpu", dtype).contiguous() for k, v in heads.state_dict().items()}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"heads tensor {name} is not finite; nothing was written to {path}")
    tensors["base.sample"] = base.sample.float().contiguous()
    if heads.frequent is not None:
        tensors["draft.frequent"] = heads.frequent.to("cpu", torch.int32).contiguous()
    header = {
        "version": FORMAT_VERSION,
        "base": base.name,
        "heads": heads.config.to_dict(),
        "notes": notes or {},
    }
    if heads.calibration is not None:
        header["calibration"] = heads.calibration
    try:
        with replacing(path) as part:
            save_file(tensors, part, metadata={METADATA_KEY: json.dumps(header)})
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write heads to {path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def read_heads(path: str | Path) -> tuple[Heads, HeadsBase, dict[str, Any]]:
    """A heads file's content: float32 heads on the CPU, their base's identity, their notes."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"heads file {path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(f"heads file {path} is not a safetensors file: {_reason(error)}") from error
    if METADATA_KEY not in metadata:
        raise InputError(f"{path} holds no draft heads of tokenswift; import-heads reads published ones")
    try:
        header = json.loads(metadata[METADATA_KEY])
        version = header["version"]
        if version != FORMAT_VERSION:
            raise InputError(f"heads file {path} has format version {version}; known: {FORMAT_VERSION}")
        config = HeadsConfig.from_dict(header["heads"])
    except InputError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"heads file {path} has a broken header: {_reason(error)}") from error
    sample = tensors.pop("base.sample", None)
    if sample is None:
        raise InputError(f"heads file {path} lacks tensor base.sample")
    frequent = tensors.pop("draft.frequent", None)
    heads = build_heads(config, {k.removeprefix("heads."): v for k, v in tensors.items()}, str(path))
    if frequent is not None:
        if not len(frequent) or int(frequent.min()) < 0 or int(frequent.max()) >= config.vocab_size:
            raise InputError(f"heads file {path} names frequent tokens outside 0 to {config.vocab_size - 1}")
        heads.frequent = frequent.long()
    heads.calibration = _calibration(header.get("calibration"), path)
    heads.source = str(path)
    base = HeadsBase(str(header.get("base", "?")), config.hidden_size, config.vocab_size, sample.float())
    return heads, base, dict(header.get("notes") or {})


def _calibration(found: Any, path: Path) -> dict[str, list[list[float]]] | None:
    """The weights of `drafting.calibration` that a header holds: two lists of six numbers for each source."""
    if found is None:
        return None
    try:
        kept = {
            str(name): [[float(weight) for weight in row] for row in rows] for name, rows in found.items()
        }
        shapes = {tuple(map(len, rows)) for rows in kept.values()}
        numbers = [weight for rows in kept.values() for row in rows for weight in row]
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"heads file {path} has a broken calibration: {_reason(error)}") from error
    if shapes - {(6, 6)} or not all(map(math.isfinite, numbers)):
        raise InputError(
            f"heads file {path} has a broken calibration; valid: six finite numbers, twice a source"
        )
    return kept


def build_heads(config: HeadsConfig, tensors: dict[str, Tensor], source: str) -> Heads:
    """Heads from named tensors; every fault of the tensors is an :class:`InputError`."""
    heads = Heads(config)
    wanted = heads.state_dict()
    for name, tensor in wanted.items():
        if name not in tensors:
            raise InputError(f"heads in {source} lack tensor {name}")
        if tensors[name].shape != tensor.shape:
            found, need = list(tensors[name].shape), list(tensor.shape)
            raise InputError(f"heads in {source}: tensor {name} has shape {found}; {need} is needed")
        if not bool(torch.isfinite(tensors[name]).all()):
            raise InputError(f"heads in {source}: tensor {name} holds values that are not finite")
    unknown = sorted(set(tensors) - set(wanted))
    if unknown:
        raise InputError(f"heads in {source} hold an unknown tensor {unknown[0]}")
    heads.load_state_dict({name: tensors[name].float() for name in wanted})
    return heads.eval().requires_grad_(False)


def load_heads(path: str | Path, model: Any) -> Heads:
    """Heads from a file, checked against the model they are to draft for.

    Args:
        path: a heads file.
        model: the loaded transformers causal LM.
    """
    heads, base, _ = read_heads(path)
    check_base(str(path), base, base_of(model))
    return heads.to(dtype=model.dtype, device=model.device)


def packaged_kinds(model: Any) -> dict[str, Traversable]:
    """The files of the shipped heads that were made for this model, by kind, in the order of their names.

    Only headers and samples are read, and those only where the sizes fit.
    """
    identity = base_of(model)
    found: dict[str, Traversable] = {}
    for entry in sorted(resources.files("tokenswift").joinpath("data").iterdir(), key=lambda e: e.name):
        if not entry.name.endswith(".heads.safetensors"):
            continue
        with resources.as_file(entry) as path, safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(METADATA_KEY, "{}"))
            config = header.get("heads", {})
            if (config.get("hidden_size"), config.get("vocab_size")) != (
                identity.hidden_size,
                identity.vocab_size,
            ):
                continue
            sample = file.get_tensor("base.sample").float()
        base = HeadsBase(str(header.get("base")), identity.hidden_size, identity.vocab_size, sample)
        if base.distance(identity) <= TOLERANCE:
            found.setdefault(config["kind"], entry)
    return found


def packaged_heads(model: Any, kind: str | None = None) -> Heads | None:
    """The shipped heads that were made for this model, if there are any: the first file by name, or
    the first of a ``kind``."""
    found = packaged_kinds(model)
    entry = next(iter(found.values()), None) if kind is None else found.get(kind)
    if entry is None:
        return None
    heads = read_packaged(entry)
    return heads.to(dtype=model.dtype, device=model.device)


def read_packaged(entry: Traversable) -> Heads:
    """Shipped heads from :func:`packaged_kinds`, which has seen that they fit; float32 on the CPU."""
    with resources.as_file(entry) as path:
        heads, _, _ = read_heads(path)
    heads.source = f"{entry.name} (shipped)"
    return heads


def resolve_heads(spec: str | Path | Heads | None, model: Any) -> Heads | None:
    """The heads that a ``heads=`` argument or ``--heads`` names.

    Args:
        spec: "auto" (heads in the model's own folder, shipped heads that fit the model, else none),
            "none" or None, the path of a heads file, or the heads themselves.
        model: the loaded transformers causal LM.
    """
    if spec is None or spec == "none":
        return None
    if isinstance(spec, Heads):
        width = base_of(model).hidden_size
        if spec.config.hidden_size != width:
            raise InputError(f"heads have hidden size {spec.config.hidden_size}, the model has {width}")
        same = (spec.dtype, next(spec.parameters()).device) == (model.dtype, model.device)
        return spec if same else copy.deepcopy(spec).to(dtype=model.dtype, device=model.device)
    if not isinstance(spec, str | Path):
        raise InputError(f"heads is {shown(spec)}; valid: auto, none, an adapter file, or Heads")
    if spec == "auto":
        return _heads_beside(model) or packaged_heads(model)
    return load_heads(spec, model)


def _heads_beside(model: Any) -> Heads | None:
    """The heads inside a checkpoint of the published layout that the model was loaded from, a folder's or
    a hub id's."""
    from tokenswift.heads.published import cached_folder, holds_heads, import_checkpoint

    name = getattr(model.config, "_name_or_path", "")
    folder = cached_folder(name) if name else None
    if folder is None or not holds_heads(folder):
        return None
    heads, _ = import_checkpoint(folder, model)
    heads.source = str(folder)
    return heads.to(dtype=model.dtype, device=model.device)
