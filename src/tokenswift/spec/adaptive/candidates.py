"""Candidates with chances, and passes and levels only while the next promises more than it costs."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tokenswift.sampling.choice import Sampler
from tokenswift.sampling.ranking import Ranked, Subset
from tokenswift.spec.adaptive.acceptance import Calibration
from tokenswift.spec.adaptive.controller import Control
from tokenswift.spec.drafters.candidates import Below, Candidates, Run
from tokenswift.spec.drafters.invalid_logits import Source
from tokenswift.spec.strategy import TokenSequence

WIDTH = 4  # candidates of a place
ROWS = 4  # places that one level, or one pass over several places, continues
CHAIN = 6  # passes in one step that only draft


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
        kept = [one for one in _likeliest(below) if one[0] * ahead > control.rate * control.row_ms]
        gain = ahead * sum(chance for chance, _, _ in kept)
        if gain < control.rate * (control.level_ms + control.row_ms * len(kept)):
            return [], []
        return [node for _, node, _ in kept], [row for _, _, row in kept]

    def chain(
        self, run: Run, subset: Subset | None = None, kind: str | None = None, most: int | None = None
    ) -> list[int]:
        """Candidates by one pass after another along the likeliest path, while it is likely enough; returns
        its end where a level of heads promises more than it costs."""
        control, known = self.control, self.control.passes[self.drafter.name]
        node, chance = 0, 1.0
        for follow in self._follow(run, subset, kind, most):
            below = follow(node)
            if not below:
                return []
            node, chance = below[0]
            self._led([below], 0, True)
            if chance * known.lead < control.rate * (known.ms + control.row_ms):
                break
        return [node] if chance * control.lead(0) > control.rate * (control.level_ms + control.row_ms) else []

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

    def _worth_passes(self, below: list[Below]) -> list[int]:
        """Where the next pass promises more than it costs: the likeliest place, and others whose candidates
        are worth a row of that pass and one of the verify pass."""
        control, known = self.control, self.control.passes[self.drafter.name]
        if not any(below):
            return []
        self._led(below, 0, True)
        one, six = (control.costs.verify(rows, 0) for rows in (1, 6))
        row_ms = known.ms * max(0.0, six / one - 1) / 5  # of a pass what a row is of the target's
        least = control.rate * (row_ms + control.row_ms)
        best, *others = _likeliest(below)
        kept = [best, *(other for other in others if other[0] * known.lead > least)]
        gain = known.lead * sum(chance for chance, _, _ in kept)
        price = known.ms + control.row_ms * len(kept) + row_ms * (len(kept) - 1)
        return [] if gain < control.rate * price else [node for _, node, _ in kept]


def _likeliest(below: list[Below]) -> list[tuple[float, int, int]]:
    """Chance, node and row of the candidates that may be continued, the likeliest first."""
    spread = [(chance, node, row) for row, children in enumerate(below) for node, chance in children]
    return sorted(spread, reverse=True)[:ROWS]
