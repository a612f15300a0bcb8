"""The backend: computes model passes on a device. This one, in plain torch, is the reference for
the others.

A backend packs weights, allocates KV caches, runs a decoder's layers over a *batch* of segments
(rows of one or several sequences, each with its own cache and tree), multiplies with the LM head
and ranks tokens. In a pass, the model asks for a batch, embeds its tokens, and gives their states
to :meth:`Backend.layers`.

`kernels.cpu` has compiled kernels by the specification of docs/exactness.md, `kernels.cuda` those
for a GPU; torch runs where neither works. Torch sums in an order of its own, so that a row's bits
may depend on the other rows. Code elsewhere asks a backend for its abilities, never for its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift import memory
from tokenswift.config.sampling import SamplingParams
from tokenswift.kernels.attention import attention_bias, capped, turned
from tokenswift.kernels.batch import Batch, Body, Taps, check_ids
from tokenswift.kernels.formats import Q8_0, STORED_IN, Stored
from tokenswift.kernels.weights import LayerWeights, Packed, Shape, active_type
from tokenswift.kv.cache import Entries, FullCache, KVCache
from tokenswift.kv.memory import Arena
from tokenswift.kv.passes import Segment
from tokenswift.sampling.rows import Ranker


class Backend:
    """Computes on one device with torch's operations. It keeps no state between passes; threads may
    share it.

    Args:
        device: the device of all tensors.

    Attributes:
        name: its name in messages and files.
        build: compiler, flags and version of its kernels; None: nothing is compiled.
        equal_bits: whether a row's bits depend on its own context alone, so that plain decoding and
            verify passes agree in every bit.
        prefill_keeps_bits: whether that holds for prefill too. Otherwise a prompt is prefilled in
            chunks with fixed borders, and generated tokens of a resumed text are run again by
            decode passes.
        decodes: whether it can run a decoder's layers; otherwise models use transformers' own
            forward.
        fused: whether it has kernels for products and norms, for which draft heads are packed too.
        formats: quantized formats that its products read as stored, also with int8 activations.
        fill: function that packs quantized weights into panels, see `weights.Packed`; None: they
            are matrices.
        kind: type of the device, "cpu" or "cuda".
        on_host: whether tensors are in the host's memory, so that reading a value does not wait for
            a device.
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

    # ---- memory ----------------------------------------------------------------------------------

    def keeps(self, form: str, dtype: torch.dtype) -> bool:
        """Whether products of this type read weights of a quantized format as stored."""
        return form in self.formats and dtype in STORED_IN

    def pack(
        self,
        weight: Tensor | Stored | Sequence[Tensor | Stored],
        dtype: torch.dtype | None = None,
        arena: Arena | None = None,
    ) -> Packed:
        """Pack a linear layer's weight (N, K), or several of them one below the other, for
        products.

        Args:
            dtype: type of its values in products; default: the tensors' own, float32 for quantized
                formats.
            arena: memory shared with other weights.
        """
        return Packed(weight, self.fill, dtype, arena)

    def pack_for_drafts(self, weight: Float[Tensor, "N K"], int8: bool) -> Packed:
        """Pack a matrix that is used only to draft: as Q8_0 if products are in ``int8``."""
        if int8 and Q8_0.name in self.formats and weight.shape[1] % Q8_0.block == 0:
            return self.pack(Stored(Q8_0, Q8_0.encode(weight.float())), torch.float32)
        return self.pack(weight)

    def draft_product(
        self, states: Float[Tensor, "n K"], weight: Packed, bias: Tensor | None = None
    ) -> Float[Tensor, "n N"]:
        """:meth:`linear` with a weight from :meth:`pack_for_drafts`."""
        return self.linear(states, weight, bias, torch.int8 if weight.stored else None)

    def take(self, weight: Packed, ids: Int[Tensor, " m"]) -> Float[Tensor, "m K"]:
        """Some rows of a packed weight, in the type of its products.

        Raises:
            InputError: an id (on the host) without a row.
        """
        check_ids(ids, weight.rows)
        return weight.take(ids)

    def new_cache(
        self,
        layers: int,
        kv_heads: int,
        width: int,
        capacity: int,
        dtype: torch.dtype,
        wide_keys: Sequence[bool] = (),
    ) -> FullCache:
        """An empty full cache for ``capacity`` tokens, scratch rows included.

        Args:
            wide_keys: in int8, of each layer whether its keys are of 16 bits; empty: none are.
        """
        return FullCache(Entries(layers, kv_heads, width, capacity, dtype, self.device))

    def has_int8_keys(self, width: int) -> bool:
        """Whether keys and values of heads of this width may be int8."""
        return False

    def has_wide_keys(self, width: int) -> bool:
        """Whether keys of heads of this width may be integers of 16 bits, beside values in int8."""
        return False

    def memory(self) -> memory.Memory | None:
        """Memory of the device; None if unknown."""
        return memory.memory_of(self.device)

    def held(self) -> int:
        """Bytes of the device's memory that this process uses."""
        return (
            torch.cuda.memory_allocated(self.device) if self.kind == "cuda" else memory.resident()
        )

    def processor(self) -> str:
        """The processor with its instruction sets, or the accelerator's name."""
        if self.kind == "cuda":
            return torch.cuda.get_device_name(self.device)
        from tokenswift.kernels.cpu.library import processor

        return processor()

    # ---- passes ----------------------------------------------------------------------------------

    def body(self, shape: Shape, weights: list[LayerWeights]) -> Body:
        """Prepare layers for :meth:`layers`."""
        return Body(shape, weights)

    def batch(self, segments: Sequence[Segment], shape: Shape) -> Batch:
        """Prepare the rows of a pass for :meth:`layers`.

        Raises:
            ValueError: as for :meth:`layers`, which may check instead.
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
        """Run a pass through all layers. ``states``, float32, change in place, from embeddings to
        hidden states before the final norm. Keys and values go to the scratch rows of each cache.

        Args:
            keep: return the queries of all layers instead of the last one's.
            taps: filled with the inputs of its layers.
            beside: a second input (float32) for layers with `LayerWeights.beside`, as EAGLE-3 has.
        Returns:
            For each segment the rotated queries of its m rows, (L, H, m, d), or (1, H, m, d)
            without ``keep``.
        Raises:
            ValueError: a segment does not fit its cache, or a parent is no earlier row.
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
        """The norm of states, or without a weight the states themselves."""
        return states.to(dtype) if weight is None else self.norm(states, weight, shape.eps, dtype)

    def _heads(
        self,
        qkv: Float[Tensor, "n N"],
        layer: LayerWeights,
        shape: Shape,
        cos: Float[Tensor, "*sets n half"],
        sin: Float[Tensor, "*sets n half"],
    ) -> list[Float[Tensor, "h n d"]]:
        """Queries, keys and values, each (h, n, d); queries and keys normalised and rotated."""
        width, made = shape.width, list[Tensor]()
        own = [shape.heads * width, *[shape.kv_heads * width] * 2]
        for part, norm in zip(
            qkv.split(own, -1), (layer.query_norm, layer.key_norm, None), strict=True
        ):
            if norm is not None:  # over all heads together, or over each
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
        """Attention of one layer, with the pass's own keys and values in the cache's scratch rows.

        Args:
            parents: see `passes.Segment`.
            window: newest keys that a row sees, itself included; 0: all.
            softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
            sinks: a score for each head that takes part in the softmax and has no value (gpt-oss).
            notes: a dict that the caller keeps for all layers of a pass, to reuse masks.
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
                notes[key_of] = attention_bias(before, rows, parents, window, packed).repeat(
                    groups, 1
                )
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
        """``states @ weight.T + bias`` in float32; with ``active`` int8 and a weight stored
        quantized, states are quantized too and integers are multiplied."""
        active = active_type(weight.dtype)
        out = F.linear(states.to(active), weight.unpack().to(active)).float()
        return out if bias is None else out + bias

    def norm(
        self, states: Float[Tensor, "*m D"], weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Float[Tensor, "*m D"]:
        """RMS norm, computed in float32; the result is ``dtype``."""
        states = states.float()
        return (states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * weight).to(dtype)

    def ranker(self, params: SamplingParams) -> Ranker | None:
        """Compiled code that ranks tokens; None: `sampling.sampler.Sampler` does it in torch."""
        return None
