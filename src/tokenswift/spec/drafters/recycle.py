"""Token recycling (Luo et al. 2024): what the target itself ranked first after the same last tokens, earlier.

Every row of a verify pass, also of a draft that was rejected, has logits that were computed anyway. Their
first few tokens are kept under the last three, two and one tokens of the row's context; a later place whose
end is known, of these the longest, has them for candidates. With coupled drafting they are ranked by the kept
logits plus the noise of the place itself, by which the target will choose there. How likely a candidate is
right is learnt: by the length of the context, its rank, and its share among those that were kept.

The text of a prompt adds nothing: a prompt's logits are not computed.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
from torch import Tensor

from tokenswift.memory import Need
from tokenswift.sampling.choice import Sampler, gumbel, position_key
from tokenswift.spec.drafters.base import Candidates, Drafter, Outcome
from tokenswift.spec.strategy import SequenceState
from tokenswift.types import DraftTree

Kind = tuple[int, int, int]  # of a candidate: by its context's length, its rank and its share
Outcomes = dict[Kind, tuple[float, float]]  # right ones, and all
KEPT = 4  # tokens of a ranking
LONGEST = 3  # tokens of a context
DEPTH = 6  # of a path
EXPANDED = 16  # places of a step that get candidates
SLOTS = 1 << 15  # contexts of a table
_SLOT = 250  # bytes that one takes, about
_CLASS = 128  # tokens of which the greatest logit is looked at first
_BOUNDS = (0.3, 0.6, 0.85, 0.95)  # of shares that are told apart
_PRIOR = (0.15, 0.4, 0.7)  # chance of a candidate over its share at first, by the length of the context
_FIRST, _DECAY = 4.0, 0.99  # weight of that, and of older outcomes at each new one


def best_of(logits: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    """The first :data:`KEPT` tokens of each row of logits (n, V), and their logits.

    By way of the maxima of classes of tokens, several times as fast as to sort whole rows; the tokens behind
    the last whole class are left out. In numpy: threads of torch would go on spinning while the next pass
    begins.
    """
    tokens, values = list[list[int]](), list[list[float]]()
    for row in logits.cpu().numpy():
        each = _CLASS if len(row) >= _CLASS * KEPT else 1
        classes = row[: len(row) // each * each].reshape(each, -1)
        at = _largest(classes.max(0))
        some = classes[:, at].ravel()
        places = _largest(some)
        tokens.append((places // len(at) * classes.shape[1] + at[places % len(at)]).tolist())
        values.append(some[places].tolist())
    return tokens, values


def _largest(values: np.ndarray) -> np.ndarray:
    """Places of the :data:`KEPT` largest values, the largest first."""
    some = values.argpartition(-min(KEPT, len(values)))[-KEPT:]
    return some[values[some].argsort()[::-1]]


class Rankings:
    """Rankings by the last tokens of their context, the newest of each; of two in one slot the newer."""

    def __init__(self) -> None:
        self._slots: list[tuple[tuple[int, ...], list[int], list[float]] | None] = [None] * SLOTS

    def put(self, context: list[int], tokens: list[int], values: list[float]) -> None:
        """Keep a ranking of what follows the last tokens of a context."""
        for length in range(1, min(LONGEST, len(context)) + 1):
            end = tuple(context[-length:])
            self._slots[hash(end) % SLOTS] = (end, tokens, values)

    def get(self, context: list[int]) -> tuple[int, list[int], list[float]] | None:
        """Of the longest known end of a context its length, and the ranking."""
        for length in range(min(LONGEST, len(context)), 0, -1):
            end = tuple(context[-length:])
            slot = self._slots[hash(end) % SLOTS]
            if slot is not None and slot[0] == end:
                return length, slot[1], slot[2]
        return None


class Recycle(Drafter):
    """What the target ranked first in earlier passes, in every step, for nothing.

    Args:
        sampler: the target's choice rule.
        coupled: rank with the target's noise.
        outcomes: by kind of candidate, how many were right, and how many there were, in earlier texts too.
    """

    name = source = "recycle"

    def __init__(self, sampler: Sampler, coupled: bool, outcomes: Outcomes | None = None) -> None:
        self.params, self.rankings = sampler.params, Rankings()
        self.coupled = coupled and not sampler.params.greedy
        self._outcomes: Outcomes = {} if outcomes is None else outcomes
        #: places whose candidates were proposed: tokens behind the root, candidates and their kinds
        self._places: list[tuple[list[int], dict[int, Kind]]] = []

    def needs(self, text: int, row: int) -> list[Need]:
        """The table."""
        return [Need("recycle", "auto", SLOTS * _SLOT)]

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """Candidates below the root and the likeliest nodes, whoever proposed these, as far as they pay."""
        self._places, tree = [], candidates.tree
        below: dict[int, list[int]] = {}
        for node in range(1, len(tree)):
            below.setdefault(tree.parents[node], []).append(node)
        heap = [(-1.0, 0)]
        while heap and len(self._places) < EXPANDED:
            chance, node = heapq.heappop(heap)
            if -chance < candidates.least:
                break
            children = self._expand(candidates, sequence.tokens, node, -chance) | {*below.get(node, ())}
            if tree.depths[node] + 1 < DEPTH:
                for child in children:
                    heapq.heappush(heap, (chance * tree.chances[child], child))

    def _expand(self, candidates: Candidates, text: list[int], node: int, above: float) -> set[int]:
        """Candidates below one node, which comes with the chance ``above``; their nodes."""
        tree = candidates.tree
        path = tree.path(node)
        known = self.rankings.get([*text[-LONGEST:], *path])
        if known is None:
            return set()
        length, tokens, logits = known
        scores = self._scores(tokens, logits, len(text) + len(path))
        order = sorted(range(KEPT), key=scores.__getitem__, reverse=True)
        weights = [math.exp(score - scores[order[0]]) for score in scores]
        total, kinds, found = sum(weights), dict[int, Kind](), set[int]()
        for rank, at in enumerate(order):
            share = weights[at] / total
            kind = kinds[tokens[at]] = (length, rank, sum(share > bound for bound in _BOUNDS))
            right, every = self._outcomes.setdefault(kind, (_FIRST * _PRIOR[length - 1] * share, _FIRST))
            chance = right / every
            child = tree.child(node, tokens[at])
            if child is not None:
                tree.chances[child] = max(tree.chances[child], chance)
            elif above * chance >= candidates.least:
                child = candidates.add(node, tokens[at], chance)
            found.update(() if child is None else (child,))
        self._places.append((path, kinds))
        return found

    def _scores(self, tokens: list[int], logits: list[float], position: int) -> list[float]:
        """By what candidates for a position are ranked."""
        if not self.coupled:
            return logits
        heat, key = self.params.temperature, position_key(self.params.seed, position)
        return [logit / heat + gumbel(key, token) for token, logit in zip(tokens, logits, strict=True)]

    def observe(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Learn what was right, and keep the rankings of the pass."""
        done, tree = sequence.last_pass, outcome.tree
        if outcome.in_use and done is not None and done.logits is not None and tree is not None:
            self._learn(outcome.tokens)
            self._keep(sequence, outcome.tokens, tree, done.logits)

    def _keep(self, sequence: SequenceState, new: list[int], tree: DraftTree, logits: Tensor) -> None:
        """The rankings of a pass over a tree, after which ``new`` came."""
        known = len(sequence.tokens) - len(new)
        end = sequence.tokens[max(0, known - LONGEST) : known]
        tokens, values = best_of(logits)
        for node in range(len(tree)):
            if len(values[node]) < KEPT or not math.isfinite(sum(values[node])):
                continue
            path = [tree.tokens[at] for at in tree.path(node)]
            self.rankings.put([*end, *path], tokens[node], values[node])

    def _learn(self, new: list[int]) -> None:
        """Whether the candidates of places that the text has passed were right."""
        for path, kinds in self._places:
            depth = len(path)
            if depth >= len(new) or path != new[:depth]:
                continue
            for token, kind in kinds.items():
                right, every = self._outcomes[kind]
                self._outcomes[kind] = (right * _DECAY + (token == new[depth]), every * _DECAY + 1)
        self._places = []
