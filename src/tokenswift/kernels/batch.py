"""A decoder's layers, and the rows of a pass over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.checks import check_tokens
from tokenswift.kernels.weights import LayerWeights, Shape
from tokenswift.kv.cache import KVCache
from tokenswift.kv.passes import Segment


@dataclass(slots=True, eq=False)
class Body:
    """A decoder's layers, ready to run; backends add their own form of them.

    Attributes:
        shape: sizes and types of the layers.
        weights: the weights of each layer.
    """

    shape: Shape
    weights: list[LayerWeights]


@dataclass(slots=True)
class Batch:
    """The rows of a pass, segment by segment; backends add fields of their own.

    Attributes:
        segments: the segments.
        tokens, positions: of each row, (n,), on the backend's device; padding rows come last.
    """

    segments: Sequence[Segment]
    tokens: Int[Tensor, " n"]
    positions: Int[Tensor, " n"]

    def rows(self) -> list[slice]:
        """The rows of each segment."""
        ends = accumulate((len(segment.tokens) for segment in self.segments), initial=0)
        return [slice(start, end) for start, end in pairwise(ends)]


@dataclass(slots=True)
class LayerFeatures:
    """Copies of the input states of some layers, filled by a pass.

    Attributes:
        layers: numbers of the k layers; the number of all layers stands for the last one's output.
        states: the copies.
    """

    layers: tuple[int, ...]
    states: Float[Tensor, "k n D"]

    def fill(self, number: int, states: Float[Tensor, "n D"]) -> None:
        """Copy the input states of layer ``number``, if it is one of them."""
        for index, layer in enumerate(self.layers):
            if layer == number:
                self.states[index].copy_(states)


@dataclass(slots=True, kw_only=True)
class LayerPass:
    """What goes through all layers in one pass.

    Attributes:
        batch: the rows.
        states: float32; the pass changes them in place, from embeddings to the hidden states
            before the final norm.
        cos, sin: of the angles by which queries and keys are rotated; one set, or one for each
            kind of layer.
        keep_queries: whether the queries of all layers are returned, or the last layer's alone.
        features: to be filled with the inputs of its layers; None: nobody reads them.
        second_input: float32, for layers with `LayerWeights.second_qkv`, as EAGLE-3 has.
        query_scale: float32, what each row's rotated queries are multiplied with; None: nothing.
    """

    batch: Batch
    states: Float[Tensor, "n D"]
    cos: Float[Tensor, "*sets n half"]
    sin: Float[Tensor, "*sets n half"]
    keep_queries: bool = True
    features: LayerFeatures | None = None
    second_input: Float[Tensor, "n D"] | None = None
    query_scale: Float[Tensor, " n"] | None = None


def check_ids(ids: Tensor, count: int) -> None:
    """Check that token ids on the host are below ``count``.

    Raises:
        InputError: naming one that is not.
    """
    if ids.device.type == "cpu" and len(ids):
        numbers = ids.numpy()  # torch would start its threads
        check_tokens((int(numbers.min()), int(numbers.max())), count)


def check_rows(cache: KVCache, count: int, parents: Sequence[int] | None) -> None:
    """Check the rows of a sequence before a pass.

    Raises:
        ValueError: they do not fit the cache, or a parent is no earlier row.
    """
    parts = [(cache.length, cache.entries.capacity)]
    if cache.tail is not None:
        parts.append((cache.tail_length, cache.tail.entries.capacity))
    for before, capacity in parts:
        if before + count > capacity:
            raise ValueError(
                f"a pass of {count} rows over {before} keys needs more room than the cache's "
                f"{capacity}"
            )
    if parents is not None and (
        len(parents) != count or any(not -1 <= parent < row for row, parent in enumerate(parents))
    ):
        raise ValueError(
            f"parents are {tuple(parents)}; valid: {count} of them, each -1 or an earlier row"
        )


def row_paths(count: int, parents: Sequence[int] | None) -> list[list[int]]:
    """For each row of a pass, the rows on its path, itself last."""
    paths: list[list[int]] = []
    for row, parent in enumerate(range(-1, count - 1) if parents is None else parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return paths
