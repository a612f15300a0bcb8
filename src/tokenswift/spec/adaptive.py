"""Adaptive trees: each step drafts what is expected to gain time, or nothing.

A step is worth ``tokens - rate · time``, with the rate that decoding reaches now; every decision asks
whether it adds to that. Candidates come from drafters: those that cost nothing propose in every step, and
one of the others, or none (*plain*), as follows from what their steps have brought (`spec.control`). The best
part of the candidates by chance and price becomes the tree (`tree.CandidateTree.select`). Of the drafters no
more is known here than their names, the tokens that they expect and their prices. The text cannot depend on
any of this, only the time can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenswift.memory import Need
from tokenswift.sampling.choice import Ranked, Sampler
from tokenswift.spec.control import Calibration, Control, CostEstimate, Costs, Drafted, Learnt
from tokenswift.spec.drafters.base import Below, Candidates, Drafter, Outcome
from tokenswift.spec.strategy import ALONE, TokenSequence
from tokenswift.tree import CandidateTree
from tokenswift.types import DraftTree, Step

MOST_NODES = 31  # below the root
YOUNG = 64  # steps that are all learnt from
WIDTH = 4  # candidates of a place
ROWS = 4  # places that one level, or one pass over several places, continues
CHAIN = 6  # passes in one step that only draft


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
        self.least = 0.5 * control.rate * control.row
        self._rankings: list[tuple[int, Callable[[int], None]]] = []

    def offer(self, node: int, ranked: Ranked, level: int = 0, kind: str | None = None) -> Below:
        """Add a ranking's candidates below ``node``, each with its chance (see `Candidates.offer`)."""
        kind = self.drafter.name if kind is None else kind
        chances, learn = self.calibration.chances(kind, ranked, level)
        self._rankings.append((node, learn))
        tree, mark = self.tree, self.drafter.mark
        above = tree.chance(node)
        below = []
        for token, chance in zip(ranked.tokens, chances, strict=True):
            child = tree.add(node, token, mark, chance)
            below.append((child, above * tree.given[child]))
        return below

    def go_on(self, below: list[Below], level: int) -> tuple[list[int], list[int]]:
        """The likeliest candidates of a level, where the next level promises more than it costs."""
        self.levels += 1
        control = self.control
        self._led(below, level)
        ahead = control.lead(level + 1)
        kept = [one for one in _likeliest(below) if one[0] * ahead > control.rate * control.row]
        gain = ahead * sum(chance for chance, _, _ in kept)
        if gain < control.rate * (control.level + control.row * len(kept)):
            return [], []
        return [node for _, node, _ in kept], [row for _, _, row in kept]

    def learn(self, new: list[int]) -> None:
        """Take in the tokens that came, at the rankings whose paths had come."""
        for node, learn in self._rankings:
            depth = self.tree.depths[node]
            if depth < len(new) and self.tree.path(node) == new[:depth]:
                learn(new[depth])

    def _width_at(self, depth: int) -> int:
        return WIDTH

    def _led(self, below: list[Below], of: int | str) -> float:
        """Take in how likely the best candidates of a level are, or of a drafter's pass; the chance of those
        of the next."""
        firsts = [self.tree.given[children[0][0]] for children in below if children]
        if firsts:
            self.control.led(of, sum(firsts) / len(firsts))
        return self.control.lead(of)

    def _worth_levels(self, nodes: list[int]) -> list[int]:
        control = self.control
        gain = self.tree.chance(nodes[0]) * control.lead(0)
        return nodes[:1] if gain > control.rate * (control.level + control.row) else []

    def _worth_passes(self, below: list[Below], places: int | None) -> list[int]:
        """Where the next pass promises more than it costs: the likeliest place, and others whose candidates
        are worth a row of that pass and one of the verify pass."""
        if not any(below):
            return []
        control, name = self.control, self.drafter.name
        lead, cost = self._led(below, name), control.modes[name].pass_cost
        row = cost * (control.costs.verify(6) - 1) / 5  # of such a pass, as of the target's
        least = control.rate * (row + control.row)
        best, *others = _likeliest(below)[:places]
        kept = [best, *(other for other in others if other[0] * lead > least)]
        gain = lead * sum(chance for chance, _, _ in kept)
        price = cost + control.row * len(kept) + row * (len(kept) - 1)
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
        learnt: what earlier texts of the model taught.
    """

    acceptance, max_nodes = "exact", MOST_NODES + 1

    def __init__(self, drafters: Sequence[Drafter], sampler: Sampler, coupled: bool, learnt: Learnt) -> None:
        self.drafters, self.sampler, self.coupled, self.learnt = drafters, sampler, coupled, learnt
        self._free: list[Drafter] = []  # propose in every step
        self._priced: dict[str, Drafter] = {}
        self._before: Step | None = None
        self._candidates: PricedCandidates | None = None  # none in a rest
        self._steps = 0
        self._rest = 0  # steps to come in which nobody is asked
        self._unread: list[int] = []  # tokens of such steps

    def needs(self, text: int, row: int) -> list[Need]:
        """The widest tree's rows, and what the drafters hold (see `memory.needs_of`)."""
        own = Need("tree", "auto", self.max_nodes * row)
        return [own, *(need for drafter in self.drafters for need in drafter.needs(text, row))]

    def begin(self, sequence: TokenSequence) -> None:
        """Let the drafters read the prompt, and hear what they offer."""
        costs = Costs(self.learnt.ratios)
        offers: dict[str, CostEstimate] = {}
        for drafter in self.drafters:
            drafter.begin(sequence)
            offer = drafter.offer(costs)
            if offer is None:
                self._free.append(drafter)
            else:
                offers[drafter.name], self._priced[drafter.name] = offer, drafter
        self.control = Control(costs, offers, self.learnt.biases)

    # ---- a step ---------------------------------------------------------------------------------

    def draft(self, sequence: TokenSequence) -> DraftTree:
        """The tree of this step; the bare root where nothing pays."""
        control, length = self.control, len(sequence.tokens) - 1
        if self._rest and sequence.load == ALONE:
            self._candidates = None
            return CandidateTree(sequence.tokens[-1]).build()
        self._read_on(sequence)
        control.left = sequence.left
        mode = control.mode(length, sequence.load)
        made = PricedCandidates(sequence, self.sampler, self.coupled, self.learnt.calibration, control)
        self._candidates = made
        if not control.bare:
            for drafter in self._free:
                made.ask(drafter)
            if mode in self._priced and sequence.newest is not None:
                made.ask(self._priced[mode])
        sequence.draft_passes += made.passes
        prices = control.prices(min(MOST_NODES, len(made.tree) - 1))
        rate = control.rate / control.modes[mode].bias  # chances are off by as much as they were of late
        nodes, expected = made.tree.select(prices, rate)
        while out := made.forbidden(nodes):
            for node in out:
                made.tree.given[node] = 0.0
            nodes, expected = made.tree.select(prices, rate)
        tree = self._tree = made.tree.build(nodes)
        control.drafted(Drafted(mode, 1 + expected, len(tree), made.passes, made.levels, made.loaded))
        return tree

    def observe(self, sequence: TokenSequence, step: Step, nodes: tuple[int, ...]) -> None:
        """Learn from the step: chances from its outcome, costs from its times."""
        spent = {name: 1000 * seconds for name, seconds in step.times.items()}
        draft_ms = spent.pop("draft", 0.0)
        verify_ms = sum(spent.values())
        control, new = self.control, list(step.token_ids)
        if self._candidates is None:
            self._rest, self._before = max(0, self._rest - 1), None
            control.record_rest(verify_ms, draft_ms)
            self._unread += new
            return
        learning_ms = 1000 * self._before.times.get("observe", 0.0) if self._before else 0.0
        control.record_step(len(new), step.drafted + 1, verify_ms, draft_ms + learning_ms)
        self._before = step
        self._steps += 1
        if self._steps <= YOUNG or self._steps % 4 == 0:  # then chances are known well
            self._candidates.learn(new)
        for drafter in self.drafters:
            in_use = control.uses(drafter.name)
            drafter.observe(sequence, Outcome(new, len(nodes), in_use, self._tree))
        self._rest = control.rest()

    def _read_on(self, sequence: TokenSequence) -> None:
        """The drafters take in what came while nobody was asked."""
        if self._unread:
            for drafter in self.drafters:
                drafter.observe(sequence, Outcome(self._unread, len(self._unread), False))
            self._unread = []

    # ---- what it did ----------------------------------------------------------------------------

    def report(self) -> dict[str, Any] | None:
        """Figures, ready for JSON (see `Control.record`); None before the first step."""
        return self.control.record() if self._steps else None
