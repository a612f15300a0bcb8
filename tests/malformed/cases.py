"""All cases, in an order that does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Case:
    """A model that is wrong in one way.

    Attributes:
        kind: of the file that is wrong: "gguf", "safetensors", "config", "tokenizer".
        name: what is wrong, unique within the kind.
        write: writes the model into an empty folder; gives the path to load.
    """

    kind: str
    name: str
    write: Callable[[Path], Path]

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def corpus(kind: str | None = None) -> Iterator[Case]:
    """All cases, or those of a kind; every name is there once."""
    from tests.malformed import config_cases, gguf_cases, mutated_cases, tokenizer_cases, weights_cases

    for module in (gguf_cases, weights_cases, config_cases, tokenizer_cases, mutated_cases):
        for write, name, of in module.cases():
            if kind in (None, of):
                yield Case(of, name, write)
