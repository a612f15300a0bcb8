"""Which drafter drafts, what rows cost and how likely candidates are right: learnt from the steps alone.

*Chances*: with coupled drafting the draft ranks tokens by its own scores plus the target's noise, so how far
the best candidate leads says how likely the target agrees. For every source of candidates a logistic
regression over a handful of features of the ranking gives the chance of each candidate; it starts from
figures that come with the heads and learns from every place whose outcome becomes known, drafted or not.

*Times* are counted in *plain passes*: what a pass over one row of this text takes now. That unit follows the
machine and the context, so what is known of a row, a level or a drafter holds when a machine gets busy, or a
text long. A step of several texts is judged as a whole: what all of them yield over what all of them take.

A *mode* is a drafter's name, or *plain*, which drafts nothing but what drafts in every step. Its rate is what
its steps are expected to yield, corrected by what they did yield, over what they take. Modes that are not in
use are tried for a few steps, each time after twice as many steps as before. There is no clock here: steps
bring their times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

from tokenswift.sampling.choice import Ranked
from tokenswift.spec.strategy import ALONE, BatchLoad

# ---- chances -----------------------------------------------------------------------------------------------


_LOGS = [math.log(at + 1.0) for at in range(64)]
_FAR = 3.0  # perturbed scores further apart than this say no more
_RATE = 0.06  # step of the online regression
_PRIORS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    # source → weights of the first candidate, weights of the others
    "hidden": ((-1.19, 0.33, 0.25, 0.68, -0.14, 0.0), (-0.76, -0.54, 0.09, 0.81, -0.02, -1.32)),
    "backbone": ((1.2, 0.6, 0.5, 0.8, -0.1, 0.0), (-2.0, -0.5, -0.6, 0.5, -0.05, -0.5)),
    "model": ((0.0, 0.5, 0.4, 0.8, -0.1, 0.0), (-2.0, -0.5, -0.6, 0.5, -0.05, -0.5)),
    "after": ((-1.19, 0.33, 0.25, 0.68, -0.14, 0.0), (-0.76, -0.54, 0.09, 0.81, -0.02, -1.32)),
}
_GENERAL = _PRIORS["hidden"]  # of kinds that nobody knows better weights for


def features(ranked: Ranked, at: int, depth: int) -> tuple[float, ...]:
    """The features of candidate ``at`` of a ranking, ``depth`` levels below where its source starts: 1, lead
    over the next one (the best) or distance behind the best (the others), its logarithm, its share in the
    draft, the depth, and the logarithm of the rank."""
    values = ranked.values
    if at == 0:
        gap = min(_FAR, values[0] - values[1]) if len(values) > 1 else _FAR
    else:
        gap = min(_FAR, values[0] - values[at])
    return (1.0, gap, math.log(gap + 0.1), ranked.shares[at], float(depth), _LOGS[at])


class Regression:
    """One logistic regression, updated by stochastic gradient steps.

    Args:
        weights: to start from.
        rate: step of the gradient.
    """

    __slots__ = ("weights", "rate")

    def __init__(self, weights: Sequence[float], rate: float = _RATE) -> None:
        self.weights, self.rate = list(weights), rate

    def chance(self, x: Sequence[float]) -> float:
        """The predicted probability."""
        score = sum(map(mul, self.weights, x))
        return 1.0 / (1.0 + math.exp(-score)) if score > -30 else 0.0

    def learn(self, x: Sequence[float], error: float) -> None:
        """One step; ``error`` is the outcome (0 or 1) minus the predicted probability."""
        step = self.rate * error / sum(map(mul, x, x))
        self.weights = [weight + step * value for weight, value in zip(self.weights, x, strict=True)]


class Calibration:
    """The regressions of all sources.

    Args:
        priors: source → (weights of the first candidate, weights of the others), where better ones than the
            library's are known (a heads file brings its own).
    """

    def __init__(self, priors: Mapping[str, Sequence[Sequence[float]]] | None = None) -> None:
        self._models: dict[str, tuple[Regression, ...]] = {}
        self._priors = {**_PRIORS, **(priors or {})}

    def _model(self, kind: str) -> tuple[Regression, ...]:
        if kind not in self._models:
            pair = self._priors.get(kind, _GENERAL)
            self._models[kind] = tuple(Regression(weights) for weights in pair)
        return self._models[kind]

    def chances(self, source: str, ranked: Ranked, depth: int) -> tuple[list[float], Callable[[int], None]]:
        """Chance of each candidate of a ranking, and what takes in which token the target chose there."""
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


# ---- prices, and who drafts --------------------------------------------------------------------------------


KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # row counts that are told apart
ROW = 0.1  # of a plain pass that a row takes, before any was seen
LEVEL = 0.1  # plain passes that a level of heads takes, before any was made
FIRST = 3  # plain steps at first, what the fastest takes is the unit
_OFF = math.log(1.5)  # a step counts as no further off than this: a hiccup of the machine
_UNIT, _RATIO = 1 / 8, 1 / 32  # least weights of a new figure
_ANCHOR = 1 / 3  # weight of what a plain step after another one says of the unit, and so of all ratios

PLAIN = "plain"
_WORDS = "plain decoding with drafts from the text"
_BASELINE = 128  # steps until the next two, if there were none meanwhile
_SLOW, _FAST = 1 / 32, 1 / 16  # least weights of a new figure
_MEMORY = 64.0  # drafted tokens that say how good a mode's expectations are
_MARGIN = 1.02  # a mode has to be this much better to take over; plain decoding need only be better
_TRIAL, _FIRST, _LAST = 4, 16, 1024  # steps of a trial; between trials: at first, and at most
_PROMISE = 0.8  # of the rate now that a mode must promise to be tried; as much of it beside other texts
_LOADED = 512  # tokens to come for which it is worth to load a cache
_IDLE, _ASKED = 8, 4  # steps without a draft until a rest; steps between rests
_REST, _LONG_REST = 16, 128  # steps of a rest at first, and at most
_DEAR = 0.015  # of a plain pass that asking for drafts from the text may take for nothing
_DOUBT = 0.8  # bias of a drafter before any of its tokens was verified
_CHANCE = 0.35  # of a level's best candidate, before anything is known


@dataclass(slots=True)
class Learnt:
    """What the texts of a model have taught, so that the next need not learn it again; each adds to it.

    Attributes:
        calibration: makes chances of rankings.
        ratios: see `Costs`.
        biases: by mode, drafted tokens that came over those that were expected.
        outcomes: of recycled rankings (see `drafters.recycle`).
    """

    calibration: Calibration = field(default_factory=Calibration)
    ratios: list[float] = field(default_factory=lambda: [0.0] * len(KNOTS))
    biases: dict[str, float] = field(default_factory=dict)
    outcomes: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)


class Costs:
    """What passes take, in plain passes; from their times the unit too, in milliseconds.

    Args:
        ratios: of each of :data:`KNOTS` what was learnt before, 0 where nothing was; it learns on.

    Attributes:
        unit: milliseconds of a plain pass; 0 before the first step.
    """

    def __init__(self, ratios: list[float] | None = None) -> None:
        self.ratios = [0.0] * len(KNOTS) if ratios is None else ratios
        self.unit = 0.0
        self._seen = [0] * len(KNOTS)
        self._plain = 0  # plain steps in a row

    def verify(self, rows: float) -> float:
        """A pass over so many rows, with the choice of its tokens: between row counts that were seen by
        interpolation, beyond them as steep as up to the last one."""
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
        """Take in a verify pass: part of what it is off is the machine's speed, part the row count's.

        Drafted steps tell how fast unit and ratio are together, and the first plain step after them is slowed
        by what drafting left in the processor's caches; the second one tells the unit.
        """
        at = next((at for at, knot in enumerate(KNOTS) if knot >= rows), 0)
        self._seen[at] += 1
        self._plain = 0 if at else self._plain + 1
        if not self.unit or (not at and self._seen[0] <= FIRST):  # the first ones may have been slow
            found = milliseconds / self.verify(rows)
            self.unit = min(found, self.unit or found)
            return
        error = math.log(max(milliseconds, 1e-9) / (self.unit * self.verify(rows)))
        error = min(_OFF, max(-_OFF, error))
        if self._plain == 1:
            return
        if self._plain == 2:
            change = math.exp(_ANCHOR * error)
            self.unit *= change
            self.ratios[:] = [ratio and max(1.0, ratio / change) for ratio in self.ratios]
            return
        share = max(_RATIO, 1 / (1 + self._seen[at])) if at else 0.0
        if at:
            known = self.ratios[at] or self.verify(KNOTS[at])
            self.ratios[at] = max(1.0, known * math.exp(share * error))
        self.unit *= math.exp(_UNIT * (1 - share) * error)


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """What a drafter expects of its steps, before there were any. Times are in plain passes: what a pass of
    the target over one row takes.

    Attributes:
        words: what it does, for the summary ("heads from the verified state").
        tokens: yield of a step, the target's own token included.
        rows: of a step's verify pass.
        price: time that drafting takes in a step.
        pass_cost, lead: of a drafter that makes one pass after another: time of one, and the chance of its
            best candidate; 0 for others.
        least: it drafts only over more cached tokens than these.
        loads: it has to load a cache first, so it is tried only where much of the text is left.
    """

    words: str
    tokens: float
    rows: int
    price: float
    pass_cost: float = 0.0
    lead: float = 0.0
    least: int = 0
    loads: bool = False


@dataclass(slots=True)
class _Mode:
    """Running means of a mode's steps: tokens, rows, and drafting in plain passes."""

    tokens: float  # expected a step
    rows: float
    draft: float
    pass_cost: float = 0.0  # of one that drafts by passes: what one takes
    next_trial: int = 0
    wait: int = _FIRST
    steps: int = 0
    learnt: int = 0  # steps that the means are of
    made: int = 0  # tokens that its steps yielded
    drafted: int = 0  # nodes below the root, in all
    bias: float = 1.0  # drafted tokens that came over those that were expected
    judged: float = 4.0  # drafted tokens that the bias is known from

    def learn(self, expected: float, made: int, rows: int, draft: float | None) -> None:
        """It was expected to yield so many; ``draft``: None where what it took is no price of a step."""
        weight = max(_SLOW, 1 / (self.learnt + 3))
        self.learnt += 1
        self.tokens += weight * (expected - self.tokens)
        self.rows += weight * (rows - self.rows)
        if draft is not None and (self.learnt < 4 or draft < 3 * self.draft + 0.1):
            self.draft += weight * (draft - self.draft)
        hoped = expected - 1
        if hoped > 0.05:
            self.judged = max(hoped, min(_MEMORY, self.judged + hoped))
            self.bias = min(1.3, max(0.3, self.bias + (made - 1 - hoped * self.bias) / self.judged))


