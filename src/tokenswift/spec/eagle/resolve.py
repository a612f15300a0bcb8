"""Which EAGLE-3 drafter a name means, made ready for its target."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenswift.config import shown
from tokenswift.loader.find import check_eagle, locate
from tokenswift.models.target import Target
from tokenswift.spec.eagle.checkpoint import EagleWeights, load_eagle
from tokenswift.spec.eagle.packed import EagleModel
from tokenswift.types import InputError, OnProgress


def eagle_of(
    wanted: str | Path | EagleWeights, target: Target, codec: Any, on_progress: OnProgress | None = None
) -> EagleModel:
    """A drafter for a target, whose passes give features from now on.

    Args:
        wanted: folder, GGUF file or hub id of a checkpoint, or the weights themselves.
        codec: the target's tokenizer, or None.
        on_progress: told of the stage "fetch", in bytes.
    Raises:
        InputError: there is none of that name, or it is none of this target.
    """
    if isinstance(wanted, EagleWeights):
        weights = wanted
    elif isinstance(wanted, str | Path):
        weights = load_eagle(place_of(str(wanted), on_progress), target.config, _tokens(codec))
    else:
        raise InputError(f"eagle is {shown(wanted)}; valid: a folder, a GGUF file or a hub id", "eagle")
    made = EagleModel(weights, target)
    target.tap(weights.config.feature_layers)
    return made


def place_of(name: str, on_progress: OnProgress | None = None) -> Path:
    """A checkpoint's folder or file, fetched where it is the hub's.

    Raises:
        InputError: there is none of that name.
    """
    check_eagle(name)
    path = Path(name).expanduser()
    if path.exists():
        return path
    try:
        return Path(locate(name, on_progress)[0])
    except InputError as error:
        raise InputError(re.sub("^model", "eagle", str(error)), "eagle") from error


def _tokens(codec: Any) -> Sequence[str] | None:
    """A tokenizer's tokens by their ids; those that it does not name are padding."""
    if codec is None:
        return None
    named = {number: token for token, number in codec.get_vocab().items()}
    return [named.get(number, f"[PAD{number}]") for number in range(max(named, default=-1) + 1)]
