"""Which EAGLE-3 drafter a name means, and which one was trained for a target."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from tokenswift.loader.default_model import left_out, shipped_files, trained_files
from tokenswift.loader.find import SHIPPED, check_name, locate
from tokenswift.loader.gguf import GgufFile
from tokenswift.loader.identity import TOLERANCE, BaseIdentity
from tokenswift.loader.weights import Weights
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.target import Target
from tokenswift.speculation.eagle.config import EagleWeights
from tokenswift.speculation.eagle.files import BASE, load_eagle
from tokenswift.speculation.eagle.model import EagleModel
from tokenswift.speculation.eagle.mtp import MtpModel
from tokenswift.types import InputError

#: a drafter that nobody named may take so large a part of the free memory for a text
SHARE = 4


def place_of(name: str) -> Path:
    """A checkpoint's folder or file, fetched where it is the hub's.

    Raises:
        InputError: there is none of that name.
    """
    check_name(name, "eagle")
    if name == SHIPPED:
        return shipped_files(".eagle.gguf")[0]
    path = Path(name).expanduser()
    if path.exists():
        return path
    try:
        return locate(name)
    except InputError as error:
        raise InputError(re.sub("^model", "eagle", str(error)), "eagle") from error


def eagle_of(wanted: str | Path | EagleWeights, target: Target) -> EagleModel:
    """A drafter for a target, whose passes give features from now on.

    Args:
        wanted: folder, GGUF file or hub id of a checkpoint, "shipped", or the weights themselves.
    Raises:
        InputError: there is none of that name, or it is none of this target.
    """
    if not isinstance(wanted, EagleWeights):
        wanted = load_eagle(place_of(str(wanted)), target.config)
    model = EagleModel(wanted, target)
    target.set_feature_layers(wanted.config.feature_layers)
    return model


def own_drafter(weights: Weights | None, target: Target) -> MtpModel | None:
    """The drafter that a target's files bring, whose passes give their last states from now on;
    None: they bring none.

    Args:
        weights: of its layer.
    """
    if weights is None or not isinstance(target, NativeTarget):
        return None
    model = MtpModel(weights, target)
    target.set_feature_layers((target.layers,))
    return model


def eagle_trained(base: BaseIdentity, target: Target) -> EagleModel | None:
    """The drafter that was trained for a target, the user's own or beside the source; None where
    there is none. Files that cannot be used are left out.

    Args:
        base: the target's identity.
    """
    for file in trained_files(".gguf"):
        with left_out(file):
            sample = GgufFile(file).metadata.get(BASE)
            if (
                isinstance(sample, list)
                and len(sample) == len(base.sample)
                and {*map(type, sample)} == {float}
            ):
                identity = replace(base, sample=torch.tensor(sample, dtype=torch.float32))
                if identity.distance(base) <= TOLERANCE:
                    return _modest(load_eagle(file, target.config), target)
    return None


def _modest(weights: EagleWeights, target: Target) -> EagleModel:
    """A drafter that nobody named, for a target whose texts have room beside it.

    Raises:
        InputError: it would take too much of the free memory for each text.
    """
    model = EagleModel(weights, target)
    memory = target.backend.memory()
    if memory is not None and model.nbytes > memory.free // SHARE:
        raise InputError(
            f"it takes {model.nbytes:,} bytes for each text, {memory.free:,} bytes are available; "
            "valid: up to a quarter of these"
        )
    target.set_feature_layers(weights.config.feature_layers)
    return model
