"""What measurements share: a model with a row's settings, sides that take turns, and times of
calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median as middle
from time import perf_counter

import torch

from benchmarks.prompts import Prompt, prompt
from benchmarks.settings import Config
from benchmarks.words import Measured
from tokenswift.config.sampling import SamplingParams
from tokenswift.engine.litany import LitanyGuard
from tokenswift.engine.llm import LLM
from tokenswift.engine.stream import Prefilled
from tokenswift.kv.cache import FullCache
from tokenswift.models.base import BaseTarget
from tokenswift.turns import take_turns
from tokenswift.types import Generation, InputError

PLAIN = "autoregressive"
AUTO = "auto"
#: options of a strategy by name
Options = Mapping[str, object]
#: measures once; more is faster
Side = Callable[[], float]


@dataclass(frozen=True)
class Trial:
    """A model, and what a row's configuration asks of it."""

    llm: LLM
    config: Config

    @property
    def params(self) -> SamplingParams:
        """How tokens are chosen."""
        return SamplingParams(**self.config["sampling"])

    @property
    def options(self) -> Options:
        """Of the strategy."""
        return options_of(self.config)

    @property
    def new_tokens(self) -> int:
        """How many are generated."""
        return self.config["points"][-1]

    @property
    def rounds(self) -> int:
        """How often each side has its turn."""
        if "rounds" not in self.config:
            raise InputError("rounds is not set; valid: a kind of measurement that has rounds")
        return self.config["rounds"]

    def prompt(self, length: int | None = None, index: int | None = None) -> Prompt:
        """The row's prompt, or another length or number of its source."""
        return prompt(
            source=self.config["prompts"],
            encode=self.llm.encode,
            index=self.config["text"] if index is None else index,
            length=length or self.config["prefill"],
            vocabulary=self.llm.target.vocab_size,
        )

    def generate(
        self, state: Prefilled, strategy: str, options: Options | None = None
    ) -> Generation:
        """Go on from a state by a strategy."""
        return state.generate(
            self.new_tokens, strategy, options or {}, self.params, ignore_eos=True
        )

    def row(
        self, figures: Mapping[str, float], prompt: Prompt | None = None, **more: object
    ) -> Measured:
        """What a row says: the prompt, figures (rounded to four digits) at the number of new
        tokens."""
        about: Measured = {"prompt": prompt.about} if prompt else {}
        rounded = {name: round(value, 4) for name, value in figures.items()}
        return {**about, "runs": self.rounds, **more, "figures": {str(self.new_tokens): rounded}}


def options_of(config: Config) -> Options:
    """A strategy's options: lists are tuples there."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in config["options"].items()
    }


def in_turns(sides: Mapping[str, Side], rounds: int) -> dict[str, list[float]]:
    """What each side measures in each round, in turns; a first round is not counted."""
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for _, name in take_turns(list(sides), range(rounds + 1)):
        measured[name].append(sides[name]())
    return {name: values[1:] for name, values in measured.items()}


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Each value over the other side's of the same round."""
    return [value / other for value, other in zip(values, others, strict=True)]


def spread(name: str, values: Iterable[float]) -> dict[str, float]:
    """Median, least and most under a name."""
    numbers = list(values)
    return {
        name: middle(numbers),
        f"{name}_least": min(numbers),
        f"{name}_most": max(numbers),
    }


def times(work: Callable[[], object], runs: int = 5, least: float = 0.0) -> list[float]:
    """Milliseconds of each call after a first one, work on an accelerator included: at least
    ``runs``, until ``least`` seconds are over."""
    milliseconds: list[float] = []
    end = perf_counter() + least
    while len(milliseconds) <= runs or perf_counter() < end:
        start = perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        milliseconds.append(1e3 * (perf_counter() - start))
    return milliseconds[1:]


def median(values: Iterable[float]) -> float:
    """The median, rounded to four digits."""
    return round(middle(values), 4)


def fill(cache: FullCache, length: int) -> None:
    """Random entries in a cache's slots, as of a text of a length: what keys hold costs nothing."""
    cache.entries.put_random(torch.Generator().manual_seed(0))
    if cache.tail is not None:
        cache.tail.entries.put_random(torch.Generator().manual_seed(0))
    cache.commit(tuple(range(length)))
    if cache.tail is not None:
        cache.tail.dropped = cache.tail.first(length)


def pass_times(target: BaseTarget, context: int, rows: int, runs: int) -> list[float]:
    """Milliseconds of a pass of some rows (a chain of drafts) with its logits, behind a context."""
    cache = target.new_cache(context + rows)
    fill(cache, context)
    tokens = torch.arange(rows, device=target.device) % target.vocab_size
    positions = torch.arange(context, context + rows, device=target.device)
    parents = None if rows == 1 else list(range(-1, rows - 1))
    return times(
        lambda: target.logits(target.forward(tokens, positions, cache, parents).hidden), runs
    )


def first_litany(llm: LLM, tokens: Sequence[int]) -> int | None:
    """The token at which a text becomes a litany; None: it never does."""
    guard = LitanyGuard()
    for token in tokens:
        guard.push(llm.tokenizer.decode([token]))
    return guard.first.start if guard.first else None
