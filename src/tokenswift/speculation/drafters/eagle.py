"""An EAGLE-3 drafter (Li et al. 2025): one decoder layer that reads features of the target's
passes.

Its row at position t reads the target's feature at t and the embedding of the token at t + 1, and
predicts the token at t + 2. For drafted tokens there is no feature yet; the drafter's own output of
the row before takes its place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenswift.kv.cache import FullCache
from tokenswift.memory import Need
from tokenswift.speculation.costs import CostEstimate, Costs
from tokenswift.speculation.drafters.base import Candidates, Drafter
from tokenswift.speculation.eagle.model import CHUNK, SCRATCH, EagleModel
from tokenswift.speculation.sequence_state import SequenceState

NARROW_NOISE = (
    0.5  # weight of the target's noise where little was learnt: logits are half as far apart
)
_LAG = 32  # rows run before a draft from which its time is not typical


class Branches:
    """The drafter's rows for drafted tokens. Each pass covers the nodes of one depth. The common
    trunk of their paths is committed to the cache; the other nodes of their paths are run again.

    Args:
        model: the drafter.
        cache: the drafter's KV cache.
        candidates: the candidates of the step.
        at: position of the last row with a feature.
        newest: the drafter's output in that row, (1, H).
    """

    def __init__(
        self, model: EagleModel, cache: FullCache, candidates: Candidates, at: int, newest: Tensor
    ) -> None:
        self.model, self.cache, self.candidates, self.at = model, cache, candidates, at
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
        tree, outputs, model = self.tree, self._outputs, self.model
        paths = [self._above(node) for node in nodes]
        stays = [shared[0] for shared in zip(*paths, strict=True) if len({*shared}) == 1]
        self.cache.commit(tuple(self._rows.index(node) for node in stays))
        self._trunk = stays[-1] if stays else self._trunk
        rows = sorted({*nodes}.union(*paths) - {*stays})  # parents before their children
        place = {node: row for row, node in enumerate(rows)}
        above = [tree.parents[node] for node in rows]
        states = model.fed_back(torch.cat([outputs[node] for node in above]))
        parents = [place.get(node, -1) for node in above]
        at = self.at + tree.depths[self._trunk] + 1
        output = model.run(
            [self.candidates.tree.tokens[row] for row in rows], states, at, self.cache, parents
        )
        outputs |= {node: output[row : row + 1] for node, row in place.items()}
        self._rows = rows

    def _above(self, node: int) -> list[int]:
        """Nodes from the trunk's child down to a node's parent."""
        nodes = list[int]()
        while (node := self.tree.parents[node]) != self._trunk:
            nodes.append(node)
        return nodes[::-1]


class EagleDrafter(Drafter):
    """Drafts a tree with an EAGLE-3 drafter.

    Args:
        model: the drafter.
    """

    name = source = "eagle"

    def __init__(self, model: EagleModel) -> None:
        self.model = model
        self._cache: FullCache | None = None
        self._next = 0  # position of the next feature to read
        self.noise = NARROW_NOISE if "narrow" in model.config.parts else 1.0
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
            "the EAGLE-3 drafter",
            tokens=1.9,
            rows=3,
            draft_cost=2 * cost,
            pass_cost=cost,
            best_chance=0.6,
        )

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """Add a tree by one pass for each depth, as far as that pays."""
        candidates.loaded |= self._read(sequence) > _LAG
        cache, newest = self._cache, len(sequence.tokens) - 2
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
        cache, model = self._cache, self.model
        unread = None if sequence.features is None else sequence.features.drain()
        if cache is None or unread is None:
            return 0
        at, features = unread
        if at != self._next:
            cache.rewind(0)
        count = features.shape[1]
        for start in range(0, count, CHUNK):
            rows = slice(start, min(start + CHUNK, count))
            size = rows.stop - rows.start
            if cache.length + size + SCRATCH > cache.capacity:
                cache.slide(model.window)
            tokens = sequence.tokens[at + rows.start + 1 : at + rows.stop + 1]
            output = model.run(tokens, model.fuse(features[:, rows]), at + rows.start, cache)
            cache.commit(tuple(range(size)))
            self._newest = output[-1:]
            sequence.raise_if_cancelled()
        self._next = at + count
        return count
