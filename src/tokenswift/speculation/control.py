"""Which drafter to use: learnt from the steps.

A step drafts a tree of tokens and verifies it in one pass of the model, with a row for each node:
the root, which is the text's last token, and the drafted nodes below it. It yields one token or
more. *Free* drafters, those that look tokens up, are asked in every step; of the others, one at
most. Among these, heads draft level by level from a state that the last pass has left, and others
make draft passes of their own.

A *mode* is the name of the drafter in use, or *plain*: only the free ones. All costs are in *plain
passes*, the time of a pass over the root alone (`costs`). A mode's *rate* is its expected tokens,
corrected by the bias of past expectations, per plain pass. With several sequences in a step, their
total yield is set against their total time. In a step whose next token the free drafters already
know, a mode's drafter is not asked, and every step of a mode shows what plain would have made of
it. Modes not in use are tried for a few steps, at intervals that double once they are known. This
module reads no clock: steps carry their own times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from tokenswift.speculation.calibration import Calibration
from tokenswift.speculation.costs import (
    FIRST,
    FIRST_COST,
    KNOTS,
    CostEstimate,
    Costs,
    dense_cost,
)
from tokenswift.speculation.modes import FIRST_WAIT, MOST_ERROR, PLAIN, ControlRecord, Drafted, Mode
from tokenswift.speculation.sequence_state import ALONE, BatchLoad

_PLAIN_WORDS = "plain decoding with drafts from the text"
# Each constant stands with what other values of it do to tokens a unit of time, in the mean of ten
# texts of made-up steps (tools/control_constants.py, 24 seeds): "-.1, +.2%" is what half of it and
# twice as much do, "1 +.1%" what 1 does. ±.2% is noise.

# ---- averages
_FAST = 1 / 16  # weight of a new value in means of costs and chances: a scale, no difference
_FIRST_BIAS = 0.8  # bias of a drafter before any of its tokens was verified: .6 -.3%, 1 +.1%

# ---- prices before any was timed
_FIRST_ASKING = 0.03  # plain passes that asking the free drafters takes: 0, +.1%
_FIRST_CHANCE = 0.35  # chance of a level's best candidate, about what heads reach
_SLOPE_ROWS = 5  # rows over which the cost of one more is averaged: more than any step of `KNOTS`

# ---- changes of mode
_MARGIN = 1.02  # a mode takes over at this many times the current one's rate: 1 0%, 1.05 +.1%
_TRIAL = 4  # steps of a trial: -.1, -.1%
_TRIAL_RATE = 0.8  # part of the current rate that a mode must promise to be tried: 1 -6.3%, .6 -.1%
_LAST_WAIT = 1024  # steps between trials at most: a trial of 4 steps takes .4% of them
_LOAD_TOKENS = 512  # tokens to come that repay filling a partial cache, which takes 135 ms
# chance of wrong free drafters from which a mode's drafter is always asked, as its price is learnt
# only in steps that ask it: .3 -.1%
_ALWAYS = 0.5
# steps without two plain ones in a row, after which two are made to time them; twice as often or
# half as often: -1.1 to +.5% with the prices of an EPYC
_PLAIN_EVERY = 256

# ---- pauses: chat of the default model .988 of plain, one step in eight that asks .940
_PAUSE_AFTER = 8  # steps without a draft until a pause; half as many from one pause to the next
_LONG_PAUSE = 128  # steps of the longest pause
_IDLE_COST = 0.015  # plain passes that asking the free drafters in vain may cost


@dataclass(slots=True)
class Learnt:
    """What was learnt from earlier sequences of a model. Every sequence starts from it and adds to
    it.

    Attributes:
        calibration: turns rankings into chances.
        ratios: costs of passes by their rows, see `Costs`.
        biases: by mode, accepted ÷ expected drafted tokens.
        outcomes: how often recycled tokens were right, see `drafters.recycle`.
        first_cost: of a pass by its rows before any was timed, see `Costs`.
    """

    calibration: Calibration = field(default_factory=Calibration)
    ratios: list[float] = field(default_factory=lambda: [0.0] * len(KNOTS))
    biases: dict[str, float] = field(default_factory=dict)
    outcomes: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)
    first_cost: Callable[[float], float] = dense_cost


class Control:
    """Chooses the mode of every step, and knows the costs.

    Args:
        costs: cost of verify passes.
        estimates: what each drafter that is not free expects, by its name.
        biases: see `Learnt`.

    Attributes:
        tokens_per_pass: current tokens per plain pass, those of the other sequences in the step
            included.
        load: the other sequences in the step.
        remaining: new tokens still to come at most; None: unknown.
        row_cost: cost of one more row in a verify pass, in plain passes.
        level_cost: cost of one level of heads, in plain passes.
        last_draft: how the last tree was drafted.
        timing_plain: this step drafts nothing, to time a plain pass.
    """

    def __init__(
        self,
        costs: Costs,
        estimates: Mapping[str, CostEstimate],
        biases: dict[str, float] | None = None,
    ) -> None:
        self.costs = costs
        self.estimates = estimates
        self.biases = {} if biases is None else biases
        self.load = ALONE
        self.remaining: int | None = None
        plain_bias = self.biases.get(PLAIN, 1.0)
        self.modes = {
            PLAIN: Mode(mean_tokens=1.0, mean_rows=1, draft_cost=_FIRST_ASKING, bias=plain_bias)
        }
        for name, estimate in estimates.items():
            self.modes[name] = Mode(
                mean_tokens=estimate.tokens,
                mean_rows=estimate.rows,
                draft_cost=estimate.draft_cost,
                pass_cost=estimate.pass_cost,
                bias=self.biases.get(name, _FIRST_BIAS),
            )
        self.current = PLAIN
        self.tokens_per_pass = 1.0
        self.timing_plain = True
        self.row_cost = FIRST_COST
        self.level_cost = FIRST_COST
        self._best_chances: dict[int | str, float] = {
            name: estimate.best_chance for name, estimate in estimates.items()
        }
        self._trial: list[str] = []  # modes of the next steps
        self._step = 0
        self._last_bare = 0  # the last step that was the second without a draft in a row
        self.last_draft = Drafted()
        self._idle = 0  # steps without a draft
        self._next_pause = FIRST_WAIT  # its length in steps
        self._plain_ms = 0.0  # what plain decoding would have taken for these tokens
        self._spent_ms = 0.0

    # ---- decisions -------------------------------------------------------------------------------

    def choose_mode(self, context: int, load: BatchLoad = ALONE) -> str:
        """Choose the mode of the next step, with ``context`` tokens cached and ``load`` in the same
        pass."""
        self._step += 1
        self.load = load
        self.row_cost = self._next_row_cost()
        names = [PLAIN]
        names += [name for name, each in self.estimates.items() if context >= each.min_cached]
        rates = {name: self.expected_rate(name) for name in names}
        if load == ALONE:
            rates[PLAIN] = max(1.0, rates[PLAIN])  # one token per plain pass, with no drafter asked
        self.timing_plain = self._step <= FIRST or self._step - self._last_bare >= _PLAIN_EVERY
        if self.timing_plain:
            return PLAIN
        if self._trial:
            return self._trial.pop()
        self._choose(rates)
        self.tokens_per_pass = max(rates[self.current], rates[PLAIN])
        return self._begin_trial(rates) or self.current

    def _next_row_cost(self) -> float:
        """Cost of one more row in a verify pass: the mean over the next few rows."""
        rows = self.load.rows + 1
        more = self.costs.verify(rows + _SLOPE_ROWS) - self.costs.verify(rows)
        return max(1e-6, more / _SLOPE_ROWS)

    def _begin_trial(self, rates: Mapping[str, float]) -> str | None:
        """The mode to try from this step on, whose other steps are put down; None where no trial is
        due."""
        for name, mode in self.modes.items():
            if name not in rates or name == self.current or self._step < mode.next_trial:
                continue
            mode.next_trial = self._step + mode.wait
            if mode.is_known or not self._is_cheap(name):
                mode.wait = min(_LAST_WAIT, 2 * mode.wait)
            if self._promises(name):
                steps = _TRIAL if mode.pass_cost else _TRIAL // 2
                self._trial = [name] * (steps - 1)
                return name
        return None

    def _choose(self, rates: Mapping[str, float]) -> None:
        """Change to the best of the modes that have been used, where it is better by the margin."""
        seen = {
            name: rate for name, rate in rates.items() if name == PLAIN or self.modes[name].steps
        }
        best = max(seen, key=seen.__getitem__)
        margin = 1.0 if best == PLAIN else _MARGIN
        if self.current not in seen or seen[best] > margin * seen[self.current]:
            self.current = best

    def _promises(self, name: str) -> bool:
        """Whether a mode is worth a trial, which may show more than the few steps that it had."""
        loads = name != PLAIN and self.estimates[name].loads
        few = self.remaining is not None and self.remaining < _LOAD_TOKENS
        share = _TRIAL_RATE if self.load == ALONE else 1.0
        mode = self.modes[name]
        bias = mode.bias
        if self._is_cheap(name):
            bias = max(bias, mode.hoped_bias(_FIRST_BIAS))
        return not (loads and few) and self._rate(mode, bias) > share * self.tokens_per_pass

    def _is_cheap(self, name: str) -> bool:
        """Whether a few steps of a drafter cost little: it has no cache to fill first."""
        return name != PLAIN and not self.estimates[name].loads

    def expected_rate(self, name: str) -> float:
        """Tokens per plain pass that a mode is expected to reach, with the current load."""
        mode = self.modes[name]
        return self._rate(mode, mode.bias)

    def _rate(self, mode: Mode, bias: float) -> float:
        """Tokens per plain pass of a mode with this bias."""
        load = self.load
        others_cost = self._in_plain_passes(load.ms)
        spent = self.costs.verify(mode.mean_rows + load.rows) + mode.draft_cost + others_cost
        return (1 + (mode.mean_tokens - 1) * bias + load.tokens) / spent

    def _in_plain_passes(self, milliseconds: float) -> float:
        """A time in plain passes; next to nothing before one was timed."""
        return milliseconds / (self.costs.unit or 1e9)

    def uses(self, name: str) -> bool:
        """Whether a drafter is in use: its mode is the current or last one, or on trial; a free
        drafter is unless the step only times a plain pass."""
        if name not in self.modes:
            return not self.timing_plain
        return name in (self.current, self.last_draft.mode, *self._trial)

    def verify_costs(self, most: int) -> list[float]:
        """Costs of verify passes with 0, 1, … ``most`` nodes below the root, made
        non-decreasing."""
        others = self.load.rows
        costs = (self.costs.verify(others + rows) for rows in range(1, most + 2))
        return list(accumulate(costs, max))

    # ---- outcomes --------------------------------------------------------------------------------

    def should_ask(self, name: str, expected: float, rows: int, chance: float) -> bool:
        """Whether to ask a mode's drafter in a step, and what *plain* would make of it, which is
        learnt.

        Args:
            name: of the mode.
            expected, rows: tokens and rows of the step with what the free drafters propose.
            chance: that one of their candidates for the next token is right.
        """
        mode = self.modes[name]
        plain = self.modes[PLAIN]
        plain.observe_draft(expected, rows)
        gain = self.estimates[name].tokens - 1
        cost = self.tokens_per_pass * (mode.draft_cost - plain.draft_cost)
        return name != self.current or 1 - chance > _ALWAYS or gain * (1 - chance) > cost

    def record_draft(self, draft: Drafted) -> None:
        """Take note of the step's tree."""
        if draft.rows == self.last_draft.rows == 1:
            self._last_bare = self._step
        is_drafting = self.current != PLAIN or (draft.mode == PLAIN and draft.rows > 1)
        if is_drafting:
            self._idle = 0
            self._next_pause = FIRST_WAIT
        elif draft.mode == PLAIN and not self.timing_plain:  # neither on trial nor timing a pass
            self._idle += 1
        self.last_draft = draft

    def pause(self) -> int:
        """Steps to come in which no drafter is asked: for a while no candidate was worth a row, and
        asking costs time. Each pause is twice as long as the one before, until something is
        drafted."""
        costly = self.load == ALONE and self.modes[PLAIN].draft_cost > _IDLE_COST
        if self._trial or self._idle < _PAUSE_AFTER or not costly:
            return 0
        pause = self._next_pause
        self._next_pause = min(_LONG_PAUSE, 2 * pause)
        self._idle = _PAUSE_AFTER // 2
        return pause

    def record_pause(self, verify_ms: float, draft_ms: float) -> None:
        """Record a step during a pause, which yields one token."""
        self.last_draft = Drafted()
        self.timing_plain = True
        self.record_step(1, 1, verify_ms, draft_ms)

    def record_step(self, tokens: int, rows: int, verify_ms: float, draft_ms: float) -> None:
        """Record a step: its tokens, rows and times. ``draft_ms`` includes learning from the step
        before."""
        last = self.last_draft
        if last.rows == rows:  # unless the end of the sequence cut the tree
            self.costs.observe(rows + self.load.rows, verify_ms)
        if not self.load.rows:
            self._plain_ms += tokens * self.costs.unit
            self._spent_ms += verify_ms + draft_ms
        draft_cost = self._in_plain_passes(draft_ms)
        mode = self.modes[last.mode]
        mode.steps += 1
        mode.total_tokens += tokens
        mode.total_nodes += rows - 1
        if not self.timing_plain:  # such a step says nothing about the free drafters
            mode.learn(last.expected, tokens, rows, None if last.loaded else draft_cost)
        self.biases[last.mode] = mode.bias
        expected = last.levels * self.level_cost + last.passes * mode.pass_cost
        if not expected and last.mode != PLAIN:  # only the free drafters were asked
            self.modes[PLAIN].update_bias(last.expected - 1, tokens - 1)
        if expected and not last.loaded:
            self._learn_draft_costs((draft_cost - self.modes[PLAIN].draft_cost) / expected)

    def _learn_draft_costs(self, ratio: float) -> None:
        """Learn the cost of a level of heads, or of a draft pass, from the last step, whose levels
        and passes took ``ratio`` times as long as they were expected to."""
        ratio = min(MOST_ERROR, max(1 / MOST_ERROR, ratio))
        if self.last_draft.levels:
            self.level_cost *= 1 + _FAST * (ratio - 1)
        if self.last_draft.passes:
            self.modes[self.last_draft.mode].pass_cost *= 1 + _FAST * (ratio - 1)

    def best_chance(self, place: int | str) -> float:
        """Mean chance of the best candidate at a level of heads (from 0), or in the passes of a
        drafter (its name)."""
        return self._best_chances.get(place, _FIRST_CHANCE)

    def observe_best(self, place: int | str, chance: float) -> None:
        """Take the chance of a best candidate into that mean."""
        mean = self.best_chance(place)
        self._best_chances[place] = mean + _FAST * (chance - mean)

    # ---- reports ---------------------------------------------------------------------------------

    def record(self) -> ControlRecord:
        """What was decided in the steps so far, of which there is at least one."""
        used = {name: mode for name, mode in self.modes.items() if mode.steps}
        return {
            "summary": self._summary(used),
            "gain": self._gain(),
            "modes": {
                name: {"steps": mode.steps, "tokens": mode.total_tokens, "nodes": mode.total_nodes}
                for name, mode in used.items()
            },
        }

    def _summary(self, used: Mapping[str, Mode]) -> str:
        """The modes that were used, the most frequent first, and the nodes of a step."""
        words = {name: estimate.words for name, estimate in self.estimates.items()}
        words[PLAIN] = _PLAIN_WORDS
        steps = sum(mode.steps for mode in used.values())
        nodes = sum(mode.total_nodes for mode in used.values())
        ranked = sorted(used, key=lambda name: -used[name].steps)
        shares = "; ".join(f"{words[name]} in {used[name].steps / steps:.0%}" for name in ranked)
        return f"{shares} of the steps, {nodes / steps:.1f} nodes a step"

    def _gain(self) -> float | None:
        """Speed-up over plain decoding; None where too few plain passes were timed."""
        if not self._spent_ms or self.modes[PLAIN].steps < FIRST:
            return None
        return self._plain_ms / self._spent_ms