@dataclass(frozen=True, slots=True)
class Drafted:
    """A tree that was made.

    Attributes:
        mode: who drafted.
        expected: tokens that the step is expected to yield.
        rows: nodes, the root included.
        passes, levels: that were made for it.
        loaded: its drafting time is no price of a step.
    """

    mode: str = PLAIN
    expected: float = 1.0
    rows: int = 1
    passes: int = 0
    levels: int = 0
    loaded: bool = False


class Control:
    """Chooses the mode of every step and knows all prices.

    Args:
        costs: of verify passes.
        offers: by name, what the drafters expect that have a price.
        biases: see `Learnt`.

    Attributes:
        rate: tokens a plain pass that decoding reaches now, those of the texts beside it included.
        load: what the next pass holds besides.
        left: new tokens that may still come; None: nobody knows.
        row, level: what one more row of a verify pass takes, and one level of the heads.
        last: the tree that was made last.
        bare: whether the next step drafts nothing, to see what that takes.
    """

    def __init__(
        self, costs: Costs, offers: Mapping[str, CostEstimate], biases: dict[str, float] | None = None
    ) -> None:
        self.costs, self.offers = costs, offers
        self.biases = {} if biases is None else biases
        self.load = ALONE
        self.left: int | None = None
        self.modes = {PLAIN: _Mode(1.0, 1, 0.0, bias=self.biases.get(PLAIN, 1.0))}
        for at, (name, offer) in enumerate(offers.items()):
            first, bias = FIRST + 1 + _TRIAL * at, self.biases.get(name, _DOUBT)
            known = (offer.tokens, offer.rows, offer.price, offer.pass_cost)
            self.modes[name] = _Mode(*known, next_trial=first, bias=bias)
        self.current, self.rate, self.bare = PLAIN, 1.0, True
        self.row, self.level = ROW, LEVEL
        self._leads: dict[int | str, float] = {name: offer.lead for name, offer in offers.items()}
        self._trial: tuple[str, int] | None = None
        self._step, self._last_bare = 0, 0
        self.last = Drafted()
        self._idle, self._rest = 0, _REST  # plain steps in a row without a draft; steps of the next rest
        self._worth = self._spent = 0.0  # milliseconds that plain decoding would have taken, and that went by

    # ---- decisions ------------------------------------------------------------------------------

    def mode(self, context: int, load: BatchLoad = ALONE) -> str:
        """The mode of the next step, with ``context`` tokens cached and ``load`` beside it in the pass."""
        self._step, self.load = self._step + 1, load
        more = self.costs.verify(load.rows + 6) - self.costs.verify(load.rows + 1)
        self.row = max(1e-6, more / 5)
        rates = {name: self.pace(name) for name in self.modes if self._open(name, context)}
        if load == ALONE:
            rates[PLAIN] = max(1.0, rates[PLAIN])  # asking nobody
        self.bare = self._step <= FIRST or self._step - self._last_bare >= _BASELINE
        if self.bare:
            return PLAIN
        if self._trial is not None:
            name, left = self._trial
            self._trial = (name, left - 1) if left > 1 else None
            return name
        self._choose(rates)
        self.rate = max(rates[self.current], rates[PLAIN])
        for name, mode in self.modes.items():
            if name in rates and name != self.current and self._step >= mode.next_trial:
                mode.next_trial, mode.wait = self._step + mode.wait, min(_LAST, 2 * mode.wait)
                if self._promises(name, rates[name]):
                    steps = _TRIAL if mode.pass_cost else _TRIAL // 2
                    self._trial = (name, steps - 1)
                    return name
        return self.current

    def _choose(self, rates: Mapping[str, float]) -> None:
        """Change to a mode that was seen to be better."""
        seen = {name: rate for name, rate in rates.items() if name == PLAIN or self.modes[name].steps}
        best = max(seen, key=seen.__getitem__)
        margin = 1.0 if best == PLAIN else _MARGIN
        if self.current not in seen or seen[best] > margin * seen[self.current]:
            self.current = best

    def _open(self, name: str, context: int) -> bool:
        offer = self.offers.get(name)
        return offer is None or not offer.least or context > offer.least

    def _promises(self, name: str, rate: float) -> bool:
        """Whether a mode that would reach a rate is worth trying; plain decoding is."""
        if name == PLAIN:
            return True
        if self.offers[name].loads and self.left is not None and self.left < _LOADED:
            return False
        return rate > (_PROMISE if self.load == ALONE else 1.0) * self.rate

    def pace(self, name: str) -> float:
        """Tokens a plain pass that a mode reaches beside what the pass holds now."""
        mode, load = self.modes[name], self.load
        spent = self.costs.verify(mode.rows + load.rows) + mode.draft + load.ms / (self.costs.unit or 1e9)
        return (1 + (mode.tokens - 1) * mode.bias + load.tokens) / spent

    def uses(self, name: str) -> bool:
        """Whether a drafter drafts now, drafted last or is on trial; of those without a price, whether it was
        asked."""
        if name not in self.modes:
            return not self.bare
        return name in (self.current, self.last.mode, self._trial and self._trial[0])

    def prices(self, most: int) -> list[float]:
        """Verify passes with 0, 1, … ``most`` nodes below the root; more rows never take less."""
        beside = self.load.rows
        return list(accumulate((self.costs.verify(beside + rows) for rows in range(1, most + 2)), max))

    # ---- what happened --------------------------------------------------------------------------

    def drafted(self, tree: Drafted) -> None:
        """A tree was made."""
        if tree.rows == self.last.rows == 1:
            self._last_bare = self._step
        drafts = self.current != PLAIN or (tree.mode == PLAIN and tree.rows > 1)  # else it was a trial
        self._idle = 0 if drafts else self._idle + 1
        self._rest = _REST if drafts else self._rest
        self.last = tree

    def rest(self) -> int:
        """Steps to come in which nobody is asked: nothing was worth a row for a while, and asking takes long.
        Each rest takes twice as many as the one before, until something is drafted."""
        dear = self.load == ALONE and self.modes[PLAIN].draft > _DEAR
        if self._trial is not None or self._idle < _IDLE or not dear:
            return 0
        self._idle, rest, self._rest = _IDLE - _ASKED, self._rest, min(_LONG_REST, 2 * self._rest)
        return rest

    def record_rest(self, verify_ms: float, draft_ms: float) -> None:
        """A step of a rest yielded its token in these times."""
        self.costs.observe(1, verify_ms)
        plain = self.modes[PLAIN]
        plain.steps, plain.made = plain.steps + 1, plain.made + 1
        self._worth += self.costs.unit
        self._spent += verify_ms + draft_ms

    def record_step(self, tokens: int, rows: int, verify_ms: float, draft_ms: float) -> None:
        """It was drafted and verified in these times and yielded ``tokens``; learning from the step before
        counts as drafting."""
        last = self.last
        if last.rows == rows:  # not where the text's end cut it short
            self.costs.observe(rows + self.load.rows, verify_ms)
        if not self.load.rows:
            self._worth += tokens * self.costs.unit
            self._spent += verify_ms + draft_ms
        draft = draft_ms / (self.costs.unit or 1e9)
        mode = self.modes[last.mode]
        mode.steps, mode.made, mode.drafted = mode.steps + 1, mode.made + tokens, mode.drafted + rows - 1
        if not self.bare:  # else it says nothing of what drafts in plain steps
            mode.learn(last.expected, tokens, rows, None if last.loaded else draft)
        self.biases[last.mode] = mode.bias
        expected = last.levels * self.level + last.passes * mode.pass_cost
        if last.loaded or not expected:
            return
        ratio = min(3.0, max(1 / 3, (draft - self.modes[PLAIN].draft) / expected))
        if last.levels:
            self.level *= 1 + _FAST * (ratio - 1)
        if last.passes:
            mode.pass_cost *= 1 + _FAST * (ratio - 1)

    def lead(self, of: int | str) -> float:
        """Chance of the best candidate of a level of heads, counted from 0, or of a named drafter's pass."""
        return self._leads.get(of, _CHANCE)

    def led(self, of: int | str, chance: float) -> None:
        """The best candidates of a level, or a pass, have this chance in the mean."""
        self._leads[of] = self.lead(of) + _FAST * (chance - self.lead(of))

    # ---- reports --------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """What was used in a sentence; how many times as fast as plain decoding that was, by what a plain
        pass took then (None where such passes were hardly seen, or all steps were of several texts); steps,
        tokens and nodes by mode."""
        seen = {name: mode for name, mode in self.modes.items() if mode.steps}
        steps = sum(mode.steps for mode in seen.values())
        nodes = sum(mode.drafted for mode in seen.values()) / steps
        words = {PLAIN: _WORDS} | {name: offer.words for name, offer in self.offers.items()}
        used = sorted(seen, key=lambda name: -seen[name].steps)
        shares = "; ".join(f"{words[name]} in {seen[name].steps / steps:.0%}" for name in used)
        return {
            "summary": f"{shares} of the steps, {nodes:.1f} nodes a step",
            "gain": self._worth / self._spent if self._spent and self.modes[PLAIN].steps >= FIRST else None,
            "modes": {
                name: {"steps": mode.steps, "tokens": mode.made, "nodes": mode.drafted}
                for name, mode in seen.items()
            },
        }
