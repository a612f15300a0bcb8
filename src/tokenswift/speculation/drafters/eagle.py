"""An EAGLE-3 drafter (Li et al. 2025): one decoder layer that reads features of the target's
passes.

Its row at position t reads the target's feature at t and the embedding of the token at t + 1, and
predicts the token at t + 2. For drafted tokens there is no feature yet; the drafter's own output of
the row before takes its place.
"""

from __future__ import annotations

from itertools import chain
from os.path import commonprefix

import torch
from torch import Tensor

from tokenswift.kv.cache import FullCache
from tokenswift.memory import Need
from tokenswift.speculation.costs import CostEstimate, Costs
from tokenswift.speculation.drafters.base import Candidates, Drafter
from tokenswift.speculation.eagle.model import CHUNK, SCRATCH
from tokenswift.speculation.eagle.mtp import FeatureModel
from tokenswift.speculation.sequence_state import SequenceState

_LAG = 32  # rows run before a draft from which its time is not typical


class Branches:
    """The drafter's rows for drafted tokens. Each pass covers the nodes of one depth. The common
    trunk of their paths is committed to the cache; the other nodes of their paths are run again.

    Args:
        model: the drafter.
        cache: the drafter's KV cache.
        candidates: the candidates of the step.
        position: position of the last row with a feature.
        newest: the drafter's output in that row, (1, H).
    """

    def __init__(
        self,
        model: FeatureModel,
        cache: FullCache,
        candidates: Candidates,
        position: int,
        newest: Tensor,
    ) -> None:
        self.model = model
        self.cache = cache
        self.position = position
        self.tree = candidates.tree
        self._outputs = {0: newest}  # output of each node's row, (1, H)
        self._trunk = 0  # the last node of the trunk
        self._rows: list[int] = []  # nodes of the last pass

    def logits(self, nodes: list[int]) -> Tensor:
        """Logits (n, S) of the tokens after nodes of one depth."""
        if nodes != [0]:
            self._run(nodes)
        return self.model.logits(torch.cat([self._outputs[node] for node in nodes]))

    def _run(self, nodes: list[int]) -> None:
        """One pass over these nodes and the part of their paths that is not in the cache."""
        tree = self.tree
        outputs = self._outputs
        paths = [self._above(node) for node in nodes]
        shared = commonprefix(paths)
        self.cache.commit(tuple(self._rows.index(node) for node in shared))
        if shared:
            self._trunk = shared[-1]
        rows = sorted({*nodes, *chain.from_iterable(paths)} - {*shared})  # parents come first
        index = {node: row for row, node in enumerate(rows)}
        parents = [tree.parents[node] for node in rows]
        states = self.model.fed_back(torch.cat([outputs[parent] for parent in parents]))
        output = self.model.run(
            [tree.tokens[node] for node in rows],
            states,
            self.position + tree.depths[self._trunk] + 1,
            self.cache,
            [index.get(parent, -1) for parent in parents],
        )
        for node, row in index.items():
            outputs[node] = output[row : row + 1]
        self._rows = rows

    def _above(self, node: int) -> list[int]:
        """Nodes from the trunk's child down to a node's parent."""
        nodes = list[int]()
        above = self.tree.parents[node]
        while above != self._trunk:
            nodes.append(above)
            above = self.tree.parents[above]
        return nodes[::-1]


class EagleDrafter(Drafter):
    """Drafts a tree with an EAGLE-3 drafter, or with the one that the model's files bring.

    Args:
        model: the drafter.
    """

    name = source = "eagle"

    def __init__(self, model: FeatureModel) -> None:
        self.model = model
        self._cache: FullCache | None = None
        self._next = 0  # position of the next feature to read
        self.noise = model.noise
        self._newest: Tensor | None = None  # output of the last row with a feature, (1, H)

    def begin(self, sequence: SequenceState) -> None:
        """Run the part of the prompt that is in the window."""
        if sequence.features is not None:
            self._cache = self.model.new_cache()
            self._read(sequence)

    def needs(self, text: int, row: int) -> list[Need]:
        """Its cache and the features."""
        return [Need("eagle", self.model.name, self.model.nbytes)]

    def estimate(self, costs: Costs) -> CostEstimate | None:
        """Two passes, with costs in proportion to the bytes of weights; None without features."""
        if self._cache is None:
            return None
        cost = self.model.weight_bytes / self.model.target.weight_bytes
        return CostEstimate(
            self.model.title,
            tokens=1.9,
            rows=3,
            draft_cost=2 * cost,
            pass_cost=cost,
            best_chance=0.6,
        )

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """Add a tree by one pass for each depth, as far as that pays."""
        candidates.loaded |= self._read(sequence) > _LAG
        cache = self._cache
        newest = len(sequence.tokens) - 2
        if cache is None or self._newest is None or self._next != newest + 1 or candidates.ahead:
            return
        read = cache.length
        branches = Branches(self.model, cache, candidates, newest, self._newest)
        candidates.add_by_passes(branches.logits, self.model.subset, max_nodes=SCRATCH)
        cache.rewind(read)

    @torch.inference_mode()
    def _read(self, sequence: SequenceState) -> int:
        """Run the rows whose features are new, and return how many; the window slides. After a gap
        in positions, earlier rows are dropped."""
        cache = self._cache
        model = self.model
        unread = None if sequence.features is None else sequence.features.drain()
        if cache is None or unread is None:
            return 0
        first, features = unread
        if first != self._next:
            cache.rewind(0)
        count = features.shape[1]
        for start in range(0, count, CHUNK):
            rows = slice(start, min(start + CHUNK, count))
            size = rows.stop - rows.start
            if cache.length + size + SCRATCH > cache.capacity:
                cache.slide(model.window)
            position = first + rows.start
            tokens = sequence.tokens[position + 1 : position + size + 1]
            output = model.run(tokens, model.fuse(features[:, rows]), position, cache)
            cache.commit(tuple(range(size)))
            self._newest = output[-1:]
            sequence.raise_if_cancelled()
        self._next = first + count
        return count
