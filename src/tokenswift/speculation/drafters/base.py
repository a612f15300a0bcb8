"""The drafter protocol, and the candidates that drafters propose in one step.

Drafters add candidates to one tree; what of it is verified is decided elsewhere, and no token
depends on it. :class:`Candidates` forms trees of fixed widths, as published methods do: so many
candidates below each node of a depth, all of them continued. `adaptive.PricedCandidates`
decides by chances and costs instead. Drafters cannot tell the two apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tokenswift.memory import Need
from tokenswift.models.base import BaseTarget
from tokenswift.sampling.masks import NoMask
from tokenswift.sampling.rows import LogitRows, Ranked, Subset
from tokenswift.sampling.sampler import RefusedRow, Sampler
from tokenswift.speculation.costs import CostEstimate, Costs
from tokenswift.speculation.sequence_state import SequenceState
from tokenswift.tree import CandidateTree
from tokenswift.types import DraftTree


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a step, for drafters to learn from.

    Attributes:
        tokens: its new tokens, already part of ``sequence.tokens``.
        nodes: number of tokens that it committed to the cache.
        in_use: whether this drafter is in use (see `Control.uses`).
        tree: the tree verified by ``sequence.last_pass``; None: outcome of several steps of a
            pause.
    """

    tokens: list[int]
    nodes: int
    in_use: bool
    tree: DraftTree | None = None


