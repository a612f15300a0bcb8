"""Files of draft heads.

A heads file is one safetensors file: the tensors of `Heads` under ``heads.``, a sample of the base
model's weights as ``base.sample``, and a JSON object under ``tokenswift_heads`` in the header's
metadata. A matrix is of floats, or of bytes: rows of Q8_0 blocks as GGUF files hold them. The
sample is the base's identity. It is compared with a tolerance, so that a base model cast to another
type still matches, and a fine-tuned one does not.

A published checkpoint (`published`) is read as a heads file is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tokenswift.files import line_of, replacing
from tokenswift.kernels.batch import check_ids
from tokenswift.kernels.formats import Q8_0, Stored
from tokenswift.loader.host import HeadsHost
from tokenswift.loader.identity import BaseIdentity
from tokenswift.loader.safetensors_file import SafetensorsFile
from tokenswift.loader.tensors import Entry, dense
from tokenswift.loader.weights import unstored
from tokenswift.speculation.files import read_tensors
from tokenswift.speculation.heads.config import HeadsConfig
from tokenswift.speculation.heads.modules import Heads
from tokenswift.speculation.heads.published import published_heads
from tokenswift.types import InputError

METADATA_KEY = "tokenswift_heads"
PREFIX = "heads."  # what the names of the heads' tensors begin with
SAMPLE = "base.sample"
FREQUENT = "draft.frequent"
MOST_NAME = 200  # characters of a name in messages
#: greatest distance of a model from the one that shipped heads were made for: that one's weights
#: are those of a Q4_1 file, rounding to which moves weights by .08 of their size; the model before
#: it gets them, too
ROUNDED = 0.15
_Row = Annotated[list[float], msgspec.Meta(min_length=6, max_length=6)]
_Rows = Annotated[list[_Row], msgspec.Meta(min_length=2, max_length=2)]


class _Header(msgspec.Struct):
    """The header of a heads file.

    Attributes:
        version: the version of the format.
        heads: what it takes to build them.
        base: the model's name.
        notes: how they were trained.
        calibration: weights of `speculation.calibration`, two rows of six a source.
    """

    version: Annotated[int, msgspec.Meta(ge=1, le=1)]
    heads: HeadsConfig
    base: str = "?"
    notes: dict[str, object] | None = None
    calibration: dict[str, _Rows] | None = None


def save_heads(
    heads: Heads, path: str | Path, base: BaseIdentity, notes: dict[str, object] | None = None
) -> None:
    """Write a heads file, matrices of whole blocks in Q8_0 and all else in float32; a failure
    leaves no half-written file behind.

    Args:
        heads: the heads.
        path: the file; by custom it ends in ``.heads.safetensors``.
        base: the identity of their base model, from `loader.weights.base_of`.
        notes: JSON values kept in the header (how the heads were trained).
    Raises:
        InputError: a weight is not finite, or the file cannot be written.
    """
    tensors = {}
    for name, weight in heads.state_dict().items():
        tensors[PREFIX + name] = weight.detach().float().cpu().contiguous()
    tensors[SAMPLE] = base.sample.float().contiguous()
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"heads tensor {name} is not finite; nothing was written to {path}")
        if tensor.ndim == 2 and tensor.shape[1] % Q8_0.block == 0:
            tensors[name] = Q8_0.encode(tensor)
    if heads.frequent is not None:
        tensors[FREQUENT] = heads.frequent.to("cpu", torch.int32).contiguous()
    header = _Header(1, heads.config, base.name, notes or {}, heads.calibration)
    try:
        with replacing(Path(path)) as part:
            save_file(tensors, part, metadata={METADATA_KEY: msgspec.json.encode(header).decode()})
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write heads to {path}: {line_of(error)}") from error


def read_heads(path: str | Path) -> tuple[Heads, BaseIdentity, dict[str, object]]:
    """The heads in a heads file, or in the folder of a published checkpoint, in float32 on the CPU;
    the identity of their base model; and their notes.

    Raises:
        InputError: it is not there, damaged, or holds no heads.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"heads file {path} does not exist")
    label = f"heads {path}"
    if path.is_dir():
        checkpoint = published_heads(path, label)
        heads = _built(checkpoint.config, checkpoint.tensors, label)
        heads.source = str(path)
        return heads, checkpoint.base(), heads.notes
    file = SafetensorsFile(path, "heads file")
    header = _header(file, path)
    tensors = dict[str, Entry]()
    others = dict[str, Entry]()
    for entry in file.entries.values():
        if entry.name.startswith(PREFIX):
            tensors[entry.name.removeprefix(PREFIX)] = _unpacked(entry)
        else:
            others[entry.name] = entry
    config = header.heads
    heads = _built(config, tensors, label)
    base = _sampled(config, header.base[:MOST_NAME], others, label)
    if FREQUENT in others:
        heads.frequent = ids = dense(others[FREQUENT]).long().flatten()
        check_ids(ids, config.vocab_size)
    heads.source = str(path)
    heads.calibration = header.calibration
    heads.notes = header.notes or {}
    return heads, base, heads.notes


def _sampled(
    config: HeadsConfig, name: str, tensors: Mapping[str, Entry], label: str
) -> BaseIdentity:
    if SAMPLE not in tensors:
        raise InputError(f"{label} lacks tensor {SAMPLE}; valid: a heads file")
    return BaseIdentity(name, config.hidden_size, config.vocab_size, dense(tensors[SAMPLE]).float())


def _unpacked(entry: Entry) -> Entry:
    """A matrix of Q8_0 blocks as what they hold; anything else as it is."""
    if entry.kind != "U8" or len(entry.shape) != 2 or entry.shape[1] % Q8_0.nbytes:
        return entry
    shape = entry.shape[0], entry.shape[1] // Q8_0.nbytes * Q8_0.block
    return Entry(entry.name, shape, "F32", lambda: Stored(Q8_0, dense(entry)))


def _built(config: HeadsConfig, entries: Mapping[str, Entry], label: str) -> Heads:
    with torch.device("meta"):  # no memory, and none of the random numbers that modules begin with
        heads = Heads(config)
    shapes = {name: tuple(part.shape) for name, part in heads.state_dict().items()}
    stored = read_tensors(entries, shapes, label)
    floats = {name: unstored(value, torch.float32).clone() for name, value in stored.items()}
    heads.load_state_dict(floats, assign=True)
    return heads.eval().requires_grad_(False)


def _header(file: SafetensorsFile, path: Path) -> _Header:
    text = file.metadata.get(METADATA_KEY, "null")
    try:
        return msgspec.json.decode(text, type=_Header)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(
            f"{path} holds no draft heads ({line_of(error)}); valid: a heads file"
        ) from error


def kind_for(path: Path, host: HeadsHost) -> str | None:
    """The kind of a file's heads where they were made for this model, or for its weights quantized.
    Only the header and the sample are read."""
    file = SafetensorsFile(path, "heads file")
    config = _header(file, path).heads
    distance = _sampled(config, "", file.entries, f"heads {path}").distance(host.base)
    return config.kind if distance <= ROUNDED else None
