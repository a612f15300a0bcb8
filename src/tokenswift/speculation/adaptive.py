"""Adaptive drafting, the strategy ``auto``: each step drafts what is expected to save time, or
nothing.

A step is worth ``tokens - rate · time``, where the rate is the current speed; every decision asks
what adds to that. Free drafters propose in every step. Of the others one drafts, or none (*plain*),
chosen by the results of recent steps (`control`). The nodes that are worth a row of the verify
pass become the tree (`tree.CandidateTree.select`). None of this can change a token; it changes the
time alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenswift.memory import Need
from tokenswift.sampling.rows import Ranked
from tokenswift.sampling.sampler import Sampler
from tokenswift.speculation.calibration import Calibration
from tokenswift.speculation.control import Control, Learnt
from tokenswift.speculation.costs import CostEstimate, Costs
from tokenswift.speculation.drafters.base import (
    Candidate,
    Candidates,
    Drafter,
    Outcome,
    Ranking,
)
from tokenswift.speculation.modes import PLAIN, Drafted
from tokenswift.speculation.sequence_state import ALONE, SequenceState, Strategy
from tokenswift.tree import CandidateTree
from tokenswift.types import DraftTree, Step

MOST_NODES = 31  # nodes below the root
WIDTH = 4  # candidates below a node
ROWS = 4  # nodes that a level of heads or a draft pass continues, at most
CHAIN = 6  # draft passes in a step


class AdaptiveStrategy(Strategy):
    """Adaptive drafting for one sequence.

    Args:
        drafters: all drafters, in the order in which they are asked and reported.
        sampler: the target's choice rule.
        coupled: rank candidates with the target's noise.
        learnt: what was learnt from earlier sequences of the model.
    """

    max_nodes = MOST_NODES + 1

    def __init__(
        self, drafters: Sequence[Drafter], sampler: Sampler, coupled: bool, learnt: Learnt
    ) -> None:
        self.drafters = drafters
        self.sampler = sampler
        self.coupled = coupled
        self.learnt = learnt
        self._free: list[Drafter] = []  # asked in every step
        self._priced: dict[str, Drafter] = {}
        self.control = Control(Costs(learnt.ratios, learnt.first_cost), {}, learnt.biases)
        self._learnt_before = False  # whether the step before was learnt from
        self._candidates: PricedCandidates | None = None  # None during a pause
        self._tree: DraftTree | None = None  # the last one; None before the first
        self._pause = 0  # steps to come in which no drafter is asked
        self._pause_tokens: list[int] = []  # tokens of a pause, which the drafters have not seen

    def needs(self, text: int, row: int) -> list[Need]:
        """Memory of the largest tree's rows and of the drafters (see `memory.needs_of`)."""
        needs = [Need("tree", "auto", self.max_nodes * row)]
        for drafter in self.drafters:
            needs += drafter.needs(text, row)
        return needs

    def begin(self, sequence: SequenceState) -> None:
        """Show the drafters the prompt, and ask each for its estimate."""
        costs = self.control.costs
        estimates = dict[str, CostEstimate]()
        for drafter in self.drafters:
            drafter.begin(sequence)
            estimate = drafter.estimate(costs)
            if estimate is None:
                self._free.append(drafter)
            else:
                estimates[drafter.name] = estimate
                self._priced[drafter.name] = drafter
        self.control = Control(costs, estimates, self.learnt.biases)

    # ---- a step ----------------------------------------------------------------------------------

    def draft(self, sequence: SequenceState) -> DraftTree:
        """The tree of this step: the root alone where nothing is worth its cost."""
        control = self.control
        if self._pause and sequence.load == ALONE:
            self._candidates = None
            return CandidateTree(sequence.tokens[-1]).build()
        self._show_pause(sequence)
        control.remaining = sequence.remaining
        mode = control.choose_mode(len(sequence.tokens) - 1, sequence.load)
        calibration = self.learnt.calibration
        candidates = PricedCandidates(sequence, self.sampler, self.coupled, calibration, control)
        self._candidates = candidates
        self._ask(sequence, candidates, mode)
        sequence.draft_passes += candidates.passes
        nodes, expected = self._allowed_nodes(candidates, mode)
        tree = candidates.tree.build(nodes)
        self._tree = tree
        control.record_draft(
            Drafted(
                mode,
                expected=1 + expected,
                rows=len(tree),
                passes=candidates.passes,
                levels=candidates.levels,
                loaded=candidates.loaded,
            )
        )
        return tree

    def _ask(self, sequence: SequenceState, candidates: PricedCandidates, mode: str) -> None:
        """Let the free drafters propose, and the mode's where that is worth its time."""
        control = self.control
        if control.timing_plain:
            return
        for drafter in self._free:
            candidates.ask(drafter)
        if mode in self._priced and sequence.last_pass is not None:
            tree = candidates.tree
            nodes, expected = self._best(tree, PLAIN)
            pairs = zip(tree.chances, tree.parents, strict=True)
            next_token = sum(chance for chance, parent in pairs if parent == 0)
            if control.should_ask(mode, 1 + expected, 1 + len(nodes), next_token):
                candidates.ask(self._priced[mode])

    def _allowed_nodes(self, candidates: PricedCandidates, mode: str) -> tuple[list[int], float]:
        """The nodes that are worth a row and that the grammar allows, and their expected tokens."""
        tree = candidates.tree
        nodes, expected = self._best(tree, mode)
        while forbidden := candidates.forbidden(nodes):
            for node in forbidden:
                tree.chances[node] = 0.0
            nodes, expected = self._best(tree, mode)
        return nodes, expected

    def _best(self, tree: CandidateTree, mode: str) -> tuple[list[int], float]:
        """The nodes that are worth a row, and their expected tokens; chances are corrected by the
        mode's recent error."""
        costs = self.control.verify_costs(min(MOST_NODES, len(tree) - 1))
        return tree.select(costs, self.control.tokens_per_pass / self.control.modes[mode].bias)

    def observe(self, sequence: SequenceState, step: Step, nodes: tuple[int, ...]) -> None:
        """Learn chances from the step's tokens, and costs from its times."""
        spent = {name: 1000 * seconds for name, seconds in step.times.items()}
        draft_ms = spent.pop("draft", 0.0)
        verify_ms = sum(spent.values())
        control = self.control
        new = list(step.token_ids)
        if self._candidates is None:
            self._pause = max(0, self._pause - 1)
            self._learnt_before = False
            control.record_pause(verify_ms, draft_ms)
            self._pause_tokens += new
            return
        if self._learnt_before:  # learning from the step before is drafting for this one
            draft_ms += 1000 * sequence.observe_seconds
        control.record_step(len(new), step.drafted + 1, verify_ms, draft_ms)
        self._learnt_before = True
        self._candidates.learn(new)
        for drafter in self.drafters:
            in_use = control.uses(drafter.name)
            drafter.observe(sequence, Outcome(new, len(nodes), in_use, self._tree))
        self._pause = control.pause()

    def _show_pause(self, sequence: SequenceState) -> None:
        """Show the drafters the tokens of a pause."""
        if self._pause_tokens:
            outcome = Outcome(self._pause_tokens, len(self._pause_tokens), in_use=False)
            for drafter in self.drafters:
                drafter.observe(sequence, outcome)
            self._pause_tokens = []

    # ---- report ----------------------------------------------------------------------------------

    def report(self) -> dict[str, object] | None:
        """See `Control.record`; None before the first step."""
        if not any(mode.steps for mode in self.control.modes.values()):
            return None
        return dict(self.control.record())


