"""Decoding by a strategy beside plain decoding, from the same state, in turns of some tokens.

Both run in one process and take turns through the whole text, first one ahead, then the other, so
that whatever slows the machine down slows both. Times are those that steps know of themselves;
nothing else is counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.common import PLAIN, Trial
from tokenswift.config.sampling import SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.engine.stream import Prefilled, Stream
from tokenswift.types import Step, distinct

TURNS = 128  # at most about so many turns a run
LEAST = 16  # tokens of a turn
WARM = 8  # tokens before the clock runs: what is made at first use is there then
COLUMNS = ("tokens", "seconds", "steps", "drafted", "accepted", "ngram_accepted", "gamma")


class Side:
    """One of the two: its steps so far, added up at the end of each turn.

    Attributes:
        steps: where they come from.
        tokens: its new tokens.
        curve: at the end of each turn the sums so far, as :data:`COLUMNS` names them.
        phases: seconds by phase.
    """

    def __init__(self, steps: Iterator[Step]) -> None:
        self.steps = steps
        self._sums = [0.0] * len(COLUMNS)
        self.tokens: list[int] = []
        self.curve: list[list[float]] = []
        self.phases: dict[str, float] = {}

    def run_to(self, tokens: int) -> None:
        """Decode until there are so many tokens."""
        while len(self.tokens) < tokens:
            step = next(self.steps)
            self.tokens += step.token_ids
            counts = (step.drafted, step.accepted, step.ngram_accepted, step.gamma)
            added = (len(step.token_ids), step.seconds, 1, *counts)
            self._sums = [a + b for a, b in zip(self._sums, added, strict=True)]
            for phase, seconds in step.times.items():
                self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        self.curve.append([round(value, 6) for value in self._sums])

    def at(self, point: int) -> dict[str, float]:
        """The sums at the end of the first turn that has so many tokens."""
        entry = next(entry for entry in self.curve if entry[0] >= point)
        return dict(zip(COLUMNS, entry, strict=True))

    @property
    def raw(self) -> dict[str, Any]:
        """What the row keeps of it."""
        phases = {name: round(seconds, 6) for name, seconds in self.phases.items()}
        return {"curve": self.curve, "phases": phases}


def paired_run(
    base: Prefilled,
    strategy: str,
    options: dict[str, Any],
    sampling: SamplingParams,
    points: list[int],
) -> tuple[Side, Side]:
    """Decode plainly and by a strategy; (plain, the variant).

    Args:
        base: the state that both go on from.
        points: new tokens at which turns must end; the last is how many there are.
    """
    both: tuple[tuple[str, dict[str, Any]], ...] = ((PLAIN, {}), (strategy, options))
    for name, values in both:
        base.generate(WARM, name, values, sampling, ignore_eos=True)
    new = points[-1]
    plain, variant = (
        Side(base.stream(new, name, values, sampling, ignore_eos=True)) for name, values in both
    )
    order = [plain, variant]
    for end in turns(points):
        for side in order:
            side.run_to(end)
        order.reverse()
    return plain, variant


def turns(points: list[int]) -> list[int]:
    """Where turns end: at every point, and often enough between them."""
    size = max(LEAST, -(-points[-1] // TURNS))
    return sorted({*range(size, points[-1], size), *points})


def figures(plain: Side, variant: Side, point: int) -> dict[str, Any]:
    """What tables show of a run's first so many new tokens (definitions: `metrics`)."""
    slow, fast = plain.at(point), variant.at(point)
    seconds = slow["seconds"] / slow["tokens"], fast["seconds"] / fast["tokens"]
    several = [distinct(variant.tokens[:point], n) for n in (1, 2, 3, 4)]
    made: dict[str, Any] = {
        "alpha": fast["accepted"] / fast["gamma"] if fast["gamma"] else 0.0,
        "beta": fast["ngram_accepted"] / fast["gamma"] if fast["gamma"] else 0.0,
        "length": fast["tokens"] / fast["steps"],
        "nodes": fast["drafted"] / fast["steps"],
        "speedup": seconds[0] / seconds[1],
        "plain_ms": 1000 * seconds[0],
        "ms": 1000 * seconds[1],
        "step_ms": 1000 * fast["seconds"] / fast["steps"],
        "price": fast["seconds"] / fast["steps"] / seconds[0],
        "plain_minutes": seconds[0] * point / 60,
        "minutes": seconds[1] * point / 60,
        **{f"d{n}": value for n, value in enumerate(several, 1)},
        "distinct": sum(several) / 4,
    }
    return {name: round(value, 6) for name, value in made.items()}


def decode(trial: Trial, keep: bool = False) -> dict[str, Any]:
    """A strategy beside plain decoding.

    Args:
        keep: the text too, with what repeats in it.
    """
    config, options = trial.config, trial.options
    points: list[int] = config["points"]
    length: int = config["prefill"]
    measured, by_text = list(points), config["reach"] == "text"
    if by_text:  # the last tokens of the length are generated, all before are prompt
        new = min(config["measured"], points[-1])
        length, measured = length + points[-1] - new, [new]
    begun = trial.prompt(length)
    base = trial.llm.prefill(begun.ids)
    sides = paired_run(base, config["strategy"], options, trial.params, measured)
    plain, variant = sides
    found = {str(point): figures(*sides, at) for point, at in zip(points, measured, strict=True)}
    drafting = _whole(variant, found[str(points[-1])])
    return {
        "prompt": begun.about,
        "context": f"{len(begun.ids)} tokens prefilled, {measured[-1]} generated",
        "reached": "by prefilled text" if by_text else "by generating",
        "prefill_seconds": round(base.seconds, 4),
        "lossless": options.get("acceptance", "exact") == "exact",
        "identical": plain.tokens == variant.tokens,
        "digest": hashlib.sha256(" ".join(map(str, variant.tokens)).encode()).hexdigest()[:16],
        "figures": found,
        "raw": {"columns": COLUMNS, "plain": plain.raw, "variant": variant.raw},
        **({"drafting": drafting} if drafting else {}),
        **({"stretches": _stretches(trial.llm, variant.tokens)} if keep else {}),
    }


def _whole(variant: Side, last: dict[str, Any]) -> dict[str, Any] | None:
    """Add to the last point's figures those of the whole run alone; what adaptive drafting says of
    it."""
    if not isinstance(variant.steps, Stream):
        return None
    done, total = variant.steps.result, sum(variant.phases.values())
    last |= {f"share_{name}": round(seconds / total, 4) for name, seconds in variant.phases.items()}
    last["draft_passes"] = round(done.metrics.draft_passes / done.metrics.steps, 3)
    return done.drafting


def repeats(tokens: Sequence[int], n: int = 8) -> list[bool]:
    """For each token whether it lies in an n-gram that the text has had before (overlaps count)."""
    seen: set[tuple[int, ...]] = set()
    marked = [False] * len(tokens)
    for at in range(len(tokens) - n + 1):
        gram = tuple(tokens[at : at + n])
        if gram in seen:
            marked[at : at + n] = [True] * n
        else:
            seen.add(gram)
    return marked


def _stretches(llm: LLM, tokens: list[int]) -> list[list[Any]]:
    """The text in stretches, [text, whether it repeats an earlier one]."""
    marked = repeats(tokens)
    edges = [0, *(i for i in range(1, len(tokens)) if marked[i] != marked[i - 1]), len(tokens)]
    return [
        [llm.tokenizer.decode(tokens[start:end]), marked[start]] for start, end in pairwise(edges)
    ]
