"""Which drafter to use, what a pass costs, how likely a candidate is accepted: all learnt from the
steps.

*Chances.* With coupled drafting, a draft ranks tokens by its own scores plus the target's noise, so
the lead of its best candidate over the next says how likely the target agrees. For each source of
candidates, a logistic regression on a few features of the ranking gives every candidate's chance of
acceptance. It starts from the library's weights or the heads file's, and learns from every position
whose token becomes known.

*Costs* are in *plain passes*: the time that a pass over one row of this sequence takes now. The
    unit follows
the machine's load and the context length, so the cost of a row, a head level or a drafter keeps its
meaning when these change. With several sequences in a step, their total yield is set against their
total time.

A *mode* is the name of the drafter in use, or *plain*: only the free drafters (lookups in the
    text). A mode's
rate is its expected tokens, corrected by the bias of past expectations, per plain pass. In a step
whose next token the free drafters already know, a mode's drafter is not asked, and every step of a
mode shows what plain would have made of it. Modes not in use are tried for a few steps, at
intervals that double. This module reads no clock: steps carry their own times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

from tokenswift.sampling.rows import Ranked
from tokenswift.speculation.sequence_state import ALONE, BatchLoad

# ---- chances -------------------------------------------------------------------------------------


_LOGS = [math.log(at + 1.0) for at in range(64)]
_MAX_GAP = 3.0  # larger differences of noisy scores carry no further information
_RATE = 0.06  # learning rate
_PRIORS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    # source → weights for the best candidate, weights for the others
    "hidden": ((-1.19, 0.33, 0.25, 0.68, -0.14, 0.0), (-0.76, -0.54, 0.09, 0.81, -0.02, -1.32)),
    "backbone": ((1.2, 0.6, 0.5, 0.8, -0.1, 0.0), (-2.0, -0.5, -0.6, 0.5, -0.05, -0.5)),
    "model": ((0.0, 0.5, 0.4, 0.8, -0.1, 0.0), (-2.0, -0.5, -0.6, 0.5, -0.05, -0.5)),
    "after": ((-1.19, 0.33, 0.25, 0.68, -0.14, 0.0), (-0.76, -0.54, 0.09, 0.81, -0.02, -1.32)),
}
_DEFAULT_PRIOR = _PRIORS["hidden"]  # for sources without weights of their own


def features(ranked: Ranked, at: int, depth: int) -> tuple[float, ...]:
    """Features of candidate ``at`` (0 is the best) of a ranking, ``depth`` levels below its
    source's start.

    They are 1; the gap (the best one's lead over the second, or another's distance behind the
    best); its logarithm; the draft's probability; the depth; and the logarithm of the rank.
    """
    values, other = ranked.values, at or 1
    gap = min(_MAX_GAP, values[0] - values[other]) if other < len(values) else _MAX_GAP
    return (1.0, gap, math.log(gap + 0.1), ranked.probs[at], float(depth), _LOGS[at])


class Regression:
    """One logistic regression, trained online by normalised gradient steps.

    Args:
        weights: initial weights.
        rate: learning rate.
    """

    def __init__(self, weights: Sequence[float], rate: float = _RATE) -> None:
        self.weights, self.rate = list(weights), rate

    def chance(self, x: Sequence[float]) -> float:
        """Predicted probability for features ``x``."""
        score = sum(map(mul, self.weights, x))
        return 1.0 / (1.0 + math.exp(-score)) if score > -30 else 0.0

    def learn(self, x: Sequence[float], error: float) -> None:
        """One gradient step; ``error`` is the outcome (0 or 1) minus the predicted probability."""
        step = self.rate * error / sum(map(mul, x, x))
        self.weights = [
            weight + step * value for weight, value in zip(self.weights, x, strict=True)
        ]


class Calibration:
    """The regressions of all sources, two each: one for the best candidate, one for the others.

    Args:
        priors: source → (initial weights for the best candidate, for the others), where better ones
            than the library's are known (a heads file brings its own).
    """

    def __init__(self, priors: Mapping[str, Sequence[Sequence[float]]] | None = None) -> None:
        self._models: dict[str, tuple[Regression, ...]] = {}
        self._priors = {**_PRIORS, **(priors or {})}

    def _model(self, kind: str) -> tuple[Regression, ...]:
        if kind not in self._models:
            pair = self._priors.get(kind, _DEFAULT_PRIOR)
            self._models[kind] = tuple(Regression(weights) for weights in pair)
        return self._models[kind]

    def chances(
        self, source: str, ranked: Ranked, depth: int
    ) -> tuple[list[float], Callable[[int], None]]:
        """Each candidate's chance, and a function that learns from the token that the target chose
        there."""
        first, others = self._model(source)
        made = [features(ranked, at, depth) for at in range(len(ranked.tokens))]
        found = [(others if at else first).chance(x) for at, x in enumerate(made)]
        total = sum(found)
        if total > 0.98:  # at most one is right
            found = [chance * 0.98 / total for chance in found]

        def learn(right: int) -> None:
            for at, token in enumerate(ranked.tokens):
                (others if at else first).learn(made[at], (token == right) - found[at])

        return found, learn


# ---- costs, and the choice of a drafter ----------------------------------------------------------


KNOTS = (
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
)  # row counts with a cost of their own
ROW = 0.1  # initial cost of one more row in a pass, in plain passes
LEVEL = 0.1  # initial cost of a level of heads, in plain passes
FIRST = 3  # plain steps at the start; the fastest of them sets the unit
_OUTLIER = math.log(
    1.5
)  # log error of a time is clipped to this: the machine was busy for a moment
_UNIT, _RATIO = 1 / 8, 1 / 32  # smallest weight of a new time in the unit, and in a ratio
_ANCHOR = 1 / 3  # weight, in the unit, of the second plain step in a row

PLAIN = "plain"
_PLAIN_WORDS = "plain decoding with drafts from the text"
_PLAIN_EVERY = 256  # steps without two plain ones in a row, after which two are made to time them
_SLOW, _FAST = 1 / 32, 1 / 16  # smallest weight of a new value in a running mean
_BIAS_MEMORY = 64.0  # expected drafted tokens over which a mode's bias is averaged
_MARGIN = (
    1.02  # a mode takes over when its rate is this many times the current one's; plain at once
)
_TRIAL, _FIRST_WAIT, _LAST_WAIT = (
    4,
    16,
    1024,
)  # steps of a trial; steps between trials, first and last
_ALWAYS = 0.5  # chance of wrong free drafters from which a mode's drafter is always asked
_TRIAL_RATE = 0.8  # part of the current rate that a mode must promise to be tried (1 in a batch)
_LOAD_TOKENS = 512  # tokens still to come that repay filling a partial cache
_REST_AFTER, _REST_GAP = 8, 4  # steps without a draft until a rest; steps between rests
_REST, _LONG_REST = 16, 128  # steps of a rest, first and longest
_IDLE_COST = 0.015  # plain passes that asking the free drafters in vain may cost
_FIRST_BIAS = 0.8  # bias of a drafter before any of its tokens was verified
_FIRST_CHANCE = 0.35  # chance of a level's best candidate before any was seen


@dataclass(slots=True)
class Learnt:
    """What was learnt from earlier sequences of a model; every sequence starts from it and adds to
    it.

    Attributes:
        calibration: turns rankings into chances.
        ratios: see `Costs`.
        biases: by mode, accepted ÷ expected drafted tokens.
        outcomes: see `drafters.recycle`.
    """

    calibration: Calibration = field(default_factory=Calibration)
    ratios: list[float] = field(default_factory=lambda: [0.0] * len(KNOTS))
    biases: dict[str, float] = field(default_factory=dict)
    outcomes: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)


class Costs:
    """Cost of a pass by its number of rows, in plain passes, and the milliseconds of a plain pass.

    Args:
        ratios: cost at each of :data:`KNOTS` as learnt so far, 0 where unknown; updated in place.

    Attributes:
        unit: milliseconds of a plain pass; 0 before the first step.
    """

    def __init__(self, ratios: list[float] | None = None) -> None:
        self.ratios = [0.0] * len(KNOTS) if ratios is None else ratios
        self.unit = 0.0
        self._seen = [0] * len(KNOTS)
        self._plain = 0  # plain steps in a row

    def verify(self, rows: float) -> float:
        """Cost of a verify pass over ``rows`` rows, the choice of tokens included: interpolated
        between known row counts, extrapolated beyond the last with the mean slope up to it."""
        low, below, slope = 1.0, 1.0, ROW
        for knot, ratio in zip(KNOTS, self.ratios, strict=True):
            if not ratio or knot == 1:
                continue
            slope = (ratio - below) / (knot - low)
            if knot >= rows:
                return below + slope * (rows - low)
            low, below, slope = float(knot), ratio, (ratio - 1) / (knot - 1)
        return below + slope * (rows - low)

    def observe(self, rows: int, milliseconds: float) -> None:
        """Learn from the time of a verify pass, whose error is shared between unit and ratio.

        A drafted step shows only unit × ratio. The first plain step after one is slow, because
        drafting has filled the processor's caches; it is ignored, and the second one corrects the
        unit.
        """
        at = next((at for at, knot in enumerate(KNOTS) if knot >= rows), 0)
        self._seen[at] += 1
        self._plain = 0 if at else self._plain + 1
        if not self.unit or (not at and self._seen[0] <= FIRST):  # the machine may be slow at first
            found = milliseconds / self.verify(rows)
            self.unit = min(found, self.unit or found)
            return
        error = math.log(max(milliseconds, 1e-9) / (self.unit * self.verify(rows)))
        error = min(_OUTLIER, max(-_OUTLIER, error))
        if self._plain == 1:
            return
        if self._plain == 2:
            change = math.exp(_ANCHOR * error)
            self.unit *= change
            self.ratios[:] = [ratio and max(1.0, ratio / change) for ratio in self.ratios]
            return
        share = max(_RATIO, 1 / (1 + self._seen[at])) if at else 0.0
        if at:
            ratio = max(1.0, (self.ratios[at] or self.verify(KNOTS[at])) * math.exp(share * error))
            # fewer rows cost no more, or they are never tried again
            self.ratios[: at + 1] = [*(min(fewer, ratio) for fewer in self.ratios[:at]), ratio]
        self.unit *= math.exp(_UNIT * (1 - share) * error)


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """What a drafter expects of its steps before it has made any; times are in plain passes.

    Attributes:
        words: what it does, for the summary ("heads from the verified state").
        tokens: tokens per step, the target's own included.
        rows: rows of a step's verify pass.
        price: time that drafting takes in a step.
        pass_cost, best_chance: time of one draft pass and the chance of its best candidate, where a
            drafter makes one pass after another; 0 for others.
        least: it drafts only while at least so many tokens are cached.
        loads: it must fill a cache first, so it is tried only where many tokens are still to come.
    """

    words: str
    tokens: float
    rows: int
    price: float
    pass_cost: float = 0.0
    best_chance: float = 0.0
    least: int = 0
    loads: bool = False


@dataclass(slots=True)
class _Mode:
    """Running means over a mode's steps, and its totals."""

    tokens: float  # expected tokens per step
    rows: float  # rows per verify pass
    draft: float  # drafting time per step, in plain passes
    pass_cost: float = 0.0  # time of one draft pass, in plain passes; 0 without such
    next_trial: int = FIRST + 1  # number of the step from which it may be tried
    wait: int = _FIRST_WAIT  # steps from its next trial to the one after
    steps: int = 0
    learnt: int = 0  # steps in the means
    made: int = 0  # tokens of all its steps
    drafted: int = 0  # nodes below the root in all its steps
    bias: float = 1.0  # accepted ÷ expected drafted tokens
    judged: float = 4.0  # expected drafted tokens that the bias is averaged over

    def foresee(self, expected: float, rows: int) -> float:
        """Learn what a step would draft; returns the weight of that in the means."""
        weight = max(_SLOW, 1 / (self.learnt + 3))
        self.learnt += 1
        self.tokens += weight * (expected - self.tokens)
        self.rows += weight * (rows - self.rows)
        return weight

    def learn(self, expected: float, made: int, rows: int, draft: float | None) -> None:
        """Learn from a step; ``draft`` is its drafting time, None where that is not typical."""
        weight = self.foresee(expected, rows)
        if draft is not None:
            self.draft += weight * (min(draft, 3 * self.draft + 0.1) - self.draft)
        self.judge(expected - 1, made - 1)

    def judge(self, hoped: float, accepted: int) -> None:
        """Learn the bias from a step's drafted tokens."""
        if hoped > 0.05:
            self.judged = max(hoped, min(_BIAS_MEMORY, self.judged + hoped))
            self.bias = min(1.3, max(0.3, self.bias + (accepted - hoped * self.bias) / self.judged))


