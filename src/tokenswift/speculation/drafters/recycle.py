"""Token recycling (Luo et al. 2024): drafts what the target ranked first after the same tokens
earlier.

Every row of a verify pass has logits, even that of a rejected draft. The best few tokens of each
are kept under the last three, two and one tokens of the row's context. Wherever a later context
ends in these tokens (the longest known end counts), they become candidates. They are ranked by the
kept logits, less what DRY will take from them; with coupled drafting plus the noise of the new
position, which the target will add too. A candidate's chance is learnt by the length of the
context, its rank, and its share of probability among the kept tokens.

Prompts add nothing, since prefill computes no logits.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from tokenswift.memory import Need
from tokenswift.sampling.noise import gumbel, position_key
from tokenswift.sampling.sampler import Sampler
from tokenswift.speculation.drafters.base import Candidates, Drafter, Outcome
from tokenswift.speculation.drafters.occurrences import DryLosses
from tokenswift.speculation.sequence_state import SequenceState
from tokenswift.types import DraftTree

#: candidates that are right equally often: tokens of the context that their ranking was found by;
#: their rank, 0 for the best; and the class of their share of probability, see :data:`_BOUNDS`
Kind: TypeAlias = tuple[int, int, int]
Outcomes: TypeAlias = dict[Kind, tuple[float, float]]  # by kind: right candidates, and all
# Each constant stands with what half of it and twice as much, or the values named, do to tokens a
# unit of time: the mean over four texts of 160 tokens of the default model at a fixed price of rows
# (`tools/drafter_constants.py`), in which ±1% is noise.
RANKED = 4  # tokens remembered of a ranking, as many as a node gets candidates: +.1, +.6%
LONGEST = 3  # tokens of a context: 1 -2.2%, 2 +.6%
DEPTH = 6  # depth of a path, at most: +.6, -.1%
EXPANDED = 16  # nodes of a step that get candidates, at most: -.2, 0%
SLOTS = (
    1 << 15
)  # contexts in the table, those of some 10,000 rows: a limit for the memory of a text
_SLOT = 340  # bytes of one, by tracemalloc where every slot is filled
_BOUNDS = (
    0.3,
    0.6,
    0.85,
    0.95,
)  # bounds between classes of shares: .6 alone -.3%, seven of them 0%
# initial chance of a candidate ÷ its share, by the length of the context: -2.6, +1.4%
_PRIOR = (0.15, 0.4, 0.7)
_FIRST = 4.0  # weight of that in outcomes: +.8, -.8%
_DECAY = 0.99  # of older outcomes with each new one: .98 -1.0%, .995 0%


class Rankings:
    """Rankings by the last tokens of their context; what was kept longest ago goes first."""

    def __init__(self) -> None:
        self._slots = OrderedDict[tuple[int, ...], tuple[list[int], list[float]]]()

    def put(self, context: list[int], tokens: list[int], values: list[float]) -> None:
        """Keep the ranking after a context."""
        for length in range(1, min(LONGEST, len(context)) + 1):
            self._slots[tuple(context[-length:])] = (tokens, values)
        while len(self._slots) > SLOTS:
            self._slots.popitem(last=False)

    def get(self, context: list[int]) -> tuple[int, list[int], list[float]] | None:
        """The longest known end of a context: its length, and its ranking's tokens and values."""
        for length in range(min(LONGEST, len(context)), 0, -1):
            ranking = self._slots.get(tuple(context[-length:]))
            if ranking is not None:
                tokens, values = ranking
                return length, tokens, values
        return None


@dataclass(frozen=True, slots=True)
class _Expanded:
    """A node that got candidates.

    Attributes:
        path: tokens down to it.
        kinds: of its candidates, by their tokens.
    """

    path: list[int]
    kinds: dict[int, Kind]


