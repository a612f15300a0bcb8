"""The sampling settings that a model itself names: in its ``generation_config.json``, or in a GGUF file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenswift.config import ANSWERS, CONTINUED, SamplingParams, sampling_by
from tokenswift.files import read_small
from tokenswift.loader.prompts import is_chat
from tokenswift.types import InputError

logger = logging.getLogger("tokenswift")
NAMES = ("temperature", "top_k", "top_p", "min_p", "eta_cutoff", "repetition_penalty")
#: key of a GGUF file, after ``general.sampling.`` → field of `config.SamplingParams`
KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def named(config: Any) -> dict[str, Any]:
    """The fields of `config.SamplingParams` that a transformers ``GenerationConfig`` names; of None, none."""
    found = {key: value for key in NAMES if (value := getattr(config, key, None)) is not None}
    if getattr(config, "do_sample", None) is False:
        found["greedy"] = True
    return found


def named_in(
    folder: Path, files: tuple[str, ...] = ("generation_config.json", "config.json")
) -> dict[str, Any]:
    """Those that a model's folder names: as transformers has it, in the first of the files that is there."""
    for file in files:
        try:
            said = json.loads(read_small(folder / file))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError):
            return {}
        return named(SimpleNamespace(**said)) if isinstance(said, dict) else {}
    return {}


def named_by_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a GGUF file names."""
    said = {name: metadata.get(f"general.sampling.{key}") for key, name in KEYS.items()}
    return {
        name: round(value, 6) if isinstance(value, float) else value  # a file has them in float32
        for name, value in said.items()
        if value is not None
    }


def check_named(found: dict[str, Any], model: str) -> dict[str, Any]:
    """The fields.

    Args:
        model: its name.
    Raises:
        InputError: there are none.
    """
    if not found:
        raise InputError(
            f"sampling is 'model', but the generation_config.json of {model} names no setting of it; "
            f"valid: default"
        )
    return found


class OwnSampling:
    """The sampling of one model's texts: as the model itself names it, and where none is given.

    Args:
        model: its name.
        named: gives the settings that it names.
    """

    def __init__(self, model: str, named: Callable[[], dict[str, Any]]) -> None:
        self._model, self._named = model, named
        self._said = False  # that they are not usable

    def of_model(self, given: Mapping[str, Any]) -> SamplingParams:
        """As the model says, with the given fields over it; what neither names is off.

        Raises:
            InputError: the model names no setting, or a field is out of its range.
        """
        return sampling_by(check_named(self._named(), self._model), given)

    def usual(self, prompt: Any) -> SamplingParams:
        """`config.CONTINUED` for a text that is continued; of chat messages as the model says, if it does."""
        if not is_chat(prompt):
            return CONTINUED
        found = self._named()
        try:
            return sampling_by(found, {}) if found else ANSWERS
        except InputError as error:
            if not self._said:
                self._said = True
                logger.warning("the sampling settings of %s are ignored: %s", self._model, error)
            return ANSWERS
