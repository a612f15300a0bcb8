"""Decoding by a strategy beside plain decoding, from the same state, in turns of some tokens.

Both run in one process and take turns through the whole text, first one ahead, then the other, so
that whatever slows the machine down slows both. Times are those that steps know of themselves;
nothing else is counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import pairwise

from benchmarks.common import PLAIN, Options, Trial
from benchmarks.settings import Config
from benchmarks.words import Measured
from tokenswift.config.sampling import SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.engine.stream import Prefilled, Stream
from tokenswift.turns import DecodingSide, take_turns
from tokenswift.types import Step, distinct

TURNS = 128  # at most about so many turns a run
LEAST = 16  # tokens of a turn
WARM = 8  # tokens before the clock runs: what is made at first use is there then
SHARE = "share_"  # how the shares of a step's phases begin
#: figures that rows without times lack, beside the shares of a step's phases
TIMES = ("speedup", "plain_ms", "ms", "step_ms", "price", "plain_minutes", "minutes")


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the first steps of a side, as they are in the curves of a row.

    Attributes:
        tokens: new tokens.
        seconds: of the steps.
        steps: how many.
        drafted: drafted nodes that the target checked.
        accepted: drafted tokens accepted.
        ngram_accepted: those of them on n-gram branches.
        gamma: γ of all steps.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    steps: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    ngram_accepted: float = 0.0
    gamma: float = 0.0


COLUMNS = tuple(column.name for column in fields(Totals))


class Side(DecodingSide):
    """One of the two: its steps so far, added up at the end of each turn.

    Attributes:
        curve: the sums at the end of each turn.
    """

    def __init__(self, steps: Iterator[Step]) -> None:
        super().__init__(steps)
        self.curve: list[Totals] = []
        self._totals = Totals()

    def add(self, step: Step) -> None:
        """Count a step."""
        super().add(step)
        before = self._totals
        self._totals = Totals(
            tokens=before.tokens + len(step.token_ids),
            seconds=before.seconds + step.seconds,
            steps=before.steps + 1,
            drafted=before.drafted + step.drafted,
            accepted=before.accepted + step.accepted,
            ngram_accepted=before.ngram_accepted + step.ngram_accepted,
            gamma=before.gamma + step.gamma,
        )

    def run_to(self, length: int) -> None:
        """A turn: decode until there are that many tokens."""
        super().run_to(length)
        self.curve.append(self._totals)

    def at(self, point: int) -> Totals:
        """The sums at the end of the first turn that has so many tokens."""
        return next(totals for totals in self.curve if totals.tokens >= point)

    @property
    def raw(self) -> dict[str, object]:
        """What the row keeps of it."""
        return {
            "curve": [[round(value, 6) for value in astuple(totals)] for totals in self.curve],
            "phases": {name: round(value, 6) for name, value in self.phase_seconds.items()},
        }


def paired_run(
    base: Prefilled,
    strategy: str,
    options: Options,
    sampling: SamplingParams,
    points: list[int],
) -> tuple[Side, Side]:
    """Decode plainly and by a strategy; (plain, the variant).

    Args:
        base: the state that both go on from.
        points: new tokens at which turns must end; the last is how many there are.
    """

    def side(name: str, values: Options) -> Side:
        base.generate(WARM, name, values, sampling, ignore_eos=True)
        return Side(base.stream(points[-1], name, values, sampling, ignore_eos=True))

    plain = side(PLAIN, {})
    variant = side(strategy, options)
    for end, current in take_turns((plain, variant), ends_of_turns(points)):
        current.run_to(end)
    return plain, variant


def ends_of_turns(points: list[int]) -> list[int]:
    """Where turns end: at every point, and often enough between them."""
    size = max(LEAST, -(-points[-1] // TURNS))
    return sorted({*range(size, points[-1], size), *points})


def figures(plain: Side, variant: Side, point: int) -> dict[str, float]:
    """What tables show of a run's first so many new tokens (definitions: `metrics`)."""
    slow = plain.at(point)
    fast = variant.at(point)
    plain_seconds = slow.seconds / slow.tokens
    seconds = fast.seconds / fast.tokens
    step_seconds = fast.seconds / fast.steps
    several = [distinct(variant.tokens[:point], n) for n in (1, 2, 3, 4)]
    values = {
        "alpha": fast.accepted / fast.gamma if fast.gamma else 0.0,
        "beta": fast.ngram_accepted / fast.gamma if fast.gamma else 0.0,
        "length": fast.tokens / fast.steps,
        "nodes": fast.drafted / fast.steps,
        "speedup": plain_seconds / seconds,
        "plain_ms": 1000 * plain_seconds,
        "ms": 1000 * seconds,
        "step_ms": 1000 * step_seconds,
        "price": step_seconds / plain_seconds,
        "plain_minutes": plain_seconds * point / 60,
        "minutes": seconds * point / 60,
        **{f"d{n}": value for n, value in enumerate(several, 1)},
        "distinct": sum(several) / 4,
    }
    return {name: round(value, 6) for name, value in values.items()}


