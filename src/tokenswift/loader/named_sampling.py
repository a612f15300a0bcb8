"""The sampling that a model itself names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from tokenswift.config.sampling import NEUTRAL, SamplingParams
from tokenswift.types import InputError

logger = logging.getLogger("tokenswift")
#: fields of `SamplingParams` that a generation_config.json may have
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "eta_cutoff", "repetition_penalty")


def named_sampling(config: object) -> dict[str, object]:
    """The fields of `SamplingParams` that a transformers ``GenerationConfig`` names; of
    None, none."""
    settings: dict[str, object] = {}
    for name in SAMPLING:
        value = getattr(config, name, None)
        if value is not None:
            settings[name] = value
    if getattr(config, "do_sample", None) is False:
        settings["greedy"] = True
    return settings


def usable_sampling(named: Mapping[str, object], model: str) -> SamplingParams | None:
    """The sampling of the settings that a model names, without those out of their range: a WARNING
    of the logger ``tokenswift`` names each of these. None: there are no others.

    Args:
        named: fields of `SamplingParams`.
        model: its name, for messages.
    """
    usable: SamplingParams | None = None
    settings: dict[str, object] = {**NEUTRAL}
    for name, value in named.items():
        more = {**settings, name: value}
        try:
            usable = replace(SamplingParams(), **more)
        except InputError as error:
            logger.warning("a sampling setting of model %s is ignored: %s", model, error)
        else:
            settings = more
    return usable
