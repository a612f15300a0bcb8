"""The target's features of committed tokens, until a drafter reads them."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


class Features:
    """A `kv.FeatureStore` of committed tokens that a drafter has not read yet.

    Args:
        most: tokens that are worth keeping, the newest; up to a pass more are kept.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._parts: list[Tensor] = []
        self._start = 0  # position of the first one
        self._end = 0  # position behind the last one

    def __len__(self) -> int:
        return self._end - self._start

    def take(self, at: int, features: Float[Tensor, "k n D"]) -> None:
        """See `kv.FeatureStore.take`; what lies before a gap is dropped."""
        if at != self._end:
            self._parts = []
            self._start = at
        self._parts.append(features)
        self._end = at + features.shape[1]
        while len(self) - self._parts[0].shape[1] >= self.most:
            self._start += self._parts[0].shape[1]
            del self._parts[0]

    def drain(self) -> tuple[int, Float[Tensor, "k n D"]] | None:
        """The position of the first of them, and all of them, which are gone then; None without
        any."""
        if not self._parts:
            return None
        start = self._start
        features = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts, dim=1)
        self._parts = []
        self._start = self._end
        return start, features

    def copy(self) -> Features:
        """Another store of the same features."""
        store = Features(self.most)
        store._parts = list(self._parts)
        store._start = self._start
        store._end = self._end
        return store
