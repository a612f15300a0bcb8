"""Token recycling (Luo et al. 2024): drafts what the target ranked first after the same tokens
earlier.

Every row of a verify pass has logits, even that of a rejected draft. The best few tokens of each
are kept under the last three, two and one tokens of the row's context. Wherever a later context
ends in these tokens (the longest known end counts), they become candidates. With coupled drafting
they are ranked by the kept logits plus the noise of the new position, which the target will add
too. A candidate's chance is learnt by the length of the context, its rank, and its share of
probability among the kept tokens.

Prompts add nothing, since prefill computes no logits.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict

from torch import Tensor

from tokenswift.memory import Need
from tokenswift.sampling.noise import gumbel, position_key
from tokenswift.sampling.sampler import Sampler
from tokenswift.speculation.drafters.base import Candidates, Drafter, Outcome
from tokenswift.speculation.sequence_state import SequenceState
from tokenswift.types import DraftTree

Kind = tuple[int, int, int]  # kind of a candidate: context length, rank, class of its share
Outcomes = dict[Kind, tuple[float, float]]  # by kind: right candidates, and all
RANKED = 4  # tokens remembered of a ranking
LONGEST = 3  # tokens of a context
DEPTH = 6  # depth of a path, at most
EXPANDED = 16  # nodes of a step that get candidates, at most
SLOTS = 1 << 15  # contexts in the table
_SLOT = 250  # bytes of one, about
_BOUNDS = (0.3, 0.6, 0.85, 0.95)  # bounds between classes of shares
_PRIOR = (0.15, 0.4, 0.7)  # initial chance of a candidate ÷ its share, by the length of the context
_FIRST = 4.0  # weight of that in outcomes
_DECAY = 0.99  # of older outcomes with each new one


class Rankings:
    """Rankings by the last tokens of their context; what was kept longest ago goes first."""

    def __init__(self) -> None:
        self._slots = OrderedDict[tuple[int, ...], tuple[list[int], list[float]]]()

    def put(self, context: list[int], tokens: list[int], values: list[float]) -> None:
        """Keep the ranking after a context."""
        for length in range(1, min(LONGEST, len(context)) + 1):
            self._slots[tuple(context[-length:])] = tokens, values
        while len(self._slots) > SLOTS:
            self._slots.popitem(last=False)

    def get(self, context: list[int]) -> tuple[int, list[int], list[float]] | None:
        """The longest known end of a context: its length, and its ranking's tokens and values."""
        for length in range(min(LONGEST, len(context)), 0, -1):
            if ranking := self._slots.get(tuple(context[-length:])):
                return length, *ranking
        return None


class Recycle(Drafter):
    """Drafts tokens that the target ranked first in earlier passes; free.

    Args:
        sampler: the target's choice rule.
        coupled: rank with the target's noise.
        outcomes: right candidates, and all, by kind; shared with other sequences of the model.
    """

    name = source = "recycle"

    def __init__(self, sampler: Sampler, coupled: bool, outcomes: Outcomes | None = None) -> None:
        self.sampler, self.params, self.rankings = sampler, sampler.params, Rankings()
        self.coupled = coupled and not sampler.params.greedy
        self._outcomes: Outcomes = {} if outcomes is None else outcomes
        #: of each node that got candidates: tokens of its path, and the candidates with their kinds
        self._places: list[tuple[list[int], dict[int, Kind]]] = []

    def needs(self, text: int, row: int) -> list[Need]:
        """The table."""
        return [Need("recycle", "auto", SLOTS * _SLOT)]

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """Add candidates below the likeliest nodes of any drafter, as far as they may be worth a
        row."""
        self._places, tree = [], candidates.tree
        below: dict[int, list[int]] = {}
        for node in range(1, len(tree)):
            below.setdefault(tree.parents[node], []).append(node)
        heap = [(-1.0, 0)]
        while heap and len(self._places) < EXPANDED:
            chance, node = heapq.heappop(heap)
            if -chance < candidates.min_chance:
                break
            children = self._expand(candidates, sequence.tokens, node, -chance) | {
                *below.get(node, ())
            }
            if tree.depths[node] + 1 < DEPTH:
                for child in children:
                    heapq.heappush(heap, (chance * tree.chances[child], child))

    def _expand(self, candidates: Candidates, text: list[int], node: int, above: float) -> set[int]:
        """Add candidates below a node with path chance ``above``; return their nodes."""
        tree = candidates.tree
        path = tree.path(node)
        known = self.rankings.get([*text[-LONGEST:], *path])
        if known is None:
            return set()
        length, tokens, logits = known
        scores, heat = logits, self.params.temperature
        if self.coupled:
            key = position_key(self.params.seed, len(text) + len(path))
            scores = [
                logit / heat + gumbel(key, token)
                for token, logit in zip(tokens, logits, strict=True)
            ]
        order = sorted(range(RANKED), key=scores.__getitem__, reverse=True)
        weights = [math.exp(score - scores[order[0]]) for score in scores]
        total = sum(weights)
        kinds = dict[int, Kind]()
        nodes = set[int]()
        for rank, at in enumerate(order):
            share = weights[at] / total
            kind = kinds[tokens[at]] = (length, rank, sum(share > bound for bound in _BOUNDS))
            right, every = self._outcomes.setdefault(
                kind, (_FIRST * _PRIOR[length - 1] * share, _FIRST)
            )
            chance = right / every
            child = tree.child(node, tokens[at])
            if child is not None:
                tree.chances[child] = max(tree.chances[child], chance)
            elif above * chance >= candidates.min_chance:
                child = candidates.add(node, tokens[at], chance)
            if child is not None:
                nodes.add(child)
        self._places.append((path, kinds))
        return nodes

    def observe(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Learn which candidates were right, and keep the rankings of the pass."""
        done, tree = sequence.last_pass, outcome.tree
        if outcome.in_use and done is not None and done.logits is not None and tree is not None:
            self._learn(outcome.tokens)
            self._keep(sequence, outcome.tokens, tree, done.logits)

    def _keep(
        self, sequence: SequenceState, new: list[int], tree: DraftTree, logits: Tensor
    ) -> None:
        """Keep the rankings of a verify pass, which yielded the tokens ``new``."""
        known = len(sequence.tokens) - len(new)
        end = sequence.tokens[max(0, known - LONGEST) : known]
        for node, (tokens, values) in enumerate(self.sampler.best(logits, RANKED)):
            if len(values) == RANKED and math.isfinite(sum(values)):
                path = [tree.tokens[at] for at in tree.path(node)]
                self.rankings.put([*end, *path], tokens, values)

    def _learn(self, new: list[int]) -> None:
        """Learn from candidates at nodes that the step's tokens passed."""
        for path, kinds in self._places:
            depth = len(path)
            if depth >= len(new) or path != new[:depth]:
                continue
            for token, kind in kinds.items():
                right, every = self._outcomes[kind]
                self._outcomes[kind] = (right * _DECAY + (token == new[depth]), every * _DECAY + 1)
        self._places = []
