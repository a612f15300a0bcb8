"""The boundary to C: structures of packed weights, caches and tensors. Every tensor that the
kernels read or write is looked at in :func:`address`, and nowhere else."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int, c_int32, c_long, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from tokenswift.kernels.batch import check_rows
from tokenswift.kernels.formats import PANEL
from tokenswift.kernels.weights import PRODUCTS, LayerWeights, Packed, Part, Shape
from tokenswift.kv.cache import KVCache

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of weights, keys and values
KEYS = {**TYPES, torch.int8: 3}  # of keys and values
INT16_KEYS = 4  # of keys, beside values in int8
ACTIVE = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 3}  # of what enters a product
LOW = 16  # a quantized format: this and GGUF's number of it
_GROUP, _BLOCK = 48, 12  # bytes of 32 activations in int8, and rows that stand together
MOST_NUMBERS = 1 << 18  # of a row that the kernels hold on the stack
PAGE = 16  # tokens of a page of keys and values in int8
SCALES = 3 * 4 * PAGE  # bytes of a page's scales
KEY_LEVELS = 8191  # the greatest integer of keys of 16 bits
MOST_WIDE = 512  # dimensions of a head whose keys may be of 16 bits: sums stay below 2^31


VECTORS = ("norm", "mlp_norm", "out_norm", "down_norm", "query_norm", "key_norm")
_KINDS: dict[str, Any] = {
    **{"long": c_long, "int": c_int, "float": c_float, "double": c_double},
    **{"uint64": c_uint64, "pointer": c_void_p},
}


def fields(declared: str, **kinds: Any) -> list[tuple[str, Any]]:
    """A structure's fields, declared nearly as in C: ``long rows, columns; pointer data``."""
    made: list[tuple[str, Any]] = []
    for line in declared.split(";"):
        kind, _, names = line.strip().partition(" ")
        made += [(name.strip(), (_KINDS | kinds)[kind]) for name in names.split(",")]
    return made


class CShape(ctypes.Structure):
    _fields_ = fields(
        "long layers, hidden, inner, heads, kv_heads, width; int keys, active; "
        "float eps, scale, cap, residual; int gelu, whole_norms, parallel"
    )


class CPart(ctypes.Structure):
    _fields_ = fields("pointer data; long rows; int format")


class CWeight(ctypes.Structure):
    _fields_ = fields("pointer parts, bias")


class CLayer(ctypes.Structure):
    _fields_ = fields(
        f"weight {', '.join(PRODUCTS)}; pointer {', '.join(VECTORS)}; long window, rope; int wide; "
        "weight beside; pointer beside_norm",
        weight=CWeight,
    )


class CRows(ctypes.Structure):
    _fields_ = fields(
        "long n, before, capacity; pointer parents, keys_values, queries; int windows; pointer "
        "tail; "
        "long tail_before, tail_capacity"
    )


class CPass(ctypes.Structure):
    _fields_ = fields(
        "long n, count; pointer rows, cos, sin, states, work; long work_bytes; int threads, "
        "keep; long taps; "
        "pointer tapped, features, beside"
    )


#: of each function: what it returns, and its arguments
_ENTRIES = {
    "ts_linear": "void: pointer pointer pointer long long long int pointer int",
    "ts_take": "long: pointer pointer pointer long long long",
    "ts_norm": "void: pointer pointer pointer long long float int int",
    "ts_layers": "long: pointer pointer pointer",
    "ts_attend": "long: pointer pointer long pointer pointer pointer pointer pointer long int",
    "ts_pack": "void: pointer int pointer long long long int",
    "ts_copy": "void: pointer long pointer long long long pointer long long pointer pointer int",
    "ts_best": "void: pointer long long int pointer pointer",
    "ts_rank": "long: pointer pointer pointer long int pointer pointer pointer pointer pointer",
}


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes what the library's functions take and return."""
    for name, declared in _ENTRIES.items():
        result, _, arguments = declared.partition(": ")
        entry = getattr(library, name)
        entry.restype, entry.argtypes = (
            _KINDS.get(result),
            [_KINDS[kind] for kind in arguments.split()],
        )