def split_length(config: Config) -> tuple[int, list[int]]:
    """Tokens of the prompt, and the numbers of new tokens at which figures are taken."""
    length = config["prefill"]
    points = config["points"]
    if "measured" not in config:
        return length, points
    new = min(config["measured"], points[-1])  # all before them is prompt
    return length + points[-1] - new, [new]


def decode(trial: Trial, keep_text: bool = False) -> Measured:
    """A strategy beside plain decoding.

    Args:
        keep_text: the row has the text, too, with what repeats in it.
    """
    config = trial.config
    points = config["points"]
    length, measured_points = split_length(config)
    prompt = trial.prompt(length)
    base = trial.llm.prefill(prompt.ids)
    options = trial.options
    plain, variant = paired_run(
        base=base,
        strategy=config["strategy"],
        options=options,
        sampling=trial.params,
        points=measured_points,
    )
    figures_by_point = {
        str(point): figures(plain, variant, measured_point)
        for point, measured_point in zip(points, measured_points, strict=True)
    }
    row: Measured = {
        "prompt": prompt.about,
        "context": f"{len(prompt.ids)} tokens prefilled, {measured_points[-1]} generated",
        "reached": "by prefilled text" if "measured" in config else "by generating",
        "prefill_seconds": round(base.seconds, 4),
        "lossless": options.get("acceptance", "exact") == "exact",
        "identical": plain.tokens == variant.tokens,
        "digest": hashlib.sha256(" ".join(map(str, variant.tokens)).encode()).hexdigest()[:16],
        "figures": figures_by_point,
        "raw": {"columns": COLUMNS, "plain": plain.raw, "variant": variant.raw},
    }
    if isinstance(variant.steps, Stream):
        figures_by_point[str(points[-1])] |= run_figures(variant, variant.steps)
        if drafting := variant.steps.result.drafting:
            row["drafting"] = drafting
    if not config.get("timed", True):
        row["figures"] = {point: counted(named) for point, named in figures_by_point.items()}
    if keep_text:
        row["stretches"] = stretches(trial.llm, variant.tokens)
    return row


def run_figures(side: Side, stream: Stream) -> dict[str, float]:
    """Figures of a finished run that are known of all of it alone."""
    metrics = stream.result.metrics
    total = sum(side.phase_seconds.values())
    shares = {
        f"{SHARE}{phase}": round(seconds / total, 4)
        for phase, seconds in side.phase_seconds.items()
    }
    return {**shares, "draft_passes": round(metrics.draft_passes / metrics.steps, 3)}


def counted(figures: Mapping[str, float]) -> dict[str, float]:
    """The figures that are counted, not timed."""
    return {
        name: value
        for name, value in figures.items()
        if name not in TIMES and not name.startswith(SHARE)
    }


def repeats(tokens: Sequence[int], n: int = 8) -> list[bool]:
    """For each token whether it lies in an n-gram that the text has had before (overlaps count)."""
    seen: set[tuple[int, ...]] = set()
    repeated = [False] * len(tokens)
    for start in range(len(tokens) - n + 1):
        gram = tuple(tokens[start : start + n])
        if gram in seen:
            repeated[start : start + n] = [True] * n
        else:
            seen.add(gram)
    return repeated


def stretches(llm: LLM, tokens: list[int]) -> list[tuple[str, bool]]:
    """The text in stretches: each with whether it repeats an earlier one."""
    repeated = repeats(tokens)
    changes = [i for i in range(1, len(tokens)) if repeated[i] != repeated[i - 1]]
    return [
        (llm.tokenizer.decode(tokens[start:end]), repeated[start])
        for start, end in pairwise([0, *changes, len(tokens)])
    ]
