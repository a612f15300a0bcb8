"""Adaptive trees: each step drafts what is expected to gain time, or nothing.

A step is worth ``tokens - rate · time``, with the rate that decoding reaches now; every decision asks
whether it adds to that. Candidates come from drafters: those that cost nothing propose in every step, and
one of the others, or none (*plain*), as follows from what their steps have brought (`spec.control`). The best
part of the candidates by chance and price becomes the tree (`tree.CandidateTree.select`). Of the drafters no
more is known here than their names, the tokens that they expect and their prices. The text cannot depend on
any of this, only the time can.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tokenswift.memory import Need
from tokenswift.sampling.choice import Sampler
from tokenswift.sampling.ranking import Ranked, Subset
from tokenswift.spec.chances import Calibration
from tokenswift.spec.control import PLAIN, Control, CostEstimate, Costs, Drafted, Gain, Learnt
from tokenswift.spec.drafters.base import Drafter, Outcome
from tokenswift.spec.drafters.candidates import Below, Candidates, Source
from tokenswift.spec.strategy import ALONE, TokenSequence
from tokenswift.tree import CandidateTree
from tokenswift.types import DraftTree, InputError, RunError, Step

MOST_NODES = 31  # below the root
YOUNG = 64  # steps that are all learnt from
WIDTH = 4  # candidates of a place
ROWS = 4  # places that one level, or one pass over several places, continues
CHAIN = 6  # passes in one step that only draft
#: after so many steps without a draft so many steps ask nobody, where asking takes this much of a plain pass
BARE, REST, DEAR = 16, 16, 0.015


class _Ranking(NamedTuple):
    """A ranking below a node, to be learnt from: its kind, features, chances and tokens."""

    node: int
    kind: str
    features: list[tuple[float, ...]]
    chances: list[float]
    tokens: list[int]


class PricedCandidates(Candidates):
    """The candidates of one step of adaptive drafting.

    Args:
        sequence, sampler, coupled: as for `Candidates`.
        calibration: makes chances of rankings.
        control: knows rate and prices.
    """

    shares = True

    def __init__(
        self,
        sequence: TokenSequence,
        sampler: Sampler,
        coupled: bool,
        calibration: Calibration,
        control: Control,
    ) -> None:
        super().__init__(sequence, sampler, coupled, most=CHAIN)
        self.calibration, self.control = calibration, control
        self.row = control.rate * control.row
        self.least = 0.5 * self.row
        self.speed = 1000 * control.rate / control.costs.unit if control.costs.unit else 0.0
        self._rankings_made: list[_Ranking] = []
        self._told: list[tuple[int, int, float]] = []  # parent, token, chance of candidates with their own

    def add(self, parent: int, token: int, chance: float = 1.0) -> int:
        """The node of ``token`` below ``parent``; what becomes of it shows how reliable the chance is."""
        self._told.append((parent, token, chance))
        return super().add(parent, token, chance)

    def offer(self, node: int, ranked: Ranked, level: int = 0, kind: str | None = None) -> Below:
        """Add a ranking's candidates below ``node``, each with its chance (see `Candidates.offer`)."""
        kind = self.drafter.name if kind is None else kind
        chances, made = self.calibration.chances(kind, ranked, level)
        self._rankings_made.append(_Ranking(node, kind, made, chances, ranked.tokens))
        tree, mark = self.tree, self.drafter.mark.name
        above = tree.chance(node)
        below = []
        for token, chance in zip(ranked.tokens, chances, strict=True):
            child = tree.add(node, token, mark, chance)
            below.append((child, above * tree.given[child]))
        return below

    def rank(
        self,
        nodes: list[int],
        logits: Tensor,
        level: int = 0,
        subset: Subset | None = None,
        kind: str | None = None,
        refusals: Source | None = None,
    ) -> list[Below]:
        """`Candidates.rank`, but every node is ranked by its own path, whoever shares the logits."""
        if len(logits) < len(nodes):
            logits = logits.expand(len(nodes), -1)
        return super().rank(nodes, logits, level, subset, kind, refusals)

    def go_on(self, below: list[Below], level: int) -> tuple[list[int], list[int]]:
        """The likeliest candidates of a level, where the next level promises more than it costs."""
        self.levels += 1
        control = self.control
        self._led(below, level, False)
        ahead = control.lead(level + 1)
        kept = [one for one in _likeliest(below) if one[0] * ahead > control.rate * control.row]
        gain = ahead * sum(chance for chance, _, _ in kept)
        if gain < control.rate * (control.level + control.row * len(kept)):
            return [], []
        return [node for _, node, _ in kept], [row for _, _, row in kept]

    def learn(self, new: list[int], rankings: bool) -> None:
        """Take in the tokens that came; ``rankings``: learn from rankings, too."""
        for node, kind, made, chances, tokens in self._rankings_made if rankings else ():
            right = self._came(node, new)
            if right is not None:
                self.calibration.learn(kind, made, chances, tokens, right)
        for parent, token, chance in self._told:
            right = self._came(parent, new)
            if right is not None:
                self.calibration.reliability.add(chance, token == right)

    def _came(self, node: int, new: list[int]) -> int | None:
        """The token that came where ``node``'s path had come; None where it had not."""
        depth = self.tree.depths[node]
        if depth < len(new) and self.tree.path(node) == new[:depth]:
            return new[depth]
        return None

    def _width_at(self, depth: int) -> int:
        return WIDTH

    def _led(self, below: list[Below], level: int, chained: bool) -> None:
        """Take in how likely the best candidates of a level are, or of a pass of a chain."""
        firsts = [self.tree.given[children[0][0]] for children in below if children]
        if firsts and chained:
            self.control.passes[self.drafter.name].led(sum(firsts) / len(firsts))
        elif firsts:
            self.control.led(level, sum(firsts) / len(firsts))

    def _worth_pass(self, below: Below) -> bool:
        control, known = self.control, self.control.passes[self.drafter.name]
        self._led([below], 0, True)
        return below[0][1] * known.lead >= control.rate * (known.cost + control.row)

    def _worth_levels(self, nodes: list[int]) -> list[int]:
        control = self.control
        gain = self.tree.chance(nodes[0]) * control.lead(0)
        return nodes[:1] if gain > control.rate * (control.level + control.row) else []

    def _worth_passes(self, below: list[Below]) -> list[int]:
        """Where the next pass promises more than it costs: the likeliest place, and others whose candidates
        are worth a row of that pass and one of the verify pass."""
        control, known = self.control, self.control.passes[self.drafter.name]
        if not any(below):
            return []
        self._led(below, 0, True)
        row = known.cost * (control.costs.verify(6) - 1) / 5  # of such a pass, as of the target's
        least = control.rate * (row + control.row)
        best, *others = _likeliest(below)
        kept = [best, *(other for other in others if other[0] * known.lead > least)]
        gain = known.lead * sum(chance for chance, _, _ in kept)
        price = known.cost + control.row * len(kept) + row * (len(kept) - 1)
        return [] if gain < control.rate * price else [node for _, node, _ in kept]


