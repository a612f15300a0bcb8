"""What models and kernels hand to each other: rows of a pass, their caches, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(slots=True)
class Pass:
    """The outcome of one model pass over n tokens.

    Attributes:
        hidden: hidden states *before* the final norm (what the draft heads start from).
        queries: by layer, the rotated queries (H, n, d), for the partial cache's importance.
        features: the states that enter the layers of the model's ``taps``; None where it has none.
        logits: of a verify pass, by node, float32; None for others.
    """

    hidden: Float[Tensor, "n D"]
    queries: Sequence[Tensor] | Tensor
    features: Float[Tensor, "k n D"] | None = None
    logits: Float[Tensor, "n V"] | None = None


@dataclass(slots=True)
class Segment:
    """Rows of one text in a pass.

    Attributes:
        tokens: (m,) token ids, on the host, or where the model is if they arose there.
        positions: (m,) their positions, on the host.
        cache: the text's own; the rows' entries go to its scratch.
        parents: the row that each row follows (-1 for the root): it sees the whole cache, its ancestors and
            itself. None is a chain, each row after the last.
    """

    tokens: Int[Tensor, " m"]
    positions: Int[Tensor, " m"]
    cache: KVCache
    parents: Sequence[int] | None = None


class KVCache:
    """Keys and values of the tokens committed so far, plus room for the pass under way; with the methods that
    transformers' own code calls a cache by.

    Attributes:
        data: (2 · layers, K, capacity, d): layer l's keys at index 2l, its values at 2l + 1; of int8
            (layers, K, pages, bytes of a page), see `kernels.cpu.int8_cache`.
        ordered: whether entry i is position i (the full cache), so that sliding windows hold.
        work: scratch memory of the kernels, uint8; they replace it by more when they need it.
        tail: `kv.full.Tail`, where layers with windows stand apart, in no tensor but its; None: nowhere.
    """

    data: Tensor
    ordered: bool
    work: Tensor
    tail: Any = None

    @property
    def length(self) -> int:
        """Entries that a pass attends to besides its own tokens."""
        raise NotImplementedError

    @property
    def tail_length(self) -> int:
        """Those of layers in the :attr:`tail`."""
        raise NotImplementedError

    def make_room(self, rows: int) -> None:
        """A pass of so many rows comes."""
        raise NotImplementedError

    def of_layer(self, layer: int) -> tuple[Tensor, int, int, bool]:
        """Where a layer's entries are: a tensor, the layer's number in it, how many there are before the
        pass's, and whether they are a text's last ones, each at its place, so that windows hold."""
        if self.tail is None:
            return self.data, layer, self.length, self.ordered
        apart, number = self.tail.places[layer]
        if apart:
            return self.tail.entries.data, number, self.tail_length, True
        return self.data, number, self.length, self.ordered

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """:attr:`length`, under the name that transformers asks for."""
        return self.length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write a pass's entries (1, K, n, d) of one layer; return views of all, (1, K, L + n, d).

        Raises:
            ValueError: there is no room.
        """
        start, end = self.length, self.length + key_states.shape[2]
        if end > self.data.shape[2]:
            raise ValueError(f"a pass needs {end} rows, the cache has {self.data.shape[2]}")
        keys, values = self.data[2 * layer_idx], self.data[2 * layer_idx + 1]
        keys[:, start:end] = key_states[0]
        values[:, start:end] = value_states[0]
        return keys[None, :, :end], values[None, :, :end]


class FeatureStore(Protocol):
    """Keeps features of a text's committed tokens for what drafts from them."""

    def take(self, at: int, features: Float[Tensor, "k n D"]) -> None:
        """The tokens at positions ``at`` and on have these; each position once, in order, but some may be
        left out (those whose keys and values were copied from another text)."""
        ...
