"""The boundary to C: what the library declares, and tensors and caches for it. Every tensor that
the kernels read or write is looked at in :func:`address`, and nowhere else."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int, c_int32, c_long, c_uint64, c_void_p

import torch
from torch import Tensor

from tokenswift.kernels.batch import check_rows
from tokenswift.kernels.cpu.recurrent import CRecurrence, CRecurrent
from tokenswift.kernels.weights import Shape
from tokenswift.kv.cache import KVCache

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of weights, keys and values
KEYS = {**TYPES, torch.int8: 3}  # of keys and values
INT16_KEYS = 4  # of keys, beside values in int8
ACTIVE = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 3}  # of what enters a product
LOW = 16  # a quantized format: this and GGUF's number of it
_GROUP = 48  # bytes of 32 activations in int8
_BLOCK = 12  # rows of activations in int8 that stand together
MOST_NUMBERS = 1 << 18  # of a row that the kernels hold on the stack
PAGE = 16  # tokens of a page of keys and values in int8
PAGE_DTYPE = torch.uint8  # of the tensors that hold pages: bytes, whose integers have 8 or 16 bits
SCALES = 3 * 4 * PAGE  # bytes of a page's scales
KEY_LEVELS = 8191  # the greatest integer of keys of 16 bits
MOST_WIDE = 512  # dimensions of a head whose keys may be of 16 bits: sums stay below 2^31


#: the weights of a layer that are multiplied with, in the order of the kernels
PRODUCTS = ("qkv", "out", "gate_up", "down")
#: the vectors of a layer, in the order of the kernels
VECTORS = ("norm", "mlp_norm", "out_norm", "down_norm", "query_norm", "key_norm")
_C_TYPES: dict[str, type] = {
    "long": c_long,
    "int": c_int,
    "float": c_float,
    "double": c_double,
    "uint64": c_uint64,
    "pointer": c_void_p,
}


def fields(declared: str, **structures: type) -> list[tuple[str, type]]:
    """A structure's fields, declared nearly as in C: ``long rows, columns; pointer data``.

    Args:
        structures: other structures that a field may be, by name.
    """
    types = _C_TYPES | structures
    result: list[tuple[str, type]] = []
    for line in declared.split(";"):
        type_name, _, names = line.strip().partition(" ")
        result += [(name.strip(), types[type_name]) for name in names.split(",")]
    return result


class CMixture(ctypes.Structure):
    _fields_ = fields("long experts, used, inner, shared; int shared_gate, sigmoid, renormalised")


class CShape(ctypes.Structure):
    _fields_ = fields(
        "long layers, hidden, inner, heads, kv_heads, width; int keys, active; "
        "float eps, scale, cap, residual, limit, slope; int gelu, norm_all_heads, parallel; "
        "mixture mixture; recurrence recurrence",
        mixture=CMixture,
        recurrence=CRecurrence,
    )


class CPart(ctypes.Structure):
    _fields_ = fields("pointer data; long rows; int format")


class CWeight(ctypes.Structure):
    _fields_ = fields("pointer parts, bias")


class CExpert(ctypes.Structure):
    _fields_ = fields("weight gate_up, down", weight=CWeight)


class CLayer(ctypes.Structure):
    _fields_ = fields(
        f"weight {', '.join(PRODUCTS)}; pointer {', '.join(VECTORS)}; long window, rope; int wide; "
        "weight second_qkv; pointer second_norm, experts; weight router; "
        "pointer router_bias, sinks; recurrent recurrent; weight gate",
        weight=CWeight,
        recurrent=CRecurrent,
    )


class CRows(ctypes.Structure):
    _fields_ = fields(
        "long n, before, capacity; pointer parents, keys_values, queries; int windows; "
        "pointer tail; long tail_before, tail_capacity; pointer now, next, log; long log_rows"
    )


class CPass(ctypes.Structure):
    _fields_ = fields(
        "long n, count; pointer rows, cos, sin, states, work; long work_bytes; int threads, keep; "
        "long feature_count; pointer feature_layers, features, second_input, query_scale"
    )


#: of each function: what it returns, and its arguments
_FUNCTIONS = {
    "ts_linear": "void: pointer pointer pointer long long long int pointer int",
    "ts_take": "long: pointer pointer pointer long long long",
    "ts_norm": "void: pointer pointer pointer long long float int int",
    "ts_layers": "long: pointer pointer pointer",
    "ts_attend": "long: pointer pointer long pointer pointer pointer pointer pointer pointer "
    "long int",
    "ts_replay": "void: pointer pointer pointer pointer long long long int",
    "ts_pack": "void: pointer int pointer long long long int",
    "ts_copy": "void: pointer long pointer long long long pointer long long pointer pointer int",
    "ts_best": "void: pointer long long int pointer pointer",
    "ts_rank": "long: pointer pointer pointer long int pointer pointer pointer pointer pointer",
}


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes what the library's functions take and return."""
    for name, declared in _FUNCTIONS.items():
        result, _, arguments = declared.partition(": ")
        function = getattr(library, name)
        function.restype = None if result == "void" else _C_TYPES[result]
        function.argtypes = [_C_TYPES[argument] for argument in arguments.split()]


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


