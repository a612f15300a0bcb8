"""Which EAGLE-3 drafter a name means, made ready for its target."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenswift.config import shown
from tokenswift.loader.default_model import weights
from tokenswift.loader.find import SHIPPED, check_eagle, locate
from tokenswift.models.target import Target
from tokenswift.spec.eagle.checkpoint import EagleWeights, load_eagle
from tokenswift.spec.eagle.packed import EagleModel
from tokenswift.types import InputError, OnProgress


def eagle_of(
    wanted: str | Path | EagleWeights, target: Target, codec: Any, on_progress: OnProgress | None = None
) -> EagleModel:
    """A drafter for a target, whose passes give features from now on.

    Args:
        wanted: folder, GGUF file or hub id of a checkpoint, "shipped", or the weights themselves.
        codec: the target's tokenizer, or None.
        on_progress: told of the stage "fetch", in bytes.
    Raises:
        InputError: there is none of that name, or it is none of this target.
    """
    if isinstance(wanted, EagleWeights):
        found = wanted
    elif isinstance(wanted, str | Path):
        try:
            found = load_eagle(place_of(str(wanted), on_progress), target.config, _tokens(codec))
        except InputError as error:
            if wanted != SHIPPED:
                raise
            told = "that drafter is the default model's, and does not fit this one"
            raise InputError(f"eagle is 'shipped': {told}; valid: one of this model", "eagle") from error
    else:
        raise InputError(
            f"eagle is {shown(wanted)}; valid: a folder, a GGUF file, a hub id or shipped", "eagle"
        )
    made = EagleModel(found, target)
    target.tap(found.config.feature_layers)
    return made


def place_of(name: str, on_progress: OnProgress | None = None) -> Path:
    """A checkpoint's folder or file, fetched where it is the hub's.

    Raises:
        InputError: there is none of that name.
    """
    check_eagle(name)
    if name == SHIPPED:
        return Path(str(weights(".eagle.gguf")[0]))
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
