"""What the kernels in C are called with: checked structures of packed weights, caches and tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int32, c_int64, c_long, c_void_p

import torch
from torch import Tensor

from tokenswift.interfaces import KVCache
from tokenswift.kernels.base import capacity_of, check_rows
from tokenswift.kernels.cpu.buffers import address
from tokenswift.kernels.cpu.entries import PAGE, page_bytes
from tokenswift.kernels.formats.panels import PANEL, panel_bytes
from tokenswift.kernels.weights import PRODUCTS, DraftWeights, Packed, Part, Shape, active_type

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of weights, keys and values
KEYS = {**TYPES, torch.int8: 3}  # of keys and values
ACTIVE = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 3}  # of what enters a product
LOW = 16  # a quantized format: this and GGUF's number of it
_GROUP, _BLOCK = 48, 12  # bytes of 32 activations in int8, and rows that stand together
MOST_NUMBERS = 1 << 18  # of a row that the kernels hold on the stack


class CShape(ctypes.Structure):
    _fields_ = [
        *((name, c_long) for name in ("layers", "hidden", "inner", "heads", "kv_heads", "width")),
        *((name, c_int) for name in ("keys", "active")),
        *((name, c_float) for name in ("eps", "scale")),
    ]


class CPart(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("rows", c_long), ("format", c_int)]


class CWeight(ctypes.Structure):
    _fields_ = [("parts", c_void_p), ("bias", c_void_p)]


VECTORS = ("norm", "mlp_norm", "query_norm", "key_norm")


class CLayer(ctypes.Structure):
    _fields_ = [
        *((name, CWeight) for name in PRODUCTS),
        *((name, c_void_p) for name in VECTORS),
        ("window", c_long),
        ("beside", CWeight),
        ("beside_norm", c_void_p),
    ]


class CRows(ctypes.Structure):
    _fields_ = [
        *((name, c_long) for name in ("n", "before", "capacity")),
        *((name, c_void_p) for name in ("parents", "keys_values", "queries")),
        ("windows", c_int),
    ]


class CDraftStep(ctypes.Structure):
    _fields_ = [
        *((name, CWeight) for name in ("first", "outer")),
        *((name, c_void_p) for name in ("norm", "base_norm", "embed_norm", "heads", "sizes")),
        *((name, c_long) for name in ("count", "width", "inner")),
        ("eps", c_float),
        ("active", c_int),
    ]


class CPass(ctypes.Structure):
    _fields_ = [
        *((name, c_long) for name in ("n", "count")),
        *((name, c_void_p) for name in ("rows", "cos", "sin", "states", "work")),
        ("work_bytes", c_long),
        *((name, c_int) for name in ("threads", "keep")),
        ("waited", c_int64),
        ("shared", c_int),
        ("taps", c_long),
        *((name, c_void_p) for name in ("tapped", "features", "beside")),
    ]


def draft_step(step: DraftWeights, heads: Sequence[Packed]) -> CDraftStep | None:
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
    made = CDraftStep(
        first=weight_of(step.first, step.bias),
        count=len(heads),
        width=width,
        inner=inner,
        eps=step.eps,
        active=ACTIVE[torch.int8 if stored else torch.float32],
    )
    if step.outer is not None:
        made.outer = weight_of(step.outer)
    made.norm, made.base_norm, made.embed_norm = (vector("a norm", norm, width) for norm in step.norms)
    lists = (CWeight * len(heads))(*map(weight_of, heads)), (c_long * len(heads))(*(h.rows for h in heads))
    made.heads, made.sizes = map(ctypes.addressof, lists)
    made.kept = lists  # by the one who calls: another thread may draft with other rows meanwhile
    step.native = (list(heads), made)
    return made


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
        size = panel_bytes(part.format, columns)
        return address(f"a weight in {part.format.name}", part.data, torch.uint8, panels, size)
    pairs = 2 if kind == torch.bfloat16 else 1
    sizes = (panels, columns // pairs, PANEL, pairs)
    return address("a weight", part.data, kind if kind in TYPES else torch.float32, *sizes)


def groups_bytes(rows: int, columns: int) -> int:
    """Bytes of rows of activations in int8; blocks of rows are filled up."""
    return -(-rows // _BLOCK) * _BLOCK * -(-columns // 32) * _GROUP


def entries(data: Tensor, shape: Shape, capacity: int) -> int:
    """Where a cache's keys and values are."""
    if shape.keys == torch.int8:
        sizes = (shape.layers, shape.kv_heads, capacity // PAGE, page_bytes(shape.width))
        return address("keys and values", data, torch.uint8, *sizes)
    return address(
        "keys and values", data, shape.keys, 2 * shape.layers, shape.kv_heads, capacity, shape.width
    )


def vector(name: str, vector: Tensor | None, size: int) -> int | None:
    """Where the numbers of a bias or a norm are."""
    return None if vector is None else address(name, vector, torch.float32, size)


def work_space(cache: KVCache) -> tuple[int, int]:
    """A cache's work space for the kernels, and its bytes."""
    size = cache.work.numel()
    return address("work space", cache.work, torch.uint8, size), size


def product_sizes(shape: Shape) -> dict[str, tuple[int, int]]:
    """Rows and columns of a layer's weights."""
    own, hidden, inner = shape.heads * shape.width, shape.hidden, shape.inner
    both = own + 2 * shape.kv_heads * shape.width
    sizes = ((both, hidden), (hidden, own), (2 * inner, hidden), (hidden, inner))
    return dict(zip(PRODUCTS, sizes, strict=True))


def check_sizes(shape: Shape) -> None:
    """Refuse layers that the kernels do not run: a head's numbers, for one, go by their threads' stacks.

    Raises:
        ValueError: heads that do not divide, or sizes that are not in range.
    """
    if shape.kv_heads < 1 or shape.heads < 1 or shape.heads % shape.kv_heads:
        raise ValueError(f"heads are {shape.heads} over {shape.kv_heads}; valid: a multiple of 1 or more")
    if shape.width % 2 or not 2 <= shape.width <= MOST_NUMBERS:
        raise ValueError(f"a head's width is {shape.width}; valid: an even number, 2 to {MOST_NUMBERS}")
    if shape.keys == torch.int8 and shape.width % 4:
        raise ValueError(f"a head's width is {shape.width}; valid with keys in int8: a multiple of 4")
    if max(shape.hidden, shape.inner) > MOST_NUMBERS:
        raise ValueError(f"a row has {max(shape.hidden, shape.inner)} numbers; valid: {MOST_NUMBERS} at most")


def check_product(name: str, weight: Packed, size: tuple[int, int]) -> None:
    """Refuse a weight of other rows and columns.

    Raises:
        ValueError: it has such.
    """
    if (weight.rows, weight.columns) != size:
        raise ValueError(f"{name} has {(weight.rows, weight.columns)} numbers; valid: {size}")


def shape_of(shape: Shape) -> CShape:
    sizes = (shape.layers, shape.hidden, shape.inner, shape.heads, shape.kv_heads, shape.width)
    return CShape(*sizes, KEYS[shape.keys], ACTIVE[shape.active], shape.eps, shape.scale)


def describe(rows: CRows, cache: KVCache, count: int, parents: Sequence[int] | None) -> None:
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


def grow_work(cache: KVCache, need: int) -> None:
    """Room for what the kernels asked for, and more: with the text the need grows, not each time.

    Raises:
        ValueError: they have refused the rows.
    """
    if need < 0:
        raise ValueError("the kernels refuse rows; valid: rows that fit, each parent -1 or an earlier row")
    cache.work = torch.empty(need + need // 4, dtype=torch.uint8, device="cpu")
