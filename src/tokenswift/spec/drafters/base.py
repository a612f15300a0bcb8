"""What drafts, and what it proposes in one step: candidates in one tree.

A drafter proposes; whether that is drafted follows from widths, or from chances and prices, and no token can
depend on it. Here the tree has fixed widths, as published methods have it: every place gets so many
candidates, all of them are continued, and nobody asks what they cost. Adaptive drafting puts chances and
prices in the place of the widths (`spec.adaptive`); drafters cannot tell the two apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokenswift.memory import Need
from tokenswift.models.decoder import BaseTarget
from tokenswift.sampling.choice import LogitRows, Ranked, RefusedRow, Sampler, Subset
from tokenswift.sampling.masks import NoMask
from tokenswift.spec.control import CostEstimate, Costs
from tokenswift.spec.strategy import TokenSequence
from tokenswift.tree import CandidateTree
from tokenswift.types import DraftTree


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step that was verified.

    Attributes:
        tokens: its new tokens, which end the text.
        nodes: how many tokens it committed to the cache.
        in_use: whether this drafter drafts now, drafted last or is on trial, or was asked for nothing.
        tree: what was verified; ``sequence.newest`` is the pass over it.
    """

    tokens: list[int]
    nodes: int
    in_use: bool
    tree: DraftTree | None = None


class Drafter:
    """One source of drafts in one run.

    Attributes:
        name: of its steps in figures and explanations.
        mark: of its tokens, one of `types.SOURCES`.
    """

    name: str
    mark: str

    def needs(self, text: int, row: int) -> list[Need]:
        """Memory that it will hold in a run of up to ``text`` tokens, and that nodes beside the tree's take;
        ``row``: bytes of one node."""
        return []

    def begin(self, sequence: TokenSequence) -> None:
        """The prompt is there."""

    def offer(self, costs: Costs) -> CostEstimate | None:
        """What it expects, once after :meth:`begin`; None where it proposes for nothing, in every step. By
        ``costs`` a pass over n rows takes ``costs.verify(n)`` plain passes."""
        return None

    def propose(self, sequence: TokenSequence, candidates: Candidates) -> None:
        """Add candidates for the tokens that may follow ``sequence.tokens``, each with a chance."""
        raise NotImplementedError

    def observe(self, sequence: TokenSequence, outcome: Outcome) -> None:
        """A step was verified, whoever drafted it; ``sequence`` holds its tokens."""


# ---- what they propose in one step -------------------------------------------------------------------------


Below = list[tuple[int, float]]  # candidates below a node: their nodes, and the chances of their whole paths


