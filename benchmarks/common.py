"""What measurements share: a model with a row's settings, and sides that take turns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from statistics import median as middle
from typing import Any

import pandas as pd

from benchmarks.prompts import Prompt, prompt
from tokenswift.config import SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.engine.sequence import Prefilled
from tokenswift.types import Generation

PLAIN, AUTO = "autoregressive", "auto"
FLOATS = ("float32", "bfloat16", "float16")  # what transformers computes in
SHORT = 2048  # tokens of a prompt up to which it is read once a round; a longer one is read once
WARM = 64  # tokens of a prompt that is read before
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
        """Tokens to write."""
        return self.config["points"][-1]

    @property
    def rounds(self) -> int:
        """How often each side has its turn."""
        return self.config["rounds"]

    def prompt(self, length: int | None = None, index: int | None = None) -> Prompt:
        """The row's prompt, or another length or number of its source."""
        config, vocabulary = self.config, self.llm.target.vocab_size
        which: int = config["text"] if index is None else index
        return prompt(config["prompts"], self.llm.encode, which, length or config["prefill"], vocabulary)

    def write(self, state: Prefilled, strategy: str, options: dict[str, Any] | None = None) -> Generation:
        """Go on from a state by a strategy."""
        return state.generate(self.new, strategy, options or {}, self.params, ignore_eos=True)

    def row(self, figures: dict[str, float], begun: Prompt | None = None, **more: Any) -> dict[str, Any]:
        """What a row says: the prompt, figures (rounded to four digits) at the number of new tokens."""
        said = {"prompt": begun.about} if begun else {}
        at = {str(self.new): {name: round(value, 4) for name, value in figures.items()}}
        return {**said, "runs": self.rounds, **more, "figures": at}


def options_of(config: dict[str, Any]) -> dict[str, Any]:
    """A strategy's options: lists are tuples there."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in config["options"].items()}


def in_turns(sides: dict[str, Side], rounds: int) -> Any:
    """A DataFrame of what each side (a column) says in each round (a line), forth and back; a first round is
    not counted."""
    found, order = [], list(sides)
    for _ in range(rounds + 1):
        found.append({name: sides[name]() for name in order})
        order.reverse()
    return pd.DataFrame(found[1:], columns=list(sides))


def spread(name: Hashable, values: Iterable[float]) -> dict[str, float]:
    """Median, least and most under a name."""
    found = list(values)
    made = {f"{name}": middle(found), f"{name}_least": min(found), f"{name}_most": max(found)}
    return {key: round(value, 4) for key, value in made.items()}


def spreads(found: Any) -> dict[str, float]:
    """The spread of each column."""
    return {key: value for name in found for key, value in spread(name, found[name]).items()}


def read(llm: LLM, ids: list[int], rounds: int) -> tuple[Prefilled, list[float]]:
    """The state after a prompt; tokens of it a second, each time that it was read."""
    llm.prefill(ids[:WARM])
    states = [llm.prefill(ids) for _ in range(rounds if len(ids) <= SHORT else 1)]
    return states[-1], [len(ids) / state.seconds for state in states]


def sizes(llm: LLM, context: int) -> dict[str, float]:
    """MB of weights that a pass reads, and of keys and values after a context."""
    target = llm.target
    weights, kv = target.weight_bytes / 1e6, target.kv_bytes * context / 1e6
    return {"weights_mb": round(weights, 2), "kv_mb": round(kv, 2)}