@dataclass(frozen=True, slots=True)
class Drafted:
    """How a step's tree was drafted.

    Attributes:
        mode: the mode of the step.
        expected: tokens that the step is expected to yield.
        rows: nodes, the root included.
        passes, levels: draft passes, and levels of heads, made for it.
        loaded: a cache was filled meanwhile, so its drafting time is not typical.
    """

    mode: str = PLAIN
    expected: float = 1.0
    rows: int = 1
    passes: int = 0
    levels: int = 0
    loaded: bool = False


class Control:
    """Chooses the mode of every step, and knows the costs.

    Args:
        costs: cost of verify passes.
        estimates: what each drafter that is not free expects, by its name.
        biases: see `Learnt`.

    Attributes:
        rate: current tokens per plain pass, those of the other sequences in the step included.
        load: the other sequences in the step.
        remaining: new tokens still to come at most; None: unknown.
        row, level: cost of one more row in a verify pass, and of one level of heads, in plain
            passes.
        last: how the last tree was drafted.
        timing_plain: this step drafts nothing, to time a plain pass.
    """

    def __init__(
        self,
        costs: Costs,
        estimates: Mapping[str, CostEstimate],
        biases: dict[str, float] | None = None,
    ) -> None:
        self.costs, self.estimates = costs, estimates
        self.biases = {} if biases is None else biases
        self.load = ALONE
        self.remaining: int | None = None
        # asking the free drafters takes about .03 of a plain pass
        self.modes = {PLAIN: _Mode(1.0, 1, 0.03, bias=self.biases.get(PLAIN, 1.0))}
        for name, estimate in estimates.items():
            known = (estimate.tokens, estimate.rows, estimate.price, estimate.pass_cost)
            self.modes[name] = _Mode(*known, bias=self.biases.get(name, _FIRST_BIAS))
        self.current, self.rate, self.timing_plain = PLAIN, 1.0, True
        self.row, self.level = ROW, LEVEL
        self._best_chances: dict[int | str, float] = {
            name: e.best_chance for name, e in estimates.items()
        }
        self._trial: list[str] = []  # modes of the next steps
        self._step, self._last_bare = 0, 0
        self.last = Drafted()
        self._idle, self._rest = 0, _REST  # steps without a draft; length of the next rest
        self._worth = self._spent = (
            0.0  # milliseconds: of plain decoding for these tokens, and spent
        )

    # ---- decisions -------------------------------------------------------------------------------

    def mode(self, context: int, load: BatchLoad = ALONE) -> str:
        """Choose the mode of the next step, with ``context`` tokens cached and ``load`` in the same
        pass."""
        self._step, self.load = self._step + 1, load
        more = self.costs.verify(load.rows + 6) - self.costs.verify(load.rows + 1)
        self.row = max(1e-6, more / 5)
        found = [PLAIN, *(name for name, one in self.estimates.items() if context >= one.least)]
        rates = {name: self.expected_rate(name) for name in found}
        if load == ALONE:
            rates[PLAIN] = max(1.0, rates[PLAIN])  # one token per plain pass, with no drafter asked
        self.timing_plain = self._step <= FIRST or self._step - self._last_bare >= _PLAIN_EVERY
        if self.timing_plain:
            return PLAIN
        if self._trial:
            return self._trial.pop()
        self._choose(rates)
        self.rate = max(rates[self.current], rates[PLAIN])
        for name, mode in self.modes.items():
            if name in rates and name != self.current and self._step >= mode.next_trial:
                mode.next_trial, mode.wait = self._step + mode.wait, min(_LAST_WAIT, 2 * mode.wait)
                if self._promises(name, rates[name]):
                    self._trial = [name] * ((_TRIAL if mode.pass_cost else _TRIAL // 2) - 1)
                    return name
        return self.current

    def _choose(self, rates: Mapping[str, float]) -> None:
        """Change to the best of the modes that have been used, where it is better by the margin."""
        seen = {
            name: rate for name, rate in rates.items() if name == PLAIN or self.modes[name].steps
        }
        best = max(seen, key=seen.__getitem__)
        margin = 1.0 if best == PLAIN else _MARGIN
        if self.current not in seen or seen[best] > margin * seen[self.current]:
            self.current = best

    def _promises(self, name: str, rate: float) -> bool:
        """Whether a mode with this expected rate is worth a trial."""
        loads = name != PLAIN and self.estimates[name].loads
        few = self.remaining is not None and self.remaining < _LOAD_TOKENS
        return (
            not (loads and few) and rate > (_TRIAL_RATE if self.load == ALONE else 1.0) * self.rate
        )

    def expected_rate(self, name: str) -> float:
        """Tokens per plain pass that a mode is expected to reach, with the current load."""
        mode, load = self.modes[name], self.load
        spent = (
            self.costs.verify(mode.rows + load.rows)
            + mode.draft
            + load.ms / (self.costs.unit or 1e9)
        )
        return (1 + (mode.tokens - 1) * mode.bias + load.tokens) / spent

    def uses(self, name: str) -> bool:
        """Whether a drafter is in use: its mode is the current or last one, or on trial; a free
        drafter is unless the step only times a plain pass."""
        ours = (self.current, self.last.mode, *self._trial)
        return name in ours if name in self.modes else not self.timing_plain

    def prices(self, most: int) -> list[float]:
        """Costs of verify passes with 0, 1, … ``most`` nodes below the root, made
        non-decreasing."""
        beside = self.load.rows
        return list(
            accumulate((self.costs.verify(beside + rows) for rows in range(1, most + 2)), max)
        )

    # ---- outcomes --------------------------------------------------------------------------------

    def worth(self, name: str, expected: float, rows: int, chance: float) -> bool:
        """Whether to ask a mode's drafter in a step, and what *plain* would make of it, which is
        learnt.

        Args:
            name: of the mode.
            expected, rows: tokens and rows of the step with what the free drafters propose.
            chance: that one of their candidates for the next token is right.
        """
        mode, plain = self.modes[name], self.modes[PLAIN]
        plain.foresee(expected, rows)
        gain, price = self.estimates[name].tokens - 1, self.rate * (mode.draft - plain.draft)
        return name != self.current or 1 - chance > _ALWAYS or gain * (1 - chance) > price

    def drafted(self, tree: Drafted) -> None:
        """Take note of the step's tree."""
        if tree.rows == self.last.rows == 1:
            self._last_bare = self._step
        drafts = self.current != PLAIN or (tree.mode == PLAIN and tree.rows > 1)
        # neither a trial counts nor a step that only times a plain pass
        self._idle = 0 if drafts else self._idle + (tree.mode == PLAIN and not self.timing_plain)
        self._rest = _REST if drafts else self._rest
        self.last = tree

    def rest(self) -> int:
        """Steps to come in which no drafter is asked: for a while no candidate was worth a row, and
        asking costs time. Each rest is twice as long as the one before, until something is
        drafted."""
        costly = self.load == ALONE and self.modes[PLAIN].draft > _IDLE_COST
        if self._trial or self._idle < _REST_AFTER or not costly:
            return 0
        self._idle, rest, self._rest = (
            _REST_AFTER - _REST_GAP,
            self._rest,
            min(_LONG_REST, 2 * self._rest),
        )
        return rest

    def record_rest(self, verify_ms: float, draft_ms: float) -> None:
        """Record a step during a rest, which yields one token."""
        self.last, self.timing_plain = Drafted(), True
        self.record_step(1, 1, verify_ms, draft_ms)

    def record_step(self, tokens: int, rows: int, verify_ms: float, draft_ms: float) -> None:
        """Record a step: its tokens, rows and times. ``draft_ms`` includes learning from the step
        before."""
        last = self.last
        if last.rows == rows:  # unless the end of the sequence cut the tree
            self.costs.observe(rows + self.load.rows, verify_ms)
        if not self.load.rows:
            self._worth += tokens * self.costs.unit
            self._spent += verify_ms + draft_ms
        draft = draft_ms / (self.costs.unit or 1e9)
        mode = self.modes[last.mode]
        mode.steps, mode.made, mode.drafted = (
            mode.steps + 1,
            mode.made + tokens,
            mode.drafted + rows - 1,
        )
        if not self.timing_plain:  # such a step says nothing about the free drafters
            mode.learn(last.expected, tokens, rows, None if last.loaded else draft)
        self.biases[last.mode] = mode.bias
        expected = last.levels * self.level + last.passes * mode.pass_cost
        if not expected and last.mode != PLAIN:  # only the free drafters were asked
            self.modes[PLAIN].judge(last.expected - 1, tokens - 1)
        if last.loaded or not expected:
            return
        ratio = min(3.0, max(1 / 3, (draft - self.modes[PLAIN].draft) / expected))
        if last.levels:
            self.level *= 1 + _FAST * (ratio - 1)
        if last.passes:
            mode.pass_cost *= 1 + _FAST * (ratio - 1)

    def best_chance(self, of: int | str) -> float:
        """Mean chance of the best candidate at a level of heads (from 0) or in a drafter's pass
        (name)."""
        return self._best_chances.get(of, _FIRST_CHANCE)

    def observe_best(self, of: int | str, chance: float) -> None:
        """Take the chance of a best candidate into that mean."""
        self._best_chances[of] = self.best_chance(of) + _FAST * (chance - self.best_chance(of))

    # ---- reports ---------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """A report for JSON: ``summary``, a sentence on what was used; ``gain``, the speed-up over
        plain decoding at the measured time of a plain pass (None where too few were seen);
        ``modes``, the steps, tokens and nodes of each."""
        seen = {name: mode for name, mode in self.modes.items() if mode.steps}
        steps = sum(mode.steps for mode in seen.values())
        nodes = sum(mode.drafted for mode in seen.values()) / steps
        words = {PLAIN: _PLAIN_WORDS} | {name: e.words for name, e in self.estimates.items()}
        ranked = sorted(seen.items(), key=lambda pair: -pair[1].steps)
        shares = "; ".join(f"{words[name]} in {mode.steps / steps:.0%}" for name, mode in ranked)
        return {
            "summary": f"{shares} of the steps, {nodes:.1f} nodes a step",
            "gain": self._worth / self._spent
            if self._spent and self.modes[PLAIN].steps >= FIRST
            else None,
            "modes": {
                name: {"steps": mode.steps, "tokens": mode.made, "nodes": mode.drafted}
                for name, mode in seen.items()
            },
        }
