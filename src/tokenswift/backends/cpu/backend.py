"""The compiled CPU kernels (cpu.c) on torch tensors. `backends.torch` says in torch what they compute."""

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

from tokenswift.backends import base
from tokenswift.backends.base import Backend, check_rows
from tokenswift.backends.cpu.choose import NativeRanker
from tokenswift.backends.cpu.threads import Threads
from tokenswift.backends.torch import TorchBackend
from tokenswift.backends.weights import PRODUCTS, STORED_IN, LayerWeights, Packed, Shape, active_type
from tokenswift.config import SamplingParams
from tokenswift.interfaces import KVCache, Segment
from tokenswift.weights.registry import FORMATS

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of weights, keys and values
_ACTIVE = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 3}  # of what enters a product
_LOW = 16  # a low-bit format: this and GGUF's number of it
_GROUP = 48  # bytes of 32 activations as whole numbers


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
    """Kernels of a compiled library; see :func:`tokenswift.backends.cpu.build.library`.

    The library's work space belongs to the cache that a pass runs over, and bits do not depend on who else
    runs, so passes over different caches may run at the same time. One of them has the team of threads, the
    others run on the thread that calls.

    Args:
        library: the compiled kernels.
        threads: of every pass; by default ``torch.get_num_threads()`` at most, and fewer on a busy machine.
    """

    name = "native"
    panels = fused = equal_bits = True
    formats = tuple(FORMATS)

    def __init__(self, library: ctypes.CDLL, threads: int | None = None) -> None:
        super().__init__()
        self._lib = library
        self._fixed = threads
        self._threads = Threads()
        self.build = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "ts_build"))).decode()
        names = ("ts_linear", "ts_take", "ts_norm", "ts_layers", "ts_attend")
        linear, take, norm, layers, attend = (getattr(library, name) for name in names)
        rows = (c_void_p, c_long, c_void_p, c_long)
        linear.argtypes = [*rows, POINTER(_Weight), *[c_long] * 3, c_int, c_int, c_void_p, c_int]
        take.argtypes = [c_void_p, POINTER(_Weight), c_void_p, c_long, c_long]
        norm.argtypes = [c_void_p, c_void_p, c_void_p, c_long, c_long, c_float, c_int, c_int]
        layers.argtypes = [POINTER(_Shape), c_void_p, POINTER(_Pass)]
        attend.argtypes = [POINTER(_Shape), POINTER(_Rows), c_long, *[c_void_p] * 5, c_long, c_int]
        linear.restype = take.restype = norm.restype = None
        layers.restype = attend.restype = c_long

    def keeps(self, form: str, dtype: torch.dtype) -> bool:
        """See :meth:`Backend.keeps`."""
        return form in self.formats and dtype in STORED_IN

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
        array = (_Layer * len(weights))()
        for entry, layer in zip(array, weights, strict=True):
            for name in PRODUCTS:
                setattr(entry, name, _weight(getattr(layer, name), getattr(layer, f"{name}_bias")))
            for name in _VECTORS:
                setattr(entry, name, _pointer(getattr(layer, name)))
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
            count = len(segment.tokens)
            _describe(entry, segment.cache, count, segment.parents)
            found.append(torch.empty(layers, shape.heads, count, shape.width, dtype=shape.queries))
            entry.queries, entry.keys_values = _pointers(found[-1], segment.cache.data)
        limit = torch.get_num_threads()
        args = _Pass(n=len(states), count=len(segments), threads=self._count(limit), keep=keep)
        args.rows = ctypes.addressof(rows)
        args.cos, args.sin, args.states = _pointers(cos, sin, states)
        cache = segments[0].cache
        begun = perf_counter()
        while True:
            args.work, args.work_bytes = cache.work.data_ptr(), cache.work.numel()
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
        """See :meth:`Backend.attend`. Caps and sinks are left to torch, and so are other types of keys."""
        data = cache.data
        if softcap is not None or sinks is not None or data.dtype not in TYPES:
            more = {"softcap": softcap, "sinks": sinks}
            return TorchBackend().attend(query, layer, cache, parents, scale, window, **more)
        heads, count, width = query.shape
        active = active_type(data.dtype)
        shape = Shape(1, 0, 0, heads, data.shape[1], width, data.dtype, data.dtype, active, 0.0, scale)
        query = query.to(active).contiguous()
        out = torch.empty(count, heads, width, dtype=active)
        rows, c_shape = _Rows(), _c_shape(shape)
        _describe(rows, cache, count, parents)
        rest = (c_long(window), *_pointers(query, data[2 * layer], data[2 * layer + 1], out))
        while need := self._lib.ts_attend(
            byref(c_shape), byref(rows), *rest, cache.work.data_ptr(), cache.work.numel(), self._count()
        ):
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
        states = states.to(torch.float32 if whole else active_type(weight.dtype)).contiguous()
        out = torch.empty(len(states), weight.rows)
        work = torch.empty(len(states), -(-weight.columns // 32) * _GROUP if whole else 0, dtype=torch.uint8)
        self._lib.ts_linear(
            out.data_ptr(),
            weight.rows,
            states.data_ptr(),
            states.stride(0) * states.element_size(),
            byref(_weight(weight, bias)),
            len(states),
            weight.rows,
            weight.columns,
            _ACTIVE[torch.int8 if whole else states.dtype],
            0,
            work.data_ptr(),
            self._count(),
        )
        return out

    def take(self, weight: Packed, ids: Int[Tensor, " m"]) -> Float[Tensor, "m K"]:
        """See :meth:`Backend.take`."""
        if len(weight.parts) == 1 and weight.parts[0].format is None:
            return weight.take(ids)
        if not weight.stored:
            return weight.unpack()[ids]
        out, ids = torch.empty(len(ids), weight.columns), ids.long().contiguous()
        self._lib.ts_take(out.data_ptr(), byref(_weight(weight)), ids.data_ptr(), *out.shape)
        return out.to(weight.dtype)

    def norm(
        self, states: Float[Tensor, "n D"], weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Float[Tensor, "n D"]:
        """See :meth:`Backend.norm`."""
        states = states.float().contiguous()
        out = torch.empty(states.shape, dtype=dtype)
        self._lib.ts_norm(*_pointers(out, states, weight), *states.shape, eps, TYPES[dtype], self._count())
        return out


def _weight(packed: Packed, bias: Tensor | None = None) -> _Weight:
    """A weight for the kernels; its list of parts is made once."""
    if packed.native is None:
        packed.native = (_Part * len(packed.parts))()
        for entry, part in zip(packed.native, packed.parts, strict=True):
            entry.data, entry.rows = part.data.data_ptr(), part.rows
            entry.format = TYPES[part.data.dtype] if part.format is None else _LOW + part.format.code
    return _Weight(ctypes.addressof(packed.native), _pointer(bias))


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _pointers(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def _c_shape(shape: Shape) -> _Shape:
    sizes = (shape.layers, shape.hidden, shape.inner, shape.heads, shape.kv_heads, shape.width)
    return _Shape(*sizes, TYPES[shape.keys], _ACTIVE[shape.active], shape.eps, shape.scale)


def _describe(rows: _Rows, cache: KVCache, count: int, parents: Sequence[int] | None) -> None:
    """Fill in the rows of one text.

    Raises:
        ValueError: they do not fit the cache, or a parent is no earlier row.
    """
    check_rows(cache, count, parents)
    rows.n, rows.before, rows.capacity, rows.windows = count, cache.length, cache.data.shape[2], cache.ordered
    if parents is not None:
        rows.parents = ctypes.cast((c_int32 * count)(*parents), c_void_p)


def _more_work(cache: KVCache, need: int) -> None:
    """Room for what the kernels asked for, and more: with the text the need grows, not each time."""
    cache.work = torch.empty(need + need // 4, dtype=torch.uint8)
