"""Weights of draft heads and draft models for the default model: those of the package, and those of other
methods, which a checkout holds beside ``src`` and a wheel does not. Light: no torch in here."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

SOURCE = Path(__file__).parents[2]
#: the folder of a checkout with the paper's heads, Medusa's heads and TriForce's draft model
RIVALS = SOURCE.parent / "benchmarks" / "data"
WHERE = "benchmarks/data of a checkout of the repository has it, scripts/train_rivals.sh there trains it"


def has_rivals() -> bool:
    """Whether the weights of other methods are there: in a checkout."""
    return SOURCE.name == "src" and RIVALS.is_dir()


def where() -> str:
    """What a message says in brackets of weights that are missing; "" in a checkout."""
    return "" if has_rivals() else f" ({WHERE})"


def weights(end: str) -> list[Traversable]:
    """The files whose names end so, by name."""
    folders: list[Traversable] = [resources.files("tokenswift").joinpath("data")]
    folders += [RIVALS] if has_rivals() else []
    found = [entry for folder in folders for entry in folder.iterdir() if entry.name.endswith(end)]
    return sorted(found, key=lambda entry: entry.name)
