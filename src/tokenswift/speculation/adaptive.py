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
from tokenswift.speculation.control import PLAIN, Control, Drafted, Learnt
from tokenswift.speculation.costs import CostEstimate, Costs
from tokenswift.speculation.drafters.base import Below, Candidates, Drafter, Outcome
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
        self.drafters, self.sampler, self.coupled, self.learnt = drafters, sampler, coupled, learnt
        self._free: list[Drafter] = []  # asked in every step
        self._priced: dict[str, Drafter] = {}
        self.control = Control(Costs(learnt.ratios), {}, learnt.biases)
        self._before: Step | None = None
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
        costs, estimates = self.control.costs, dict[str, CostEstimate]()
        for drafter in self.drafters:
            drafter.begin(sequence)
            estimate = drafter.estimate(costs)
            if estimate is None:
                self._free.append(drafter)
            else:
                estimates[drafter.name], self._priced[drafter.name] = estimate, drafter
        self.control = Control(costs, estimates, self.learnt.biases)

    # ---- a step ----------------------------------------------------------------------------------

    def draft(self, sequence: SequenceState) -> DraftTree:
        """The tree of this step: the root alone where nothing is worth its cost."""
        control, length = self.control, len(sequence.tokens) - 1
        if self._pause and sequence.load == ALONE:
            self._candidates = None
            return CandidateTree(sequence.tokens[-1]).build()
        self._show_pause(sequence)
        control.remaining = sequence.remaining
        mode = control.mode(length, sequence.load)
        candidates = self._candidates = PricedCandidates(sequence, self)
        tree = candidates.tree
        if not control.timing_plain:
            for drafter in self._free:
                candidates.ask(drafter)
            if mode in self._priced and sequence.last_pass is not None:
                nodes, expected = self._best(tree, PLAIN)
                first = sum(
                    at for at, parent in zip(tree.chances, tree.parents, strict=True) if not parent
                )
                if control.should_ask(mode, 1 + expected, 1 + len(nodes), first):
                    candidates.ask(self._priced[mode])
        sequence.draft_passes += candidates.passes
        nodes, expected = self._best(tree, mode)
        while out := candidates.forbidden(nodes):
            for node in out:
                tree.chances[node] = 0.0
            nodes, expected = self._best(tree, mode)
        self._tree = built = tree.build(nodes)
        work = (candidates.passes, candidates.levels, candidates.loaded)
        control.drafted(Drafted(mode, 1 + expected, len(built), *work))
        return built

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
        control, new = self.control, list(step.token_ids)
        if self._candidates is None:
            self._pause, self._before = max(0, self._pause - 1), None
            control.record_pause(verify_ms, draft_ms)
            self._pause_tokens += new
            return
        learning_ms = 1000 * self._before.times.get("observe", 0.0) if self._before else 0.0
        control.record_step(len(new), step.drafted + 1, verify_ms, draft_ms + learning_ms)
        self._before = step
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
        return (
            self.control.record() if any(one.steps for one in self.control.modes.values()) else None
        )


# ---- candidates with chances and costs -----------------------------------------------------------


class PricedCandidates(Candidates):
    """The candidates of one step of adaptive drafting.

    Args:
        strategy: whose control knows the rate and all costs, and whose calibration turns rankings
            into chances.
    """

    with_probs = True

    def __init__(self, sequence: SequenceState, strategy: AdaptiveStrategy) -> None:
        super().__init__(sequence, strategy.sampler, strategy.coupled, max_passes=CHAIN)
        self.calibration, self.control = strategy.learnt.calibration, strategy.control
        self.min_chance = 0.5 * self.control.tokens_per_pass * self.control.row
        self._rankings: list[tuple[int, Callable[[int], None]]] = []

    def add_ranking(
        self, node: int, ranked: Ranked, level: int = 0, kind: str | None = None
    ) -> Below:
        """See `Candidates.add_ranking`; the chances come from the calibration."""
        kind = self.drafter.name if kind is None else kind
        chances, learn = self.calibration.chances(kind, ranked, level)
        self._rankings.append((node, learn))
        tree, source = self.tree, self.drafter.source
        above = tree.path_chance(node)
        below = []
        for token, chance in zip(ranked.tokens, chances, strict=True):
            child = tree.add(node, token, source, chance)
            below.append((child, above * tree.chances[child]))
        return below

    def next_level(self, below: list[Below], level: int) -> tuple[list[int], list[int]]:
        """The likeliest candidates, if the next level of heads is expected to gain more than it
        costs."""
        self.levels += 1
        control = self.control
        self._observe_best(below, level)
        ahead = control.best_chance(level + 1)
        min_chance = control.tokens_per_pass * control.row
        grown = [one for one in _likeliest(below) if one[0] * ahead > min_chance]
        gain = ahead * sum(chance for chance, _, _ in grown)
        if gain < control.tokens_per_pass * (control.level + control.row * len(grown)):
            return [], []
        return [node for _, node, _ in grown], [row for _, _, row in grown]

    def learn(self, new: list[int]) -> None:
        """Let the calibration learn from a step's tokens, at rankings whose context they have."""
        for node, learn in self._rankings:
            depth = self.tree.depths[node]
            if depth < len(new) and self.tree.path(node) == new[:depth]:
                learn(new[depth])

    def _width_at(self, depth: int) -> int:
        return WIDTH

    def _observe_best(self, below: list[Below], of: int | str) -> float:
        """Record how likely the best candidates of a level, or a draft pass, are; return the mean
        of such chances, as a forecast for the next one."""
        firsts = [self.tree.chances[children[0][0]] for children in below if children]
        if firsts:
            self.control.observe_best(of, sum(firsts) / len(firsts))
        return self.control.best_chance(of)

    def _worth_levels(self, nodes: list[int]) -> list[int]:
        control = self.control
        gain = self.tree.path_chance(nodes[0]) * control.best_chance(0)
        return nodes[:1] if gain > control.tokens_per_pass * (control.level + control.row) else []

    def _worth_passes(self, below: list[Below], per_pass: int | None) -> list[int]:
        """The likeliest node, if one more draft pass is expected to gain more than it costs, and
        others that are worth a row in that pass and one in the verify pass."""
        if not any(below):
            return []
        control, name = self.control, self.drafter.name
        ahead, cost = self._observe_best(below, name), control.modes[name].pass_cost
        row = cost * (control.costs.verify(6) - 1) / 5  # cost of one more row in that pass
        min_chance = control.tokens_per_pass * (row + control.row)
        best, *others = _likeliest(below)[:per_pass]
        grown = [best, *(other for other in others if other[0] * ahead > min_chance)]
        gain = ahead * sum(chance for chance, _, _ in grown)
        total_cost = cost + control.row * len(grown) + row * (len(grown) - 1)
        if gain < control.tokens_per_pass * total_cost:
            return []
        return [node for _, node, _ in grown]


def _likeliest(below: list[Below]) -> list[tuple[float, int, int]]:
    """Path chance, node and parent's row of the likeliest candidates, the likeliest first."""
    spread = [
        (chance, node, row) for row, children in enumerate(below) for node, chance in children
    ]
    return sorted(spread, reverse=True)[:ROWS]
