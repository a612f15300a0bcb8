"""Options as frozen dataclasses: every field checked, every error names the field and the value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from tokenswift.types import InputError

T = TypeVar("T")


def check_number(name: str, value: object, valid: str, ok: bool) -> None:
    """Raise :class:`InputError` unless ``value`` is a finite number and ``ok`` holds."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not ok:  # type: ignore[arg-type]
        raise InputError(f"{name} is {value!r}; valid: {valid}")


def check_integer(name: str, value: object, least: int, valid: str | None = None) -> None:
    """Raise :class:`InputError` unless ``value`` is an integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} is {value!r}; valid: {valid or f'an integer of at least {least}'}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise :class:`InputError` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise InputError(f"{name} is {value!r}; valid: {', '.join(choices)}")


def _finite(value: object) -> float:
    """The value as a float for range checks; NaN (which fails every check) when it is no number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults are the paper's setting for LLaMA3.1-8b (Table 10).

    Attributes:
        temperature: > 0; logits are divided by it. For greedy decoding set ``greedy``.
        top_k: keep the k best tokens; 0 keeps all.
        top_p: in (0, 1]; keep the smallest set with at least this mass; 1 keeps all.
        min_p: in [0, 1); drop tokens less likely than ``min_p`` times the best; 0 keeps all.
        eta_cutoff: in [0, 1); η-sampling's ε; 0 switches it off.
        repetition_penalty: θ ≥ 1 (the paper's contextual penalty); 1 switches it off.
        penalty_window: W ≥ 1, the number of newest tokens that the penalty looks at.
        seed: ≥ 0; the noise is a pure function of (seed, position, token id).
        greedy: take the argmax after the penalty; no noise and no filter.
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

    def __post_init__(self) -> None:
        t, p, m = _finite(self.temperature), _finite(self.top_p), _finite(self.min_p)
        e, r = _finite(self.eta_cutoff), _finite(self.repetition_penalty)
        check_number("temperature", self.temperature, "> 0 (for greedy decoding use greedy)", t > 0)
        check_integer("top_k", self.top_k, 0, "an integer of at least 1, or 0 for all tokens")
        check_number("top_p", self.top_p, "in (0, 1]", 0 < p <= 1)
        check_number("min_p", self.min_p, "in [0, 1)", 0 <= m < 1)
        check_number("eta_cutoff", self.eta_cutoff, "in [0, 1)", 0 <= e < 1)
        check_number("repetition_penalty", self.repetition_penalty, "at least 1 (1 is off)", r >= 1)
        check_integer("penalty_window", self.penalty_window, 1)
        check_integer("seed", self.seed, 0, "an integer from 0 to 2^63 - 1")
        if self.seed >= 2**63:
            raise InputError(f"seed is {self.seed!r}; valid: an integer from 0 to 2^63 - 1")
        if not isinstance(self.greedy, bool):
            raise InputError(f"greedy is {self.greedy!r}; valid: True, False")

    @property
    def window(self) -> int:
        """The penalty window in tokens; 0 when the penalty is off."""
        return self.penalty_window if self.repetition_penalty != 1.0 else 0


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Options of a strategy that has none."""


@dataclass(frozen=True, slots=True)
class TokenSwiftOptions:
    """Options of the ``tokenswift`` strategy.

    Attributes:
        tree: candidates per level, e.g. ``(1, 3, 3, 3)`` (paper); None chooses by device.
        ngrams: k, n-gram branches per step; 0 switches reutilisation off; None chooses by device.
        ngram_count: an n-gram is drafted only when it was seen this often; None chooses by device.
        budget: B, tokens in the partial KV cache.
        sinks: S, first positions that the partial cache always holds.
        cache: "dynamic" (paper), "partial" (selected once, at prefill) or "full".
        candidates: "coupled" (ranked with the target's own noise) or "probability".
        acceptance: "exact", or "published" (the paper's code; not lossless).
        draft: where a step's draft comes from: "partial" (one pass over the partial cache, the
            paper), "hidden" (the verified hidden state, no extra pass), or "auto".
        vocabulary: tokens that heads may draft: "frequent" (those that the heads file names and the
            prompt's; all where it names none) or "full".
    """

    tree: tuple[int, ...] | None = None
    ngrams: int | None = None
    ngram_count: int | None = None
    budget: int = 4096
    sinks: int = 16
    cache: str = "dynamic"
    candidates: str = "coupled"
    acceptance: str = "exact"
    draft: str = "auto"
    vocabulary: str = "frequent"

    def __post_init__(self) -> None:
        if self.tree is not None:
            widths = self.tree if isinstance(self.tree, tuple | list) else ()
            if not widths or any(isinstance(w, bool) or not isinstance(w, int) or w < 1 for w in widths):
                raise InputError(f"tree is {self.tree!r}; valid: integers of at least 1, such as 1,3,3,3")
            object.__setattr__(self, "tree", tuple(widths))
        if self.ngrams is not None:
            check_integer("ngrams", self.ngrams, 0)
        if self.ngram_count is not None:
            check_integer("ngram_count", self.ngram_count, 1)
        check_integer("sinks", self.sinks, 0)
        check_integer("budget", self.budget, 1)
        if self.budget <= self.sinks:
            raise InputError(f"budget is {self.budget}; valid: more than the {self.sinks} sink tokens")
        check_choice("cache", self.cache, ("full", "partial", "dynamic"))
        check_choice("candidates", self.candidates, ("coupled", "probability"))
        check_choice("acceptance", self.acceptance, ("exact", "published"))
        check_choice("draft", self.draft, ("auto", "partial", "hidden"))
        check_choice("vocabulary", self.vocabulary, ("frequent", "full"))


def build_options(kind: type[T], strategy: str, values: Mapping[str, Any] | None) -> T:
    """Make a strategy's options from a mapping; unknown names raise :class:`InputError`."""
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name in values or {}:
        if name not in known:
            valid = ", ".join(known) or "none"
            raise InputError(f"{name!r} is no option of strategy {strategy}; valid: {valid}")
    return kind(**(values or {}))
