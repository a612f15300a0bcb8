"""Automatic drafting: each step drafts what pays, from whatever is there, or nothing.

A step is worth ``tokens - rate · time``, with the rate that decoding reaches now; every decision asks whether
it adds to that. Candidates come from four places:

- long matches in the text so far (`reuse`), which cost nothing to make;
- the heads, on the hidden state that the last verify pass left (*hidden*), a level at a time;
- passes over a partial KV cache (*partial*), one after the other while the path is likely enough, and the
  heads after the last of them;
- passes of a draft model that the user gave (*model*), likewise.

The best part of them by chance and cost becomes the tree (`growth`). Which of the three drafts, or none
(*plain*), follows from what their steps have brought; what is not in use is tried rarely. The text
cannot depend on any of this, only the time can.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tokenswift.drafting.calibration import Calibration
from tokenswift.drafting.chain import ModelDrafter
from tokenswift.drafting.context import SparseContext
from tokenswift.drafting.control import MODEL, PARTIAL, PLAIN, Control
from tokenswift.drafting.costs import Costs, Table
from tokenswift.drafting.growth import Growth
from tokenswift.drafting.heads import HeadLevels, newest_hidden
from tokenswift.drafting.reuse import Reuse
from tokenswift.heads.modules import Heads
from tokenswift.interfaces import DraftModel, Sequence
from tokenswift.sampling import Ranked, Sampler
from tokenswift.types import DraftTree, Step

MOST_NODES = 31  # below the root
WIDTH = 4  # candidates of a place
DEPTH = 8  # levels that heads draft
ROWS = 4  # places that one level continues
CHAIN = 6  # passes in one step that only draft
_CHANCE = 0.35  # of a level's best candidate, before anything is known
_YOUNG = 64  # steps that are all learnt from
_RECENT = 1 / 16  # weight of a new figure in its running mean


class AutoDrafter:
    """Grows a tree a step and decides what from.

    Args:
        model: the target.
        heads: draft heads, or None.
        sampler: the target's choice rule.
        context: the partial KV cache; None leaves partial passes out.
        guest: a draft model over its own cache; None for none.
        table: gives the measured costs, when the run begins.
        frequent: let the heads draft frequent tokens and the prompt's only.
        coupled: rank with the target's noise.
        reuse: look for long matches.
        hidden: let the heads start from the verified state.
        explain: a file to write one line a decision to, as JSON; None for none.
    """

    def __init__(
        self,
        model: DraftModel,
        heads: Heads | None,
        sampler: Sampler,
        context: SparseContext | None,
        guest: ModelDrafter | None,
        table: Callable[[], Table],
        frequent: bool,
        coupled: bool,
        reuse: bool,
        hidden: bool,
        explain: Path | None,
    ) -> None:
        self.model, self.sampler, self.context, self.guest = model, sampler, context, guest
        self.coupled, self.explain = coupled, explain
        self.levels = None if heads is None else HeadLevels(model, heads, frequent)
        self.depth = 0 if heads is None else DEPTH if heads.conditioned else heads.count
        self.reuse = Reuse(sampler.params.window > 0) if reuse else None
        priors = None if heads is None else heads.calibration
        self.calibration = Calibration(priors)
        self._table, self._hidden = table, hidden and heads is not None
        self._control: Control | None = None
        self._best = [_CHANCE] * (DEPTH + 1)  # by level, running mean of the best candidate's chance
        self._growth = Growth(0)
        self._rankings: list[tuple[int, int, str, list[tuple[float, ...]], list[float], list[int]]] = []
        self._record: dict[str, Any] = {}
        self._draft_seconds = self._mark = 0.0
        self._steps, self._loading = 0, 0.0

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
        """Settle which tokens the heads may draft, and read the prompt for matches."""
        budget = None if self.context is None else self.context.budget
        costs, guest_ms = Costs(self._table()), None
        if self.guest is not None:
            self.guest.begin(sequence.tokens)
            guest_ms = costs.verify(1, 0) * self.guest.model.weight_bytes / self.model.weight_bytes
        self._control = Control(costs, self._hidden, budget, guest_ms)
        if self.levels is not None:
            self.levels.begin(sequence.tokens)
        if self.reuse is not None:
            self.reuse.extend(sequence.tokens)
        if self.explain is not None:
            self.explain.write_text("", encoding="utf-8")
        sequence.drafting = self

    # ---- a step ---------------------------------------------------------------------------------

    def draft(self, sequence: Sequence) -> DraftTree:
        """The tree of this step; the bare root where nothing pays."""
        begun = perf_counter()
        control, length = self.control, len(sequence.tokens) - 1
        mode = control.mode(length)
        growth = self._growth = Growth(sequence.tokens[-1])
        self._rankings, self._loading = [], 0.0
        if self.reuse is not None:
            node = 0
            for token, chance in self.reuse.predict():
                node = growth.add(node, token, chance, "ngram")
        spent = perf_counter()
        if mode != PLAIN and sequence.newest is not None:
            if mode == PARTIAL:
                self._partial(sequence, growth)
            elif mode == MODEL:
                self._model(sequence, growth)
            elif self.levels is not None:
                states = self.levels.start(newest_hidden(sequence))
                self._heads(sequence, growth, [0], states, "hidden", 0)
        self._draft_seconds = perf_counter() - spent
        nodes, expected = growth.select(control.prices(length, MOST_NODES), control.rate)
        tree = growth.build(nodes)
        control.drafted(mode, 1 + expected, len(tree), 1000 * (self._draft_seconds - self._loading))
        self._record = {"context": length, "mode": mode, "nodes": len(nodes), "depth": tree.gamma}
        self._record |= {"expected": 1 + expected, "draft_ms": 1000 * self._draft_seconds}
        self._mark = perf_counter()
        control.busy += self._mark - begun - self._draft_seconds
        return tree

    def observe(self, sequence: Sequence, step: Step, nodes: tuple[int, ...]) -> None:
        """Learn from the step: chances from its outcome, costs from its time."""
        now = perf_counter()
        milliseconds = 1000 * (now - self._mark)
        length, new = len(sequence.tokens) - 1, list(step.token_ids)
        self.control.took(len(new), step.drafted + 1, length - len(new), milliseconds)
        self._steps += 1
        for node, _, source, made, chances, tokens in self._rankings:
            if self._steps > _YOUNG and self._steps % 4:
                break  # what is known well is learnt from every fourth step
            path = self._growth.path(node)
            if len(path) < len(new) and path == new[: len(path)]:
                self.calibration.learn(source, made, chances, tokens, new[len(path)])
        if self.reuse is not None:
            for chance, hit in self.reuse.learn(new):
                self.calibration.reliability.add(chance, hit)
            self.reuse.extend(new)
        if self.context is not None and self.control.wants_context:
            self.context.observe(sequence, len(nodes))
        elif self.context is not None:
            self.context.sparse = None
        if self.guest is not None:
            self.guest.observe(sequence.tokens)
        if self.explain is not None:
            spent = milliseconds + self._record["draft_ms"]
            plain = self.control.plain_ms(length)
            self._record |= {"tokens": len(new), "spent_ms": spent, "gained_ms": len(new) * plain - spent}
            line = {k: round(v, 4) if isinstance(v, float) else v for k, v in self._record.items()}
            with self.explain.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self.control.busy += perf_counter() - now

    # ---- sources --------------------------------------------------------------------------------

    def _rank(
        self,
        sequence: Sequence,
        growth: Growth,
        nodes: list[int],
        logits: torch.Tensor,
        source: str,
        level: int,
    ) -> list[list[tuple[int, float]]]:
        """Add the candidates below each of ``nodes``; their nodes and path chances, likeliest first."""
        text, subset = sequence.tokens, None
        if source == MODEL and self.guest is not None:
            subset = self.guest.subset
        elif source != "backbone" and self.levels is not None:
            subset = self.levels.subset
        paths = [growth.path(node) for node in nodes]
        positions = [len(text) + len(path) for path in paths]
        found = self.sampler.candidates(
            logits, text, paths, positions, [WIDTH] * len(nodes), self.coupled, subset
        )
        begun = perf_counter()
        below = [self._take(growth, node, row, source, level) for node, row in zip(nodes, found, strict=True)]
        self.control.busy += perf_counter() - begun
        return below

    def _take(
        self, growth: Growth, node: int, ranked: Ranked, source: str, level: int
    ) -> list[tuple[int, float]]:
        chances, made = self.calibration.chances(source, ranked, level)
        self._rankings.append((node, level, source, made, chances, ranked.tokens))
        above = growth.chance(node)
        below = []
        for token, chance in zip(ranked.tokens, chances, strict=True):
            child = growth.add(node, token, chance, "chain" if source == MODEL else "head")
            below.append((child, above * growth.given[child]))
        return below

    def _heads(
        self,
        sequence: Sequence,
        growth: Growth,
        nodes: list[int],
        states: torch.Tensor,
        source: str,
        head: int,
    ) -> None:
        """Levels of the heads below ``nodes`` while the next one promises more than it costs."""
        levels, rate = self.levels, self.control.rate
        if levels is None:
            return
        row = self.control.row_ms
        while head < self.depth:
            last = [growth.tokens[node] for node in nodes]
            begun = perf_counter()
            states, logits = levels.level(head, states, last)
            below = self._rank(sequence, growth, nodes, logits, source, head)
            ended = perf_counter()
            self.control.level_took(1000 * (ended - begun))
            firsts = [growth.given[children[0][0]] for children in below if children]
            if firsts:
                self._best[head] += _RECENT * (sum(firsts) / len(firsts) - self._best[head])
            spread = [(chance, child, at) for at, children in enumerate(below) for child, chance in children]
            spread.sort(reverse=True)
            ahead = self._best[min(head + 1, DEPTH)]
            kept = [entry for entry in spread[:ROWS] if entry[0] * ahead > rate * row]
            gain = ahead * sum(chance for chance, _, _ in kept)
            self.control.busy += perf_counter() - ended
            if gain < rate * (self.control.level_ms + row * len(kept)):
                return
            nodes = [child for _, child, _ in kept]
            states = states[[at for _, _, at in kept]]
            head += 1

    def _partial(self, sequence: Sequence, growth: Growth) -> None:
        """Passes over the partial cache along the likeliest path, then the heads below its end."""
        if self.context is None:
            return
        begun, before = perf_counter(), self.context.selections
        cache = self.context.cache(sequence)
        if self.context.selections != before:  # once in many steps: no price of a step
            self._loading = perf_counter() - begun
        model, start, hidden = self.model, len(sequence.tokens) - 1, newest_hidden(sequence)

        def run(path: list[int]) -> torch.Tensor:
            nonlocal hidden
            token = torch.tensor([path[-1] if path else sequence.tokens[-1]], device=model.device)
            position = torch.tensor([start + len(path)], device=model.device)
            hidden = model.forward(token, position, cache).hidden
            cache.grow(1)
            return model.logits(hidden)

        node, chance = self._chain(sequence, growth, PARTIAL, "backbone", run)
        worth = self.control.rate * (self.control.level_ms + self.control.row_ms)
        if self.levels is not None and chance * self._best[0] > worth:
            self._heads(sequence, growth, [node], self.levels.start(hidden), "after", 0)

    def _model(self, sequence: Sequence, growth: Growth) -> None:
        """Passes of the draft model along the likeliest path."""
        guest, text = self.guest, sequence.tokens
        if guest is None:
            return
        begun = perf_counter()
        if guest.catch_up(text):
            self._loading = perf_counter() - begun
        most = min(CHAIN, guest.passes(text))
        self._chain(sequence, growth, MODEL, MODEL, lambda path: guest.row(text, path), most)

    def _chain(
        self,
        sequence: Sequence,
        growth: Growth,
        mode: str,
        source: str,
        run: Callable[[list[int]], torch.Tensor],
        most: int = CHAIN,
    ) -> tuple[int, float]:
        """Candidates by one pass after another while the next promises more than it costs.

        Args:
            run: a path below the root → logits (1, S) of what follows it.
            most: passes at most.
        Returns:
            The likeliest path's last node and its chance; chance 0 where nothing was ranked.
        """
        control, known = self.control, self.control.passes[mode]
        node, chance = 0, 1.0
        for done in range(most):
            begun = perf_counter()
            logits = run(growth.path(node))
            sequence.draft_passes += 1
            below = self._rank(sequence, growth, [node], logits, source, done)[0]
            known.took(1000 * (perf_counter() - begun))
            if not below:
                return node, 0.0
            node, chance = below[0]
            known.led(growth.given[node])
            if chance * known.lead < control.rate * (known.ms + control.row_ms):
                break
        return node, chance

    # ---- what it did ----------------------------------------------------------------------------

    def summary(self) -> str:
        """What was used and why, in a sentence."""
        return self.control.summary()

    def record(self) -> dict[str, Any]:
        """Figures for a JSON record: shares of modes, reliability of the chances, the drafter's own time."""
        return {
            "summary": self.summary(),
            **self.control.record(),
            "calibration": self.calibration.reliability.rows(),
            "weights": self.calibration.weights(),
        }
