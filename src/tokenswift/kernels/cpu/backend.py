"""The compiled CPU kernels (cpu.c) on torch tensors. `kernels.base` says in torch what they
compute."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref, c_int32, c_long, c_void_p
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.checks import check_tokens
from tokenswift.config.sampling import SamplingParams
from tokenswift.kernels.base import Backend
from tokenswift.kernels.batch import Batch, Body, Taps
from tokenswift.kernels.cpu import structs
from tokenswift.kernels.cpu.int8_cache import Pages
from tokenswift.kernels.cpu.library import library, processor
from tokenswift.kernels.cpu.ranker import NativeRanker
from tokenswift.kernels.cpu.structs import address, vector
from tokenswift.kernels.formats import FORMATS, PANEL, Stored
from tokenswift.kernels.weights import LayerWeights, Packed, Shape, active_type
from tokenswift.kv.cache import Entries, FullCache, KVCache


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
            count = len(segment.tokens)
            structs.describe(entry, segment.cache, count, segment.parents)
            sizes = (layers, shape.heads, count, shape.width)
            found.append(torch.empty(sizes, dtype=shape.queries, device="cpu"))
            entry.queries = address("queries", found[-1], shape.queries, *sizes)
            tail = segment.cache.tail
            in_tail = [tail is not None and layer.window > 0 for layer in body.weights]
            if tail is not None:
                entry.tail_before = segment.cache.tail_length
                entry.tail_capacity = tail.entries.capacity
                entry.tail = _entries_address(tail.entries, body, in_tail, True)
            entry.keys_values = _entries_address(segment.cache.entries, body, in_tail, False)
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
        data = cache.data
        entries = cache.entries
        odd = query.shape[-1] % 2  # the kernels take numbers in pairs
        readable = isinstance(entries, Pages) or data.dtype in structs.TYPES
        if sinks is not None or not readable or odd:
            more = {"softcap": softcap, "sinks": sinks}
            return super().attend(query, layer, cache, parents, scale, window, **more)
        heads, count, width = query.shape
        keys = torch.int8 if isinstance(entries, Pages) else data.dtype
        active = active_type(keys)
        shape = Shape(
            layers=1,
            hidden=0,
            inner=0,
            heads=heads,
            kv_heads=entries.kv_heads,
            width=width,
            weights=active,
            keys=keys,
            active=active,
            eps=0.0,
            scale=scale,
            cap=softcap or 0.0,
        )
        query = query.to(active).contiguous()
        out = torch.empty(count, heads, width, dtype=active, device="cpu")
        rows = structs.CRows()
        c_shape = structs.shape_of(shape)
        structs.describe(rows, cache, count, parents)
        if isinstance(entries, Pages):
            wide = entries.wide_keys[layer]
            pages = entries.pages(layer)
            page = structs.page_bytes(width, wide)
            sizes = (entries.kv_heads, entries.capacity // structs.PAGE, page)
            c_shape.keys = structs.INT16_KEYS if wide else structs.KEYS[torch.int8]
            first = address("keys and values", pages, torch.uint8, *sizes)
            behind = 0
        else:
            both = data[2 * layer : 2 * layer + 2]
            first = structs.entries(both, shape, rows.capacity, [False])
            behind = shape.kv_heads * rows.capacity * width * data.itemsize
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


def _entries_address(entries: Entries, body: Body, in_tail: Sequence[bool], tail: bool) -> int:
    """Where the keys and values of a body's layers are that are in a cache's tail, or are not.

    Raises:
        ValueError: the cache has other types of keys, or other sizes.
    """
    layers = zip(body.weights, in_tail, strict=True)
    wide = tuple(layer.wide_keys for layer, apart in layers if apart == tail)
    if isinstance(entries, Pages) and entries.wide_keys != wide:
        raise ValueError(f"keys of 16 bits are {entries.wide_keys}; valid for this model: {wide}")
    return structs.entries(entries.data, body.shape, entries.capacity, wide)


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
    cases = [Case(kernels[0], *kind) for kind in kinds]
    cases.append(Case(kernels[0], torch.float32, q8, torch.int8, keys=torch.int8))
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
