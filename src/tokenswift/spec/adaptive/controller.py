"""Which drafter drafts: measured tokens per second, with hysteresis and rare trials.

A mode is a drafter's name, or *plain*, which drafts nothing but what drafts in every step. Of a drafter no
more is known than what it offers and what came of it. A mode's rate is what its steps were expected to
yield (the calibrated chances), corrected by what they did yield, over what they cost; costs of verify
passes follow the context, so a mode that is not in use is judged for the text as long as it is now.

Where a pass holds other texts as well, all of this is asked of the step as a whole: what all of them yield
over what all of them take. A row is dearer then, the more rows there are, and a pass that only drafts keeps
all of them waiting; with enough texts nothing pays but plain decoding.

There is no clock here: steps bring their times. What a pass or a level that drafts takes follows from the
drafting time of its steps, less what drafting takes in plain ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenswift.spec.adaptive.cost import Costs
from tokenswift.spec.adaptive.estimate import CostEstimate
from tokenswift.spec.strategy import ALONE, BatchLoad

PLAIN = "plain"
_WORDS = "plain decoding with long matches of the text"
_SLOW = 1 / 32  # weight of a new figure in a running mean
_PASS = 1 / 16  # the same for passes and levels that draft
_CHANCE = 0.35  # of a level's best candidate, before anything is known
_OFF = 3.0  # a step that took this many times what was expected says no more: a hiccup of the machine
_TRUST = 4.0  # drafted tokens for which a mode's expectations are believed at first
_MEMORY = 64.0  # drafted tokens that say how good they are
_LEVELS = 8  # levels of heads whose best candidates are told apart
_MARGIN = 1.02  # a mode has to be this much better to take over; plain decoding need only be better
_BASELINE = 96  # steps between plain ones, which keep the price of plain decoding known
_BEGINNING = 8  # steps before the first of them, and between the first ones while it is a close thing
_FIRSTS = 8  # of these
_CLOSE = 1.25  # times as fast as plain decoding, at most
_FIRST, _LAST = 16, 1024  # steps between trials of a mode that is not in use: at first, and at most
_LONGEST = 8  # passes of a chain that is thought of
_LOADED = 512  # the same for a mode that has to load its cache first
_PROMISING = 1.05  # what such a mode must promise to be tried
_LOADING = 4.0  # what its loading takes, in plain steps, before it was seen
_TRYING = 4.0  # what trying such a mode may lose besides, in plain steps
_REPAID = 4.0  # times that its gain over what is left of the text must repay both
_TRIED = 0.8  # what another one must promise; beside other texts, which wait for its trial, as much
_DWELL = 16  # steps that a mode is kept for at least
_DEAR = 0.4  # tokens that a row has to yield, from which on no candidates are looked for
_STALE = 32  # tokens of context after which prices are computed anew
_LOOK = 8  # steps between looks at what prices in doubt forbid
_HOPED = 0.5  # of the price of a row in doubt, at such a look
_SEEN = 2  # plain steps that say what plain decoding takes
_HELD = 7  # plain steps that one decision is good for


@dataclass(slots=True)
class _Mode:
    """Running means of a mode's steps."""

    tokens: float  # expected a step
    rows: float
    draft_ms: float
    steps: int = 0
    made: int = 0  # tokens that its steps yielded
    drafted: int = 0  # nodes below the root, in all
    interval: int = _FIRST
    next_trial: int = 0
    load_ms: float | None = None  # what loading its cache took
    bias: float = 1.0  # drafted tokens that came over those that were expected
    judged: float = _TRUST  # drafted tokens that were expected, and those that its first value counts for

    def learn(self, tokens: float, rows: int, draft_ms: float | None) -> None:
        weight = max(_SLOW, 1 / (self.steps + 2))
        self.tokens += weight * (tokens - self.tokens)
        self.rows += weight * (rows - self.rows)
        if draft_ms is not None and (self.steps < 3 or draft_ms < _OFF * self.draft_ms):
            self.draft_ms += weight * (draft_ms - self.draft_ms)
        self.steps += 1
        self.drafted += rows - 1

    def judge(self, tokens: int, expected: float) -> None:
        """Compare what a step yielded with what was expected of it."""
        if expected > 1.05:
            drafted = expected - 1
            self.judged = max(drafted, min(_MEMORY, self.judged + drafted))
            change = (tokens - 1 - drafted * self.bias) / self.judged
            self.bias = min(1.3, max(0.3, self.bias + change))


