"""What computes the passes of models on a device, in plain torch; compiled kernels replace it.

A backend packs weights, owns the memory of caches, runs a decoder's layers over a *batch* of segments (rows
of one or several texts, each over its own cache with its own tree), multiplies with the LM head and ranks
tokens. A pass goes down only: the model asks for a batch, embeds its tokens, hands their states to the layers
and takes logits of what they give. `kernels.cpu` has compiled kernels, by the specification of
docs/exactness.md, `kernels.cuda` those of a card. Which device it is, and what follows from that, is asked
here and nowhere else. Torch's own operations are the reference, and run where nothing can be compiled: they
add up in their own order, and a row's bits may depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift import memory
from tokenswift.config import SamplingParams
from tokenswift.kernels.weights import Q8_0, STORED_IN, LayerWeights, Packed, Shape, Stored, active_type
from tokenswift.kv import Arena, Entries, FullCache, KVCache, Segment
from tokenswift.sampling.choice import Ranker
from tokenswift.tree import ancestor_mask
from tokenswift.types import check_tokens


@dataclass(slots=True, eq=False)
class Body:
    """A decoder's layers, ready to run.

    Attributes:
        shape: the layers' sizes and types.
        weights: of each layer.
        native: what the backend keeps beside them.
    """

    shape: Shape
    weights: list[LayerWeights]
    native: Any = None


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


class Backend:
    """Computes on one device, by torch's own operations. It keeps nothing of a pass, so threads may share it.

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
        kind: of the device, "cpu" or "cuda".
        on_host: whether tensors are in the host's memory, where looking at one waits for nobody, so that rows
            are chosen one by one; otherwise for all at once.
    """

    name = "torch"
    build: str | None = None
    equal_bits = False
    prefill_keeps_bits = True
    fused = False
    formats: tuple[str, ...] = ()
    fill: Any = None

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.kind = self.device.type
        self.on_host = self.decodes = self.kind == "cpu"

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

    def body(self, shape: Shape, weights: list[LayerWeights]) -> Body:
        """The layers in the form that :meth:`layers` takes."""
        return Body(shape, weights)

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

    def layers(
        self,
        body: Body,
        states: Float[Tensor, "n D"],
        cos: Float[Tensor, "*sets n half"],
        sin: Float[Tensor, "*sets n half"],
        batch: Batch,
        keep: bool = True,
        taps: Taps | None = None,
        beside: Float[Tensor, "n D"] | None = None,
    ) -> list[Float[Tensor, "L H m d"]]:
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
        shape, count, places = body.shape, len(states), batch.rows()
        kept: list[list[Tensor]] = [[] for _ in places]
        notes: list[dict[Any, Any]] = [{} for _ in places]
        active = shape.active
        for number, layer in enumerate(body.weights):
            if shape.parallel:
                states -= states.mean(-1, keepdim=True)
            if taps is not None:
                taps.fill(number, states)
            normed = self._normed(states, layer.norm, shape, active)
            qkv = self.linear(normed, layer.qkv, layer.qkv_bias)
            if layer.beside is not None and layer.beside_norm is not None and beside is not None:
                normed = self.norm(beside, layer.beside_norm, shape.eps, active)
                qkv += self.linear(normed, layer.beside)
            query, key, value = self._heads(qkv, layer, shape, cos, sin)
            mixed: list[Tensor] = []
            for segment, rows, own, noted in zip(batch.segments, places, kept, notes, strict=True):
                cache = segment.cache
                data, place, before, ordered = cache.of_layer(number)
                into = slice(before, before + len(segment.tokens))
                data[2 * place, :, into] = key[:, rows].to(shape.keys)
                data[2 * place + 1, :, into] = value[:, rows].to(shape.keys)
                window = layer.window if ordered else 0
                own.append(query[:, rows])
                how = (cache, segment.parents, shape.scale, window, shape.cap or None)
                mixed.append(self.attend(own[-1], number, *how, notes=noted))
            mixes = torch.cat(mixed).reshape(count, -1).to(active)
            made = self.linear(mixes, layer.out, layer.out_bias)
            states += self._normed(made, layer.out_norm, shape) * shape.residual
            if not shape.parallel:
                normed = self._normed(states, layer.mlp_norm, shape, active)
            gate, up = self.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            gated = F.gelu(gate, approximate="tanh") if shape.gelu else F.silu(gate)
            made = self.linear((gated * up).to(active), layer.down, layer.down_bias)
            states += self._normed(made, layer.down_norm, shape) * shape.residual
        if shape.parallel:
            states -= states.mean(-1, keepdim=True)
        if taps is not None:
            taps.fill(len(body.weights), states)
        return [torch.stack(own if keep else own[-1:]) for own in kept]

    def _normed(
        self,
        states: Float[Tensor, "*m D"],
        weight: Tensor | None,
        shape: Shape,
        dtype: torch.dtype = torch.float32,
    ) -> Float[Tensor, "*m D"]:
        """The norm of states, or where there is none the states."""
        return states.to(dtype) if weight is None else self.norm(states, weight, shape.eps, dtype)

    def _heads(
        self,
        qkv: Float[Tensor, "n N"],
        layer: LayerWeights,
        shape: Shape,
        cos: Float[Tensor, "*sets n half"],
        sin: Float[Tensor, "*sets n half"],
    ) -> list[Float[Tensor, "h n d"]]:
        """Queries and keys, with their norms and turned, and values."""
        width, made = shape.width, list[Tensor]()
        own = [shape.heads * width, *[shape.kv_heads * width] * 2]
        for part, norm in zip(qkv.split(own, -1), (layer.query_norm, layer.key_norm, None), strict=True):
            if norm is not None:  # over all heads together, or each by itself
                part = self._normed(part.unflatten(-1, (-1, len(norm))), norm, shape).flatten(1)
            made.append(part.unflatten(-1, (-1, width)).transpose(0, 1))
        query, key, value = made
        if layer.rope >= 0:
            angles = [part.view(-1, *part.shape[-2:])[layer.rope] for part in (cos, sin)]
            query, key = turned(query, *angles), turned(key, *angles)
        return [query.to(shape.queries), key, value]

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
        heads, rows, width = query.shape
        data, place, before, _ = cache.of_layer(layer)
        end = before + rows
        key, value = (data[2 * place + part, None, :, :end] for part in (0, 1))
        kind = key.dtype
        if self.on_host and kind != torch.float64:
            kind, key, value = active_type(kind), key.float(), value.float()
        groups = heads // key.shape[1]
        packed = query.to(kind).to(key.dtype).reshape(1, -1, groups * rows, width)
        window, bias = window if window < end else 0, None
        if rows > 1 or window:
            notes = {} if notes is None else notes
            key_of = (before, window, groups)
            if key_of not in notes:
                notes[key_of] = _bias(before, rows, parents, window, packed).repeat(groups, 1)
            bias = notes[key_of]
        if softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(packed, key, value, attn_mask=bias, scale=scale)
        else:
            out = capped(packed, key, value, bias, scale, softcap, sinks)
        return out.reshape(heads, rows, width).transpose(0, 1).to(kind)

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
        active = active_type(weight.dtype)
        out = F.linear(states.to(active), weight.unpack().to(active)).float()
        return out if bias is None else out + bias

    def norm(
        self, states: Float[Tensor, "*m D"], weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Float[Tensor, "*m D"]:
        """RMS norm of float32 states, as ``dtype``."""
        states = states.float()
        return (states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * weight).to(dtype)

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


def capped(
    query: Float[Tensor, "1 K m d"],
    key: Float[Tensor, "1 K L d"],
    value: Float[Tensor, "1 K L d"],
    bias: Float[Tensor, "m L"] | None,
    scale: float,
    softcap: float | None,
    sinks: Float[Tensor, " H"] | None,
) -> Float[Tensor, "1 K m d"]:
    """Attention with a cap of the scores or with sinks, which torch's own lacks; in float32 at least."""
    kind = torch.promote_types(key.dtype, torch.float32)
    scores = query.to(kind) @ key.to(kind).mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    if sinks is not None:
        kv_heads, rows = query.shape[1:3]
        own = sinks.to(scores.dtype).view(kv_heads, -1, 1).expand(-1, -1, rows * kv_heads // len(sinks))
        scores = torch.cat([scores, own.reshape(1, kv_heads, rows, 1)], -1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value.to(kind)


def _bias(
    before: int, rows: int, parents: Sequence[int] | None, window: int, like: Tensor
) -> Float[Tensor, "n L"]:
    """What is added to scores: -inf where a row does not see a key."""
    device = like.device
    mask = ancestor_mask(range(-1, rows - 1) if parents is None else parents, device)
    visible = torch.cat([mask.new_ones(rows, before), mask], dim=1)
    if window:
        here = before + mask.sum(1) - 1
        places = torch.cat([torch.arange(before, device=device), here])
        visible &= places[None, :] > here[:, None] - window
    bias = torch.zeros(visible.shape, dtype=like.dtype, device=device)
    return bias.masked_fill_(~visible, -torch.inf)


def turned(
    states: Float[Tensor, "*h n d"], cos: Float[Tensor, "n half"], sin: Float[Tensor, "n half"]
) -> Float[Tensor, "*h n d"]:
    """Rotary embedding: pairs (j, j + d/2) turned by the angles of each row's position."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def row_paths(count: int, parents: Sequence[int] | None) -> list[list[int]]:
    """For each row of a pass, the rows on its path (itself last), which follow the committed keys."""
    paths: list[list[int]] = []
    for row, parent in enumerate(range(-1, count - 1) if parents is None else parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return paths
