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
        self._at = self._end = 0  # positions of the first one, and behind the last one

    def __len__(self) -> int:
        return self._end - self._at

    def take(self, at: int, features: Float[Tensor, "k n D"]) -> None:
        """See `kv.FeatureStore.take`; what lies before a gap is dropped."""
        if at != self._end:
            self._parts, self._at = [], at
        self._parts.append(features)
        self._end = at + features.shape[1]
        while len(self) - (first := self._parts[0].shape[1]) >= self.most:
            del self._parts[0]
            self._at += first

    def drain(self) -> tuple[int, Float[Tensor, "k n D"]] | None:
        """The position of the first of them, and all of them, which are gone then; None without
        any."""
        if not self._parts:
            return None
        start = self._at
        features = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts, dim=1)
        self._parts, self._at = [], self._end
        return start, features

    def copy(self) -> Features:
        """Another store of the same."""
        store = Features(self.most)
        store._parts, store._at, store._end = list(self._parts), self._at, self._end
        return store