@dataclass(slots=True)
class Passes:
    """Running means of a source that drafts by passes.

    Attributes:
        ms: milliseconds of a pass, with the ranking of its candidates.
        lead: chance that the best candidate is right.
    """

    ms: float
    lead: float

    def led(self, chance: float) -> None:
        """Its best candidate is right with this chance."""
        self.lead += _PASS * (chance - self.lead)


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


@dataclass(slots=True)
class Gain:
    """What drafting gained over plain decoding, measured while a text is written.

    A step without drafts takes what a token of plain decoding takes, drafting and learning aside.
    """

    plain_steps: int = 0
    plain: float = 0.0  # seconds that such a step takes, lately
    unpriced: int = 0  # tokens before the first of them
    worth: float = 0.0  # seconds that plain decoding would have taken
    spent: float = 0.0

    def add(self, tokens: int, drafted: int, times: Mapping[str, float]) -> None:
        """A step yielded ``tokens``; ``drafted`` nodes were verified; ``times`` are its seconds by phase."""
        self.spent += sum(times.values())
        self.unpriced += tokens
        if not drafted:
            took = sum(seconds for phase, seconds in times.items() if phase not in ("draft", "observe"))
            if not self.plain_steps or took < _OFF * self.plain:
                self.plain_steps += 1
                self.plain += max(1 / 8, 1 / self.plain_steps) * (took - self.plain)
        if self.plain_steps:
            self.worth += self.unpriced * self.plain
            self.unpriced = 0

    @property
    def ratio(self) -> float | None:
        """Times as fast as plain decoding; None where it was hardly seen."""
        return self.worth / self.spent if self.plain_steps >= _SEEN else None


