"""Published checkpoints of draft heads, to compare with.

They are folders: a whole transformers checkpoint with the paper's linear heads in it, as
``model.medusa_layers.{i}…``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from tokenswift.files import MOST_CONFIG, object_in
from tokenswift.kernels.formats import Stored
from tokenswift.loader.identity import BaseIdentity, base_of_weights
from tokenswift.loader.tensors import Entry
from tokenswift.speculation.files import tensors_in
from tokenswift.speculation.heads.config import HeadsConfig
from tokenswift.types import InputError

PREFIX = "model.medusa_"  # what the names of the heads' tensors begin with


@dataclass(frozen=True, slots=True)
class PublishedHeads:
    """A published checkpoint that holds linear heads.

    Attributes:
        config: what it takes to build the heads.
        tensors: tensors of the heads, by their names in `Heads`.
        base_tensors: all others, those of the model.
        base_name: name of the model.
        base_layers: its number of layers.
    """

    config: HeadsConfig
    tensors: Mapping[str, Entry]
    base_tensors: Mapping[str, Entry]
    base_name: str
    base_layers: int

    def base(self) -> BaseIdentity:
        """The identity of the model. Its weights are read for that."""
        return base_of_weights(self._matrix, self.base_layers, self.base_name)

    def _matrix(self, name: str) -> Tensor | Stored | None:
        entry = self.base_tensors.get(name)
        if entry is None or len(entry.shape) != 2 or 0 in entry.shape:
            return None
        return entry.get()


def published_heads(folder: Path, label: str) -> PublishedHeads:
    """The heads in a published checkpoint.

    Args:
        label: whose files they are, for messages.
    Raises:
        InputError: it holds no heads, or its files cannot be read.
    """
    config, layers = _config(folder, label)
    heads = dict[str, Entry]()
    others = dict[str, Entry]()
    for entry in tensors_in(folder, label):
        if entry.name.startswith(PREFIX):
            heads[entry.name.removeprefix(PREFIX)] = entry
        else:
            others[entry.name] = entry
    return PublishedHeads(config, heads, others, folder.resolve().name, layers)


def _config(folder: Path, label: str) -> tuple[HeadsConfig, int]:
    """What a checkpoint says of the linear heads in it, and how many layers its model has."""
    outer = object_in(folder / "config.json", MOST_CONFIG, label)
    fields = {
        "kind": "linear",
        "count": outer.get("medusa_heads"),
        "hidden_size": outer.get("hidden_size"),
        "vocab_size": outer.get("vocab_size"),
        "eps": outer.get("rms_norm_eps", 1e-5),
    }
    try:
        config = msgspec.convert(fields, HeadsConfig)
        return config, msgspec.convert(outer.get("num_hidden_layers"), int)
    except msgspec.ValidationError as error:
        raise InputError(f"{label}: {error}; valid: a checkpoint with medusa_heads") from error
