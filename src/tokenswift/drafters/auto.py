"""Automatic drafting: each step drafts what pays, from whatever is there, or nothing.

A step is worth ``tokens - rate · time``, with the rate that decoding reaches now; every decision asks
whether it adds to that. Candidates come from drafters (`drafter`): those that cost nothing propose in every
step, and one of the others, or none (*plain*), as follows from what their steps have brought (`control`);
what is not in use is tried rarely. The best part of the candidates by chance and cost becomes the tree
(`growth`). Of the drafters no more is known here than their names, the tokens that they expect and their
prices. The text cannot depend on any of this, only the time can.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from time import perf_counter
from typing import Any

from tokenswift.drafters.calibration import Calibration
from tokenswift.drafters.candidates import Candidates
from tokenswift.drafters.control import Control
from tokenswift.drafters.costs import Costs, Table
from tokenswift.drafters.drafter import Drafter
from tokenswift.drafters.offer import Offer, Outcome
from tokenswift.drafters.refusal import Source
from tokenswift.interfaces import Sequence
from tokenswift.sampling.choice import Sampler
from tokenswift.types import DraftTree, RunError, Step

MOST_NODES = 31  # below the root
_YOUNG = 64  # steps that are all learnt from


class AutoDrafter:
    """Grows a tree a step and decides what from.

    Args:
        drafters: what may draft, in the order in which they are asked and named.
        sampler: the target's choice rule.
        table: gives the measured costs, when the run begins.
        priors: weights that chances start from, by kind of ranking, where better ones than the library's are
            known.
        coupled: rank with the target's noise.
        explain: a file to write one line a decision to, as JSON; None for none.
    """

    def __init__(
        self,
        drafters: Seq[Drafter],
        sampler: Sampler,
        table: Callable[[], Table],
        priors: Mapping[str, Seq[Seq[float]]] | None,
        coupled: bool,
        explain: Path | None,
    ) -> None:
        self.drafters, self.sampler = list(drafters), sampler
        self.coupled, self.explain = coupled, explain
        self.calibration = Calibration(priors)
        self._table = table
        self._control: Control | None = None
        self._free: list[Drafter] = []  # propose in every step
        self._priced: dict[str, Drafter] = {}
        self._candidates: Candidates | None = None
        self._ranked: dict[str, Source] = {}
        self._record: dict[str, Any] = {}
        self._draft_seconds = self._mark = 0.0
        self._steps = 0

    @property
    def control(self) -> Control:
        """What decides.

        Raises:
            ValueError: the run has not begun.
        """
        if self._control is None:
            raise ValueError("begin was not called")
        return self._control

    def begin(self, sequence: Sequence) -> None:
        """Let the drafters read the prompt, and hear what they offer."""
        costs = Costs(self._table())
        offers: dict[str, Offer] = {}
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
        sequence.drafting = self

    # ---- a step ---------------------------------------------------------------------------------

    def draft(self, sequence: Sequence) -> DraftTree:
        """The tree of this step; the bare root where nothing pays."""
        begun = perf_counter()
        control, length = self.control, len(sequence.tokens) - 1
        mode = control.mode(length)
        made = Candidates(sequence.tokens, self.sampler, self.coupled, self.calibration, control)
        self._candidates = made
        for drafter in self._free:
            made.ask(drafter, sequence)
        spent = perf_counter()
        if mode in self._priced and sequence.newest is not None:
            made.ask(self._priced[mode], sequence)
        self._draft_seconds = perf_counter() - spent
        self._leave_out(made)
        nodes, expected = made.growth.select(control.prices(length, MOST_NODES), control.rate)
        tree = made.growth.build(nodes)
        control.drafted(mode, 1 + expected, len(tree), 1000 * (self._draft_seconds - made.loading))
        self._record = {"context": length, "mode": mode, "nodes": len(nodes), "depth": tree.gamma}
        self._record |= {"expected": 1 + expected, "draft_ms": 1000 * self._draft_seconds}
        self._mark = perf_counter()
        control.busy += self._mark - begun - self._draft_seconds
        return tree

    def _leave_out(self, made: Candidates) -> None:
        """Drop the drafters whose rows are refused again and again."""
        self._ranked |= made.ranked
        for drafter in self.drafters:
            if drafter.refusals.dropped:
                self.control.drop(drafter.name)
                if drafter in self._free:
                    self._free.remove(drafter)

    def observe(self, sequence: Sequence, step: Step, nodes: tuple[int, ...]) -> None:
        """Learn from the step: chances from its outcome, costs from its time."""
        now = perf_counter()
        milliseconds = 1000 * (now - self._mark)
        length, new = len(sequence.tokens) - 1, list(step.token_ids)
        control = self.control
        control.took(len(new), step.drafted + 1, length - len(new), milliseconds)
        self._steps += 1
        if self._candidates is not None:  # what is known well is learnt from every fourth step
            self._candidates.learn(new, rankings=self._steps <= _YOUNG or self._steps % 4 == 0)
        for drafter in self.drafters:
            drafter.observe(sequence, Outcome(new, len(nodes), milliseconds, control.uses(drafter.name)))
        if self.explain is not None:
            spent = milliseconds + self._record["draft_ms"]
            plain = control.plain_ms(length)
            self._record |= {"tokens": len(new), "spent_ms": spent, "gained_ms": len(new) * plain - spent}
            line = {k: round(v, 4) if isinstance(v, float) else v for k, v in self._record.items()}
            _write(self.explain, "a", json.dumps(line) + "\n")
        control.busy += perf_counter() - now

    # ---- what it did ----------------------------------------------------------------------------

    def summary(self) -> str:
        """What was used and why, in a sentence."""
        left_out = [source.name for source in self._ranked.values() if source.dropped]
        return self.control.summary() + "".join(f"; {name} were left out" for name in left_out)

    def record(self) -> dict[str, Any]:
        """Figures for a JSON record: shares of modes, reliability of the chances, the drafter's own time."""
        return {
            "summary": self.summary(),
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
