"""Adaptive trees: each step drafts what is expected to gain time, or nothing.

A step is worth ``tokens - rate · time``, with the rate that decoding reaches now; every decision asks
whether it adds to that. Candidates come from drafters: those that cost nothing propose in every step, and one
of the others, or none (*plain*), as follows from what their steps have brought (`control`); what is not in
use is tried rarely. The best part of the candidates by chance and cost becomes the tree
(`tree.CandidateTree.select`). Of the drafters no more is known here than their names, the tokens that they
expect and their prices; times come with the steps. The text cannot depend on any of this, only the time can.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenswift.memory import Need
from tokenswift.sampling.choice import Sampler
from tokenswift.spec.adaptive.acceptance import Calibration
from tokenswift.spec.adaptive.candidates import PricedCandidates
from tokenswift.spec.adaptive.controller import PLAIN, Control, Drafted, Gain
from tokenswift.spec.adaptive.cost import Costs, Table
from tokenswift.spec.adaptive.estimate import CostEstimate, Outcome
from tokenswift.spec.drafters.drafter import Drafter
from tokenswift.spec.drafters.invalid_logits import Source
from tokenswift.spec.strategy import TokenSequence
from tokenswift.tree import CandidateTree
from tokenswift.types import DraftTree, InputError, RunError, Step

MOST_NODES = 31  # below the root
LOOKS = 16  # steps from one look at what could be drafted to the next, beside texts that make rows dear
YOUNG = 64  # steps that are all learnt from


class ByChance:
    """Adaptive drafting.

    Args:
        drafters: what may draft, in the order in which they are asked and named.
        sampler: the target's choice rule.
        coupled: rank candidates with the target's noise.
        table: gives the measured costs, when the run begins.
        learned: takes them as the run has corrected them, at its end.
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
        table: Callable[[], Table],
        learned: Callable[[Table], None] = lambda table: None,
        priors: Mapping[str, Sequence[Sequence[float]]] | None = None,
        explain: str | None = None,
    ) -> None:
        self.drafters, self.sampler, self.coupled = list(drafters), sampler, coupled
        self.explain = None if explain is None else Path(explain)
        if self.explain and (self.explain.is_dir() or not self.explain.absolute().parent.is_dir()):
            raise InputError(f"explain is {str(explain)!r}; valid: a file in an existing folder")
        self.calibration = Calibration(priors)
        self._table, self._learned = table, learned
        self._control: Control | None = None
        self.gain = Gain()
        self._free: list[Drafter] = []  # propose in every step
        self._priced: dict[str, Drafter] = {}
        self._candidates: PricedCandidates | None = None
        self._ranked: dict[str, Source] = {}
        self._record: dict[str, Any] = {}
        self._before: Step | None = None
        self._steps = 0
        self._rests = 0  # steps for which nothing is decided
        self._rested = False  # whether the last one was such a step

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

    def calibrate(self) -> None:
        """Have the costs of passes measured, if that was never done."""
        self._table()

    def settle(self) -> None:
        """Hand on what the steps have shown of the costs."""
        table = None if self._control is None else self._control.costs.learned()
        if table is not None:
            self._learned(table)

    def begin(self, sequence: TokenSequence) -> None:
        """Let the drafters read the prompt, and hear what they offer."""
        costs = Costs(self._table())
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
        self._control = Control(costs, offers)
        if self.explain is not None:
            _write(self.explain, "w", "")

    # ---- a step ---------------------------------------------------------------------------------

    def draft(self, sequence: TokenSequence) -> DraftTree:
        """The tree of this step; the bare root where nothing pays."""
        control, length = self.control, len(sequence.tokens) - 1
        self._rested = self._rests > 0 and sequence.load.rows >= control.load.rows
        free = None
        if self._rested and not sequence.load.rows:
            free = self._asked(sequence)
            self._rested = len(free.tree) == 1
        if self._rested:
            self._rests -= 1
            self._record = {"context": length, "mode": PLAIN, "nodes": 0, "depth": 0, "expected": 1.0}
            return CandidateTree(sequence.tokens[-1]).build([])
        self._rests = 0
        if self._before is not None:
            control.observed(1000 * self._before.times.get("observe", 0.0))
        if sequence.load != control.load:
            control.join(sequence.load, length)
        control.left = sequence.left
        mode = control.mode(length)
        made = self._candidates = free or self._asked(sequence)
        if mode in self._priced and sequence.newest is not None:
            made.ask(self._priced[mode])
        sequence.draft_passes += made.passes
        self._leave_out(made)
        for node in made.forbidden():
            made.tree.given[node] = 0.0
        nodes, expected = made.tree.select(control.prices(length, MOST_NODES), control.rate)
        tree = made.tree.build(nodes)
        if control.skip_drafting and mode not in self._priced and not nodes:
            self._rests = LOOKS - 1
        elif mode == PLAIN and len(made.tree) == 1:
            self._rests = control.hold()
        self._drafted(mode, tree, 1 + expected, made, length)
        return tree

    def _drafted(
        self, mode: str, tree: DraftTree, expected: float, made: PricedCandidates, length: int
    ) -> None:
        """A step's tree is known."""
        self.control.drafted(Drafted(mode, expected, len(tree), made.passes, made.levels, made.loaded))
        self._record = {"context": length, "mode": mode, "nodes": len(tree) - 1, "depth": tree.gamma}
        self._record |= {"expected": expected}

    def _asked(self, sequence: TokenSequence) -> PricedCandidates:
        """The candidates of the drafters that cost nothing."""
        made = PricedCandidates(sequence, self.sampler, self.coupled, self.calibration, self.control)
        for drafter in self._free:
            made.ask(drafter)
        return made

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
        length = len(sequence.tokens) - 1
        if self._rested:
            control.rested(len(new), verify_ms + draft_ms)
            self._before = None
        else:
            control.record_step(len(new), step.drafted + 1, length - len(new), verify_ms, draft_ms)
            self._before = step
        self._steps += 1
        if self._candidates is not None and not self._rested:
            # what is known well is learnt from every fourth step
            self._candidates.learn(new, rankings=self._steps <= YOUNG or self._steps % 4 == 0)
        for drafter in self.drafters:
            drafter.observe(sequence, Outcome(new, len(nodes), step.times, control.uses(drafter.name)))
        if self.explain is not None:
            both, plain = verify_ms + draft_ms, control.plain_ms(length)
            self._record |= {"draft_ms": draft_ms, "tokens": len(new), "spent_ms": both}
            self._record |= {"gained_ms": len(new) * plain - both}
            line = {k: round(v, 4) if isinstance(v, float) else v for k, v in self._record.items()}
            _write(self.explain, "a", json.dumps(line) + "\n")

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