class Candidates:
    """The candidates of one step. Nodes are numbered; node 0 is the root, the newest token.

    Args:
        sequence: the text so far, root included.
        sampler: the target's choice rule.
        coupled: rank with the target's noise.
        widths: candidates of a place, by its depth.
        most: passes at most in which a drafter goes along one path; by default one for each depth.
        ahead: tokens after the text that are not committed yet; the last of them is then the root.

    Attributes:
        tree: the candidates.
        copies_from: the node behind which copies of the text go on.
        passes, levels: made so far, by models and by draft heads.
        loaded: whether a drafter did work that is no price of a step, such as the selection of a cache.
        drafter: who proposes now.
        least: chance of a node that may be worth its row; less likely ones need not be proposed.
    """

    least = 0.0

    def __init__(
        self,
        sequence: TokenSequence,
        sampler: Sampler,
        coupled: bool,
        widths: tuple[int, ...] = (),
        most: int | None = None,
        ahead: list[int] | None = None,
    ) -> None:
        self.sequence, self.text = sequence, sequence.tokens
        self.sampler, self.coupled, self.widths = sampler, coupled, widths
        self.most = len(widths) if most is None else most
        self.ahead = ahead or []
        self.tree = CandidateTree(self.ahead[-1] if ahead else self.text[-1])
        self.copies_from = self.passes = self.levels = 0
        self.loaded = False
        self.drafter: Drafter

    def ask(self, drafter: Drafter) -> None:
        """Let a drafter propose.

        Raises:
            Stopped: nobody wants the text any more.
        """
        self.sequence.check()
        self.drafter = drafter
        drafter.propose(self.sequence, self)

    def forbidden(self, among: Sequence[int]) -> set[int]:
        """Those of some nodes that the text's grammar does not allow there: no step follows them."""
        masks = self.sampler.masks
        if masks is None:
            return set()
        tree, known, found, told = self.tree, set[int](), set[int](), {*among}
        for end in sorted(told, reverse=True):  # the last of a path first: one question for all of it
            if end in known:
                continue
            nodes, node = list[int](), end
            while node > 0:
                nodes.append(node)
                node = tree.parents[node]
            reached = masks.reach(self.text, self.path(end)) - len(self.ahead)
            known.update(nodes)
            found.update(told.intersection(nodes[: len(nodes) - max(0, reached)]))
        return found

    # ---- what drafters call ---------------------------------------------------------------------

    def path(self, node: int) -> list[int]:
        """Tokens that follow the text, down to ``node``."""
        return [*self.ahead, *self.tree.path(node)]

    def add(self, parent: int, token: int, chance: float = 1.0) -> int:
        """The node of ``token`` below ``parent``, with a chance that the drafter itself knows."""
        return self.tree.add(parent, token, self.drafter.mark, chance)

    def offer(self, node: int, ranked: Ranked, level: int = 0, kind: str | None = None) -> Below:
        """Add a ranking's candidates below ``node``, with chances that are learnt from what came of others.

        Args:
            ranked: tokens, best first, with scores and shares.
            level: levels below where the drafter starts.
            kind: rankings whose chances are learnt together; the drafter's name where it has one kind.
        Returns:
            Node and chance of the whole path of each, in the order of the ranking.
        """
        return [(self.add(node, token), 1.0) for token in ranked.tokens]

    def rank(
        self,
        nodes: list[int],
        logits: Tensor,
        level: int = 0,
        subset: Subset | None = None,
        kind: str | None = None,
    ) -> list[Below]:
        """Rank logits (n, S), or (1, S) for all of n ``nodes``, by the choice rule and :meth:`offer` the best
        below each node.

        A row that no token can be chosen from has no candidates: heads and draft models may overflow, or hold
        NaN, where the target does not.

        Args:
            subset: what the columns stand for; None: token ids.
        """
        if self.shares:  # every node is ranked by its own path, whoever shares the logits
            logits = logits.expand(len(nodes), -1)
        rows = self._rows(nodes[: len(logits)], logits, subset)
        found = self._ranked(rows)
        if len(found) < len(nodes):
            found *= len(nodes)
        return [self.offer(node, row, level, kind) for node, row in zip(nodes, found, strict=True)]

    def go_on(self, below: list[Below], level: int) -> tuple[list[int], list[int]]:
        """Which candidates of a level the next level continues.

        Args:
            below: from :meth:`rank`.
            level: of the heads, counted from 0.
        Returns:
            Their nodes, and for each the number of its parent's row.
        """
        self.levels += 1
        grown = [(node, row) for row, children in enumerate(below) for node, _ in children]
        if not grown or self.tree.depths[grown[0][0]] == len(self.widths):
            return [], []
        return [node for node, _ in grown], [row for _, row in grown]

    def spread(
        self,
        run: Callable[[list[int]], Tensor],
        subset: Subset | None = None,
        kind: str | None = None,
        places: int | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Candidates by one pass after another, each over places of a depth that are worth going on at.

        Args:
            run: nodes of one depth → logits (n, S) of what follows each; the first are the root alone, each
                later one a child of one before.
            places: of a pass, at most; 1 makes a chain along the best path.
            most: nodes below the root at most, in all calls of ``run`` together.
        Returns:
            The nodes below which levels of heads may go on, from those of the last pass.
        """
        nodes, left, ends = [0], most, list[int]()
        for level in range(self.most):
            self.sequence.check()
            self.passes += 1
            below = self.rank(nodes, run(nodes), level, subset, kind)
            ends = [node for node, _ in below[0]]
            self.copies_from = self.copies_from or next(iter(ends), 0)
            nodes = self._worth_passes(below, places)[:left]
            if not nodes:
                break
            left = None if left is None else left - len(nodes)
        return self._worth_levels(ends) if ends else []

    # ---- what forms of a tree differ in ---------------------------------------------------------

    shares = False  # whether the candidates' probabilities are wanted

    def _width_at(self, depth: int) -> int:
        """Candidates wanted below a node of a depth."""
        return self.widths[depth]

    def _worth_levels(self, nodes: list[int]) -> list[int]:
        """Of the candidates of a chain's last pass those below which levels of heads may go on."""
        return nodes if self.tree.depths[nodes[0]] < len(self.widths) else []

    def _worth_passes(self, below: list[Below], places: int | None) -> list[int]:
        """Which candidates of a pass the next one goes on at, the likeliest first, so many at most."""
        return [node for children in below for node, _ in children][:places]

    def _ranked(self, rows: LogitRows) -> list[Ranked]:
        """The best of each row; none of one that no token can be chosen from."""
        try:
            return self.sampler.candidates(rows)
        except (RefusedRow, NoMask):
            if len(rows.paths) == 1:
                return [Ranked([], [], [])]
        return [ranked for row in range(len(rows.paths)) for ranked in self._ranked(rows.one(row))]

    def _rows(self, nodes: list[int], logits: Tensor, subset: Subset | None) -> LogitRows:
        """Rows of logits, one a node."""
        paths = [self.path(node) for node in nodes]
        positions = [len(self.text) + len(path) for path in paths]
        widths = [self._width_at(self.tree.depths[node]) for node in nodes]
        return LogitRows(logits, self.text, paths, positions, widths, self.coupled, subset, self.shares)


# ---- the tokens that drafts may consist of ------------------------------------------------------


class DraftVocabulary:
    """A model's LM head over the tokens that may be drafted.

    Args:
        model: whose LM head.
        size: tokens of the target; those that the model has no row for are never drafted.
        frequent: token ids (m,) that may be drafted besides the prompt's; None: all tokens may.
        prompt: token ids.

    Attributes:
        subset: the tokens that the columns of logits stand for; None for all.
    """

    def __init__(
        self, model: BaseTarget, size: int, frequent: Tensor | None = None, prompt: Sequence[int] = ()
    ) -> None:
        self.model, self.size, parts = model, size, list[Tensor]()
        if frequent is not None:
            own = torch.tensor(prompt, dtype=torch.long).unique()
            parts = [frequent, own[~torch.isin(own, frequent.cpu())]]
        parts = [ids[ids < min(size, model.vocab_size)] for ids in parts]
        kept = [ids.to(model.device) for ids in parts if len(ids)]
        self.rows = [model.head_rows(ids) for ids in kept]
        self.subset = Subset(torch.cat(kept), size) if kept else None

    def project(self, normed: Tensor) -> Tensor:
        """Normalised states (m, D) → logits (m, S) float32, a column for each token of the subset."""
        if self.subset is None:
            logits = self.model.project(normed)
            more = self.size - logits.shape[1]
            return nn.functional.pad(logits, (0, more), value=-torch.inf).contiguous() if more else logits
        parts = [self.model.project(normed, rows) for rows in self.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
