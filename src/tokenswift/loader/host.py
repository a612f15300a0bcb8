"""The model that draft heads are to fit, and whether its own folder holds heads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenswift.files import MOST_CONFIG, object_in
from tokenswift.loader.identity import BaseIdentity, base_of
from tokenswift.types import InputError


@dataclass(frozen=True, slots=True)
class HeadsHost:
    """The model that heads are to draft for.

    Attributes:
        base: its identity.
        dtype, device: the type and the device of its weights.
        place: the folder or hub id that it was loaded from, "" where it came from a program.
    """

    base: BaseIdentity
    dtype: torch.dtype
    device: torch.device
    place: str


def host_of(model: Any) -> HeadsHost:
    """A loaded transformers causal LM as heads see it."""
    place = str(getattr(model.config, "_name_or_path", "") or "")
    return HeadsHost(base_of(model), model.dtype, model.device, place)


def holds_heads(folder: str | Path) -> bool:
    """True for a folder in the published TokenSwift layout."""
    path = Path(folder) / "config.json"
    try:
        return path.is_file() and "medusa_heads" in object_in(path, MOST_CONFIG, str(folder))
    except InputError:
        return False
