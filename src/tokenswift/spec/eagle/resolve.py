"""Which EAGLE-3 drafter a name means, made ready for its target."""

from __future__ import annotations

import re
from pathlib import Path

from tokenswift.config import shown
from tokenswift.loader.find import locate
from tokenswift.models.target import Target
from tokenswift.spec.eagle.checkpoint import EagleWeights, load_eagle
from tokenswift.spec.eagle.packed import EagleModel
from tokenswift.types import InputError, OnProgress


def eagle_of(
    wanted: str | Path | EagleWeights, target: Target, on_progress: OnProgress | None = None
) -> EagleModel:
    """A drafter for a target, whose passes give it features from now on.

    Args:
        wanted: folder, GGUF file or hub id of a checkpoint, or the weights themselves.
        on_progress: told of the stage "fetch", in bytes.
    Raises:
        InputError: there is none of that name, or it is none of this target.
    """
    if isinstance(wanted, EagleWeights):
        weights = wanted
    elif isinstance(wanted, str | Path):
        try:
            place, _ = locate(str(wanted), on_progress)
        except InputError as error:
            raise InputError(re.sub("^model", "eagle", str(error)), "eagle") from error
        weights = load_eagle(Path(place), target.config)
    else:
        raise InputError(f"eagle is {shown(wanted)}; valid: a folder, a GGUF file or a hub id", "eagle")
    made = EagleModel(weights, target)
    target.taps = weights.config.feature_layers
    return made
