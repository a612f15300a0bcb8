"""What drafters propose in one step: candidates in one tree.

Here the tree has fixed widths, as published methods have it: every place gets so many candidates, all of them
are continued, and nobody asks what they cost. Adaptive drafting puts chances and prices in the place of the
widths (`spec.adaptive`); drafters cannot tell the two apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tokenswift.models.decoder import BaseTarget
from tokenswift.sampling.choice import LogitRows, Ranked, RefusedRow, Sampler, Subset
from tokenswift.sampling.masks import NoMask
from tokenswift.spec.strategy import TokenSequence
from tokenswift.tree import CandidateTree
from tokenswift.types import RunError

if TYPE_CHECKING:
    from tokenswift.spec.drafters.base import Drafter

MOST = 3  # calls with a refused row, and a source is left out

logger = logging.getLogger("tokenswift")

Run = Callable[[list[int]], Tensor]  # see Candidates.chain
Below = list[tuple[int, float]]  # candidates below a node: their nodes, and the chances of their whole paths


class Source:
    """One source of drafts in one run, and its logits that no token can be chosen from.

    Heads and draft models may overflow, or hold NaN, where the target does not. A refused row of theirs is a
    row without candidates; it is said once, and a source that goes on like that is left out of the run.

    Args:
        name: what it is, in words that begin a line.

    Attributes:
        refused: calls so far in which a row was refused.
    """

    def __init__(self, name: str) -> None:
        self.name, self.refused = name, 0

    @property
    def dropped(self) -> bool:
        """Whether it is left out for the rest of the run."""
        return self.refused >= MOST

    def candidates(self, sampler: Sampler, rows: LogitRows) -> list[Ranked]:
        """`Sampler.candidates`, but a row that is refused has none."""
        try:
            return sampler.candidates(rows)
        except RefusedRow as error:
            self.note(error)
        except NoMask:
            pass
        found: list[Ranked] = []
        for row in range(len(rows.paths)):
            try:
                found += sampler.candidates(rows.one(row))
            except (RefusedRow, NoMask):
                found.append(Ranked([], [], []))
        return found

    def note(self, error: RefusedRow) -> None:
        """Take in that a row was refused; the first one is said on the logger ``tokenswift``."""
        self.refused += 1
        if self.refused == 1:
            logger.warning(
                "%s: logits for position %d hold %s; no token is drafted from them (the text stays the "
                "same), and after %d such passes this source is left out of the run",
                self.name,
                *error.args,
                MOST,
            )


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
        ranked: sources that were ranked from, by name.
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
        self.ranked: dict[str, Source] = {}
        self.drafter: Drafter

    def ask(self, drafter: Drafter) -> None:
        """Let a drafter propose.

        Raises:
            RunError: what it proposed is no token.
            Stopped: nobody wants the text any more.
        """
        self.sequence.check()
        self.drafter, before = drafter, len(self.tree)
        drafter.propose(self.sequence, self)
        size = self.sequence.model.vocab_size
        for token in self.tree.tokens[before:]:
            if not 0 <= token < size:
                raise RunError(
                    f"the drafter {drafter.name} proposed the token {token}; valid: 0 to {size - 1}"
                )

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

    def chance(self, node: int) -> float:
        """Chance that the target chooses the node's token, given that it chose its parent's."""
        return self.tree.given[node]

    def add(self, parent: int, token: int, chance: float = 1.0) -> int:
        """The node of ``token`` below ``parent``, with a chance that the drafter itself knows."""
        return self.tree.add(parent, token, self.drafter.mark.name, chance)

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
        refusals: Source | None = None,
    ) -> list[Below]:
        """Rank logits (n, S), or (1, S) for all of n ``nodes``, by the choice rule and :meth:`offer` the best
        below each node.

        A row that no token can be chosen from has no candidates.

        Args:
            subset: what the columns stand for; None: token ids.
            refusals: counts such rows; the drafter's own by default.
        """
        if self.shares:  # every node is ranked by its own path, whoever shares the logits
            logits = logits.expand(len(nodes), -1)
        rows = self._rows(nodes[: len(logits)], logits, subset)
        of = self.drafter.refusals if refusals is None else refusals
        self.ranked[of.name] = of
        found = of.candidates(self.sampler, rows)
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

    def chain(
        self, run: Run, subset: Subset | None = None, kind: str | None = None, most: int | None = None
    ) -> list[int]:
        """Candidates by one pass after another along the best path.

        Args:
            run: tokens after the text → logits (1, S) of what follows them.
            most: passes at most.
        Returns:
            The nodes below which levels of heads may go on.
        """
        nodes = [0]
        for level in range(self.most if most is None else min(most, self.most)):
            if self.drafter.refusals.dropped:
                return []
            self.sequence.check()
            self.passes += 1
            below = self.rank(nodes[:1], run(self.path(nodes[0])), level, subset, kind)[0]
            if not below:
                return []
            nodes = [node for node, _ in below]
            self.copies_from = self.copies_from or nodes[0]
            if not self._worth_pass(below):
                break
        return self._worth_levels(nodes)

    def spread(
        self,
        run: Callable[[list[int]], Tensor],
        subset: Subset | None = None,
        kind: str | None = None,
        most: int | None = None,
    ) -> None:
        """Candidates by one pass after another, each over all places of a depth that are worth going on at.

        Args:
            run: nodes of one depth → logits (n, S) of what follows each; the first are the root alone, each
                later one a child of one before.
            most: nodes below the root at most, in all calls of ``run`` together.
        """
        nodes, left = [0], most
        for level in range(self.most):
            self.sequence.check()
            self.passes += 1
            below = self.rank(nodes, run(nodes), level, subset, kind)
            nodes = self._worth_passes(below)[:left]
            if not nodes:
                return
            left = None if left is None else left - len(nodes)

    # ---- what forms of a tree differ in ---------------------------------------------------------

    shares = False  # whether the candidates' probabilities are wanted

    def _width_at(self, depth: int) -> int:
        """Candidates wanted below a node of a depth."""
        return self.widths[depth]

    def _worth_pass(self, below: Below) -> bool:
        """Whether a chain goes on behind the best of a pass's candidates."""
        return True

    def _worth_levels(self, nodes: list[int]) -> list[int]:
        """Of the candidates of a chain's last pass those below which levels of heads may go on."""
        return nodes if self.tree.depths[nodes[0]] < len(self.widths) else []

    def _worth_passes(self, below: list[Below]) -> list[int]:
        """Which candidates of a pass the next one goes on at, the likeliest first."""
        nodes = [node for children in below for node, _ in children]
        return nodes if nodes and self.tree.depths[nodes[0]] < len(self.widths) else []

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