# ---- candidates with chances and costs -----------------------------------------------------------


class PricedCandidates(Candidates):
    """The candidates of one step of adaptive drafting.

    Args:
        sequence: the sequence, whose last token is the root.
        sampler: the target's choice rule.
        coupled: rank candidates with the target's noise.
        calibration: turns rankings into chances.
        control: knows the current rate and all costs.
    """

    with_probs = True

    def __init__(
        self,
        sequence: SequenceState,
        sampler: Sampler,
        coupled: bool,
        calibration: Calibration,
        control: Control,
    ) -> None:
        super().__init__(sequence, sampler, coupled, max_passes=CHAIN)
        self.calibration = calibration
        self.control = control
        self.min_chance = 0.5 * control.tokens_per_pass * control.row_cost
        self._rankings: list[tuple[int, Callable[[int], None]]] = []  # nodes, and what learns there

    def add_ranking(
        self, node: int, ranked: Ranked, level: int = 0, kind: str | None = None
    ) -> Ranking:
        """See `Candidates.add_ranking`; the chances come from the calibration."""
        kind = self.drafter.name if kind is None else kind
        chances, learn = self.calibration.chances(kind, ranked, level)
        self._rankings.append((node, learn))
        tree = self.tree
        source = self.drafter.source
        parent_chance = tree.path_chance(node)
        ranking = []
        for token, chance in zip(ranked.tokens, chances, strict=True):
            child = tree.add(node, token, source, chance)
            ranking.append(Candidate(parent_chance * tree.chances[child], child))
        return ranking

    def next_level(self, rankings: list[Ranking], level: int) -> list[int]:
        """The likeliest candidates, if the next level of heads is expected to gain more than it
        costs."""
        self.levels += 1
        control = self.control
        self._observe_best(rankings, level)
        next_chance = control.best_chance(level + 1)
        min_chance = control.tokens_per_pass * control.row_cost
        likeliest = _likeliest(rankings)
        grown = [each for each in likeliest if each.path_chance * next_chance > min_chance]
        cost = control.level_cost + control.row_cost * len(grown)
        return self._worth(grown, next_chance, cost)

    def learn(self, new: list[int]) -> None:
        """Let the calibration learn from a step's tokens, at rankings whose context they have."""
        for node, learn in self._rankings:
            depth = self.tree.depths[node]
            if depth < len(new) and self.tree.path(node) == new[:depth]:
                learn(new[depth])

    def _width_at(self, depth: int) -> int:
        return WIDTH

    def _observe_best(self, rankings: list[Ranking], place: int | str) -> float:
        """Record how likely the best candidates of a level, or a draft pass, are; return the mean
        of such chances, as a forecast for the next one."""
        best = [self.tree.chances[ranking[0].node] for ranking in rankings if ranking]
        if best:
            self.control.observe_best(place, sum(best) / len(best))
        return self.control.best_chance(place)

    def _worth(self, grown: list[Candidate], next_chance: float, cost: float) -> list[int]:
        """The nodes of candidates if what comes below them, right with ``next_chance`` if they are,
        gains more than it costs in plain passes; else none."""
        gain = next_chance * sum(candidate.path_chance for candidate in grown)
        if gain < self.control.tokens_per_pass * cost:
            return []
        return [candidate.node for candidate in grown]

    def _worth_levels(self, nodes: list[int]) -> list[int]:
        control = self.control
        gain = self.tree.path_chance(nodes[0]) * control.best_chance(0)
        return (
            nodes[:1]
            if gain > control.tokens_per_pass * (control.level_cost + control.row_cost)
            else []
        )

    def _worth_passes(self, rankings: list[Ranking], per_pass: int | None) -> list[int]:
        """The likeliest node, if one more draft pass is expected to gain more than it costs, and
        others that are worth a row in that pass and one in the verify pass."""
        if not any(rankings):
            return []
        control = self.control
        name = self.drafter.name
        next_chance = self._observe_best(rankings, name)
        pass_cost = control.modes[name].pass_cost
        draft_row = pass_cost * (control.costs.verify(6) - 1) / 5  # one more row in a draft pass
        min_chance = control.tokens_per_pass * (draft_row + control.row_cost)
        best, *others = _likeliest(rankings)[:per_pass]
        grown = [best]
        grown += [other for other in others if other.path_chance * next_chance > min_chance]
        cost = pass_cost + control.row_cost * len(grown) + draft_row * (len(grown) - 1)
        return self._worth(grown, next_chance, cost)


def _likeliest(rankings: list[Ranking]) -> list[Candidate]:
    """The likeliest candidates of all rankings, the likeliest first."""
    candidates = [candidate for ranking in rankings for candidate in ranking]
    return sorted(candidates, reverse=True)[:ROWS]  # they compare by their chances first