class Drafter:
    """One source of drafts, for one sequence.

    Attributes:
        name: its name in reports.
        source: the source that its tokens are counted under, one of `types.SOURCES`.
        noise: weight of the target's noise in its rankings, where candidates are coupled.
    """

    name: str
    source: str
    noise = 1.0

    def needs(self, text: int, row: int) -> list[Need]:
        """Memory that it will hold for a sequence of up to ``text`` tokens, with its own nodes
        beside the tree's, at ``row`` bytes each."""
        return []

    def begin(self, sequence: SequenceState) -> None:
        """Called once after the prefill."""

    def estimate(self, costs: Costs) -> CostEstimate | None:
        """What it expects of its steps, asked once after :meth:`begin`; None for a free drafter,
        which proposes in every step. ``costs.verify(n)`` is the cost of a pass over n rows in plain
        passes."""
        return None

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """Add candidates for the tokens that may follow ``sequence.tokens``, each with a chance."""
        raise NotImplementedError

    def observe(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Called after every step, whichever drafter was used."""


# ---- the candidates of one step ------------------------------------------------------------------


class Candidate(NamedTuple):
    """A candidate of a ranking, in the tree.

    Attributes:
        path_chance: chance of its whole path.
        node: its node.
    """

    path_chance: float
    node: int


Ranking = list[Candidate]  # the candidates below one node, best first


class Candidates:
    """The candidates of one step, in a tree whose node 0 is the root.

    Args:
        sequence: the sequence, whose last token is the root.
        sampler: the target's choice rule.
        coupled: rank candidates with the target's noise.
        widths: candidates below a node, by its depth.
        max_passes: draft passes along one path at most; default: one for each depth.
        ahead: tokens after the sequence's that are not committed yet; the last of them is then the
            root.

    Attributes:
        tree: the candidates.
        ngram_start: the node below which n-gram branches start: the first pass's best candidate, or
            the root.
        passes: draft passes so far.
        levels: levels of heads so far.
        loaded: whether drafting filled a cache, so that its time is not typical.
        min_chance: nodes with less chance than this are not worth a row, and need not be proposed.
    """

    min_chance = 0.0
    with_probs = False  # whether rankings need the candidates' probabilities

    def __init__(
        self,
        sequence: SequenceState,
        sampler: Sampler,
        coupled: bool,
        widths: tuple[int, ...] = (),
        max_passes: int | None = None,
        ahead: list[int] | None = None,
    ) -> None:
        self.sequence = sequence
        self.text = sequence.tokens
        self.sampler = sampler
        self.coupled = coupled
        self.widths = widths
        self.max_passes = len(widths) if max_passes is None else max_passes
        self.ahead = ahead or []
        self.tree = CandidateTree(self.ahead[-1] if self.ahead else self.text[-1])
        self.ngram_start = 0
        self.passes = 0
        self.levels = 0
        self.loaded = False
        self._drafter: Drafter | None = None

    @property
    def drafter(self) -> Drafter:
        """The drafter that proposes now.

        Raises:
            ValueError: none was asked yet.
        """
        if self._drafter is None:
            raise ValueError("candidates are added by a drafter; `ask` one first")
        return self._drafter

    # ---- called by strategies --------------------------------------------------------------------

    def ask(self, drafter: Drafter) -> None:
        """Let a drafter add its candidates, unless grammar masks for them would take long.

        Raises:
            Cancelled: the request was cancelled.
        """
        self.sequence.raise_if_cancelled()
        if self.sampler.masks is not None and self.sampler.masks.is_slow:
            return
        self._drafter = drafter
        drafter.propose(self.sequence, self)

    def forbidden(self, among: Sequence[int]) -> set[int]:
        """Those of some nodes that the grammar does not allow, so that no walk can reach them."""
        masks = self.sampler.masks
        if masks is None:
            return set()
        wanted = {*among}
        covered = set[int]()
        refused = set[int]()
        # from the ends of paths: one query for all nodes of a path
        for end in sorted(wanted, reverse=True):
            if end in covered:
                continue
            nodes = self._path_nodes(end)
            reached = max(0, masks.reach(self.text, self.path(end)) - len(self.ahead))
            covered.update(nodes)
            refused.update(wanted.intersection(nodes[reached:]))
        return refused

    def _path_nodes(self, end: int) -> list[int]:
        """Nodes from the root's child down to ``end``."""
        nodes = list[int]()
        node = end
        while node > 0:
            nodes.append(node)
            node = self.tree.parents[node]
        return nodes[::-1]

    # ---- called by drafters ----------------------------------------------------------------------

    def path(self, node: int) -> list[int]:
        """Tokens after the sequence's, down to ``node``."""
        return [*self.ahead, *self.tree.path(node)]

    def add(self, parent: int, token: int, chance: float = 1.0) -> int:
        """Add ``token`` below ``parent``, with a chance that the drafter knows itself; return its
        node."""
        return self.tree.add(parent, token, self.drafter.source, chance)

    def add_ranking(
        self, node: int, ranked: Ranked, level: int = 0, kind: str | None = None
    ) -> Ranking:
        """Add the candidates of a ranking below ``node``, with chances learnt from earlier
        rankings.

        Args:
            ranked: tokens, best first, with scores and probabilities.
            level: levels below the drafter's start.
            kind: rankings of one kind share what is learnt; default: the drafter's name.
        Returns:
            The candidates, in order.
        """
        return [Candidate(1.0, self.add(node, token)) for token in ranked.tokens]

    def rank(
        self,
        nodes: list[int],
        logits: Tensor,
        level: int = 0,
        subset: Subset | None = None,
        kind: str | None = None,
    ) -> list[Ranking]:
        """Rank logits (n, S), or (1, S) for all n ``nodes``, by the choice rule; add the best below
        each node.

        An invalid row gives no candidates: heads and draft models may overflow, or hold NaN, where
        the target does not.

        Args:
            subset: the tokens of the columns; None: the whole vocabulary.
        """
        if self.with_probs:  # every node is ranked with its own context
            logits = logits.expand(len(nodes), -1)
        rows = self._rows(nodes[: len(logits)], logits, subset)
        rankings = self._ranked(rows)
        if len(rankings) < len(nodes):
            rankings *= len(nodes)
        pairs = zip(nodes, rankings, strict=True)
        return [self.add_ranking(node, ranked, level, kind) for node, ranked in pairs]

    def _ranked(self, rows: LogitRows) -> list[Ranked]:
        """The candidates of each row; none of an invalid one."""
        try:
            return self.sampler.candidates(rows)
        except (RefusedRow, NoMask):
            if len(rows.paths) == 1:
                return [Ranked([], [], [])]
        rankings: list[Ranked] = []
        for row in range(len(rows.paths)):
            rankings += self._ranked(rows.one(row))
        return rankings

    def _rows(self, nodes: list[int], logits: Tensor, subset: Subset | None) -> LogitRows:
        """The rows of logits with the contexts of their nodes."""
        paths = [self.path(node) for node in nodes]
        positions = [len(self.text) + len(path) for path in paths]
        widths = [self._width_at(self.tree.depths[node]) for node in nodes]
        return LogitRows(
            logits,
            history=self.text,
            paths=paths,
            positions=positions,
            widths=widths,
            noise=self.coupled * self.drafter.noise,
            subset=subset,
            with_probs=self.with_probs,
        )

    def next_level(self, rankings: list[Ranking], level: int) -> list[int]:
        """The nodes that the next level of heads continues, children of this level's.

        Args:
            rankings: the candidates of this level, from :meth:`rank`.
            level: of the heads, from 0.
        """
        self.levels += 1
        nodes = _nodes(rankings)
        if not nodes or self.tree.depths[nodes[0]] == len(self.widths):
            return []
        return nodes

    def add_by_passes(
        self,
        run: Callable[[list[int]], Tensor],
        subset: Subset | None = None,
        kind: str | None = None,
        per_pass: int | None = None,
        max_nodes: int | None = None,
    ) -> list[int]:
        """Add candidates by one draft pass after another, each over the nodes that are worth
        continuing.

        Args:
            run: nodes of one depth → logits (n, S) after each. The first call is for the root
                alone, each later one for children of the nodes before.
            subset, kind: as for :meth:`rank` and :meth:`add_ranking`.
            per_pass: nodes in a pass at most; 1 drafts a chain along the best path.
            max_nodes: nodes below the root at most, in all passes together.
        Returns:
            The candidates of the last pass below which heads may continue.
        """
        nodes = [0]
        ends = list[int]()
        left = max_nodes
        for level in range(self.max_passes):
            self.sequence.raise_if_cancelled()
            self.passes += 1
            rankings = self.rank(nodes, run(nodes), level, subset, kind)
            ends = _nodes(rankings[:1])
            if not self.ngram_start and ends:
                self.ngram_start = ends[0]
            nodes = self._worth_passes(rankings, per_pass)[:left]
            if not nodes:
                break
            if left is not None:
                left -= len(nodes)
        return self._worth_levels(ends) if ends else []

    # ---- what adaptive drafting does otherwise ---------------------------------------------------

    def _width_at(self, depth: int) -> int:
        """Candidates below a node of this depth."""
        return self.widths[depth]

    def _worth_levels(self, nodes: list[int]) -> list[int]:
        """The candidates of a last draft pass below which heads continue."""
        return nodes if self.tree.depths[nodes[0]] < len(self.widths) else []

    def _worth_passes(self, rankings: list[Ranking], per_pass: int | None) -> list[int]:
        """The candidates that the next draft pass continues, the likeliest first, ``per_pass`` at
        most."""
        return _nodes(rankings)[:per_pass]


def _nodes(rankings: list[Ranking]) -> list[int]:
    """The nodes of all candidates, in the order of the rankings."""
    return [candidate.node for ranking in rankings for candidate in ranking]


# ---- the draft vocabulary ------------------------------------------------------------------------


class DraftVocabulary:
    """A model's LM head over the tokens that may be drafted: frequent ones and the prompt's, or
    all.

    Args:
        model: the model with the LM head.
        size: vocabulary size of the target; tokens that the model has no row for are never drafted.
        frequent: token ids (m,) that may be drafted besides the prompt's; None: all tokens may.
        prompt: token ids of the prompt.

    Attributes:
        subset: the tokens of the logits' columns; None: the whole vocabulary.
    """

    def __init__(
        self,
        model: BaseTarget,
        size: int,
        frequent: Tensor | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.size = size
        parts: list[Tensor] = []
        if frequent is not None:
            prompt_ids = torch.tensor(prompt, dtype=torch.long).unique()
            parts = [frequent, prompt_ids[~torch.isin(prompt_ids, frequent.cpu())]]
        parts = [ids[ids < min(size, model.vocab_size)] for ids in parts]
        columns = [ids.to(model.device) for ids in parts if len(ids)]
        self.rows = [model.head_rows(ids) for ids in columns]
        self.subset = Subset(torch.cat(columns), size) if columns else None

    def project(self, normed: Tensor) -> Tensor:
        """Normalised hidden states (m, D) → logits (m, S) float32, a column for each token of the
        subset."""
        if self.subset is None:
            return self._padded(self.model.project(normed))
        parts = [self.model.project(normed, rows) for rows in self.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _padded(self, logits: Tensor) -> Tensor:
        """Logits of a model with fewer tokens than the target, filled up with -inf."""
        missing = self.size - logits.shape[1]
        if not missing:
            return logits
        return nn.functional.pad(logits, (0, missing), value=-torch.inf).contiguous()
