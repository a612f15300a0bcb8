"""Runs of a tiny model, interrupted from outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.speculation.drafters.prices import fix_prices
from tokenswift import LLM, SamplingParams, Step
from tokenswift.runs import folder as folders

HOT = SamplingParams(seed=3, temperature=1.3, penalty_window=20)
OPTIONS = {
    "tree": (2, 2),
    "ngrams": 2,
    "ngram_count": 1,
    "budget": 24,
    "sinks": 2,
    "draft": "partial",
}
CALL: dict[str, Any] = {"max_new_tokens": 90, "sampling": HOT, "ignore_eos": True}


class Stop(Exception):
    """Ends a run from outside."""


def after(steps: int) -> Callable[[Step], None]:
    """A callback that ends the run after some steps."""
    left = [steps]

    def on_step(step: Step) -> None:
        left[0] -= 1
        if not left[0]:
            raise Stop

    return on_step


def begin(llm: LLM, folder: Path, steps: int, prompt: Any = "hello", **call: Any) -> None:
    """Begin a run and end it after some steps. Adaptive drafting does not make them fewer: a row
    costs a whole pass, whatever a busy machine would have measured."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        fix_prices(patch, 1.0)
        llm.generate(prompt, **{**CALL, **call}, run_dir=folder, on_step=after(steps))


def texts(folder: Path) -> dict[str, str]:
    return {p.name: p.read_bytes().decode() for p in folder.glob("text*")}


def journal_tokens(folder: Path) -> int:
    return len(folders.load(folder)[1].tokens)
