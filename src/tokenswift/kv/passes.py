"""The inputs and outputs of a model pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.kv.cache import KVCache


@dataclass(slots=True)
class Pass:
    """The result of one model pass over n tokens.

    Attributes:
        hidden: hidden states *before* the final norm (draft heads start from them).
        queries: for each layer, the rotated queries (H, n, d), by which positions are selected.
        features: the inputs of the model's ``feature_layers``; None where it has none.
        logits: float32 logits of each node of a verify pass; None for other passes.
    """

    hidden: Float[Tensor, "n D"]
    queries: Sequence[Tensor] | Tensor
    features: Float[Tensor, "k n D"] | None = None
    logits: Float[Tensor, "n V"] | None = None


@dataclass(slots=True)
class Segment:
    """The rows of one sequence in a pass.

    Attributes:
        tokens: (m,) token ids, on the host or the model's device.
        positions: (m,) their positions, on the host.
        cache: the sequence's cache; the rows' keys and values go to its scratch rows.
        parents: for each row the row before it (-1 for the root). A row sees the whole cache, its
            ancestors and itself. None: a chain.
    """

    tokens: Int[Tensor, " m"]
    positions: Int[Tensor, " m"]
    cache: KVCache
    parents: Sequence[int] | None = None


class FeatureStore(Protocol):
    """Keeps features of committed tokens, for a drafter that reads them."""

    def take(self, at: int, features: Float[Tensor, "k n D"]) -> None:
        """Take the features of the tokens at positions from ``at`` on. Each position comes once, in
        order; those of a prefix that was copied from another cache are left out."""
        ...