def page_bytes(width: int, wide_keys: bool = False) -> int:
    """Bytes of a page of heads of a width (cpu_int_attention.h); ``wide_keys``: of 16 bits."""
    key_bytes = (2 if wide_keys else 1) * width * PAGE
    value_bytes = -(-width // 16) * 16 * PAGE
    return SCALES + key_bytes + value_bytes


def groups_bytes(rows: int, columns: int) -> int:
    """Bytes of rows of activations in int8; blocks of rows are filled up."""
    return -(-rows // _BLOCK) * _BLOCK * -(-columns // 32) * _GROUP


def entries_address(data: Tensor, shape: Shape, capacity: int, wide_keys: Sequence[bool]) -> int:
    """Where a cache's keys and values of some layers are.

    Args:
        wide_keys: of each of these layers, whether its keys of whole numbers are of 16 bits.
    """
    if shape.keys == torch.int8:
        page_sizes = sum(page_bytes(shape.width, wide) for wide in wide_keys)
        size = shape.kv_heads * (capacity // PAGE) * page_sizes
        return address("keys and values", data, PAGE_DTYPE, size)
    layers = len(wide_keys)
    return address(
        "keys and values", data, shape.keys, 2 * layers, shape.kv_heads, capacity, shape.width
    )


def vector_address(name: str, vector: Tensor | None, size: int) -> int | None:
    """Where the numbers of a bias or a norm are."""
    return None if vector is None else address(name, vector, torch.float32, size)


def work_space(cache: KVCache) -> tuple[int, int]:
    """A cache's work space for the kernels, and its bytes."""
    size = cache.work.numel()
    return address("work space", cache.work, torch.uint8, size), size


def describe_rows(rows: CRows, cache: KVCache, count: int, parents: Sequence[int] | None) -> None:
    """Fill in the rows of one segment.

    Raises:
        ValueError: they do not fit the cache, or a parent is no earlier row.
    """
    check_rows(cache, count, parents)
    rows.n = count
    rows.before = cache.length
    rows.capacity = cache.entries.capacity
    rows.windows = cache.ordered
    if cache.states is not None:
        states = cache.states
        log = states.open(count, parents)
        shape = (states.layers, states.recurrence.state)
        rows.now = address("states", states.now, torch.float32, *shape)
        if states.has_next:
            rows.next = address("the next states", states.next, torch.float32, *shape)
        if log is not None:
            logged = (states.layers, log.shape[1], states.recurrence.logged)
            rows.log = address("a log", log, torch.float32, *logged)
            rows.log_rows = log.shape[1]
    if parents is not None:
        rows.parents = ctypes.cast((c_int32 * count)(*parents), c_void_p)


def grow_work(cache: KVCache, needed: int) -> None:
    """Enlarge a cache's work space to the bytes that the kernels ask for, and a quarter more: the
    need grows with the text.

    Raises:
        ValueError: ``needed`` is negative: the kernels have refused the rows.
    """
    if needed < 0:
        raise ValueError(
            "the kernels refuse rows; valid: rows that fit, each parent -1 or an earlier row"
        )
    cache.work = torch.empty(needed + needed // 4, dtype=torch.uint8, device="cpu")
