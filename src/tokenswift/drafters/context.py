"""The sparse context of a target that drafts for itself, kept in step with its full cache."""

from __future__ import annotations

from tokenswift.cache.full import FullCache
from tokenswift.cache.select import select, useful
from tokenswift.cache.sparse import SparseCache
from tokenswift.interfaces import DraftModel, Sequence


class SparseContext:
    """Selects from the full cache, takes in what is committed, and selects anew when it is due.

    Args:
        model: the target.
        policy: one of `cache.select.POLICIES`.
        budget, sinks: B and S of the sparse cache; where every layer has a sliding window, of a larger
            B only what windows and sinks can fill.
        scratch: rows of draft passes per step.
        refresh: new tokens after which the selection is made again; None: when they have replaced all
            of it; 0: never.
        frozen: take in nothing after the first selection.
        chunk: tokens of a chunk (policy "chunks").
    """

    def __init__(
        self,
        model: DraftModel,
        policy: str,
        budget: int,
        sinks: int,
        scratch: int,
        refresh: int | None = None,
        frozen: bool = False,
        chunk: int = 8,
    ) -> None:
        self.model = model
        self.policy = policy
        self.budget = useful(budget, model.windows, sinks)
        self.sinks, self.scratch = sinks, scratch
        self.refresh, self.frozen, self.chunk = refresh, frozen, chunk
        self.sparse: SparseCache | None = None

    @property
    def selections(self) -> int:
        """Selections made so far; 0 without a cache."""
        return 0 if self.sparse is None else self.sparse.selections

    def cache(self, sequence: Sequence) -> SparseCache:
        """The sparse cache to draft over, without draft rows.

        Raises:
            ValueError: nothing was committed yet.
        """
        full, newest = sequence.cache, sequence.newest
        if not isinstance(full, FullCache) or newest is None:
            raise ValueError("a sparse cache is selected from a full cache that holds tokens")
        if self.sparse is None:
            self.sparse = SparseCache(full, self.budget, self.sinks, self.scratch)
        if self._due():
            row, windows = sequence.newest_row, self.model.windows
            queries = newest.queries
            chosen = select(self.policy, full, queries, row, windows, self.budget, self.sinks, self.chunk)
            self.sparse.load(full, chosen)
        self.sparse.rewind()
        return self.sparse

    def _due(self) -> bool:
        sparse = self.sparse
        if sparse is None or not sparse.selections:
            return True
        if self.frozen or self.refresh == 0:
            return False
        return sparse.exhausted if self.refresh is None else sparse.replaced >= self.refresh

    def observe(self, sequence: Sequence, committed: int) -> None:
        """Take in the last ``committed`` tokens of the full cache."""
        full = sequence.cache
        if self.sparse is not None and not self.frozen and isinstance(full, FullCache):
            self.sparse.rewind()
            self.sparse.append(full, full.length - committed, full.length)
