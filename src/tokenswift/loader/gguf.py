"""GGUF files: what they say of a model, and their tensors, read in place.

What would make another model of the same numbers is refused, not passed over.

A file names its tensors and numbers in its own way, and Llama's converter permutes the rows of
queries and keys, for positions that pair neighbours. Here all of it gets the names and the order of
transformers' checkpoints; weights stay in the format of the file, whose rows are moved whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tokenswift.checks import shown
from tokenswift.kernels.formats import FORMATS, Stored
from tokenswift.loader.drafting import (
    BEGINNING,
    EMBEDDING_NORM,
    GGUF_NAMES,
    STATE_NORM,
    drafting_names,
)
from tokenswift.loader.experts import SHARED_GATE, Part, split_entries
from tokenswift.loader.families import FAMILIES
from tokenswift.loader.family import Family
from tokenswift.loader.fused import split_fused
from tokenswift.loader.gguf_header import WEIGHTS, Header, Place, read_header
from tokenswift.loader.gguf_names import (
    ARCHITECTURES,
    EXPERTS,
    FUSED_NAMES,
    HAVE_BIASES,
    INNER,
    LFM2_NORM,
    NORMS,
    NUMBER_KEYS,
    OF_POSITIONS,
    OUTER,
    RECURRENT,
    RECURRENT_VECTORS,
    SETTINGS,
    SINKS_NAME,
)
from tokenswift.loader.layout import NORM, SINKS, Layout
from tokenswift.loader.named_sampling import SAMPLING
from tokenswift.loader.parts import part_paths
from tokenswift.loader.recurrent import DELTA_NORM, DELTA_RATE, DELTA_TAPS, SHORT_TAPS
from tokenswift.loader.schema import refusal
from tokenswift.loader.tensors import DENSE, MOST_TENSORS, Entry, check_tensors, mapped
from tokenswift.loader.weights import Weights, unstored
from tokenswift.types import InputError

#: ends of the names of convolutions' taps
TAPS = (f"{SHORT_TAPS}.weight", f"{DELTA_TAPS}.weight")
#: what is valid where a part of a model is not named as one
PART_NAME = "a file named …-00001-of-00003.gguf, as llama.cpp names parts"


class GgufFile:
    """A GGUF file, or the files of a model that is split into several (`loader.parts`).

    Args:
        path: of the file; of any part of a split one.
    Raises:
        InputError: it cannot be read, or is not a complete GGUF file of a known version; or a part
            is missing, or is none of this model's.

    Attributes:
        path: the file, the first one of several.
        where: the file, for messages.
        metadata: its values by key; numbers and texts, and lists of them. The first of several
            files has them.
        tensors: its tensors by name, those of all files.
        architecture: the file's own name of its model's kind.
    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.path = path
        self.metadata: Mapping[str, object] = header.metadata
        self.tensors = header.tensors
        count = header.metadata.get("split.count", 1)
        if count not in (0, 1):
            self._join_parts(count)
        self.where = f"model file {self.path}"
        self.architecture = str(self.metadata.get("general.architecture"))

    def _join_parts(self, count: object) -> None:
        """Read the header of each part.

        Args:
            count: parts, as the part at ``path`` says.
        """
        paths = part_paths(self.path)
        where = f"model file {self.path}"
        if count != len(paths):
            number = self.metadata.get("split.no")
            valid = f"{shown(len(paths))}, as its name says" if len(paths) > 1 else PART_NAME
            stated = f"split.count is {shown(count)}, split.no is {shown(number)}"
            raise InputError(f"{where}: {stated}; valid: {valid}")
        for part in paths:
            if not part.is_file():
                raise InputError(
                    f"{where} is one of {count} parts of a model, and {part.name} is not in its "
                    "folder; valid: all parts in one folder"
                )
        headers = [read_header(part) for part in paths]
        tensors: dict[str, Place] = {}
        for number, (part, header) in enumerate(zip(paths, headers, strict=True)):
            _check_part(part, header, number, len(paths))
            twice = sorted(tensors.keys() & header.tensors.keys())
            if twice:
                valid = "parts that share none"
                raise refusal(f"model file {part}", "a tensor of another part", twice[0], valid)
            tensors.update(header.tensors)
        expected = headers[0].metadata.get("split.tensors.count")
        total = len(tensors)
        if expected != total or total > MOST_TENSORS:
            valid = f"{total}, the tensors of all parts, up to {MOST_TENSORS}"
            raise refusal(f"model file {paths[0]}", "split.tensors.count", expected, valid)
        self.path = paths[0]
        self.metadata = headers[0].metadata
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor | Stored:
        """A tensor, as it lies in the file (:func:`mapped`)."""
        place = self.tensors[name]
        data = mapped(place.path, place.start, place.nbytes)
        dtype = DENSE.get(place.kind)
        if dtype is not None:
            return data.view(dtype).view(place.shape)
        rows = math.prod(place.shape[:-1])
        stored = Stored(FORMATS[place.kind.lower()], data.view(rows, -1))
        return stored if len(place.shape) == 2 else stored.decode().view(place.shape)

    def part(self, name: str, index: int) -> Tensor | Stored:
        """One matrix of a tensor of three dimensions, as it lies in the file."""
        place = self.tensors[name]
        count, rows, columns = place.shape
        nbytes = place.nbytes // count
        data = mapped(place.path, place.start + index * nbytes, nbytes)
        dtype = DENSE.get(place.kind)
        if dtype is not None:
            return data.view(dtype).view(rows, columns)
        return Stored(FORMATS[place.kind.lower()], data.view(rows, -1))

    def number(self, name: str, default: float | None = None) -> float:
        """A number of the file's architecture; one for each layer only where they are the same.

        Raises:
            InputError: it is not there and there is no default.
        """
        key = f"{self.architecture}.{name}"
        value = self.metadata.get(key, default)
        if isinstance(value, list):
            value = [entry for entry in value if entry != 0 or not self.is_recurrent()]
            value = value[0] if value and all(entry == value[0] for entry in value) else None
        if isinstance(value, float):
            return short(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise InputError(f"{self.where} lacks {key}, a number; valid: a whole model's file")

    def number_keys(self) -> dict[str, str]:
        """What the file calls the numbers of a config, behind the name of the architecture."""
        kind = self.family_name()
        return {**NUMBER_KEYS, **(FAMILIES[kind].gguf_keys if kind else {})}

    def family_name(self) -> str | None:
        """The family of the model, but for one that differs by its windows alone; None: it is none
        that runs."""
        kind = ARCHITECTURES.get(self.architecture)
        if kind == "llama" and self.metadata.get("llama.expert_count", 0) != 0:
            return "mixtral"
        return kind

    def is_recurrent(self) -> bool:
        """Whether the model may have recurrent layers, of which numbers of attention are 0."""
        kind = self.family_name()
        return kind is not None and FAMILIES[kind].recurrent != ""

    def full_keys(self) -> dict[str, str]:
        """What the file calls the numbers of a config."""
        return {name: f"{self.architecture}.{key}" for name, key in self.number_keys().items()}

    def sampling(self) -> dict[str, object]:
        """Settings of sampling that the file names, floats without what float32 made of them."""
        settings: dict[str, object] = {}
        for name in SAMPLING:
            value = self.metadata.get(f"general.sampling.{SETTINGS.get(name, name)}")
            if value is not None:
                settings[name] = round(value, 6) if isinstance(value, float) else value
        return settings


def _check_part(path: Path, header: Header, number: int, count: int) -> None:
    """Refuse a file that does not say that it is this part of so many."""
    for key, valid in {"split.no": number, "split.count": count}.items():
        value = header.metadata.get(key)
        if value != valid:
            raise refusal(f"model file {path}", key, value, str(valid))


def short(value: float) -> float:
    """The shortest decimal number that is the same in float32: 1e-05 for 9.99999974e-06."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))


# ---- weights -------------------------------------------------------------------------------------


def weights_of(file: GgufFile, layout: Layout, dtype: torch.dtype, kind: str) -> Weights:
    """Weights of a GGUF file: matrices in a quantized format as they are stored, rows in the order
    of transformers' checkpoints, and norms as there, where files have what they multiply by.

    Args:
        layout: which weights there must be.
        dtype, kind: as of `weights.Weights`.
    Raises:
        InputError: tensors are missing, of other shapes or types, or none of the family's.
    """
    family = layout.family
    layers = layout.num_hidden_layers
    file_names = names_of(layers + 1 if family.recurrent else layers, family)
    our_names = {theirs: name for name, theirs in file_names.items()}
    if family.recurrent:
        our_names[LFM2_NORM] = NORM
        for theirs, name in GGUF_NAMES.items():
            our_names[f"blk.{layers}.{theirs}"] = name
    entries: dict[str, Entry] = {}
    for theirs, place in file.tensors.items():
        if theirs in OF_POSITIONS:
            continue
        name = our_names.get(theirs, theirs)
        heads = None
        if family.gguf_permuted and ".q_proj." in name:
            heads = layout.num_attention_heads
        elif family.gguf_permuted and ".k_proj." in name:
            heads = layout.num_key_value_heads
        is_norm = name.endswith("norm.weight") and not name.endswith(f"{DELTA_NORM}.weight")
        is_norm = is_norm or name in (EMBEDDING_NORM, STATE_NORM)
        has_one_added = family.plus_one and is_norm
        read = partial(read_tensor, file, theirs, heads, has_one_added)
        shape = place.shape
        if name.endswith(TAPS) and len(shape) == 2:
            shape = (shape[0], 1, shape[1])
            read = partial(_taps, read)
        if name.endswith(DELTA_RATE):
            read = partial(_logarithms, read)
        entries[name] = Entry(theirs, shape, place.kind, read)
    drafting = _split_drafting(entries, layers)
    if family.fused:
        entries = split_fused(entries, layout, file.where)
    if layout.mixture is not None:
        entries = _split_experts(file, entries, layout)
        with suppress(InputError):  # of another shape, it is of another kind
            drafting = _split_experts(file, drafting, layout)
    shapes = layout.shapes()
    optional = [name for name in shapes if name.endswith("o_proj.bias")]  # 0 where there is none
    check_tensors(entries, shapes, WEIGHTS, file.where, optional)
    return Weights(layout, dtype, entries, kind, drafting)


def _split_experts(
    file: GgufFile, entries: Mapping[str, Entry], layout: Layout
) -> dict[str, Entry]:
    """The weights and biases of each expert by themselves."""

    def read(entry: Entry, part: Part) -> Tensor | Stored:
        if len(entry.shape) == 3:
            matrix = file.part(entry.name, part.expert)
            rows = torch.arange(len(matrix))[part.rows]
            if len(rows) == len(matrix):
                return matrix
            return matrix.take(rows) if isinstance(matrix, Stored) else matrix[rows]
        return unstored(file[entry.name], torch.float32)[part.expert]

    split = split_entries(entries, layout, file.where, read)
    width = layout.hidden_size
    for name, entry in split.items():
        if name.endswith(SHARED_GATE) and entry.shape == (width,):  # a row, without saying so
            row = partial(_row, entry.get)
            split[name] = Entry(entry.name, (1, width), entry.kind, row)
    return split


def _row(read: Callable[[], Tensor | Stored]) -> Tensor:
    """A vector as a matrix of one row."""
    return unstored(read(), torch.float32).view(1, -1)


def _split_drafting(entries: dict[str, Entry], layers: int) -> dict[str, Entry]:
    """Take out the tensors of a layer behind the last, which drafts."""
    beyond = f"model.layers.{layers}."
    drafting = {
        name: entries.pop(name) for name in list(entries) if name.startswith((beyond, BEGINNING))
    }
    return drafting_names(drafting, beyond)


def _logarithms(read: Callable[[], Tensor | Stored]) -> Tensor:
    """Rates of decay as checkpoints have them, where a file has what they stand for."""
    return unstored(read(), torch.float32).double().neg().log().float()


def _taps(read: Callable[[], Tensor | Stored]) -> Tensor:
    """Taps of a convolution as checkpoints have them, (channels, 1, taps)."""
    return unstored(read(), torch.float32).unsqueeze(1)


def names_of(layers: int, family: Family) -> dict[str, str]:
    """What a file calls each tensor that a family's decoder can have, by its name in
    transformers."""
    parts = dict(INNER) if family.experts is None else {**INNER, **EXPERTS}
    if family.fused:
        fused = FUSED_NAMES.values()
        parts = {name: theirs for name, theirs in parts.items() if theirs not in fused}
        parts.update(FUSED_NAMES)
    if family.recurrent:
        parts.update(RECURRENT)
    for name, theirs in zip(family.norms, NORMS, strict=True):
        if name is not None:
            parts[name] = family.gguf_names.get(name, theirs)
    names = dict(OUTER)
    for number in range(layers):
        if family.recurrent:
            for name, theirs in RECURRENT_VECTORS.items():
                names[f"model.layers.{number}.{name}"] = f"blk.{number}.{theirs}"
        for name, theirs in parts.items():
            names[f"model.layers.{number}.{name}.weight"] = f"blk.{number}.{theirs}.weight"
            if name.endswith(HAVE_BIASES):
                names[f"model.layers.{number}.{name}.bias"] = f"blk.{number}.{theirs}.bias"
        if family.sinks:
            names[f"model.layers.{number}.{SINKS}"] = f"blk.{number}.{SINKS_NAME}.weight"
    return names


def read_tensor(
    file: GgufFile, name: str, heads: int | None, has_one_added: bool = False
) -> Tensor | Stored:
    """A tensor with its rows in transformers' order.

    Args:
        heads: of queries or keys whose rows pair neighbours; None: the order is the file's.
        has_one_added: the file has added 1 to it.
    """
    values = file[name]
    if has_one_added:
        return unstored(values, torch.float32) - 1
    return values if heads is None else unpermuted(values, heads)


def unpermuted(weight: Tensor | Stored, heads: int) -> Tensor | Stored:
    """Queries' or keys' weight whose rows pair neighbours, with these rows in transformers'
    order."""
    rows = permuted_rows(len(weight), heads)
    return weight.take(rows) if isinstance(weight, Stored) else weight[rows]


def permuted_rows(rows: int, heads: int) -> Tensor:
    """Where each row of queries or keys stands in a file of the llama kind, which pairs neighbours:
    row i of the first half of a head is at 2 i there, of the second at 2 i + 1."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)
