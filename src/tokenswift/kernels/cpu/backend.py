"""The compiled CPU kernels (cpu.c) on torch tensors. `kernels.base` says in torch what they
compute."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref, c_float, c_int32, c_long, c_void_p
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.config import SamplingParams
from tokenswift.kernels.base import Backend, Batch, Body, Taps, capacity_of
from tokenswift.kernels.cpu import structs
from tokenswift.kernels.cpu.library import library, processor
from tokenswift.kernels.cpu.structs import PAGE, SCALES, address, fields, page_bytes, vector
from tokenswift.kernels.weights import (
    FORMATS,
    PANEL,
    LayerWeights,
    Packed,
    Shape,
    Stored,
    active_type,
)
from tokenswift.kv import Entries, FullCache, KVCache, large_empty
from tokenswift.sampling.choice import LogitRows, Ranked, position_key
from tokenswift.types import check_tokens


class Pages(Entries):
    """Keys and values of a cache in int8, in the pages that the kernels read (cpu_int_attention.h).

    A head's key or value of a token is a row of integers with one scale: half the memory of
    bfloat16.

    Args:
        layers, kv_heads, width: of the cache.
        capacity: tokens that fit, rounded up to pages.
        copy_entries: ``ts_copy`` of the compiled kernels.

    Attributes:
        data: (layers, K, pages, bytes of a page).
    """

    def __init__(
        self, layers: int, kv_heads: int, width: int, capacity: int, copy_entries: Any
    ) -> None:
        shape = (layers, kv_heads, -(-capacity // PAGE), page_bytes(width))
        self.layers, self.capacity = layers, shape[2] * PAGE
        self.width, self.copy_entries = width, copy_entries
        self.data = large_empty(*shape, dtype=torch.uint8)

    def like(self, capacity: int) -> Pages:
        """Others, of another capacity."""
        layers, kv_heads = self.data.shape[:2]
        return Pages(layers, kv_heads, self.width, capacity, self.copy_entries)

    @property
    def scales(self) -> Float[Tensor, "L K pages 3 16"]:
        """Each token's scale of the key; base-2 logarithm of the scale of the value; inverse of
        that."""
        return self.data[..., :SCALES].view(torch.float32).unflatten(-1, (3, PAGE))

    def copy(
        self, source: Any, into: Sequence[int], rows: Sequence[int] | Int[Tensor, "LK n"]
    ) -> None:
        """See `Entries.copy`.

        Raises:
            ValueError: slots that there are not, or rows of another number.
        """
        heads, own = self.data.shape[0] * self.data.shape[1], isinstance(rows, Tensor)
        to = torch.tensor(into, dtype=torch.int32, device="cpu")
        of = torch.as_tensor(rows, dtype=torch.int32, device="cpu").contiguous()
        count = len(to)
        if of.shape != ((heads, count) if own else (count,)):
            raise ValueError(
                f"rows have the shape {tuple(of.shape)}; valid: one for each of {count} slots"
            )
        if not count:
            return
        for slots, room in ((to, self.capacity), (of, source.capacity)):
            first, last = int(slots.min()), int(slots.max())
            if first < 0 or last >= room:
                raise ValueError(f"slots from {first} to {last}; valid: 0 to {room - 1}")
        like, size = self.data.shape[:2], page_bytes(self.width)
        self.copy_entries(
            address("pages", self.data, torch.uint8, *like, self.capacity // PAGE, size),
            self.capacity,
            address(
                "pages of the source",
                source.data,
                torch.uint8,
                *like,
                source.capacity // PAGE,
                size,
            ),
            source.capacity,
            self.width,
            heads,
            count,
            address("slots", to, torch.int32, count),
            address("rows", of, torch.int32, *((heads, count) if own else (count,))),
            int(own),
        )

    def copy_first(self, source: Pages, length: int) -> None:
        """Copy the first ``length`` entries, by whole pages."""
        pages = -(-length // PAGE)
        self.data[:, :, :pages] = source.data[:, :, :pages]

    def keys(self, layers: slice, start: int, end: int) -> Float[Tensor, "L K n d"]:
        """Keys of slots as numbers, float32."""
        first, last = start // PAGE, -(-end // PAGE)
        pages = self.data[layers, :, first:last]
        scales = self.scales[layers, :, first:last, 0]
        words = pages[..., SCALES : SCALES + self.width * PAGE].unflatten(-1, (-1, PAGE, 4))
        whole = words.transpose(-3, -2).flatten(-2).float() - 128  # (L, K, pages, 16, d)
        found = (whole * scales[..., None]).flatten(2, 3)
        return found[:, :, start - first * PAGE : end - first * PAGE]

    def put_keys(self, start: int, keys: Float[Tensor, "L K n d"]) -> None:
        """Write keys of slots from ``start`` on."""
        at = torch.arange(start, start + keys.shape[2])
        page, place = at // PAGE, at % PAGE
        scale = keys.abs().amax(-1) / 127
        whole = (keys / scale.clamp_min(1e-30)[..., None]).round().clamp(-127, 127) + 128
        self.scales[:, :, page, 0, place] = scale
        words = self.data[..., SCALES : SCALES + self.width * PAGE].unflatten(-1, (-1, PAGE, 4))
        # (n, L, K, words, 4): indices that a slice stands between come first
        words[:, :, page, :, place] = (
            whole.to(torch.uint8).unflatten(-1, (-1, 4)).permute(2, 0, 1, 3, 4)
        )


OFF = (1.0, 0, 1.0, 0.0, -math.inf)  # temperature and filters


class CRule(ctypes.Structure):
    _fields_ = fields(
        "long size; pointer ids; float temperature; long top_k; double top_p, eta; float min_p"
    )


class CRow(ctypes.Structure):
    _fields_ = fields("uint64 key; float noise; int width; pointer mask")


class NativeRanker:
    """The choice rule in C (cpu_choose.h), as `sampling.choice.Sampler` has it in torch.

    Implements ``sampling.choice.Ranker``. Keeps work space between calls, so each generation has
    its own.

    Args:
        library: the compiled kernels.
        params: processors and seed.
    """

    def __init__(self, library: ctypes.CDLL, params: SamplingParams) -> None:
        self._rank, self._best, self._work = library.ts_rank, library.ts_best, dict[int, Tensor]()
        self._seed, self._greedy, p = params.seed, params.greedy, params
        least = math.log(p.min_p) if p.min_p else -math.inf
        how = OFF if p.greedy else (p.temperature, p.top_k, p.top_p, p.eta_cutoff, least)
        self._rule = CRule(0, None, *how)

    def rank(self, rows: LogitRows) -> list[Ranked] | int:
        """See ``sampling.choice.Ranker.rank``."""
        rule, subset, logits = self._rule, rows.subset, rows.logits.float().contiguous()
        count, size = logits.shape
        rule.size, rule.ids, tokens = size, None, size
        if subset is not None:
            tokens = subset.vocab_size
            rule.ids = address("ids of the subset", subset.ids32, torch.int32, size)
        asked, noise = (CRow * count)(), 0.0 if self._greedy else rows.noise
        for row, position, width in zip(asked, rows.positions, rows.widths, strict=True):
            row.key, row.noise, row.width = position_key(self._seed, position), noise, width
        for row, mask in zip(asked, rows.masks, strict=False):
            if mask is not None:
                row.mask = address("a mask", mask, torch.int32, -(-tokens // 32))
        most = min(max(rows.widths), size)
        tokens, values = (c_int32 * (count * most))(), (c_float * (count * most))()
        distribution = (c_float * (count * most))() if rows.with_probs else None
        counts = (c_int32 * count)()
        work = self._work.get(size)
        if work is None:
            work = self._work[size] = torch.empty(4 * size, dtype=torch.float32, device="cpu")
        refused = self._rank(
            byref(rule),
            address("logits", logits, torch.float32, count, size),
            asked,
            count,
            most,
            tokens,
            values,
            distribution,
            counts,
            address("work space", work, torch.float32, 4 * size),
        )
        if refused >= 0:
            return refused
        best = [
            slice(at, at + n) for at, n in zip(range(0, count * most, most), counts, strict=True)
        ]
        return [Ranked(tokens[n], values[n], distribution[n] if distribution else []) for n in best]

    def best(self, logits: Float[Tensor, "n V"], most: int) -> list[tuple[list[int], list[float]]]:
        """See ``sampling.choice.Ranker.best``."""
        logits = logits.float().contiguous()
        count, size = logits.shape
        tokens, values = (c_int32 * (count * most))(), (c_float * (count * most))()
        self._best(
            address("logits", logits, torch.float32, count, size), count, size, most, tokens, values
        )
        return [
            (tokens[at : at + most], values[at : at + most]) for at in range(0, count * most, most)
        ]


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
    fused = equal_bits = True
    formats = tuple(FORMATS)

    def __init__(self, library: ctypes.CDLL, threads: int | None = None) -> None:
        super().__init__()
        self._lib = library
        self._threads = threads
        structs.declare(library)
        self.build = ctypes.string_at(
            ctypes.addressof(ctypes.c_char.in_dll(library, "ts_build"))
        ).decode()

    def fill(self, stored: Stored, panels: Tensor) -> None:
        """The panels of a quantized weight, on all threads."""
        form, blocks = stored.format, stored.blocks.contiguous()
        (rows, columns), size = stored.shape, blocks.shape[1]
        self._lib.ts_pack(
            address("panels", panels, torch.uint8, -(-rows // PANEL), form.panel_bytes(columns)),
            structs.LOW + form.code,
            address("blocks", blocks, torch.uint8, rows, size),
            *(rows, size, columns),
            self._count(),
        )

    def new_cache(
        self, layers: int, kv_heads: int, width: int, capacity: int, dtype: torch.dtype
    ) -> FullCache:
        """See :meth:`Backend.new_cache`; int8 in pages."""
        if dtype != torch.int8:
            return super().new_cache(layers, kv_heads, width, capacity, dtype)
        return FullCache(Pages(layers, kv_heads, width, capacity, self._lib.ts_copy))

    def has_int8_keys(self, width: int) -> bool:
        """See :meth:`Backend.has_int8_keys`."""
        return width % 4 == 0

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
        valid = [active_type(shape.weights), *([torch.int8] if stored else [])]
        if shape.active not in valid:
            raise ValueError(f"activations are {shape.active}; valid with these weights: {valid}")
        return Body(shape, weights, (structs.shape_of(shape), structs.layers_of(shape, weights)))

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
        """See :meth:`Backend.layers`."""
        shape, segments, (c_shape, c_layers) = body.shape, batch.segments, body.native
        layers = shape.layers if keep else 1
        found: list[Tensor] = []
        rows = (structs.CRows * len(segments))()
        for entry, segment in zip(rows, segments, strict=True):
            count, data = len(segment.tokens), segment.cache.data
            structs.describe(entry, segment.cache, count, segment.parents)
            sizes = (layers, shape.heads, count, shape.width)
            found.append(torch.empty(sizes, dtype=shape.queries, device="cpu"))
            entry.queries = address("queries", found[-1], shape.queries, *sizes)
            far = shape.layers
            if (tail := segment.cache.tail) is not None:
                held, apart = tail.entries.data, tail.entries.layers
                entry.tail_before, entry.tail_capacity = (
                    segment.cache.tail_length,
                    capacity_of(held),
                )
                entry.tail = structs.entries(held, shape, entry.tail_capacity, apart)
                far -= apart
            entry.keys_values = structs.entries(data, shape, entry.capacity, far)
        count = sum(entry.n for entry in rows)
        args = structs.CPass(n=count, count=len(segments), threads=self._count(), keep=keep)
        args.rows = ctypes.addressof(rows)
        sets = max(1, *(layer.rope + 1 for layer in body.weights))
        for name, angles in (("cos", cos), ("sin", sin)):
            angles = angles if angles.dim() > 2 else angles[None]
            setattr(args, name, address(name, angles, torch.float32, sets, count, shape.width // 2))
        args.states = address("states", states, torch.float32, count, shape.hidden)
        if taps is not None:
            args.taps = len(taps.layers)
            args.tapped = ctypes.cast((c_int32 * args.taps)(*taps.layers), c_void_p)
            args.features = address(
                "features", taps.states, torch.float32, args.taps, count, shape.hidden
            )
        if any(layer.beside is not None for layer in body.weights):
            if beside is None:
                raise ValueError("the layers read rows beside the states, and there are none")
            args.beside = address("the rows beside", beside, torch.float32, count, shape.hidden)
        cache = segments[0].cache
        while True:
            args.work, args.work_bytes = structs.work_space(cache)
            need = self._lib.ts_layers(byref(c_shape), c_layers, byref(args))
            if not need:
                return found
            structs.grow_work(cache, need)

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
        """See :meth:`Backend.attend`. Sinks are left to torch, and so are other types of keys, and
        heads of odd width."""
        data, pages = cache.data, cache.data.dtype == torch.uint8
        odd = query.shape[-1] % 2  # the kernels take numbers in pairs
        if sinks is not None or not (pages or data.dtype in structs.TYPES) or odd:
            more = {"softcap": softcap, "sinks": sinks}
            return super().attend(query, layer, cache, parents, scale, window, **more)
        heads, count, width = query.shape
        keys = torch.int8 if pages else data.dtype
        active = active_type(keys)
        shape = Shape(
            1, 0, 0, heads, data.shape[1], width, active, keys, active, 0.0, scale, softcap or 0.0
        )
        query = query.to(active).contiguous()
        out = torch.empty(count, heads, width, dtype=active, device="cpu")
        rows, c_shape = structs.CRows(), structs.shape_of(shape)
        structs.describe(rows, cache, count, parents)
        at = slice(layer, layer + 1) if pages else slice(2 * layer, 2 * layer + 2)
        first = structs.entries(data[at], shape, rows.capacity, 1)
        behind = 0 if pages else shape.kv_heads * rows.capacity * width * data.itemsize
        rest = (
            c_long(window),
            address("queries", query, active, heads, count, width),
            first,
            first + behind,
            address("attention", out, active, count, heads, width),
        )
        while need := self._lib.ts_attend(
            byref(c_shape), byref(rows), *rest, *structs.work_space(cache), self._count()
        ):
            structs.grow_work(cache, need)
        return out

    def linear(
        self,
        states: Float[Tensor, "n K"],
        weight: Packed,
        bias: Tensor | None = None,
        active: torch.dtype | None = None,
    ) -> Float[Tensor, "n N"]:
        """See :meth:`Backend.linear`."""
        whole = active == torch.int8
        if whole and not weight.stored:
            raise ValueError(
                "activations are torch.int8; valid: with a weight that is stored quantized"
            )
        kind = torch.float32 if whole else active_type(weight.dtype)
        states, rows, columns = states.to(kind).contiguous(), weight.rows, weight.columns
        count, groups = len(states), structs.groups_bytes(len(states), columns) if whole else 0
        out = torch.empty(count, rows, dtype=torch.float32, device="cpu")
        work = torch.empty(groups, dtype=torch.uint8, device="cpu")
        self._lib.ts_linear(
            address("products", out, torch.float32, count, rows),
            address("states", states, kind, count, columns),
            byref(structs.weight_of(weight, bias)),
            *(count, rows, columns),
            structs.ACTIVE[torch.int8 if whole else kind],
            address("groups", work, torch.uint8, groups),
            self._count(),
        )
        return out

    def take(self, weight: Packed, ids: Int[Tensor, " m"]) -> Float[Tensor, "m K"]:
        """See :meth:`Backend.take`."""
        if not weight.stored:
            return super().take(weight, ids)
        ids = ids.long().contiguous()
        out = torch.empty(len(ids), weight.columns, dtype=torch.float32, device="cpu")
        refused = self._lib.ts_take(
            address("rows", out, torch.float32, len(ids), weight.columns),
            byref(structs.weight_of(weight)),
            address("ids", ids, torch.int64, len(ids)),
            len(ids),
            weight.rows,
            weight.columns,
        )
        if refused >= 0:
            check_tokens((int(ids[refused]),), weight.rows)
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
            vector("the norm's weight", weight, width),
            count,
            width,
            eps,
            structs.TYPES[dtype],
            self._count(),
        )
        return out


@torch.inference_mode()
def fault_of(library: ctypes.CDLL) -> str | None:
    """The first kind of layers in which a library's rows have other bits than alone, or None: on
    one and two threads, in every type, and with quantized weights."""
    from tokenswift.kernels.check import Case, keeps_bits  # asked once a machine

    kernels = [CpuBackend(library, threads) for threads in (1, 2)]
    q8 = FORMATS["q8_0"]
    kinds: list[tuple[Any, ...]] = [(dtype,) for dtype in structs.TYPES]
    kinds += [
        (torch.float32, FORMATS["q4_1"]),
        (torch.bfloat16, q8),
        (torch.float32, q8, torch.int8),
    ]
    cases = (Case(kernels[0], *kind) for kind in kinds)
    return next((case.name for case in cases if not keeps_bits(kernels, case)), None)


def started(folder: Path) -> CpuBackend | str:
    """The backend of this machine; or in one line why it has no kernels, or none that keep the
    rule.

    Args:
        folder: where compiled libraries are kept, and beside them a mark for each that has passed
            the check.
    Raises:
        InputError: the processor does not have the instruction set that is asked for.
    """
    found = library(folder)
    if isinstance(found, str):
        return f"CPU kernels are not available ({found})"
    made, of = CpuBackend(found), hashlib.sha256(processor().encode()).hexdigest()[:12]
    mark = folder / f"{Path(found._name).stem}-{of}.passed"
    if mark.exists():
        return made
    if (wrong := fault_of(found)) is not None:
        return f"the compiled CPU kernels give rows other bits than they have alone ({wrong})"
    with suppress(OSError):  # it is asked again, then
        mark.touch()
    return made