def _likeliest(below: list[Below]) -> list[tuple[float, int, int]]:
    """Chance, node and row of the candidates that may be continued, the likeliest first."""
    spread = [(chance, node, row) for row, children in enumerate(below) for node, chance in children]
    return sorted(spread, reverse=True)[:ROWS]


class ByChance:
    """Adaptive drafting.

    Args:
        drafters: what may draft, in the order in which they are asked and named.
        sampler: the target's choice rule.
        coupled: rank candidates with the target's noise.
        learnt: gives what earlier texts of the model taught, when the run begins.
        priors: weights that chances start from, by kind of ranking, where better ones than the library's are
            known.
        explain: a file to write one line a decision to, as JSON; None for none.
    Raises:
        InputError: that file cannot be written.
    """

    name, acceptance = "", "exact"
    max_nodes = MOST_NODES + 1

    def __init__(
        self,
        drafters: Sequence[Drafter],
        sampler: Sampler,
        coupled: bool,
        learnt: Callable[[], Learnt],
        priors: Mapping[str, Sequence[Sequence[float]]] | None = None,
        explain: str | None = None,
    ) -> None:
        self.drafters, self.sampler, self.coupled = list(drafters), sampler, coupled
        self.explain = None if explain is None else Path(explain)
        if self.explain and (self.explain.is_dir() or not self.explain.absolute().parent.is_dir()):
            raise InputError(f"explain is {str(explain)!r}; valid: a file in an existing folder")
        self.calibration = Calibration(priors)
        self._learnt = learnt
        self._control: Control | None = None
        self.gain = Gain()
        self._free: list[Drafter] = []  # propose in every step
        self._priced: dict[str, Drafter] = {}
        self._candidates: PricedCandidates | None = None
        self._ranked: dict[str, Source] = {}
        self._record: dict[str, Any] = {}
        self._before: Step | None = None
        self._steps = 0
        self._tree: DraftTree | None = None
        self._unread: list[int] = []  # tokens of steps that asked nobody
        self._bare = self._rest = 0  # steps in a row without a draft; steps to come that ask nobody

    @property
    def control(self) -> Control:
        """What decides.

        Raises:
            ValueError: the run has not begun.
        """
        if self._control is None:
            raise ValueError("begin was not called")
        return self._control

    def needs(self, text: int, row: int) -> list[Need]:
        """The widest tree's rows, and what the drafters hold (see `memory.Planned`)."""
        own = Need("tree", "auto", self.max_nodes * row)
        return [own, *(need for drafter in self.drafters for need in drafter.needs(text, row))]

    def begin(self, sequence: TokenSequence) -> None:
        """Let the drafters read the prompt, and hear what they offer."""
        learnt = self._learnt()
        costs = Costs(learnt.ratios)
        offers: dict[str, CostEstimate] = {}
        for drafter in list(self.drafters):
            drafter.begin(sequence)
            offer = drafter.offer(costs)
            if offer is None:
                self.drafters.remove(drafter)
                continue
            self.calibration.know(offer.priors)
            if offer.price:
                offers[drafter.name], self._priced[drafter.name] = offer, drafter
            else:
                self._free.append(drafter)
        self._control = Control(costs, offers, learnt.biases)
        if self.explain is not None:
            _write(self.explain, "w", "")

    # ---- a step ---------------------------------------------------------------------------------

    def draft(self, sequence: TokenSequence) -> DraftTree:
        """The tree of this step; the bare root where nothing pays."""
        control, length = self.control, len(sequence.tokens) - 1
        if self._rest and sequence.load == ALONE:
            self._candidates = None
            self._tree = CandidateTree(sequence.tokens[-1]).build()
            return self._tree
        self._read_on(sequence)
        control.left = sequence.left
        mode = control.mode(length, sequence.load)
        made = PricedCandidates(sequence, self.sampler, self.coupled, self.calibration, control)
        self._candidates = made
        if not control.bare:
            for drafter in self._free:
                made.ask(drafter)
            if mode in self._priced and sequence.newest is not None:
                made.ask(self._priced[mode])
        sequence.draft_passes += made.passes
        self._leave_out(made)
        prices = control.prices(min(MOST_NODES, len(made.tree) - 1))
        nodes, expected = made.tree.select(prices, control.rate)
        while out := made.forbidden(nodes):
            for node in out:
                made.tree.given[node] = 0.0
            nodes, expected = made.tree.select(prices, control.rate)
        tree = self._tree = made.tree.build(nodes)
        control.drafted(Drafted(mode, 1 + expected, len(tree), made.passes, made.levels, made.loaded))
        self._record = {"context": length, "mode": mode, "nodes": len(tree) - 1, "depth": tree.gamma}
        self._record |= {"expected": 1 + expected}
        return tree

    def _leave_out(self, made: PricedCandidates) -> None:
        """Drop the drafters whose rows are refused again and again."""
        self._ranked |= made.ranked
        for drafter in self.drafters:
            if drafter.refusals.dropped:
                self.control.drop(drafter.name)
                if drafter in self._free:
                    self._free.remove(drafter)

    def observe(self, sequence: TokenSequence, step: Step, nodes: tuple[int, ...]) -> None:
        """Learn from the step: chances from its outcome, costs from its times."""
        spent = {name: 1000 * seconds for name, seconds in step.times.items()}
        draft_ms = spent.pop("draft", 0.0)
        verify_ms = sum(spent.values())
        control, new = self.control, list(step.token_ids)
        if not sequence.load.rows:
            self.gain.add(len(new), step.drafted, step.times)
        if self._candidates is None:
            self._rested(new)
            return
        learning_ms = 1000 * self._before.times.get("observe", 0.0) if self._before else 0.0
        control.record_step(len(new), step.drafted + 1, verify_ms, draft_ms + learning_ms)
        self._before = step
        self._steps += 1
        # what is known well is learnt from every fourth step
        self._candidates.learn(new, rankings=self._steps <= YOUNG or self._steps % 4 == 0)
        self._bare = 0 if step.drafted or self._record["mode"] != PLAIN else self._bare + 1
        self._rest = REST if self._bare >= BARE and control.modes[PLAIN].draft > DEAR else 0
        for drafter in self.drafters:
            in_use = control.uses(drafter.name)
            drafter.observe(sequence, Outcome(new, len(nodes), step.times, in_use, self._tree))
        if self.explain is not None:
            both = verify_ms + draft_ms
            self._record |= {"draft_ms": draft_ms, "tokens": len(new), "spent_ms": both}
            self._record |= {"gained_ms": len(new) * control.costs.unit - both}
            line = {k: round(v, 4) if isinstance(v, float) else v for k, v in self._record.items()}
            _write(self.explain, "a", json.dumps(line) + "\n")

    def _rested(self, new: list[int]) -> None:
        """A step that asked nobody."""
        self._rest, self._before = max(0, self._rest - 1), None
        self.control.rested(len(new))
        self._unread += new

    def _read_on(self, sequence: TokenSequence) -> None:
        """The drafters take in what came while nobody was asked."""
        if self._unread:
            for drafter in self.drafters:
                drafter.observe(sequence, Outcome(self._unread, len(self._unread), {}, False))
            self._unread = []

    # ---- what it did ----------------------------------------------------------------------------

    def report(self) -> dict[str, Any] | None:
        """Figures, ready for JSON: what was used and why in a sentence, what it gained, shares of modes,
        reliability of the chances, the share of deciding; None before the run has begun."""
        if self._control is None:
            return None
        left_out = [source.name for source in self._ranked.values() if source.dropped]
        return {
            "summary": self.control.summary() + "".join(f"; {name} were left out" for name in left_out),
            "gain": self.gain.ratio,
            **self.control.record(),
            "calibration": self.calibration.reliability.rows(),
            "weights": self.calibration.weights(),
        }


def _write(path: Path, mode: str, text: str) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise RunError(f"writing the explanation {path} failed ({error.strerror or error})") from error
