"""What computes the passes of models on a device: the protocol that models, drafters and caches rely on.

A backend packs weights, owns the memory of caches, runs a decoder's layers over a *batch* of segments (rows
of one or several texts, each over its own cache with its own tree), multiplies with the LM head and ranks
tokens. A pass goes down only: the model asks for a batch, embeds its tokens, hands their states to the layers
and takes logits of what they give. `kernels.torch` is the reference; `kernels.cpu` has the compiled kernels,
by the specification of docs/exactness.md. Which device it is, and what follows from that, is asked here and
nowhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift import memory
from tokenswift.config import SamplingParams
from tokenswift.kernels.formats import Q8_0, Stored
from tokenswift.kernels.weights import STORED_IN, LayerWeights, Packed, Shape
from tokenswift.kv import KVCache, Pass, Segment
from tokenswift.kv.full import Arena, Entries, FullCache
from tokenswift.kv.sparse import SparseCache
from tokenswift.sampling.ranking import Ranker
from tokenswift.types import check_tokens


@dataclass(slots=True, eq=False)
class Body:
    """A decoder's layers, ready to run; a backend adds what it needs.

    Attributes:
        shape: the layers' sizes and types.
        weights: of each layer.
    """

    shape: Shape
    weights: list[LayerWeights]


@dataclass(slots=True)
class Taps:
    """Where a pass leaves the states that enter some layers; the number of layers stands for what leaves the
    last one.

    Attributes:
        layers: their numbers.
        states: filled by the pass.
    """

    layers: tuple[int, ...]
    states: Float[Tensor, "k n D"]

    def fill(self, number: int, states: Float[Tensor, "n D"]) -> None:
        """These states enter layer ``number``."""
        for place, layer in enumerate(self.layers):
            if layer == number:
                self.states[place].copy_(states)


@dataclass(slots=True)
class Batch:
    """The rows of a pass, its segments' one after the other; a backend adds what it needs.

    Attributes:
        segments: whose rows they are.
        tokens, positions: of each row, (n,), where the backend computes; rows that only fill up a batch
            follow the segments' own.
    """

    segments: Sequence[Segment]
    tokens: Int[Tensor, " n"]
    positions: Int[Tensor, " n"]

    def rows(self) -> list[slice]:
        """Each segment's rows."""
        ends = accumulate((len(segment.tokens) for segment in self.segments), initial=0)
        return [slice(start, end) for start, end in pairwise(ends)]

    def passes(
        self, states: Float[Tensor, "n D"], queries: Any, features: Float[Tensor, "k n D"] | None = None
    ) -> list[Pass]:
        """Each segment's part of what a pass gives: states, what :meth:`Backend.layers` returned, and what
        was tapped."""
        pairs = zip(self.rows(), queries, strict=True)
        return [Pass(states[rows], own, part_of(features, rows)) for rows, own in pairs]


def part_of(features: Float[Tensor, "k n D"] | None, rows: slice) -> Tensor | None:
    """Some rows' features."""
    return None if features is None else features[:, rows]


