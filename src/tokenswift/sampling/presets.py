"""The paper's sampling settings by name: one for each of its models (Table 10), one for each sampler that it
compares (Tables 6 and 12)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tokenswift.config import NEUTRAL, SamplingParams
from tokenswift.types import InputError

#: name → fields of `config.SamplingParams`, all but seed and greedy; "paper" is `SamplingParams()`
SAMPLERS: dict[str, dict[str, Any]] = {
    name: {**NEUTRAL, "penalty_window": 1024, **given}
    for name, given in {
        "llama3.1-8b": {"min_p": 0.1, "repetition_penalty": 1.2},
        "yarn-llama2-7b-128k": {"top_p": 0.9, "repetition_penalty": 1.15},
        "qwen2.5-1.5b": {"top_p": 0.9, "repetition_penalty": 1.15},
        "qwen2.5-7b": {"min_p": 0.05, "repetition_penalty": 1.15},
        "qwen2.5-14b": {"min_p": 0.05, "repetition_penalty": 1.13},
        "top-p": {"top_p": 0.9, "repetition_penalty": 1.2},
        "min-p": {"min_p": 0.1, "repetition_penalty": 1.2},
        "eta": {"eta_cutoff": 2e-4, "repetition_penalty": 1.2},
        "paper": {"min_p": 0.1, "repetition_penalty": 1.2},
    }.items()
}
#: what a setting may name besides
FIELDS = tuple(f.name for f in fields(SamplingParams) if f.name != "seed")


def sampler(name: str) -> dict[str, Any]:
    """The fields of a named setting.

    Raises:
        InputError: an unknown name.
    """
    if name not in SAMPLERS:
        raise InputError(f"preset is {name!r}; valid: {', '.join(SAMPLERS)}")
    return dict(SAMPLERS[name])
