"""The compiled CPU kernels (cpu.c) on torch tensors. `kernels.torch` says in torch what they compute."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_long, c_void_p
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.checks import check_tokens
from tokenswift.config import SamplingParams
from tokenswift.interfaces import KVCache, Segment
from tokenswift.kernels import base
from tokenswift.kernels.base import Backend, capacity_of, check_ids, check_rows
from tokenswift.kernels.cpu.buffers import address
from tokenswift.kernels.cpu.choose import NativeRanker
from tokenswift.kernels.cpu.entries import (
    PAGE,
    IntFullCache,
    IntSparseCache,
    Pages,
    entry_bytes,
    page_bytes,
)
from tokenswift.kernels.cpu.threads import Threads
from tokenswift.kernels.formats.panels import PANEL, panel_bytes
from tokenswift.kernels.formats.registry import FORMATS
from tokenswift.kernels.torch import TorchBackend
from tokenswift.kernels.weights import (
    PRODUCTS,
    STORED_IN,
    DraftWeights,
    LayerWeights,
    Packed,
    Part,
    Shape,
    active_type,
)
from tokenswift.kv.full import FullCache
from tokenswift.kv.sparse import SparseCache

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of weights, keys and values
KEYS = {**TYPES, torch.int8: 3}  # of keys and values
_ACTIVE = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 3}  # of what enters a product
_LOW = 16  # a low-bit format: this and GGUF's number of it
_GROUP, _BLOCK = 48, 12  # bytes of 32 activations in int8, and rows that stand together
_MOST_NUMBERS = 1 << 18  # of a row that the kernels hold on the stack


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, c_long) for name in ("layers", "hidden", "inner", "heads", "kv_heads", "width")),
        *((name, c_int) for name in ("keys", "active")),
        *((name, c_float) for name in ("eps", "scale")),
    ]


class _Part(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("rows", c_long), ("format", c_int)]


class _Weight(ctypes.Structure):
    _fields_ = [("parts", c_void_p), ("bias", c_void_p)]


_VECTORS = ("norm", "mlp_norm", "query_norm", "key_norm")


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Weight) for name in PRODUCTS),
        *((name, c_void_p) for name in _VECTORS),
        ("window", c_long),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, c_long) for name in ("n", "before", "capacity")),
        *((name, c_void_p) for name in ("parents", "keys_values", "queries")),
        ("windows", c_int),
    ]


class _DraftStep(ctypes.Structure):
    _fields_ = [
        *((name, _Weight) for name in ("first", "outer")),
        *((name, c_void_p) for name in ("norm", "base_norm", "embed_norm", "heads", "sizes")),
        *((name, c_long) for name in ("count", "width", "inner")),
        ("eps", c_float),
        ("active", c_int),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        *((name, c_long) for name in ("n", "count")),
        *((name, c_void_p) for name in ("rows", "cos", "sin", "states", "work")),
        ("work_bytes", c_long),
        *((name, c_int) for name in ("threads", "keep")),
        ("waited", c_int64),
        ("shared", c_int),
    ]


@dataclass(slots=True)
class Body(base.Body):
    """A decoder's layers, ready to run; keeps what its pointers point to."""

    c_shape: _Shape
    c_layers: Any