class Backend(ABC):
    """Computes on one device. It keeps nothing of a pass, so threads may share it.

    Args:
        device: where tensors are.

    Attributes:
        name: in files that are kept for this backend.
        build: compiler, flags and version that made it; None where nothing was compiled.
        equal_bits: whether a row's bits depend on its own context alone, so that decoding and checking trees
            agree in every bit.
        prefill_keeps_bits: whether chains without parents, by which a prompt is read, have those bits, too.
            Otherwise they have those of their chunk: prompts are read in chunks of fixed borders, and what a
            model wrote is decoded again where a text goes on.
        decodes: whether it runs a decoder's layers; otherwise models run through transformers' own forward.
        fused: whether products and norms are kernels of its own, which draft heads are packed for, too.
        formats: quantized formats that products read as they are stored, with activations of 8 bits, too.
        fill: writes what is stored quantized into panels, see `weights.Packed`; None: weights are matrices.
        prefers_int8: whether models of such weights are computed in int8 where nothing else is asked for.
        kind: of the device, "cpu" or "cuda".
        on_host: whether tensors are in the host's memory, where looking at one waits for nobody, so that rows
            are chosen one by one; otherwise for all at once.
    """

    name: str
    build: str | None = None
    equal_bits = False
    prefill_keeps_bits = True
    decodes = True
    fused = False
    formats: tuple[str, ...] = ()
    prefers_int8 = False
    fill: Any = None

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.kind = self.device.type
        self.on_host = self.kind == "cpu"

    # ---- memory ---------------------------------------------------------------------------------

    def keeps(self, form: str, dtype: torch.dtype) -> bool:
        """Whether products of a type read weights of a quantized format as they are stored."""
        return form in self.formats and dtype in STORED_IN

    def pack(
        self,
        weight: Tensor | Stored | Sequence[Tensor | Stored],
        dtype: torch.dtype | None = None,
        arena: Arena | None = None,
    ) -> Packed:
        """A linear layer's weight (N, K), or several that stand one below the other, as products read it.

        ``dtype``: of its values in products; by default the tensors' own, float32 for quantized formats.
        ``arena``: memory for it that other weights share.
        """
        return Packed(weight, self.fill, dtype, arena)

    def pack_for_drafts(self, weight: Float[Tensor, "N K"], int8: bool) -> Packed:
        """A matrix that only drafts are multiplied with; where products are in ``int8``, as Q8_0."""
        if int8 and Q8_0.name in self.formats and weight.shape[1] % Q8_0.block == 0:
            return self.pack(Stored(Q8_0, Q8_0.encode(weight.float())), torch.float32)
        return self.pack(weight)

    def draft_product(
        self, states: Float[Tensor, "n K"], weight: Packed, bias: Tensor | None = None
    ) -> Float[Tensor, "n N"]:
        """:meth:`linear` with what :meth:`pack_for_drafts` made."""
        return self.linear(states, weight, bias, torch.int8 if weight.stored else None)

    def take(self, weight: Packed, ids: Int[Tensor, " m"]) -> Float[Tensor, "m K"]:
        """Some rows of a packed weight, of the type of its products.

        Raises:
            InputError: an id, on the host, for which there is no row.
        """
        check_ids(ids, weight.rows)
        return weight.take(ids)

    def new_cache(
        self, layers: int, kv_heads: int, width: int, capacity: int, dtype: torch.dtype
    ) -> FullCache:
        """An empty full cache for ``capacity`` tokens, scratch room included; ``dtype``: its own."""
        return FullCache(Entries(layers, kv_heads, width, capacity, dtype, self.device))

    def has_int8_keys(self, width: int) -> bool:
        """Whether keys and values of heads of a width may be int8."""
        return False

    def partial_cache(self, full: FullCache, budget: int, sinks: int, scratch: int) -> SparseCache:
        """An empty cache that holds a part of a full one; see `kv.sparse.SparseCache`."""
        return SparseCache(full, budget, sinks, scratch)

    def memory(self) -> memory.Memory | None:
        """Memory of the device; None where the system does not tell."""
        return memory.memory_of(self.device)

    def held(self) -> int:
        """Bytes of the device's memory that this process holds."""
        return torch.cuda.memory_allocated(self.device) if self.kind == "cuda" else memory.resident()

    def processor(self) -> str:
        """What computes: the processor with its instruction sets, or the accelerator's name."""
        if self.kind == "cuda":
            return torch.cuda.get_device_name(self.device)
        from tokenswift.kernels.cpu.library import processor

        return processor()

    # ---- passes ---------------------------------------------------------------------------------

    @abstractmethod
    def body(self, shape: Shape, weights: list[LayerWeights]) -> Any:
        """The layers in the form that :meth:`layers` takes, a :class:`Body`."""

    def batch(self, segments: Sequence[Segment], shape: Shape) -> Batch:
        """The rows of a pass through layers of a shape, as :meth:`layers` takes them.

        Raises:
            ValueError: a segment needs more room than its cache has, or has a parent that is no earlier row
                (where it is not said before :meth:`layers`).
        """
        if self.on_host and len(segments) == 1:
            return Batch(segments, segments[0].tokens, segments[0].positions)
        tokens = torch.cat([segment.tokens.to(self.device) for segment in segments])
        positions = torch.cat([segment.positions.to(self.device) for segment in segments])
        return Batch(segments, tokens, positions)

    @abstractmethod
    def layers(
        self,
        body: Any,
        states: Float[Tensor, "n D"],
        cos: Float[Tensor, "*sets n half"],
        sin: Float[Tensor, "*sets n half"],
        batch: Any,
        keep: bool = True,
        taps: Taps | None = None,
        beside: Float[Tensor, "n D"] | None = None,
    ) -> Any:
        """Run a pass through all layers: the ``states`` of a batch's rows (float32) from embeddings to before
        the final norm, in place. Keys and values go behind each cache's own.

        Args:
            taps: filled on the way.
            beside: float32; what layers with `LayerWeights.beside` make queries, keys and values of, too.
        Returns:
            The rotated queries, for :meth:`Batch.passes`: of each segment (L, H, m, d), of its m rows; of the
            last layer alone, (1, H, m, d), unless ``keep``.
        Raises:
            ValueError: a segment needs more room than its cache has, or has a parent that is no earlier row.
        """

    @abstractmethod
    def attend(
        self,
        query: Float[Tensor, "H n d"],
        layer: int,
        cache: KVCache,
        parents: Sequence[int] | None,
        scale: float,
        window: int = 0,
        softcap: float | None = None,
        sinks: Float[Tensor, " H"] | None = None,
        notes: dict[Any, Any] | None = None,
    ) -> Float[Tensor, "n H d"]:
        """Attention of one layer, whose keys and values of the pass stand behind the cache's own already.

        Args:
            window: newest keys that a row sees, itself included; 0 is all.
            softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
            sinks: a score per head that takes part in the softmax and has no value (gpt-oss).
            notes: kept by who calls from one layer of a pass to the next: what is worked out once a pass.
        """

    @abstractmethod
    def linear(
        self,
        states: Float[Tensor, "*m K"],
        weight: Packed,
        bias: Tensor | None = None,
        active: torch.dtype | None = None,
    ) -> Float[Tensor, "*m N"]:
        """States times the weight's transpose, plus bias; float32.

        ``active``: int8 to multiply integers, with a weight that is stored quantized.
        """

    @abstractmethod
    def norm(
        self, states: Float[Tensor, "*m D"], weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Float[Tensor, "*m D"]:
        """RMS norm of float32 states, as ``dtype``."""

    def ranker(self, params: SamplingParams) -> Ranker | None:
        """What ranks tokens in one generation; None leaves it to `sampling.choice.Sampler`, in torch."""
        return None


def capacity_of(data: Tensor) -> int:
    """Tokens that a cache's tensor has room for; pages of int8 hold 16."""
    return data.shape[2] * (16 if data.dtype == torch.uint8 else 1)


def check_ids(ids: Tensor, count: int) -> None:
    """Refuse token ids that a matrix of so many rows has no row for. Those on a device are its ranker's.

    Raises:
        InputError: naming one of them.
    """
    if ids.device.type == "cpu" and len(ids):
        numbers = ids.numpy()  # torch would start its threads for a few numbers
        check_tokens((int(numbers.min()), int(numbers.max())), count)


def check_rows(cache: KVCache, count: int, parents: Sequence[int] | None) -> None:
    """Refuse rows of a text that cannot run.

    Raises:
        ValueError: they do not fit the cache, or a parent is no earlier row.
    """
    parts = [(cache.length, cache.data)]
    if cache.tail is not None:
        parts.append((cache.tail_length, cache.tail.entries.data))
    for before, data in parts:
        if before + count > (capacity := capacity_of(data)):
            raise ValueError(
                f"a pass of {count} rows over {before} keys needs more room than the cache's {capacity}"
            )
    if parents is not None and (
        len(parents) != count or any(not -1 <= parent < row for row, parent in enumerate(parents))
    ):
        raise ValueError(f"parents are {tuple(parents)}; valid: {count} of them, each -1 or an earlier row")
