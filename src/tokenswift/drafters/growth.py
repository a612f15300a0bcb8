"""One step's candidates as a tree of chances, and the part of it that is worth verifying."""

from __future__ import annotations

from collections.abc import Sequence

from tokenswift.types import DraftTree

_SURE = 0.98  # no candidate counts as more certain than this


class Growth:
    """Candidates below a root; node 0 is the root. Parents stand before their children.

    Args:
        root: id of the newest token of the text.

    Attributes:
        tokens, parents, depths, sources: of each node.
        given: chance that the target chooses the node's token, given that it chose its parent's.
    """

    __slots__ = ("tokens", "parents", "depths", "sources", "given", "_below")

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self.sources, self.given = ["target"], [1.0]
        self._below: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, chance: float, source: str) -> int:
        """The node of ``token`` below ``parent``; what two sources propose is likelier."""
        key = (parent, token)
        node = self._below.get(key)
        if node is not None:
            self.given[node] = min(_SURE, 1.0 - (1.0 - self.given[node]) * (1.0 - chance))
            if self.sources[node] == "ngram":
                self.sources[node] = source
            return node
        node = self._below[key] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.sources.append(source)
        self.given.append(min(_SURE, chance))
        return node

    def path(self, node: int) -> list[int]:
        """Tokens from below the root down to ``node``."""
        made: list[int] = []
        while node > 0:
            made.append(self.tokens[node])
            node = self.parents[node]
        return made[::-1]

    def chance(self, node: int) -> float:
        """Chance that the whole path to ``node`` is the target's choice."""
        found = 1.0
        while node > 0:
            found *= self.given[node]
            node = self.parents[node]
        return found

    def select(self, costs: Sequence[float], rate: float) -> tuple[list[int], float]:
        """The nodes that are worth their rows, in order of their numbers, and the sum of their chances.

        Likelier nodes come first, which keeps parents before children; of these prefixes the one with the
        greatest ``sum of chances - rate · cost`` is taken: what a renewal process with that long-run rate
        gains most by.

        Args:
            costs: ``costs[n]`` is the time of a pass with n nodes below the root; it bounds n.
            rate: tokens per unit of that time that decoding yields now.
        """
        chances = [1.0]
        for parent, given in zip(self.parents[1:], self.given[1:], strict=True):
            chances.append(chances[parent] * given)
        order = sorted(range(1, len(chances)), key=chances.__getitem__, reverse=True)[: len(costs) - 1]
        best, most, total, expected = 0, -rate * costs[0], 0.0, 0.0
        for count, node in enumerate(order, 1):
            total += chances[node]
            value = total - rate * costs[count]
            if value > most:
                best, most, expected = count, value, total
        return sorted(order[:best]), expected

    def build(self, nodes: list[int]) -> DraftTree:
        """The tree of the root and ``nodes`` (closed under parents, ascending)."""
        place = {0: 0, **{node: i for i, node in enumerate(nodes, 1)}}
        kept = [0, *nodes]
        depths = tuple(self.depths[node] for node in kept)
        return DraftTree(
            tokens=tuple(self.tokens[node] for node in kept),
            parents=(-1, *(place[self.parents[node]] for node in nodes)),
            depths=depths,
            sources=tuple(self.sources[node] for node in kept),
            gamma=max(depths),
        )
