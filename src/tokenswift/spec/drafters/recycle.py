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
from array import array
from typing import NamedTuple

from torch import Tensor

from tokenswift.memory import Need
from tokenswift.sampling.choice import Sampler
from tokenswift.sampling.noise import gumbel, position_key
from tokenswift.spec.costs import Costs
from tokenswift.spec.drafters.candidates import Candidates, Source
from tokenswift.spec.drafters.drafter import CostEstimate, Outcome
from tokenswift.spec.drafters.registry import RECYCLE
from tokenswift.spec.strategy import TokenSequence
from tokenswift.tree import CandidateTree

KEPT = 4  # tokens of a ranking
LONGEST = 3  # tokens of a context
DEPTH = 6  # of a path
EXPANDED = 16  # places of a step that get candidates
SLOTS = 1 << 15  # contexts of a table
_CHUNK = 128  # tokens of which the greatest logit is looked at first
_BOUNDS = (0.3, 0.6, 0.85, 0.95)  # of shares that are told apart
_PRIOR = (0.15, 0.4, 0.7)  # chance of a candidate over its share at first, by the length of the context
_FIRST, _DECAY = 4.0, 0.99  # weight of that, and of older outcomes at each new one


def best_of(logits: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    """The first :data:`KEPT` tokens of each row of logits (n, V), and their logits.

    By way of the maxima of chunks, several times as fast as a `topk` of whole rows; the tokens behind the
    last whole chunk are left out.
    """
    count, size = logits.shape
    if size < _CHUNK * KEPT:
        values, tokens = logits.topk(min(KEPT, size))
        return tokens.tolist(), values.tolist()
    chunks = logits[:, : size // _CHUNK * _CHUNK].view(count, -1, _CHUNK)
    at = chunks.amax(-1).topk(KEPT).indices
    values, places = chunks.gather(1, at[..., None].expand(-1, -1, _CHUNK)).flatten(1).topk(KEPT)
    return (at.gather(1, places // _CHUNK) * _CHUNK + places % _CHUNK).tolist(), values.tolist()


class Rankings:
    """Rankings by the last tokens of their context, the newest of each; of two in one slot the newer."""

    def __init__(self) -> None:
        self._keys = array("q", bytes(8 * SLOTS))
        self._tokens = array("i", bytes(4 * KEPT * SLOTS))
        self._values = array("f", bytes(4 * KEPT * SLOTS))

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(len(part) * part.itemsize for part in (self._keys, self._tokens, self._values))

    def put(self, context: list[int], tokens: list[int], values: list[float]) -> None:
        """Keep a ranking of what follows the last tokens of a context."""
        found, logits = array("i", tokens), array("f", values)
        for key in _keys(context):
            at = key % SLOTS
            self._keys[at] = key
            self._tokens[KEPT * at : KEPT * (at + 1)] = found
            self._values[KEPT * at : KEPT * (at + 1)] = logits

    def get(self, context: list[int]) -> tuple[int, array[int], array[float]] | None:
        """Of the longest known end of a context its length, and the ranking."""
        for longer, key in reversed(list(enumerate(_keys(context)))):
            at = key % SLOTS
            if self._keys[at] == key:
                part = slice(KEPT * at, KEPT * (at + 1))
                return longer + 1, self._tokens[part], self._values[part]
        return None


def _keys(context: list[int]) -> list[int]:
    """A number for each of the ends of a context, the shortest first; 0 stands for none."""
    found, key = [], 0
    for token in reversed(context[-LONGEST:]):
        key = (key * 0x9E3779B97F4A7C15 + token + 1) % 0x7FFFFFFFFFFFFFE7  # a prime
        found.append(key or 1)
    return found


class _Place(NamedTuple):
    """A place whose candidates were proposed: tokens and keys of their chances."""

    node: int
    tokens: list[int]
    keys: list[tuple[int, int, int]]


class Recycle:
    """What the target ranked first in earlier passes, in every step, for nothing.

    Args:
        sampler: the target's choice rule.
        coupled: rank with the target's noise.
    """

    name, mark = RECYCLE.name, RECYCLE

    def __init__(self, sampler: Sampler, coupled: bool) -> None:
        self.params, self.rankings = sampler.params, Rankings()
        self.coupled = coupled and not sampler.params.greedy
        self.refusals = Source("rankings of earlier passes")
        self._outcomes: dict[tuple[int, int, int], tuple[float, float]] = {}  # right ones, and all
        self._places: list[_Place] = []
        self._tree: CandidateTree | None = None

    def begin(self, sequence: TokenSequence) -> None:
        """Nothing to read: of a prompt there are no logits."""

    def needs(self, text: int, row: int) -> list[Need]:
        """The table."""
        return [Need("recycle", "auto", self.rankings.nbytes)]

    def offer(self, costs: Costs) -> CostEstimate:
        """It costs nothing."""
        return CostEstimate("rankings of earlier passes", "recycling", tokens=1.0, rows=1, price=0.0)

    def propose(self, sequence: TokenSequence, candidates: Candidates) -> None:
        """Candidates below the root and below the likeliest nodes, whoever proposed them."""
        tree, text = candidates.tree, sequence.tokens
        self._tree, self._places = tree, []
        below: dict[int, list[int]] = {}
        for node in range(1, len(tree)):
            below.setdefault(tree.parents[node], []).append(node)
        heap = [(-1.0, 0)]
        while heap and len(self._places) < EXPANDED:
            chance, node = heapq.heappop(heap)
            if -chance < candidates.least:
                break
            children = self._expand(candidates, text, node, -chance) | {*below.get(node, ())}
            if tree.depths[node] + 1 < DEPTH:
                for child in children:
                    heapq.heappush(heap, (chance * tree.given[child], child))

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
        total, keys, found = sum(weights), [], set[int]()
        for rank, at in enumerate(order):
            share = weights[at] / total
            key = (length, rank, sum(share > bound for bound in _BOUNDS))
            keys.append(key)
            right, every = self._outcomes.get(key) or self._first(key, share)
            chance = right / every
            child = tree.child(node, tokens[at])
            if child is not None:
                tree.given[child] = max(tree.given[child], chance)
            elif above * chance >= candidates.least:
                child = candidates.add(node, tokens[at], chance)
            found.update(() if child is None else (child,))
        self._places.append(_Place(node, [tokens[at] for at in order], keys))
        return found

    def _first(self, key: tuple[int, int, int], share: float) -> tuple[float, float]:
        """Outcomes that a kind of candidates begins with."""
        made = self._outcomes[key] = (_FIRST * _PRIOR[key[0] - 1] * share, _FIRST)
        return made

    def _scores(self, tokens: array[int], logits: array[float], position: int) -> list[float]:
        """By what candidates for a position are ranked."""
        if not self.coupled:
            return list(logits)
        heat, key = self.params.temperature, position_key(self.params.seed, position)
        return [logit / heat + gumbel(key, token) for token, logit in zip(tokens, logits, strict=True)]

    def observe(self, sequence: TokenSequence, outcome: Outcome) -> None:
        """Learn what was right, and keep the rankings of the pass."""
        self._learn(outcome.tokens)
        done, tree = sequence.newest, outcome.tree
        if done is None or done.logits is None or tree is None:
            return
        before = sequence.tokens[: len(sequence.tokens) - len(outcome.tokens)]
        end = before[-LONGEST:]
        tokens, values = best_of(done.logits)
        for node in range(len(tree)):
            if len(values[node]) < KEPT or not math.isfinite(sum(values[node])):
                continue
            path = [tree.tokens[at] for at in tree.path(node)]
            self.rankings.put([*end, *path], tokens[node], values[node])

    def _learn(self, new: list[int]) -> None:
        """Whether the candidates of places that the text has passed were right."""
        tree = self._tree
        for node, tokens, keys in self._places if tree is not None else ():
            depth = tree.depths[node]
            if depth >= len(new) or tree.path(node) != new[:depth]:
                continue
            for token, key in zip(tokens, keys, strict=True):
                right, every = self._outcomes[key]
                hit = token == new[depth]
                self._outcomes[key] = (right * _DECAY + hit, every * _DECAY + 1)
        self._places = []
