"""The compiled CPU kernels (cpu.c) on torch tensors. `reference` says in torch what they compute."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_long, c_void_p
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.backends.cpu.choose import NativeRanker
from tokenswift.backends.cpu.threads import Threads
from tokenswift.backends.cpu.weights import LayerWeights, Packed, Shape
from tokenswift.config import SamplingParams
from tokenswift.interfaces import KVCache

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Shape(ctypes.Structure):
    _fields_ = [(name, c_long) for name in ("layers", "hidden", "inner", "heads", "kv_heads", "width")] + [
        ("type", c_int),
        ("eps", c_float),
        ("scale", c_float),
    ]


_WEIGHTS = ("qkv", "out", "gate_up", "down")
_VECTORS = ("norm", "mlp_norm", "qkv_bias", "out_bias", "gate_up_bias", "down_bias", "query_norm", "key_norm")


class _Layer(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in (*_WEIGHTS, *_VECTORS)] + [("window", c_long)]


class _Pass(ctypes.Structure):
    _fields_ = [
        *((name, c_long) for name in ("n", "before", "capacity")),
        *((name, c_void_p) for name in ("parents", "cos", "sin", "keys_values", "queries", "states", "work")),
        ("work_bytes", c_long),
        ("threads", c_int),
        ("keep", c_int),
        ("windows", c_int),
        ("waited", c_int64),
        ("shared", c_int),
    ]


@dataclass(slots=True)
class Body:
    """A decoder's layers, ready to run; keeps what its pointers point to."""

    shape: Shape
    weights: list[LayerWeights]
    c_shape: _Shape
    c_layers: Any