class CpuBackend(Backend):
    """Kernels of a compiled library; see :func:`tokenswift.kernels.cpu.build.library`.

    The library's work space belongs to the cache that a pass runs over, and bits do not depend on who else
    runs, so passes over different caches may run at the same time. One of them has the team of threads, the
    others run on the thread that calls.

    Args:
        library: the compiled kernels.
        threads: of every pass; by default ``torch.get_num_threads()`` at most, and fewer on a busy machine.
    """

    name = "native"
    panels = fused = equal_bits = prefers_int8 = True
    formats = tuple(FORMATS)

    def __init__(self, library: ctypes.CDLL, threads: int | None = None) -> None:
        super().__init__()
        self._lib = library
        self._fixed = threads
        self._threads = Threads()
        self._copy_entries = library.ts_copy
        self._copy_entries.argtypes = [c_void_p, c_long, c_void_p, *[c_long] * 4, *[c_void_p] * 2, c_int]
        self._copy_entries.restype = None
        self.build = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "ts_build"))).decode()
        names = ("ts_linear", "ts_take", "ts_norm", "ts_layers", "ts_attend")
        linear, take, norm, layers, attend = (getattr(library, name) for name in names)
        rows = (c_void_p, c_long, c_void_p, c_long)
        linear.argtypes = [*rows, POINTER(_Weight), *[c_long] * 3, c_int, c_int, c_void_p, c_int]
        take.argtypes = [c_void_p, POINTER(_Weight), c_void_p, *[c_long] * 3]
        norm.argtypes = [c_void_p, c_void_p, c_void_p, c_long, c_long, c_float, c_int, c_int]
        layers.argtypes = [POINTER(_Shape), c_void_p, POINTER(_Pass)]
        attend.argtypes = [POINTER(_Shape), POINTER(_Rows), c_long, *[c_void_p] * 5, c_long, c_int]
        self._draft = library.ts_draft
        self._draft.argtypes = [*[c_void_p] * 5, POINTER(_DraftStep), c_long, c_void_p, c_long, c_int]
        self._draft.restype = c_long
        linear.restype = norm.restype = None
        take.restype = layers.restype = attend.restype = c_long

    def keeps(self, form: str, dtype: torch.dtype) -> bool:
        """See :meth:`Backend.keeps`."""
        return form in self.formats and dtype in STORED_IN

    def new_cache(
        self, layers: int, kv_heads: int, width: int, capacity: int, dtype: torch.dtype
    ) -> FullCache:
        """See :meth:`Backend.new_cache`; int8 in pages."""
        if dtype != torch.int8:
            return super().new_cache(layers, kv_heads, width, capacity, dtype)
        return IntFullCache(Pages.empty(layers, kv_heads, width, capacity, self._copy_entries))

    def has_int8_keys(self, width: int) -> bool:
        """See :meth:`Backend.has_int8_keys`."""
        return width % 4 == 0

    def entry_bytes(self, width: int, dtype: torch.dtype) -> int:
        """See :meth:`Backend.entry_bytes`."""
        return entry_bytes(width) if dtype == torch.int8 else super().entry_bytes(width, dtype)

    def partial_cache(self, full: FullCache, budget: int, sinks: int, scratch: int) -> SparseCache:
        """See :meth:`Backend.partial_cache`."""
        kind = IntSparseCache if isinstance(full, IntFullCache) else SparseCache
        return kind(full, budget, sinks, scratch)

    def _count(self, limit: int | None = None) -> int:
        """Threads of the next pass."""
        return self._fixed or self._threads.count(limit or torch.get_num_threads())

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
        _check_sizes(shape)
        array = (_Layer * shape.layers)()
        sizes = _product_sizes(shape)
        for entry, layer in zip(array, weights, strict=True):
            for name in PRODUCTS:
                weight = getattr(layer, name)
                if (weight.rows, weight.columns) != sizes[name]:
                    raise ValueError(
                        f"{name} has {(weight.rows, weight.columns)} numbers; valid: {sizes[name]}"
                    )
                setattr(entry, name, _weight(weight, getattr(layer, f"{name}_bias")))
            for name in _VECTORS:
                size = shape.hidden if name in ("norm", "mlp_norm") else shape.width
                setattr(entry, name, _vector(name, getattr(layer, name), size))
            entry.window = layer.window
        return Body(shape, weights, _c_shape(shape), array)

    def layers(
        self,
        body: Body,
        states: Float[Tensor, "n D"],
        cos: Float[Tensor, "n half"],
        sin: Float[Tensor, "n half"],
        segments: Sequence[Segment],
        keep: bool = True,
    ) -> list[Float[Tensor, "L H m d"]]:
        """See :meth:`Backend.layers`."""
        shape = body.shape
        layers = shape.layers if keep else 1
        found: list[Tensor] = []
        rows = (_Rows * len(segments))()
        for entry, segment in zip(rows, segments, strict=True):
            count, data = len(segment.tokens), segment.cache.data
            _describe(entry, segment.cache, count, segment.parents)
            sizes = (layers, shape.heads, count, shape.width)
            found.append(torch.empty(sizes, dtype=shape.queries, device="cpu"))
            entry.queries = address("queries", found[-1], shape.queries, *sizes)
            entry.keys_values = _entries(data, shape, entry.capacity)
        limit, count = torch.get_num_threads(), sum(entry.n for entry in rows)
        args = _Pass(n=count, count=len(segments), threads=self._count(limit), keep=keep)
        args.rows = ctypes.addressof(rows)
        args.cos = address("cos", cos, torch.float32, count, shape.width // 2)
        args.sin = address("sin", sin, torch.float32, count, shape.width // 2)
        args.states = address("states", states, torch.float32, count, shape.hidden)
        cache = segments[0].cache
        begun = perf_counter()
        while True:
            args.work, args.work_bytes = _work(cache)
            need = self._lib.ts_layers(byref(body.c_shape), body.c_layers, byref(args))
            if not need:
                break
            _more_work(cache, need)
        seconds = perf_counter() - begun
        if self._fixed is None:
            self._threads.observe(len(states), limit, args.shared, seconds, args.waited / 1e9)
        return found

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
        """See :meth:`Backend.attend`. Caps and sinks are left to torch, and so are other types of keys
        and heads of odd width."""
        data, pages = cache.data, cache.data.dtype == torch.uint8
        odd = query.shape[-1] % 2  # the kernels take numbers in pairs
        if softcap is not None or sinks is not None or not (pages or data.dtype in TYPES) or odd:
            more = {"softcap": softcap, "sinks": sinks}
            return TorchBackend().attend(query, layer, cache, parents, scale, window, **more)
        heads, count, width = query.shape
        keys = torch.int8 if pages else data.dtype
        active = active_type(keys)
        shape = Shape(1, 0, 0, heads, data.shape[1], width, active, keys, active, 0.0, scale)
        _check_sizes(shape)
        query = query.to(active).contiguous()
        out = torch.empty(count, heads, width, dtype=active, device="cpu")
        rows, c_shape = _Rows(), _c_shape(shape)
        _describe(rows, cache, count, parents)
        at = slice(layer, layer + 1) if pages else slice(2 * layer, 2 * layer + 2)
        first = _entries(data[at], shape, rows.capacity)
        behind = 0 if pages else shape.kv_heads * rows.capacity * width * data.itemsize
        rest = (
            c_long(window),
            address("queries", query, active, heads, count, width),
            first,
            first + behind,
            address("attention", out, active, count, heads, width),
        )
        while need := self._lib.ts_attend(byref(c_shape), byref(rows), *rest, *_work(cache), self._count()):
            _more_work(cache, need)
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
            raise ValueError("activations are torch.int8; valid: with a weight that is stored in few bits")
        kind = torch.float32 if whole else active_type(weight.dtype)
        states, rows, columns = states.to(kind).contiguous(), weight.rows, weight.columns
        count, groups = len(states), _groups(len(states), columns) if whole else 0
        out = torch.empty(count, rows, dtype=torch.float32, device="cpu")
        work = torch.empty(groups, dtype=torch.uint8, device="cpu")
        self._lib.ts_linear(
            address("products", out, torch.float32, count, rows),
            rows,
            address("states", states, kind, count, columns),
            columns * kind.itemsize,
            byref(_weight(weight, bias)),
            count,
            rows,
            columns,
            _ACTIVE[torch.int8 if whole else kind],
            0,
            address("groups", work, torch.uint8, groups),
            self._count(),
        )
        return out

    def draft_level(
        self,
        step: DraftWeights,
        states: Float[Tensor, "n D"],
        base: Float[Tensor, "1 D"],
        embeds: Float[Tensor, "n D"],
        heads: Sequence[Packed],
    ) -> tuple[Float[Tensor, "n D"], Float[Tensor, "n S"]] | None:
        """See :meth:`Backend.draft_level`; of float32 and int8 products."""
        given = _draft_step(step, heads)
        if given is None:
            return None
        states, base, embeds = (rows.float().contiguous() for rows in (states, base, embeds))
        count, width = len(states), given.width
        out = torch.empty(count, width, dtype=torch.float32, device="cpu")
        columns = sum(head.rows for head in heads)
        logits = torch.empty(count, columns, dtype=torch.float32, device="cpu")
        args = (
            address("next states", out, torch.float32, count, width),
            address("logits", logits, torch.float32, count, columns),
            address("states", states, torch.float32, count, width),
            address("the base state", base, torch.float32, 1, width),
            address("embeddings", embeds, torch.float32, count, width),
            byref(given),
            count,
        )
        size = step.room
        while True:
            work = torch.empty(size, dtype=torch.uint8, device="cpu")
            need = self._draft(*args, address("work space", work, torch.uint8, size), size, self._count())
            if not need:
                return out, logits
            step.room = size = need

    def take(self, weight: Packed, ids: Int[Tensor, " m"]) -> Float[Tensor, "m K"]:
        """See :meth:`Backend.take`."""
        if not weight.stored:
            check_ids(ids, weight.rows)
            return weight.take(ids) if len(weight.parts) == 1 else weight.unpack()[ids]
        ids = ids.long().contiguous()
        out = torch.empty(len(ids), weight.columns, dtype=torch.float32, device="cpu")
        refused = self._lib.ts_take(
            address("rows", out, torch.float32, len(ids), weight.columns),
            byref(_weight(weight)),
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
            _vector("the norm's weight", weight, width),
            count,
            width,
            eps,
            TYPES[dtype],
            self._count(),
        )
        return out


def _draft_step(step: DraftWeights, heads: Sequence[Packed]) -> _DraftStep | None:
    """Draft heads for the kernels, made once; None where these do not multiply so.

    Raises:
        ValueError: sizes that do not fit each other.
    """
    if step.native is not None and step.native[0] == heads:
        return step.native[1]
    weights = [step.first, *([] if step.outer is None else [step.outer]), *heads]
    stored = all(weight.stored for weight in weights)
    if step.dtype != torch.float32 or not stored and any(weight.stored for weight in weights):
        return None
    if any(active_type(weight.dtype) != torch.float32 for weight in weights):
        return None
    width = len(step.norms[0])
    inner = step.first.rows - width
    sizes = [(step.first, step.first.rows, 3 * width), *((head, head.rows, width) for head in heads)]
    if step.outer is not None:
        sizes.append((step.outer, width, inner))
    for weight, rows, columns in sizes:
        if (weight.rows, weight.columns) != (rows, columns) or inner < 0:
            raise ValueError(
                f"draft heads have {(weight.rows, weight.columns)} numbers; valid: {(rows, columns)}"
            )
    made = _DraftStep(
        first=_weight(step.first, step.bias),
        count=len(heads),
        width=width,
        inner=inner,
        eps=step.eps,
        active=_ACTIVE[torch.int8 if stored else torch.float32],
    )
    if step.outer is not None:
        made.outer = _weight(step.outer)
    made.norm, made.base_norm, made.embed_norm = (_vector("a norm", norm, width) for norm in step.norms)
    lists = (_Weight * len(heads))(*map(_weight, heads)), (c_long * len(heads))(*(h.rows for h in heads))
    made.heads, made.sizes = map(ctypes.addressof, lists)
    made.kept = lists  # by the one who calls: another thread may draft with other rows meanwhile
    step.native = (list(heads), made)
    return made


def _weight(packed: Packed, bias: Tensor | None = None) -> _Weight:
    """A weight for the kernels; its list of parts is made once."""
    if packed.native is None:
        made = (_Part * len(packed.parts))()
        for entry, part in zip(made, packed.parts, strict=True):
            entry.data, entry.rows = _part(part, packed.columns), part.rows
            entry.format = TYPES[part.data.dtype] if part.format is None else _LOW + part.format.code
        packed.native = made
    return _Weight(ctypes.addressof(packed.native), _vector("the bias", bias, packed.rows))


def _part(part: Part, columns: int) -> int:
    """Where a part's panels are."""
    panels, kind = -(-part.rows // PANEL), part.data.dtype
    if part.format is not None:
        size = panel_bytes(part.format, columns)
        return address(f"a weight in {part.format.name}", part.data, torch.uint8, panels, size)
    pairs = 2 if kind == torch.bfloat16 else 1
    sizes = (panels, columns // pairs, PANEL, pairs)
    return address("a weight", part.data, kind if kind in TYPES else torch.float32, *sizes)


def _groups(rows: int, columns: int) -> int:
    """Bytes of rows of activations in int8; blocks of rows are filled up."""
    return -(-rows // _BLOCK) * _BLOCK * -(-columns // 32) * _GROUP


def _entries(data: Tensor, shape: Shape, capacity: int) -> int:
    """Where a cache's keys and values are."""
    if shape.keys == torch.int8:
        sizes = (shape.layers, shape.kv_heads, capacity // PAGE, page_bytes(shape.width))
        return address("keys and values", data, torch.uint8, *sizes)
    return address(
        "keys and values", data, shape.keys, 2 * shape.layers, shape.kv_heads, capacity, shape.width
    )


def _vector(name: str, vector: Tensor | None, size: int) -> int | None:
    """Where the numbers of a bias or a norm are."""
    return None if vector is None else address(name, vector, torch.float32, size)


def _work(cache: KVCache) -> tuple[int, int]:
    """A cache's work space for the kernels, and its bytes."""
    size = cache.work.numel()
    return address("work space", cache.work, torch.uint8, size), size


def _product_sizes(shape: Shape) -> dict[str, tuple[int, int]]:
    """Rows and columns of a layer's weights."""
    own, hidden, inner = shape.heads * shape.width, shape.hidden, shape.inner
    both = own + 2 * shape.kv_heads * shape.width
    sizes = ((both, hidden), (hidden, own), (2 * inner, hidden), (hidden, inner))
    return dict(zip(PRODUCTS, sizes, strict=True))


def _check_sizes(shape: Shape) -> None:
    """Refuse layers that the kernels do not run: a head's numbers, for one, go by their threads' stacks.

    Raises:
        ValueError: heads that do not divide, or sizes that are not in range.
    """
    if shape.kv_heads < 1 or shape.heads < 1 or shape.heads % shape.kv_heads:
        raise ValueError(f"heads are {shape.heads} over {shape.kv_heads}; valid: a multiple of 1 or more")
    if shape.width % 2 or not 2 <= shape.width <= _MOST_NUMBERS:
        raise ValueError(f"a head's width is {shape.width}; valid: an even number, 2 to {_MOST_NUMBERS}")
    if shape.keys == torch.int8 and shape.width % 4:
        raise ValueError(f"a head's width is {shape.width}; valid with keys in int8: a multiple of 4")
    if max(shape.hidden, shape.inner) > _MOST_NUMBERS:
        raise ValueError(
            f"a row has {max(shape.hidden, shape.inner)} numbers; valid: {_MOST_NUMBERS} at most"
        )


def _c_shape(shape: Shape) -> _Shape:
    sizes = (shape.layers, shape.hidden, shape.inner, shape.heads, shape.kv_heads, shape.width)
    return _Shape(*sizes, KEYS[shape.keys], _ACTIVE[shape.active], shape.eps, shape.scale)


def _describe(rows: _Rows, cache: KVCache, count: int, parents: Sequence[int] | None) -> None:
    """Fill in the rows of one text.

    Raises:
        ValueError: they do not fit the cache, or a parent is no earlier row.
    """
    check_rows(cache, count, parents)
    rows.n, rows.before, rows.capacity, rows.windows = (
        count,
        cache.length,
        capacity_of(cache.data),
        cache.ordered,
    )
    if parents is not None:
        rows.parents = ctypes.cast((c_int32 * count)(*parents), c_void_p)


def _more_work(cache: KVCache, need: int) -> None:
    """Room for what the kernels asked for, and more: with the text the need grows, not each time.

    Raises:
        ValueError: they have refused the rows.
    """
    if need < 0:
        raise ValueError("the kernels refuse rows; valid: rows that fit, each parent -1 or an earlier row")
    cache.work = torch.empty(need + need // 4, dtype=torch.uint8, device="cpu")
