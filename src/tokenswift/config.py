"""Options as frozen dataclasses: every field checked, every error names the field and the value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tokenswift.checks import (
    check_flag,
    check_number,
    check_whole,
    finite,
    integer_of,
    keep_field,
    named_errors,
    shown,
)
from tokenswift.grammar import Grammar
from tokenswift.types import InputError
from tokenswift.words import OnLoop, words

API_KEY = "TOKENSWIFT_API_KEY"


def environment_key() -> str | None:
    """The key that clients of a server have to show, by the environment; None where it is not set."""
    return os.environ.get(API_KEY) or None


def check_threads(value: object) -> int:
    """A number of CPU threads: from 1 to four for each core, and up to 16 on any machine.

    Raises:
        InputError: another value.
    """
    cores = os.cpu_count() or 1
    most = max(16, 4 * cores)
    threads = integer_of(value)
    if threads is None or not 1 <= threads <= most:
        valid = f"1 to {most} (this machine has {cores} cores)"
        raise InputError(f"threads is {shown(value)}; valid: {valid}", "threads")
    return threads


@named_errors
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults are the paper's setting for LLaMA3.1-8b (Table 10).

    Attributes:
        temperature: logits are divided by it, from 1e-30 to 1e30; 0 is greedy decoding
        top_k: keep the k likeliest tokens; 0 keeps all
        top_p: in (0, 1]: keep the smallest set of tokens with this probability; 1 keeps all
        min_p: in [0, 1): drop tokens less likely than this share of the best; 0 keeps all
        eta_cutoff: in [0, 1): epsilon of eta sampling; 0 is off
        repetition_penalty: theta, from 1 to 1e30: penalty of tokens in the window; 1 is off
        penalty_window: W, at least 1: newest tokens that the penalty looks at
        seed: 0 or more: same seed, same text, whatever the strategy; the noise is a pure function of it, the
            position and the token
        greedy: take the likeliest token, after the penalty; no noise, and no filter, whatever else is given
        grammar: what the text has to be like, a `Grammar`: no token that it does not allow is chosen, and the
            text ends where it does; None is any text
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.1
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.2
    penalty_window: int = 1024
    seed: int = 0
    greedy: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        about = "0 (greedy decoding), or from 1e-30 to 1e30"
        for name, valid, fits in (
            ("temperature", about, lambda t: t == 0 or 1e-30 <= t <= 1e30),
            ("top_p", "in (0, 1]", lambda p: 0 < p <= 1),
            ("min_p", "in [0, 1)", lambda p: 0 <= p < 1),
            ("eta_cutoff", "in [0, 1)", lambda p: 0 <= p < 1),
            ("repetition_penalty", "at least 1 (1 is off), at most 1e30", lambda r: 1 <= r <= 1e30),
        ):
            value = getattr(self, name)
            keep_field(self, name, check_number(name, value, valid, fits(finite(value))))
        check_whole(self, "top_k", 0, "an integer of at least 1, or 0 for all tokens")
        check_whole(self, "penalty_window", 1)
        check_whole(self, "seed", 0, "an integer from 0 to 2^63 - 1")
        keep_field(self, "greedy", check_flag("greedy", self.greedy))
        keep_field(self, "grammar", Grammar.of(self.grammar))  # a journal has its record
        if self.temperature == 0:  # one way to say it: nothing divides by zero, and equal settings are equal
            keep_field(self, "greedy", True)
            keep_field(self, "temperature", 1.0)

    @property
    def window(self) -> int:
        """The penalty window in tokens; 0 when the penalty is off."""
        return self.penalty_window if self.repetition_penalty != 1.0 else 0


#: sampling without any filter or penalty
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
}
#: of answers, where no sampling is given and the model names none: a penalty would break what has to be
#: repeated, such as JSON, code and names
ANSWERS = SamplingParams(temperature=0.7, min_p=0.05, repetition_penalty=1.0)


def sampling_over(usual: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """A sampling with the given fields over it.

    Raises:
        InputError: one of them is out of its range.
    """
    return replace(usual, **_warm(given))


def sampling_by(named: Mapping[str, Any], given: Mapping[str, Any]) -> SamplingParams:
    """The sampling that a model names, the given fields over it; what neither names is off.

    Raises:
        InputError: a field is out of its range.
    """
    return SamplingParams(**{**NEUTRAL, **named, **_warm(given)})


def _warm(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given fields; whoever gives a temperature wants no greedy decoding, whatever is usual."""
    return {"greedy": False, **given} if given.get("temperature") else dict(given)


ON_LOOP = words(OnLoop)
MOST_PATTERN = 65_536  # tokens of a repeated pattern


@named_errors
@dataclass(frozen=True, slots=True)
class LoopOptions:
    """When a text counts as looping.

    Attributes:
        min_pattern_size, max_pattern_size: tokens of a pattern.
        min_count: copies of it, at least 2.
        min_tokens: tokens that the copies make up together.
    """

    min_pattern_size: int = 1
    max_pattern_size: int = 512
    min_count: int = 3
    min_tokens: int = 160

    def __post_init__(self) -> None:
        for name in ("min_pattern_size", "max_pattern_size", "min_tokens"):
            check_whole(self, name, 1)
        check_whole(self, "min_count", 2)
        if not self.min_pattern_size <= self.max_pattern_size <= MOST_PATTERN:
            raise InputError(
                f"max_pattern_size is {self.max_pattern_size}; valid: {self.min_pattern_size} "
                f"(min_pattern_size) to {MOST_PATTERN}"
            )

    @property
    def reach(self) -> int:
        """Tokens that decide whether the next one ends a loop."""
        return self.max_pattern_size + max(self.min_tokens, self.max_pattern_size * self.min_count)


def given_options(options: Any) -> dict[str, Any]:
    """The fields of a dataclass of options that differ from their defaults."""
    return {f.name: value for f in fields(options) if (value := getattr(options, f.name)) != f.default}