class Control:
    """Chooses the mode of every step and knows all prices.

    Args:
        costs: of verify passes and levels.
        offers: by name, what the drafters expect that have a price.

    Attributes:
        rate: tokens a millisecond that decoding reaches now, those of the texts beside it included.
        beside: what the next pass holds besides (see `join`).
        left: new tokens that may still come; None: nobody knows.
        row_ms, level_ms: one more row of a verify pass, one level of the heads.
        passes: of each drafter that drafts by passes, what is known of them.
    """

    def __init__(self, costs: Costs, offers: Mapping[str, CostEstimate]) -> None:
        self.costs, self.offers = costs, offers
        self.load = ALONE
        self.left: int | None = None
        self.level_ms = costs.level()
        self._leads = [_CHANCE] * (_LEVELS + 1)
        self.modes = {PLAIN: _Mode(1.0, 1, 0.0)}
        self.passes: dict[str, Passes] = {}
        for name, offer in offers.items():
            interval = _LOADED if offer.loads else _FIRST
            self.modes[name] = _Mode(offer.tokens, offer.rows, offer.price, interval=interval)
            if offer.pass_ms:
                self.passes[name] = Passes(offer.pass_ms, offer.lead)
        self.current = next((name for name in offers if name not in self.passes), PLAIN)
        self.rate = 1.0 / costs.verify(1, 0)
        self.row_ms = 0.0
        self._trial: tuple[str, int] | None = None
        self._step, self._since_plain = 0, _BASELINE - _BEGINNING
        self._stay = 0  # the first step goes by what is offered
        self._priced = -_STALE
        self._prices: list[float] = []
        self._last = Drafted()
        self._steps_ms = self._observed_ms = 0.0
        self._dropped: set[str] = set()

    # ---- decisions ------------------------------------------------------------------------------

    def join(self, beside: BatchLoad, context: int) -> None:
        """The next pass, with ``context`` tokens cached, holds this besides."""
        changed, self.load = beside.rows != self.load.rows, beside
        if changed:
            self.reprice(context)

    def mode(self, context: int) -> str:
        """The mode of the next step, with ``context`` tokens cached."""
        self._step += 1
        if abs(context - self._priced) >= _STALE or self._step % _STALE == 0:
            self.reprice(context)
        if self._trial is not None:
            name, left = self._trial
            self._trial = (name, left - 1) if left > 1 else None
            return name
        rates = {name: self.pace(name, context) for name in self.modes if self._open(name, context)}
        rates = {name: rate for name, rate in rates.items() if self._repays(name, rates, context)}
        best = max(rates, key=rates.__getitem__)
        self._stay -= 1
        margin = _PROMISING if self._loads(best) and not self.modes[best].steps else _MARGIN
        margin = 1.0 if best == PLAIN else margin
        better = self.current not in rates or rates[best] > margin * rates[self.current]
        if better and self._stay < 0:
            if self.current != best:
                self._stay = _DWELL
                self.modes[self.current].next_trial = self._step + self.modes[self.current].interval
            self.current = best
        self.rate = max(rates[self.current], rates[PLAIN])
        for name, mode in self.modes.items():
            if name in rates and name not in (self.current, PLAIN) and self._step >= mode.next_trial:
                mode.next_trial = self._step + mode.interval
                mode.interval = min(_LAST, 2 * mode.interval)
                promising = _PROMISING if self._loads(name) else _TRIED if self.load == ALONE else 1.0
                hopeless = (
                    name in self.passes and self._at_best(name, context) < _PROMISING * rates[self.current]
                )
                if rates[name] > promising * rates[self.current] and not hopeless:
                    self._trial = (name, 8 if name in self.passes else 2)
                    return name
        self._since_plain += 1
        if self._since_plain >= self._baseline(rates):
            self._since_plain = 0
            return PLAIN
        return self.current

    def _baseline(self, rates: Mapping[str, float]) -> int:
        """Steps between plain ones: fewer as long as little is known of a price that decides."""
        close = rates[self.current] < _CLOSE * rates[PLAIN]
        return _BEGINNING if close and self.modes[PLAIN].steps < _FIRSTS else _BASELINE

    def drop(self, name: str) -> None:
        """Leave a mode out from the next step on."""
        self._dropped.add(name)
        if self.current == name:
            self.current = PLAIN
        if self._trial is not None and self._trial[0] == name:
            self._trial = None

    def _open(self, name: str, context: int) -> bool:
        offer = self.offers.get(name)
        return name not in self._dropped and (offer is None or not offer.least or context > offer.least)

    def _loads(self, name: str) -> bool:
        return name in self.offers and self.offers[name].loads

    def _repays(self, name: str, rates: Mapping[str, float], context: int) -> bool:
        """Whether what is left of the text repays the loading of a mode's cache, and its trial."""
        if self.left is None or name == self.current or not self._loads(name):
            return True
        load, plain = self.modes[name].load_ms, self.plain_ms(context)
        price = _TRYING * plain + (_LOADING * plain if load is None else load)
        saved = 1 / rates.get(self.current, rates[PLAIN]) - 1 / rates[name]
        return saved * self.left > _REPAID * price

    @property
    def skip_drafting(self) -> bool:
        """Whether, beside other texts, a row costs so much that few candidates could be worth it."""
        return self.load.rows > 0 and self.rate * self.row_ms > _DEAR

    def hold(self) -> int:
        """Begin plain steps for which nothing has to be decided, and say how many: until a mode is due to be
        tried again, and none while prices are in doubt or other texts are in the pass."""
        if self.current != PLAIN or self._trial is not None or self.load.rows or self.costs.doubtful:
            return 0
        due = [mode.next_trial - self._step - 1 for mode in self.modes.values()]
        steps = min([_HELD, *(left for left in due if left >= 0)])
        self._step += steps
        return steps

    def pace(self, name: str, context: int) -> float:
        """Tokens a millisecond that a mode would reach with ``context`` tokens cached."""
        mode = self.modes[name]
        rows = int(mode.rows)
        part = mode.rows - rows  # of steps with a row more
        verify = (1 - part) * self._verify(rows, context) + part * self._verify(rows + 1, context)
        extra = mode.tokens - 1
        beside = self.load
        spent = mode.draft_ms + verify + beside.ms
        return (1 + extra * mode.bias + beside.tokens) / spent

    def _at_best(self, name: str, context: int) -> float:
        """Tokens a millisecond of a drafter that makes passes, if each of them found the next token."""
        pass_ms, beside = self.passes[name].ms, self.load
        return max(
            (1 + count + beside.tokens) / (count * pass_ms + self._verify(1 + count, context) + beside.ms)
            for count in range(1, _LONGEST + 1)
        )

    def uses(self, name: str) -> bool:
        """Whether a drafter drafts now, drafted last or is on trial."""
        trial = self._trial is not None and self._trial[0] == name
        return self.current == name or trial or self._last.mode == name

    def prices(self, context: int, most: int) -> list[float]:
        """Milliseconds of verify passes with 0, 1, … ``most`` nodes below the root. Where they are in doubt,
        nodes are priced lower now and then: what the step takes corrects them."""
        if len(self._prices) != most + 1:
            self._prices = [self._verify(rows, context) for rows in range(1, most + 2)]
        if self.costs.doubtful and self._step % _LOOK == 0:
            return [self._prices[0] + _HOPED * (price - self._prices[0]) for price in self._prices]
        return self._prices

    def reprice(self, context: int) -> None:
        """Take the prices of passes at a context, in tokens, from the measured costs."""
        self._priced, self._prices = context, []
        self.row_ms = max(0.0, self._verify(6, context) - self._verify(1, context)) / 5

    def plain_ms(self, context: int) -> float:
        """Milliseconds of a plain step."""
        return self._verify(1, context)

    def _verify(self, rows: int, context: int) -> float:
        return self.costs.verify(rows, context, self.load)

    # ---- what happened --------------------------------------------------------------------------

    def drafted(self, tree: Drafted) -> None:
        """A tree was made."""
        self._last = tree

    def record_step(self, tokens: int, rows: int, context: int, verify_ms: float, draft_ms: float) -> None:
        """It was drafted and verified in these times and yielded ``tokens``."""
        last = self._last
        if last.rows == rows:  # not where the text's end cut it short
            self.costs.observe(rows, context, verify_ms, self.load)
        mode = self.modes[last.mode]
        mode.learn(last.expected, rows, None if last.loaded else draft_ms)
        if last.loaded:
            mode.load_ms = max(0.0, draft_ms - mode.draft_ms)
        mode.made += tokens
        self._steps_ms += verify_ms + draft_ms
        mode.judge(tokens, last.expected)
        if not last.loaded:
            self._price(last, draft_ms)

    def rested(self, tokens: int, milliseconds: float) -> None:
        """A plain step was made that nothing was decided for."""
        plain = self.modes[PLAIN]
        plain.steps, plain.made = plain.steps + 1, plain.made + tokens
        self._steps_ms += milliseconds

    def _price(self, last: Drafted, draft_ms: float) -> None:
        """Correct what a pass and a level take by what a step's drafting took more than a plain one's."""
        plain, known = self.modes[PLAIN], self.passes.get(last.mode)
        expected = last.levels * self.level_ms + (last.passes * known.ms if known else 0.0)
        if not plain.steps or not expected:
            return
        ratio = min(_OFF, max(1 / _OFF, (draft_ms - plain.draft_ms) / expected))
        if last.levels:
            self.level_ms *= 1 + _PASS * (ratio - 1)
        if known and last.passes:
            known.ms *= 1 + _PASS * (ratio - 1)

    def observed(self, milliseconds: float) -> None:
        """Learning from the step before took so long."""
        self._observed_ms += milliseconds

    def lead(self, level: int) -> float:
        """Chance of the best candidate of a level of heads, counted from 0."""
        return self._leads[min(level, _LEVELS)]

    def led(self, level: int, chance: float) -> None:
        """The best candidates of a level have this chance in the mean."""
        level = min(level, _LEVELS)
        self._leads[level] += _PASS * (chance - self._leads[level])

    # ---- reports --------------------------------------------------------------------------------

    def summary(self) -> str:
        """What was used and why, in a sentence."""
        steps = sum(mode.steps for mode in self.modes.values())
        if not steps:
            return "nothing was decoded"
        used = max(self.modes, key=lambda name: self.modes[name].steps)
        drafted = sum(mode.drafted for mode in self.modes.values())
        words = self.offers[used].words if used in self.offers else _WORDS
        text = f"{words} in {self.modes[used].steps / steps:.0%} of the steps, "
        text += f"{drafted / steps:.1f} nodes a step"
        for name, offer in self.offers.items():
            if name == used:
                continue
            if offer.loads:
                pays = self.pays_from(name)
                text += "" if pays is None else f"; {offer.title} would pay from about {pays // 1000}K tokens"
            elif self.modes[name].steps and (offer.given or used == PLAIN):
                text += f"; {offer.title} did not pay"
        return text

    def pays_from(self, name: str) -> int | None:
        """Context from which a drafter would be the fastest, to a thousand; None below 128K."""
        if name not in self.offers or name in self._dropped:
            return None
        least = self.offers[name].least
        others = [other for other in self.modes if other != name and other not in self._dropped]
        for context in range(max(1000, -(-least // 1000) * 1000), 129_000, 1000):
            if self.pace(name, context) > max(self.pace(other, context) for other in others):
                return context
        return None

    def record(self) -> dict[str, Any]:
        """Steps, tokens and nodes by mode, and the share of the time that deciding took: learning, and what
        drafting takes in plain steps too."""
        steps = sum(mode.steps for mode in self.modes.values())
        deciding = self._observed_ms + steps * self.modes[PLAIN].draft_ms
        return {
            "modes": {
                name: {"steps": mode.steps, "tokens": mode.made, "nodes": mode.drafted}
                for name, mode in self.modes.items()
                if mode.steps
            },
            "controller_share": round(deciding / (self._steps_ms + self._observed_ms), 4) if steps else 0.0,
        }
