"""The file format of draft heads, and the check that heads and base model belong together.

A heads file is one safetensors file: the tensors of :class:`Heads` under ``heads.``, a sample of
the base model's weights under ``base.sample``, and a JSON object under ``tokenswift_heads`` in the
header's metadata. The sample is the base's identity. It is compared with a tolerance, so a base
model cast to another dtype still matches, and a fine-tuned one does not.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tokenswift.config import shown
from tokenswift.files import line_of, replacing
from tokenswift.loader.identity import SAMPLE_SIZE, TOLERANCE, BaseIdentity, Values, base_of
from tokenswift.loader.weights import open_weights
from tokenswift.spec.heads.modules import Heads, HeadsConfig
from tokenswift.types import InputError

FORMAT_VERSION = 1
METADATA_KEY = "tokenswift_heads"
#: types that weights of heads may have
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST_NAME = 200  # characters of a name in messages


@dataclass(frozen=True, slots=True)
class HeadsHost:
    """The model that heads are to draft for.

    Attributes:
        base: its identity.
        dtype, device: of the weights.
        place: the folder or hub id that it was loaded from, "" where it came from a program.
        model: the transformers model, where it is loaded.
    """

    base: BaseIdentity
    dtype: torch.dtype
    device: torch.device
    place: str
    model: Any = None


def host_of(model: Any, values: Values | None = None) -> HeadsHost:
    """A loaded transformers causal LM as heads see it; a :class:`HeadsHost` as it is. ``values`` as for
    `loader.identity.base_of`."""
    if isinstance(model, HeadsHost):
        return model
    place = getattr(model.config, "_name_or_path", "") or ""
    return HeadsHost(base_of(model, values=values), model.dtype, model.device, str(place), model)


def check_base(heads: str, wanted: BaseIdentity, model: BaseIdentity) -> None:
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
    base: BaseIdentity,
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
    tensors["base.sample"] = base.sample.float().contiguous()
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InputError(f"heads tensor {name} is not finite in {kind}; nothing was written to {path}")
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
        raise InputError(f"cannot write heads to {path}: {line_of(error)}") from error


def read_heads(path: str | Path) -> tuple[Heads, BaseIdentity, dict[str, Any]]:
    """A heads file's content: float32 heads on the CPU, their base's identity, their notes."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"heads file {path} does not exist")
    file = open_weights(path, "heads file")
    said = (file.metadata() or {}).get(METADATA_KEY)
    if said is None:
        raise InputError(f"{path} holds no draft heads of tokenswift; import-heads reads published ones")
    try:
        header = json.loads(said)
        version, notes = header["version"], header.get("notes") or {}
        if version != FORMAT_VERSION:
            raise InputError(
                f"heads file {path} has format version {shown(version)}; known: {FORMAT_VERSION}"
            )
        if not isinstance(notes, dict):
            raise TypeError("notes is not an object")
        config = HeadsConfig(**header["heads"])
    except InputError as error:
        text = str(error)
        raise InputError(text if str(path) in text else f"heads file {path}: {text}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"heads file {path} has a broken header: {line_of(error)}") from error
    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    sample = tensors.pop("base.sample", None)
    if sample is None:
        raise InputError(f"heads file {path} lacks tensor base.sample")
    _check_tensor(str(path), "base.sample", sample, [2 * SAMPLE_SIZE])
    frequent = tensors.pop("draft.frequent", None)
    heads = build_heads(config, {k.removeprefix("heads."): v for k, v in tensors.items()}, str(path))
    if frequent is not None:
        whole = frequent.ndim == 1 and frequent.dtype in (torch.int32, torch.int64)
        if not whole or not 0 < len(frequent) <= config.vocab_size:
            raise InputError(
                f"heads file {path}: tensor draft.frequent is {frequent.dtype} of shape "
                f"{shown(list(frequent.shape))}; valid: 1 to {config.vocab_size} token ids"
            )
        if int(frequent.min()) < 0 or int(frequent.max()) >= config.vocab_size:
            raise InputError(f"heads file {path} names frequent tokens outside 0 to {config.vocab_size - 1}")
        heads.frequent = frequent.long()
    heads.calibration = _calibration(header.get("calibration"), path)
    heads.source, heads.notes = str(path), notes
    name = str(header.get("base", "?"))[:MOST_NAME]
    base = BaseIdentity(name, config.hidden_size, config.vocab_size, sample.float())
    return heads, base, notes


def _calibration(found: Any, path: Path) -> dict[str, list[list[float]]] | None:
    """The weights of `spec.adaptive.acceptance` that a header holds: two lists of six numbers a source."""
    if found is None:
        return None
    try:
        kept = {
            str(name): [[float(weight) for weight in row] for row in rows] for name, rows in found.items()
        }
        shapes = {tuple(map(len, rows)) for rows in kept.values()}
        numbers = [weight for rows in kept.values() for row in rows for weight in row]
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"heads file {path} has a broken calibration: {line_of(error)}") from error
    if shapes - {(6, 6)} or not all(map(math.isfinite, numbers)):
        raise InputError(
            f"heads file {path} has a broken calibration; valid: six finite numbers, twice a source"
        )
    return kept