class NativeKernels:
    """Kernels of a compiled library; see :func:`tokenswift.backends.cpu.build.library`.

    The library's work space belongs to the cache that a pass runs over, and bits do not depend on who else
    runs, so passes over different caches may run at the same time. One of them has the team of threads, the
    others run on the thread that calls.

    Args:
        library: the compiled kernels.
        threads: of every pass; by default ``torch.get_num_threads()`` at most, and fewer on a busy machine.
    """

    name = "native"
    panels = True

    def __init__(self, library: ctypes.CDLL, threads: int | None = None) -> None:
        self._lib = library
        self._fixed = threads
        self._threads = Threads()
        #: compiler, flags and version that made the library
        self.build = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "ts_build"))).decode()
        linear, norm, layers, attend = (
            getattr(library, name) for name in ("ts_linear", "ts_norm", "ts_layers", "ts_attend")
        )
        linear.argtypes = [
            c_void_p,
            c_long,
            c_void_p,
            c_long,
            c_void_p,
            c_void_p,
            *[c_long] * 3,
            *[c_int] * 3,
        ]
        norm.argtypes = [c_void_p, c_void_p, c_void_p, c_long, c_long, c_float, c_int, c_int]
        layers.argtypes = [POINTER(_Shape), c_void_p, POINTER(_Pass)]
        attend.argtypes = [POINTER(_Shape), POINTER(_Pass), c_long, *[c_void_p] * 4]
        linear.restype = norm.restype = None
        layers.restype = attend.restype = c_long

    def _count(self, limit: int | None = None) -> int:
        """Threads of the next pass."""
        return self._fixed or self._threads.count(limit or torch.get_num_threads())

    def ranker(self, params: SamplingParams) -> NativeRanker:
        """The choice rule for one generation."""
        return NativeRanker(self._lib, params)

    def body(self, shape: Shape, weights: list[LayerWeights]) -> Body:
        """The layers in the form that :meth:`layers` takes."""
        array = (_Layer * len(weights))()
        for entry, layer in zip(array, weights, strict=True):
            for name in _WEIGHTS:
                setattr(entry, name, getattr(layer, name).data.data_ptr())
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
        cache: KVCache,
        parents: Sequence[int] | None,
        keep: bool = True,
    ) -> Float[Tensor, "L H n d"]:
        """Run a pass through all layers: ``states`` (float32) from embeddings to before the final norm, in
        place. Keys and values go behind the cache's own; returns the rotated queries (of the last layer
        alone, (1, H, n, d), unless ``keep``)."""
        shape, count = body.shape, len(states)
        layers = shape.layers if keep else 1
        queries = torch.empty(layers, shape.heads, count, shape.width, dtype=shape.active)
        limit = torch.get_num_threads()
        args = _pass(cache, count, parents, self._count(limit))
        args.keep = keep
        args.cos, args.sin, args.states, args.queries = _pointers(cos, sin, states, queries)
        args.keys_values = cache.data.data_ptr()
        begun = perf_counter()
        need = self._lib.ts_layers(byref(body.c_shape), body.c_layers, byref(args))
        if need:
            _more_work(cache, args, need)
            self._lib.ts_layers(byref(body.c_shape), body.c_layers, byref(args))
        seconds = perf_counter() - begun
        if self._fixed is None:
            self._threads.observe(count, limit, args.shared, seconds, args.waited / 1e9)
        return queries

    def attend(
        self,
        query: Float[Tensor, "H n d"],
        layer: int,
        cache: KVCache,
        parents: Sequence[int] | None,
        scale: float,
        window: int = 0,
    ) -> Float[Tensor, "n H d"]:
        """Attention of one layer, whose keys and values of the pass stand behind the cache's own already."""
        data = cache.data
        shape = Shape(1, 0, 0, query.shape[0], data.shape[1], query.shape[2], data.dtype, 0.0, scale)
        query = query.to(shape.active).contiguous()
        heads, count, width = query.shape
        out = torch.empty(count, heads, width, dtype=shape.active)
        args = _pass(cache, count, parents, self._count())
        keys, values = data[2 * layer], data[2 * layer + 1]
        rest = (c_long(window), *_pointers(query, keys, values, out))
        c_shape = _c_shape(shape)
        need = self._lib.ts_attend(byref(c_shape), byref(args), *rest)
        if need:
            _more_work(cache, args, need)
            self._lib.ts_attend(byref(c_shape), byref(args), *rest)
        return out

    def linear(
        self, states: Float[Tensor, "n K"], weight: Packed, bias: Tensor | None = None
    ) -> Float[Tensor, "n N"]:
        """States (of the weight's active type) times the weight's transpose, plus bias; float32."""
        states = states.to(torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32).contiguous()
        out = torch.empty(len(states), weight.rows)
        self._lib.ts_linear(
            out.data_ptr(),
            weight.rows,
            states.data_ptr(),
            states.stride(0) * states.element_size(),
            weight.data.data_ptr(),
            _pointer(bias),
            len(states),
            weight.rows,
            weight.columns,
            TYPES[weight.dtype],
            0,
            self._count(),
        )
        return out

    def norm(
        self, states: Float[Tensor, "n D"], weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Float[Tensor, "n D"]:
        """RMS norm of float32 states, as ``dtype``."""
        states = states.float().contiguous()
        out = torch.empty(states.shape, dtype=dtype)
        self._lib.ts_norm(*_pointers(out, states, weight), *states.shape, eps, TYPES[dtype], self._count())
        return out


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _pointers(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def _c_shape(shape: Shape) -> _Shape:
    values = [getattr(shape, field.name) for field in fields(shape)]
    return _Shape(*(TYPES[value] if isinstance(value, torch.dtype) else value for value in values))


def _pass(cache: KVCache, count: int, parents: Sequence[int] | None, threads: int) -> _Pass:
    before, capacity = cache.length, cache.data.shape[2]
    if before + count > capacity:
        raise ValueError(
            f"a pass of {count} rows over {before} keys needs more room than the cache's {capacity}"
        )
    args = _Pass(n=count, before=before, capacity=capacity, threads=threads, windows=cache.ordered)
    if parents is not None:
        if len(parents) != count or any(not -1 <= parent < row for row, parent in enumerate(parents)):
            raise ValueError(
                f"parents are {tuple(parents)}; valid: {count} of them, each -1 or an earlier row"
            )
        args.parents = ctypes.cast((c_int32 * count)(*parents), c_void_p)
    args.work, args.work_bytes = cache.work.data_ptr(), cache.work.numel()
    return args


def _more_work(cache: KVCache, args: _Pass, need: int) -> None:
    cache.work = torch.empty(
        need + need // 4, dtype=torch.uint8
    )  # with the text the need grows: not each time
    args.work, args.work_bytes = cache.work.data_ptr(), cache.work.numel()