def address(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Where a tensor's numbers are, for C, which takes their type and number on trust.

    Args:
        name: for the message.
        dtype: the type that C reads or writes.
        shape: the sizes that C goes by.
    Raises:
        ValueError: the tensor is of another type or shape, on another device, or not contiguous.
    """
    if (
        tensor.dtype != dtype
        or tensor.shape != shape
        or tensor.device.type != "cpu"
        or not tensor.is_contiguous()
    ):
        gaps = "" if tensor.is_contiguous() else ", not contiguous"
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}{gaps}; "
            f"valid: {dtype} of shape {shape} on cpu, contiguous"
        )
    return tensor.data_ptr()


def weight_of(packed: Packed, bias: Tensor | None = None) -> CWeight:
    """A weight for the kernels; its list of parts is made once."""
    if packed.native is None:
        made = (CPart * len(packed.parts))()
        for entry, part in zip(made, packed.parts, strict=True):
            entry.data, entry.rows = _part(part, packed.columns), part.rows
            entry.format = TYPES[part.data.dtype] if part.format is None else LOW + part.format.code
        packed.native = made
    return CWeight(ctypes.addressof(packed.native), vector("the bias", bias, packed.rows))


def _part(part: Part, columns: int) -> int:
    """Where a part's panels are."""
    panels, kind = -(-part.rows // PANEL), part.data.dtype
    if part.format is not None:
        size = part.format.panel_bytes(columns)
        return address(f"a weight in {part.format.name}", part.data, torch.uint8, panels, size)
    pairs = 2 if kind == torch.bfloat16 else 1
    sizes = (panels, columns // pairs, PANEL, pairs)
    return address("a weight", part.data, kind if kind in TYPES else torch.float32, *sizes)


def page_bytes(width: int, wide_keys: bool = False) -> int:
    """Bytes of a page of heads of a width (cpu_int_attention.h); ``wide_keys``: of 16 bits."""
    key_bytes = (2 if wide_keys else 1) * width * PAGE
    value_bytes = -(-width // 16) * 16 * PAGE
    return SCALES + key_bytes + value_bytes


def groups_bytes(rows: int, columns: int) -> int:
    """Bytes of rows of activations in int8; blocks of rows are filled up."""
    return -(-rows // _BLOCK) * _BLOCK * -(-columns // 32) * _GROUP


def entries(data: Tensor, shape: Shape, capacity: int, wide_keys: Sequence[bool]) -> int:
    """Where a cache's keys and values of some layers are.

    Args:
        wide_keys: of each of these layers, whether its keys of whole numbers are of 16 bits.
    """
    if shape.keys == torch.int8:
        page_sizes = sum(page_bytes(shape.width, wide) for wide in wide_keys)
        size = shape.kv_heads * (capacity // PAGE) * page_sizes
        return address("keys and values", data, torch.uint8, size)
    sizes = (2 * len(wide_keys), shape.kv_heads, capacity, shape.width)
    return address("keys and values", data, shape.keys, *sizes)


def vector(name: str, vector: Tensor | None, size: int) -> int | None:
    """Where the numbers of a bias or a norm are."""
    return None if vector is None else address(name, vector, torch.float32, size)


def work_space(cache: KVCache) -> tuple[int, int]:
    """A cache's work space for the kernels, and its bytes."""
    size = cache.work.numel()
    return address("work space", cache.work, torch.uint8, size), size


def check_sizes(shape: Shape) -> None:
    """Refuse layers that the kernels do not run: a head's numbers, for one, go by their threads'
    stacks.

    Raises:
        ValueError: heads that do not divide, or sizes that are not in range.
    """
    heads, kv_heads, width, longest = (
        shape.heads,
        shape.kv_heads,
        shape.width,
        max(shape.hidden, shape.inner),
    )
    pairs = 4 if shape.keys == torch.int8 else 2
    grouped = kv_heads >= 1 and heads >= 1 and heads % kv_heads == 0
    if not grouped or width % pairs or not 2 <= width <= MOST_NUMBERS or longest > MOST_NUMBERS:
        raise ValueError(
            f"heads are {heads} over {kv_heads} of width {width}, and a row has {longest} "
            f"numbers; valid: a "
            f"multiple of 1 or more, of a multiple of {pairs}, and {MOST_NUMBERS} numbers at most"
        )


def shape_of(shape: Shape) -> CShape:
    """A shape for the kernels.

    Raises:
        ValueError: see :func:`check_sizes`.
    """
    check_sizes(shape)
    sizes = (shape.layers, shape.hidden, shape.inner, shape.heads, shape.kv_heads, shape.width)
    switches = (shape.eps, shape.scale, shape.cap, shape.residual, shape.gelu, shape.whole_norms)
    return CShape(*sizes, KEYS[shape.keys], ACTIVE[shape.active], *switches, shape.parallel)


def layers_of(shape: Shape, weights: Sequence[LayerWeights]) -> Any:
    """Layers for the kernels.

    Raises:
        ValueError: a weight or norm of other rows and columns.
    """
    own, hidden, inner = shape.heads * shape.width, shape.hidden, shape.inner
    qkv = (own + 2 * shape.kv_heads * shape.width, hidden)
    products = dict(
        zip(PRODUCTS, (qkv, (hidden, own), (2 * inner, hidden), (hidden, inner)), strict=True)
    )
    heads = (shape.heads, shape.kv_heads) if shape.whole_norms else (1, 1)
    vectors = dict(
        zip(VECTORS, [*[hidden] * 4, *(count * shape.width for count in heads)], strict=True)
    )
    made = (CLayer * shape.layers)()
    for entry, layer in zip(made, weights, strict=True):
        for name, size in (products | {"beside": qkv}).items():
            weight: Packed | None = getattr(layer, name)
            if weight is not None and (weight.rows, weight.columns) != size:
                raise ValueError(
                    f"{name} has {(weight.rows, weight.columns)} numbers; valid: {size}"
                )
            if weight is not None:
                setattr(entry, name, weight_of(weight, getattr(layer, f"{name}_bias", None)))
        for name, size in (vectors | {"beside_norm": hidden}).items():
            setattr(entry, name, vector(name, getattr(layer, name), size))
        entry.window, entry.rope = layer.window, layer.rope
        entry.wide = layer.wide_keys
    return made


def describe(rows: CRows, cache: KVCache, count: int, parents: Sequence[int] | None) -> None:
    """Fill in the rows of one text.

    Raises:
        ValueError: they do not fit the cache, or a parent is no earlier row.
    """
    check_rows(cache, count, parents)
    rows.n, rows.before = count, cache.length
    rows.capacity = cache.entries.capacity
    rows.windows = cache.ordered
    if parents is not None:
        rows.parents = ctypes.cast((c_int32 * count)(*parents), c_void_p)


def grow_work(cache: KVCache, need: int) -> None:
    """Room for what the kernels asked for, and more: with the text the need grows, not each time.

    Raises:
        ValueError: they have refused the rows.
    """
    if need < 0:
        raise ValueError(
            "the kernels refuse rows; valid: rows that fit, each parent -1 or an earlier row"
        )
    cache.work = torch.empty(need + need // 4, dtype=torch.uint8, device="cpu")