def build_heads(config: HeadsConfig, tensors: dict[str, Tensor], source: str) -> Heads:
    """Heads from named tensors; every fault of the tensors is an :class:`InputError`."""
    if not config.kind == "conditioned" and config.count * config.blocks > len(tensors):
        raise InputError(f"heads in {source} have {len(tensors)} tensors, too few for {config.count} heads")
    try:
        with torch.device("meta"):
            heads = Heads(config)  # without memory, and without the random numbers that modules begin with
    except RuntimeError as error:  # sizes beyond what a tensor's can be
        raise InputError(f"heads in {source} have impossible sizes: {line_of(error)}") from error
    wanted = heads.state_dict()
    for name, tensor in wanted.items():
        if name not in tensors:
            raise InputError(f"heads in {source} lack tensor {name}")
        _check_tensor(source, name, tensors[name], list(tensor.shape))
    unknown = sorted(set(tensors) - set(wanted))
    if unknown:
        raise InputError(f"heads in {source} hold an unknown tensor {unknown[0][:MOST_NAME]}")
    made = {name: tensors[name].to(torch.float32, copy=True) for name in wanted}
    heads.load_state_dict(made, assign=True)
    return heads.eval().requires_grad_(False)


def _check_tensor(source: str, name: str, tensor: Tensor, shape: list[int]) -> None:
    """Refuse a tensor of a file that is of another shape, of no float type, or not finite.

    Raises:
        InputError: naming it, and what is valid.
    """
    if list(tensor.shape) != shape:
        found = shown(list(tensor.shape))
        raise InputError(f"heads in {source}: tensor {name} has shape {found}; {shape} is needed")
    if tensor.dtype not in TYPES:
        kinds = ", ".join(str(kind).removeprefix("torch.") for kind in TYPES)
        kind = str(tensor.dtype).removeprefix("torch.")
        raise InputError(f"heads in {source}: tensor {name} is of the type {kind}; valid: {kinds}")
    if not bool(torch.isfinite(tensor).all()):
        raise InputError(f"heads in {source}: tensor {name} holds values that are not finite")


def load_heads(path: str | Path, model: Any) -> Heads:
    """Heads from a file, checked against the model they are to draft for.

    Args:
        path: a heads file.
        model: the loaded transformers causal LM, or its :class:`HeadsHost`.
    """
    host = host_of(model)
    heads, base, _ = read_heads(path)
    check_base(str(path), base, host.base)
    return fitted(heads, host)


def fitted(heads: Heads, host: HeadsHost) -> Heads:
    """Finite heads in the model's type and on its device.

    Raises:
        InputError: a weight is beyond the type's range.
    """
    heads = heads.to(dtype=host.dtype, device=host.device)
    for name, tensor in heads.state_dict().items():
        if not bool(torch.isfinite(tensor).all()):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InputError(
                f"heads in {heads.source}: tensor {name} holds values beyond the range of {kind}"
            )
    return heads
