"""What measurements share: a model with a row's settings, sides that take turns, and times of
calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from statistics import median as middle
from time import perf_counter
from typing import Any

import pandas as pd
import torch

from benchmarks.prompts import Prompt, prompt
from tokenswift.config.sampling import SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.engine.stream import Prefilled
from tokenswift.types import Generation

PLAIN, AUTO = "autoregressive", "auto"
Side = Callable[[], float]


@dataclass(frozen=True)
class Trial:
    """A model, and what a row's configuration (see `settings.resolve`) asks of it."""

    llm: LLM
    config: dict[str, Any]

    @property
    def params(self) -> SamplingParams:
        """How tokens are chosen."""
        return SamplingParams(**self.config["sampling"])

    @property
    def options(self) -> dict[str, Any]:
        """Of the strategy."""
        return options_of(self.config)

    @property
    def new(self) -> int:
        """New tokens."""
        return self.config["points"][-1]

    @property
    def rounds(self) -> int:
        """How often each side has its turn."""
        return self.config["rounds"]

    def prompt(self, length: int | None = None, index: int | None = None) -> Prompt:
        """The row's prompt, or another length or number of its source."""
        config, vocabulary = self.config, self.llm.target.vocab_size
        which: int = config["text"] if index is None else index
        return prompt(
            config["prompts"], self.llm.encode, which, length or config["prefill"], vocabulary
        )

    def generate(
        self, state: Prefilled, strategy: str, options: dict[str, Any] | None = None
    ) -> Generation:
        """Go on from a state by a strategy."""
        return state.generate(self.new, strategy, options or {}, self.params, ignore_eos=True)

    def row(
        self, figures: dict[str, float], begun: Prompt | None = None, **more: Any
    ) -> dict[str, Any]:
        """What a row says: the prompt, figures (rounded to four digits) at the number of new
        tokens."""
        said = {"prompt": begun.about} if begun else {}
        at = {str(self.new): {name: round(value, 4) for name, value in figures.items()}}
        return {**said, "runs": self.rounds, **more, "figures": at}


def options_of(config: dict[str, Any]) -> dict[str, Any]:
    """A strategy's options: lists are tuples there."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in config["options"].items()}


def in_turns(sides: dict[str, Side], rounds: int) -> pd.DataFrame:
    """What each side (a column) says in each round (a line), forth and back; a first round is not
    counted."""
    found, order = [], list(sides)
    for _ in range(rounds + 1):
        found.append({name: sides[name]() for name in order})
        order.reverse()
    return pd.DataFrame(found[1:], columns=list(sides))


def spread(name: Hashable, values: Iterable[float]) -> dict[str, float]:
    """Median, least and most under a name."""
    found = list(values)
    return {f"{name}": middle(found), f"{name}_least": min(found), f"{name}_most": max(found)}


def times(work: Callable[[], object], runs: int = 5, least: float = 0.0) -> list[float]:
    """Milliseconds of each call after a first one, work on an accelerator included: at least
    ``runs``, until ``least`` seconds are over."""
    found: list[float] = []
    end = perf_counter() + least
    while len(found) <= runs or perf_counter() < end:
        begun = perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(1e3 * (perf_counter() - begun))
    return found[1:]


def median(values: Iterable[float]) -> float:
    """The median, rounded to four digits."""
    return round(middle(values), 4)


def fill(cache: Any, length: int) -> None:
    """Random entries in a cache's slots, as of a text of a length: what keys hold costs nothing."""
    for entries in (cache.entries, *([] if cache.tail is None else [cache.tail.entries])):
        entries.put_random(torch.Generator().manual_seed(0))
    cache.commit(tuple(range(length)))
    if cache.tail is not None:
        cache.tail.dropped = cache.tail.first(length)


def pass_times(target: Any, context: int, rows: int, runs: int) -> list[float]:
    """Milliseconds of a pass of some rows (a chain of drafts) with its logits, behind a context.

    Args:
        target: a loaded model (`models.target.Target`).
    """
    cache = target.new_cache(context + rows)
    fill(cache, context)
    tokens = torch.arange(rows, device=target.device) % target.vocab_size
    positions = torch.arange(context, context + rows, device=target.device)
    parents = None if rows == 1 else list(range(-1, rows - 1))
    return times(
        lambda: target.logits(target.forward(tokens, positions, cache, parents).hidden), runs
    )
