"""The compiled CPU kernels (cpu.c) on torch tensors. `kernels.reference` says in torch what they
compute."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int32, c_void_p
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.checks import check_tokens
from tokenswift.config.sampling import SamplingParams
from tokenswift.kernels.attention import AttentionContext
from tokenswift.kernels.base import Backend
from tokenswift.kernels.batch import Body, LayerPass
from tokenswift.kernels.cpu import structs
from tokenswift.kernels.cpu.int8_cache import Pages
from tokenswift.kernels.cpu.layer_structs import attention_shape, layers_of, shape_of, weight_of
from tokenswift.kernels.cpu.ranker import NativeRanker
from tokenswift.kernels.cpu.recurrent import CReplay
from tokenswift.kernels.cpu.structs import address, vector_address
from tokenswift.kernels.formats import FORMATS, Stored
from tokenswift.kernels.packed import Packed, WritePanels, panel_count
from tokenswift.kernels.weights import LayerWeights, Shape, active_type
from tokenswift.kv.cache import FullCache
from tokenswift.kv.entries import Entries
from tokenswift.kv.passes import Segment
from tokenswift.kv.states import Recurrence, States


class CpuBackend(Backend):
    """Kernels of a compiled library; see :func:`tokenswift.kernels.cpu.library.library`.

    The library's work space belongs to the cache that a pass runs over, and bits do not depend on
    who else runs, so passes over different caches may run at the same time. One of them has the
    team of threads, the others run on the thread that calls.

    Args:
        library: the compiled kernels.
        threads: of every pass; by default ``torch.get_num_threads()``.
    """

    name = "native"
    fused = True
    equal_bits = True
    formats = tuple(FORMATS)

    def __init__(self, library: ctypes.CDLL, threads: int | None = None) -> None:
        super().__init__()
        self._lib = library
        self._threads = threads
        structs.declare(library)
        build = ctypes.c_char.in_dll(library, "ts_build")
        self.build = ctypes.string_at(ctypes.addressof(build)).decode()

    def _panel_writer(self) -> WritePanels:
        """See :meth:`Backend._panel_writer`; on all threads."""
        return self._write_panels

    def _write_panels(self, stored: Stored, panels: Tensor) -> None:
        form = stored.format
        blocks = stored.blocks.contiguous()
        rows, columns = stored.shape
        row_bytes = blocks.shape[1]
        panel_bytes = form.panel_bytes(columns)
        self._lib.ts_pack(
            address("panels", panels, torch.uint8, panel_count(rows), panel_bytes),
            structs.LOW + form.code,
            address("blocks", blocks, torch.uint8, rows, row_bytes),
            rows,
            row_bytes,
            columns,
            self._count(),
        )

    def new_cache(
        self,
        layers: int,
        kv_heads: int,
        width: int,
        capacity: int,
        dtype: torch.dtype,
        wide_keys: Sequence[bool] = (),
    ) -> FullCache:
        """See :meth:`Backend.new_cache`; int8 in pages."""
        if dtype != torch.int8:
            return super().new_cache(layers, kv_heads, width, capacity, dtype)
        wide = wide_keys or [False] * layers
        return FullCache(Pages(kv_heads, width, capacity, wide, self._lib.ts_copy))

    def new_states(self, recurrence: Recurrence, layers: int) -> States:
        """See :meth:`Backend.new_states`."""
        return States(recurrence, layers, CReplay(self._lib, self._threads))

    def has_int8_keys(self, width: int) -> bool:
        """See :meth:`Backend.has_int8_keys`."""
        return width % 4 == 0

    def has_wide_keys(self, width: int) -> bool:
        """See :meth:`Backend.has_wide_keys`."""
        return width % 4 == 0 and width <= structs.MOST_WIDE

    def _count(self) -> int:
        """Threads of the next pass."""
        return self._threads or torch.get_num_threads()

    def ranker(self, params: SamplingParams) -> NativeRanker:
        """The choice rule for one generation, in C."""
        return NativeRanker(self._lib, params)

    def body(self, shape: Shape, weights: list[LayerWeights]) -> Body:
        """See :meth:`Backend.body`.

        Raises:
            ValueError: activations of another type than products with these weights take.
        """
        stored = all(weight.stored for layer in weights for weight in layer.packed())
        valid = [active_type(shape.weights)]
        if stored:
            valid.append(torch.int8)
        if shape.active not in valid:
            raise ValueError(f"activations are {shape.active}; valid with these weights: {valid}")
        c_shape = shape_of(shape)
        c_layers = layers_of(shape, weights)
        return CpuBody(shape, weights, c_shape, c_layers)

    def layers(self, body: Body, layer_pass: LayerPass) -> list[Float[Tensor, "L H m d"]]:
        """See :meth:`Backend.layers`.

        Raises:
            TypeError: another backend has prepared the layers.
            ValueError: a tensor of another type or shape than the kernels read.
        """
        if not isinstance(body, CpuBody):
            raise TypeError(
                f"layers are a {type(body).__name__}; valid: those of `CpuBackend.body`"
            )
        segments = layer_pass.batch.segments
        rows = (structs.CRows * len(segments))()
        queries: list[Tensor] = []
        attending = sum(layer.recurrent is None for layer in body.weights)
        layers = attending if layer_pass.keep_queries else 1
        for entry, segment in zip(rows, segments, strict=True):
            queries.append(_describe_segment(entry, segment, body, layers))
        c_pass = self._c_pass(body, layer_pass, rows)
        cache = segments[0].cache
        while True:
            c_pass.work, c_pass.work_bytes = structs.work_space(cache)
            needed = self._lib.ts_layers(byref(body.c_shape), body.c_layers, byref(c_pass))
            if not needed:
                return queries
            structs.grow_work(cache, needed)

    def _c_pass(
        self, body: CpuBody, layer_pass: LayerPass, rows: ctypes.Array[structs.CRows]
    ) -> structs.CPass:
        """A pass for the kernels, but for its work space."""
        shape = body.shape
        count = sum(entry.n for entry in rows)
        states = layer_pass.states
        c_pass = structs.CPass(
            n=count,
            count=len(rows),
            rows=ctypes.addressof(rows),
            threads=self._count(),
            keep=layer_pass.keep_queries,
            states=address("states", states, torch.float32, count, shape.hidden),
            cos=_angles_address("cos", layer_pass.cos, body, count),
            sin=_angles_address("sin", layer_pass.sin, body, count),
        )
        features = layer_pass.features
        if features is not None:
            number = len(features.layers)
            numbers = (c_int32 * number)(*features.layers)
            c_pass.feature_count = number
            c_pass.feature_layers = ctypes.cast(numbers, c_void_p)
            c_pass.features = address(
                "features", features.states, torch.float32, number, count, shape.hidden
            )
        if any(layer.second_qkv is not None for layer in body.weights):
            second = layer_pass.second_input
            if second is None:
                raise ValueError("the layers read a second input, and the pass has none")
            c_pass.second_input = address(
                "the second input", second, torch.float32, count, shape.hidden
            )
        scale = layer_pass.query_scale
        if scale is not None:
            c_pass.query_scale = address("the scale of queries", scale, torch.float32, count)
        return c_pass

    def attend(
        self, query: Float[Tensor, "H n d"], context: AttentionContext
    ) -> Float[Tensor, "n H d"]:
        """See :meth:`Backend.attend`. Other types of keys, and heads of odd width, are left to
        torch."""
        cache = context.cache
        entries = cache.entries
        in_pages = isinstance(entries, Pages)
        readable = in_pages or entries.data.dtype in structs.TYPES
        if not readable or query.shape[-1] % 2:
            return super().attend(query, context)
        heads, count, width = query.shape
        keys = torch.int8 if in_pages else entries.data.dtype
        active = active_type(keys)
        shape = attention_shape(heads, width, keys, context)
        c_shape = shape_of(shape)
        rows = structs.CRows()
        structs.describe_rows(rows, cache, count, context.parents)
        first_key, first_value = _layer_address(entries, context.layer, shape, c_shape)
        query = query.to(active).contiguous()
        sinks = None if context.sinks is None else context.sinks.float().contiguous()
        out = torch.empty(count, heads, width, dtype=active, device="cpu")
        while True:
            work, work_bytes = structs.work_space(cache)
            needed = self._lib.ts_attend(
                byref(c_shape),
                byref(rows),
                context.window,
                address("queries", query, active, heads, count, width),
                first_key,
                first_value,
                vector_address("sinks", sinks, heads),
                address("attention", out, active, count, heads, width),
                work,
                work_bytes,
                self._count(),
            )
            if not needed:
                return out
            structs.grow_work(cache, needed)

    def linear(
        self,
        states: Float[Tensor, "n K"],
        weight: Packed,
        bias: Tensor | None = None,
        active: torch.dtype | None = None,
    ) -> Float[Tensor, "n N"]:
        """See :meth:`Backend.linear`."""
        int8 = active == torch.int8
        if int8 and not weight.stored:
            raise ValueError(
                "activations are torch.int8; valid: with a weight that is stored quantized"
            )
        dtype = torch.float32 if int8 else active_type(weight.dtype)
        states = states.to(dtype).contiguous()
        count = len(states)
        rows = weight.rows
        columns = weight.columns
        work_bytes = structs.groups_bytes(count, columns) if int8 else 0
        work = torch.empty(work_bytes, dtype=torch.uint8, device="cpu")
        out = torch.empty(count, rows, dtype=torch.float32, device="cpu")
        self._lib.ts_linear(
            address("products", out, torch.float32, count, rows),
            address("states", states, dtype, count, columns),
            byref(weight_of(weight, bias)),
            count,
            rows,
            columns,
            structs.ACTIVE[torch.int8 if int8 else dtype],
            address("groups", work, torch.uint8, work_bytes),
            self._count(),
        )
        return out

    def take(self, weight: Packed, ids: Int[Tensor, " m"]) -> Float[Tensor, "m K"]:
        """See :meth:`Backend.take`."""
        if not weight.stored:
            return super().take(weight, ids)
        ids = ids.long().contiguous()
        out = torch.empty(len(ids), weight.columns, dtype=torch.float32, device="cpu")
        refused_index = self._lib.ts_take(
            address("rows", out, torch.float32, len(ids), weight.columns),
            byref(weight_of(weight)),
            address("ids", ids, torch.int64, len(ids)),
            len(ids),
            weight.rows,
            weight.columns,
        )
        if refused_index >= 0:
            check_tokens((int(ids[refused_index]),), weight.rows)
        return out.to(weight.dtype)

    def norm(
        self, states: Float[Tensor, "n D"], weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Float[Tensor, "n D"]:
        """See :meth:`Backend.norm`."""
        states = states.float().contiguous()
        count, width = states.shape
        out = torch.empty(count, width, dtype=dtype, device="cpu")
        self._lib.ts_norm(
            address("normed states", out, dtype, count, width),
            address("states", states, torch.float32, count, width),
            vector_address("the norm's weight", weight, width),
            count,
            width,
            eps,
            structs.TYPES[dtype],
            self._count(),
        )
        return out


@dataclass(slots=True, eq=False)
class CpuBody(Body):
    """Layers, with the structures that the kernels read.

    Attributes:
        c_shape: the shape.
        c_layers: an array of `structs.CLayer`.
    """

    c_shape: structs.CShape
    c_layers: ctypes.Array[structs.CLayer]


def _describe_segment(
    entry: structs.CRows, segment: Segment, body: CpuBody, layers: int
) -> Float[Tensor, "L H m d"]:
    """Fill in the rows of a segment; the memory for its queries of some layers."""
    shape = body.shape
    cache = segment.cache
    count = len(segment.tokens)
    structs.describe_rows(entry, cache, count, segment.parents)
    heads = shape.heads
    width = shape.width
    recurrent = sum(layer.recurrent is not None for layer in body.weights)
    held = 0 if cache.states is None else cache.states.layers
    if recurrent != held or (
        cache.states is not None and cache.states.recurrence != shape.recurrence
    ):
        raise ValueError(f"a cache has states of {held} layers; valid for this model: {recurrent}")
    queries = torch.empty(layers, heads, count, width, dtype=shape.queries, device="cpu")
    entry.queries = address("queries", queries, shape.queries, layers, heads, count, width)
    tail = cache.tail
    attending = [layer for layer in body.weights if layer.recurrent is None]
    in_tail = [tail is not None and layer.window > 0 for layer in attending]
    if tail is not None:
        entry.tail_before = cache.tail_length
        entry.tail_capacity = tail.entries.capacity
        wide = [layer.wide_keys for layer in attending if layer.window > 0]
        entry.tail = _entries_address(tail.entries, shape, wide)
    outside = zip(attending, in_tail, strict=True)
    wide = [layer.wide_keys for layer, apart in outside if not apart]
    entry.keys_values = _entries_address(cache.entries, shape, wide)
    return queries


def _entries_address(entries: Entries, shape: Shape, wide_keys: Sequence[bool]) -> int:
    """Where the keys and values of some layers are.

    Args:
        wide_keys: of each of these layers, whether its keys are of 16 bits in int8.
    Raises:
        ValueError: the cache has other types of keys, or other sizes.
    """
    valid = tuple(wide_keys)
    if isinstance(entries, Pages) and entries.wide_keys != valid:
        raise ValueError(f"keys of 16 bits are {entries.wide_keys}; valid for this model: {valid}")
    return structs.entries_address(entries.data, shape, entries.capacity, valid)


def _angles_address(name: str, angles: Tensor, body: CpuBody, count: int) -> int:
    """Where the cosines or sines of all sets of angles are."""
    sets = max(1, *(layer.rope + 1 for layer in body.weights))
    angles = angles if angles.dim() > 2 else angles[None]
    return address(name, angles, torch.float32, sets, count, body.shape.width // 2)


def _layer_address(
    entries: Entries, layer: int, shape: Shape, c_shape: structs.CShape
) -> tuple[int, int]:
    """Where a layer's first key and value are. Pages hold both: they are counted from one place,
    and the type of their keys is noted in the shape."""
    if isinstance(entries, Pages):
        wide = entries.wide_keys[layer]
        c_shape.keys = structs.INT16_KEYS if wide else structs.KEYS[torch.int8]
        pages = entries.pages(layer)
        first = address(
            "keys and values",
            pages,
            structs.PAGE_DTYPE,
            shape.kv_heads,
            entries.capacity // structs.PAGE,
            structs.page_bytes(shape.width, wide),
        )
        return first, first
    both = entries.data[2 * layer : 2 * layer + 2]
    first = structs.entries_address(both, shape, entries.capacity, [False])
    key_bytes = shape.kv_heads * entries.capacity * shape.width * both.itemsize
    return first, first + key_bytes
