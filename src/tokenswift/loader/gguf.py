"""GGUF files: what they say of a model, and their tensors, read in place.

What would make another model of the same numbers is refused, not passed over.

A file names its tensors and numbers in its own way, and Llama's converter turns the rows of queries
and keys round, for positions that pair neighbours. Here all of it gets the names and the order of
transformers' checkpoints; weights stay in the format of the file, whose rows are moved whole.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenswift.checks import shown
from tokenswift.kernels.formats import FORMATS, Stored
from tokenswift.loader.config import SAMPLING
from tokenswift.loader.families import FAMILIES, Family
from tokenswift.loader.gguf_header import MOST_TENSORS, WEIGHTS, read_header
from tokenswift.loader.gguf_names import (
    ARCHITECTURES,
    CALLED,
    FACTORS,
    INNER,
    NORMS,
    OUTER,
    SETTINGS,
)
from tokenswift.loader.layout import Layout
from tokenswift.loader.parts import part_paths
from tokenswift.loader.schema import refusal
from tokenswift.loader.tensors import DENSE, Entry, check_tensors, mapped
from tokenswift.loader.weights import Weights, unstored
from tokenswift.types import InputError

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
        self.metadata, self.tensors = header.metadata, header.tensors
        count = self.metadata.get("split.count", 1)
        if count not in (0, 1):
            path = self._join_parts(path, count)
        self.path = path
        self.where = f"model file {path}"
        self.architecture = str(self.metadata.get("general.architecture"))

    def _join_parts(self, path: Path, count: object) -> Path:
        """Read the header of each part; returns the path of the first one.

        Args:
            count: parts, as the part at ``path`` says.
        """
        where, paths = f"model file {path}", part_paths(path)
        if count != len(paths):
            number = self.metadata.get("split.no")
            valid = f"{shown(len(paths))}, as its name says" if len(paths) > 1 else PART_NAME
            what = f"split.count is {shown(count)}, split.no is {shown(number)}"
            raise InputError(f"{where}: {what}; valid: {valid}")
        for part in paths:
            if not part.is_file():
                raise InputError(
                    f"{where} is one of {count} parts of a model, and {part.name} is not in its "
                    "folder; valid: all parts in one folder"
                )
        headers = [read_header(part) for part in paths]
        self.metadata = headers[0].metadata
        self.tensors = {}
        for number, (part, header) in enumerate(zip(paths, headers, strict=True)):
            for key, valid in {"split.no": number, "split.count": count}.items():
                if (value := header.metadata.get(key)) != valid:
                    raise refusal(f"model file {part}", key, value, str(valid))
            if twice := sorted(self.tensors.keys() & header.tensors.keys()):
                valid = "parts that share none"
                raise refusal(f"model file {part}", "a tensor of another part", twice[0], valid)
            self.tensors |= header.tensors
        total, expected = len(self.tensors), self.metadata.get("split.tensors.count")
        if expected != total or total > MOST_TENSORS:
            valid = f"{total}, the tensors of all parts, up to {MOST_TENSORS}"
            raise refusal(f"model file {paths[0]}", "split.tensors.count", expected, valid)
        return paths[0]

    def __getitem__(self, name: str) -> Tensor | Stored:
        """A tensor, as it lies in the file (:func:`mapped`)."""
        place = self.tensors[name]
        data = mapped(place.path, place.start, place.nbytes)
        if (kind := DENSE.get(place.kind)) is not None:
            return data.view(kind).view(place.shape)
        stored = Stored(FORMATS[place.kind.lower()], data.view(math.prod(place.shape[:-1]), -1))
        return stored if len(place.shape) == 2 else stored.decode().view(place.shape)

    def number(self, name: str, default: Any = None) -> Any:
        """A number of the file's architecture.

        Raises:
            InputError: it is not there and there is no default.
        """
        key = f"{self.architecture}.{name}"
        found = self.metadata.get(key, default)
        if isinstance(found, list):  # one for each layer: only where they are the same
            found = found[0] if found and all(value == found[0] for value in found) else None
        if found is None or isinstance(found, str | bool | list):
            raise InputError(f"{self.where} lacks {key}, a number; valid: a whole model's file")
        return short(found) if isinstance(found, float) else found

    def keys(self) -> dict[str, str]:
        """What the file calls the numbers of a config, behind the name of the architecture."""
        kind = ARCHITECTURES.get(self.architecture)
        return CALLED | (FAMILIES[kind].gguf_keys if kind else {})

    def called(self) -> dict[str, str]:
        """What the file calls the numbers of a config."""
        return {name: f"{self.architecture}.{theirs}" for name, theirs in self.keys().items()}

    def sampling(self) -> dict[str, Any]:
        """Settings of sampling that the file names, floats without what float32 made of them."""
        said = {
            name: self.metadata.get(f"general.sampling.{SETTINGS.get(name, name)}")
            for name in SAMPLING
        }
        floats = {name: round(value, 6) for name, value in said.items() if isinstance(value, float)}
        return {name: value for name, value in (said | floats).items() if value is not None}


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
    called, family = names_of(layout.num_hidden_layers, layout.family), layout.family
    back = {theirs: name for name, theirs in called.items()}
    heads = {"q_proj": layout.num_attention_heads, "k_proj": layout.num_key_value_heads}
    found: dict[str, Entry] = {}
    for theirs, tensor in file.tensors.items():
        if theirs != FACTORS:
            name = back.get(theirs, theirs)
            turned = (
                heads.get(name.split(".")[-2]) if family.gguf_permuted and "." in name else None
            )
            minus = family.plus_one and name.endswith("norm.weight")
            found[name] = Entry(
                theirs, tensor.shape, tensor.kind, partial(read_tensor, file, theirs, turned, minus)
            )
    shapes = layout.shapes()
    zero = [name for name in shapes if name.endswith("o_proj.bias")]  # where there is none
    check_tensors(found, shapes, WEIGHTS, file.where, zero)
    return Weights(layout, dtype, found, kind)


def names_of(layers: int, family: Family) -> dict[str, str]:
    """What a file calls each tensor that a family's decoder can have, by its name in
    transformers."""
    norms = zip(family.norms, NORMS, strict=True)
    found, inner = dict(OUTER), INNER | {name: theirs for name, theirs in norms if name is not None}
    for number in range(layers):
        for name, theirs in inner.items():
            for end in ("weight", "bias") if name.endswith("_proj") else ("weight",):
                found[f"model.layers.{number}.{name}.{end}"] = f"blk.{number}.{theirs}.{end}"
    return found


def read_tensor(
    file: GgufFile, name: str, heads: int | None, minus: bool = False
) -> Tensor | Stored:
    """A tensor with its rows in transformers' order.

    Args:
        heads: of queries or keys whose rows pair neighbours; None: the order is the file's.
        minus: the file has added 1 to it.
    """
    found = file[name]
    if minus:
        return unstored(found, torch.float32) - 1
    return found if heads is None else straightened(found, heads)


def straightened(weight: Tensor | Stored, heads: int) -> Tensor | Stored:
    """Queries' or keys' weight whose rows pair neighbours, with these rows in transformers'
    order."""
    rows = straight(len(weight), heads)
    return weight.take(rows) if isinstance(weight, Stored) else weight[rows]


def straight(rows: int, heads: int) -> Tensor:
    """Where each row of queries or keys stands in a file of the llama kind, which pairs neighbours:
    row i of the first half of a head is at 2 i there, of the second at 2 i + 1."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)