class Recycle(Drafter):
    """Drafts tokens that the target ranked first in earlier passes; free.

    Args:
        sampler: the target's choice rule.
        coupled: rank with the target's noise.
        outcomes: right candidates, and all, by kind; shared with other sequences of the model.
        dry: what DRY takes from candidates; None: the sampling has no DRY.
    """

    name = source = "recycle"

    def __init__(
        self,
        sampler: Sampler,
        coupled: bool,
        outcomes: Outcomes | None = None,
        dry: DryLosses | None = None,
    ) -> None:
        self.sampler = sampler
        self._dry = dry
        self.params = sampler.params
        self.rankings = Rankings()
        self.coupled = coupled and not sampler.params.greedy
        self._outcomes: Outcomes = {} if outcomes is None else outcomes
        self._expanded: list[_Expanded] = []

    def needs(self, text: int, row: int) -> list[Need]:
        """The table."""
        return [Need("recycle", "auto", SLOTS * _SLOT)]

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """Add candidates below the likeliest nodes of any drafter, as far as they may be worth a
        row."""
        self._expanded = []
        tree = candidates.tree
        proposed: dict[int, set[int]] = {}  # by node, the children that others have proposed
        for node in range(1, len(tree)):
            proposed.setdefault(tree.parents[node], set()).add(node)
        heap = [(-1.0, 0)]  # minus the path chance, and the node
        while heap and len(self._expanded) < EXPANDED:
            minus_chance, node = heapq.heappop(heap)
            if -minus_chance < candidates.min_chance:
                break
            children = self._expand(candidates, sequence.tokens, node, -minus_chance)
            children |= proposed.get(node, set())
            if tree.depths[node] + 1 < DEPTH:
                for child in children:
                    heapq.heappush(heap, (minus_chance * tree.chances[child], child))

    def _expand(
        self, candidates: Candidates, text: list[int], node: int, path_chance: float
    ) -> set[int]:
        """Add candidates below a node; return their nodes."""
        path = candidates.tree.path(node)
        ranking = self.rankings.get([*text[-LONGEST:], *path])
        if ranking is None:
            return set()
        length, tokens, logits = ranking
        if self._dry is not None:
            losses = self._dry.losses(path, tokens)
            logits = [logit - loss for logit, loss in zip(logits, losses, strict=True)]
        scores = self._scores(tokens, logits, position=len(text) + len(path))
        order = sorted(range(RANKED), key=scores.__getitem__, reverse=True)
        weights = [math.exp(score - scores[order[0]]) for score in scores]
        total = sum(weights)
        kinds = dict[int, Kind]()
        nodes = set[int]()
        for rank, index in enumerate(order):
            token = tokens[index]
            share = weights[index] / total
            kind = (length, rank, sum(share > bound for bound in _BOUNDS))
            kinds[token] = kind
            chance = self._chance(kind, _PRIOR[length - 1] * share)
            child = self._add(candidates, node, token, chance, path_chance * chance)
            if child is not None:
                nodes.add(child)
        self._expanded.append(_Expanded(path, kinds))
        return nodes

    def _scores(self, tokens: list[int], logits: list[float], position: int) -> list[float]:
        """What the tokens of a ranking are ranked by at a position."""
        if not self.coupled:
            return logits
        key = position_key(self.params.seed, position)
        pairs = zip(tokens, logits, strict=True)
        return [logit / self.params.temperature + gumbel(key, token) for token, logit in pairs]

    def _chance(self, kind: Kind, first: float) -> float:
        """How often candidates of a kind were right; ``first`` where none was seen."""
        right, seen = self._outcomes.setdefault(kind, (_FIRST * first, _FIRST))
        return right / seen

    def _add(
        self, candidates: Candidates, node: int, token: int, chance: float, path_chance: float
    ) -> int | None:
        """Add a candidate, or raise the chance of what stands there already; its node, None where
        it is not worth a row."""
        tree = candidates.tree
        child = tree.child(node, token)
        if child is not None:
            tree.chances[child] = max(tree.chances[child], chance)
        elif path_chance >= candidates.min_chance:
            child = candidates.add(node, token, chance)
        return child

    def observe(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Learn which candidates were right, and keep the rankings of the pass."""
        result = sequence.last_pass
        tree = outcome.tree
        if outcome.in_use and result is not None and result.logits is not None and tree is not None:
            self._learn(outcome.tokens)
            self._put_rankings(sequence, outcome.tokens, tree, result.logits)

    def _put_rankings(
        self, sequence: SequenceState, new: list[int], tree: DraftTree, logits: Tensor
    ) -> None:
        """Keep the rankings of a verify pass, which yielded the tokens ``new``."""
        known = len(sequence.tokens) - len(new)
        end = sequence.tokens[max(0, known - LONGEST) : known]
        for node, (tokens, values) in enumerate(self.sampler.best(logits, RANKED)):
            if len(values) == RANKED and math.isfinite(sum(values)):
                path = [tree.tokens[above] for above in tree.path(node)]
                self.rankings.put([*end, *path], tokens, values)

    def _learn(self, new: list[int]) -> None:
        """Learn from candidates at nodes that the step's tokens passed."""
        for expanded in self._expanded:
            depth = len(expanded.path)
            if depth >= len(new) or expanded.path != new[:depth]:
                continue
            for token, kind in expanded.kinds.items():
                right, seen = self._outcomes[kind]
                right = right * _DECAY + (token == new[depth])
                self._outcomes[kind] = (right, seen * _DECAY + 1)
        self._expanded = []
