"""A decoder's layers as structures of the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from tokenswift.kernels.attention import AttentionContext
from tokenswift.kernels.cpu.recurrent import CGates, CRecurrent, recurrence_of
from tokenswift.kernels.cpu.structs import (
    ACTIVE,
    KEYS,
    LOW,
    MOST_NUMBERS,
    TYPES,
    CExpert,
    CLayer,
    CMixture,
    CPart,
    CShape,
    CWeight,
    address,
    vector_address,
)
from tokenswift.kernels.formats import PANEL
from tokenswift.kernels.packed import Packed, Part, panel_count
from tokenswift.kernels.weights import (
    MOST_EXPERTS,
    ExpertWeights,
    LayerWeights,
    Mixture,
    RecurrentWeights,
    Shape,
    active_type,
)


def weight_of(packed: Packed, bias: Tensor | None = None) -> CWeight:
    """A weight for the kernels; its array of parts is made once."""
    parts = packed.c_parts
    if not isinstance(parts, ctypes.Array):
        parts = (CPart * len(packed.parts))()
        for entry, part in zip(parts, packed.parts, strict=True):
            entry.data = _part_address(part, packed.columns)
            entry.rows = part.rows
            entry.format = TYPES[part.data.dtype] if part.format is None else LOW + part.format.code
        packed.c_parts = parts
    return CWeight(
        parts=ctypes.addressof(parts),
        bias=vector_address("the bias", bias, packed.rows),
    )


def _part_address(part: Part, columns: int) -> int:
    """Where a part's panels are."""
    panels = panel_count(part.rows)
    if part.format is not None:
        panel_bytes = part.format.panel_bytes(columns)
        name = f"a weight in {part.format.name}"
        return address(name, part.data, torch.uint8, panels, panel_bytes)
    dtype = part.data.dtype if part.data.dtype in TYPES else torch.float32
    pair = 2 if dtype == torch.bfloat16 else 1
    return address("a weight", part.data, dtype, panels, columns // pair, PANEL, pair)


def check_sizes(shape: Shape) -> None:
    """Refuse layers that the kernels do not run: a head's numbers, for one, go by their threads'
    stacks.

    Raises:
        ValueError: heads that do not divide, or sizes that are not in range.
    """
    heads = shape.heads
    kv_heads = shape.kv_heads
    width = shape.width
    mixture = shape.mixture
    longest = max(shape.hidden, shape.inner)
    if mixture is not None:
        longest = max(longest, mixture.inner, mixture.shared)
        if not 1 <= mixture.used <= mixture.experts <= MOST_EXPERTS:
            raise ValueError(
                f"a row goes through {mixture.used} of {mixture.experts} experts; valid: one or "
                f"more of at most {MOST_EXPERTS}"
            )
    multiple = 4 if shape.keys == torch.int8 else 2
    grouped = kv_heads >= 1 and heads >= 1 and heads % kv_heads == 0
    width_fits = width % multiple == 0 and 2 <= width <= MOST_NUMBERS
    if not grouped or not width_fits or longest > MOST_NUMBERS:
        raise ValueError(
            f"heads are {heads} over {kv_heads} of width {width}, and a row has {longest} "
            f"numbers; valid: a "
            f"multiple of 1 or more, of a multiple of {multiple}, and {MOST_NUMBERS} numbers at "
            "most"
        )


def shape_of(shape: Shape) -> CShape:
    """A shape for the kernels.

    Raises:
        ValueError: see :func:`check_sizes`.
    """
    check_sizes(shape)
    return CShape(
        layers=shape.layers,
        hidden=shape.hidden,
        inner=shape.inner,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        width=shape.width,
        keys=KEYS[shape.keys],
        active=ACTIVE[shape.active],
        eps=shape.eps,
        scale=shape.scale,
        cap=shape.cap,
        residual=shape.residual,
        limit=shape.gate_limit,
        slope=shape.gate_slope,
        gelu=shape.gelu,
        norm_all_heads=shape.norm_all_heads,
        parallel=shape.parallel,
        mixture=_c_mixture(shape.mixture),
        recurrence=recurrence_of(shape.recurrence),
    )


def attention_shape(heads: int, width: int, keys: torch.dtype, context: AttentionContext) -> Shape:
    """A layer that is attention alone."""
    active = active_type(keys)
    return Shape(
        layers=1,
        hidden=0,
        inner=0,
        heads=heads,
        kv_heads=context.cache.entries.kv_heads,
        width=width,
        weights=active,
        keys=keys,
        active=active,
        eps=0.0,
        scale=context.scale,
        cap=context.softcap or 0.0,
    )


def _c_mixture(mixture: Mixture | None) -> CMixture:
    """A mixture for the kernels; of None, one without experts."""
    if mixture is None:
        return CMixture()
    return CMixture(
        experts=mixture.experts,
        used=mixture.used,
        inner=mixture.inner,
        shared=mixture.shared,
        shared_gate=mixture.shared_gate,
        sigmoid=mixture.sigmoid,
        renormalised=mixture.renormalised,
    )


def layers_of(shape: Shape, weights: Sequence[LayerWeights]) -> ctypes.Array[CLayer]:
    """Layers for the kernels.

    Raises:
        ValueError: a weight or norm of other rows and columns.
    """
    lengths = _vector_lengths(shape)
    layers = (CLayer * shape.layers)()
    for entry, layer in zip(layers, weights, strict=True):
        for name, size in _weight_sizes(shape, layer).items():
            weight: Packed | None = getattr(layer, name)
            bias: Tensor | None = getattr(layer, f"{name}_bias", None)
            if weight is not None:
                setattr(entry, name, _sized_weight(name, weight, size, bias))
        for name, length in lengths.items():
            setattr(entry, name, vector_address(name, getattr(layer, name), length))
        entry.sinks = vector_address("sinks", layer.sinks, shape.heads)
        entry.window = layer.window
        entry.rope = layer.rope
        entry.wide = layer.wide_keys
        if layer.recurrent is not None:
            entry.recurrent = _c_recurrent(shape, layer.recurrent)
        if layer.experts is not None:
            _describe_experts(entry, shape, layer.experts)
        elif layer.gate_up is None or layer.down is None:
            raise ValueError("a layer has no MLP; valid: an MLP, or experts")
    return layers


def _c_recurrent(shape: Shape, weights: RecurrentWeights) -> CRecurrent:
    """What a recurrent layer has in the place of attention, for the kernels.

    Raises:
        ValueError: the shape has no recurrence, or weights are of other sizes.
    """
    recurrence = shape.recurrence
    if recurrence is None:
        raise ValueError("a layer is recurrent; valid: with a recurrence in the shape")
    entry = CRecurrent(
        taps=address("taps", weights.taps, torch.float32, recurrence.taps, recurrence.channels)
    )
    heads = recurrence.value_heads
    if not heads:
        return entry
    gates = weights.gates
    vectors = {"rate": heads, "shift": heads, "norm": recurrence.value_width}
    if gates is None or any(getattr(weights, name) is None for name in vectors):
        raise ValueError("a layer of the delta rule lacks weights; valid: gates and three vectors")
    if gates.data.dtype != torch.float32:
        raise ValueError(f"gates are {gates.data.dtype}; valid: float32")
    weight = _sized_weight("gates", gates, (2 * heads, shape.hidden))
    entry.gates = CGates(parts=weight.parts, bias=weight.bias)
    for name, length in vectors.items():
        setattr(entry, name, vector_address(name, getattr(weights, name), length))
    return entry


def _sized_weight(
    name: str, weight: Packed, size: tuple[int, int], bias: Tensor | None = None
) -> CWeight:
    """A weight of known rows and columns."""
    if (weight.rows, weight.columns) != size:
        raise ValueError(f"{name} has {(weight.rows, weight.columns)} numbers; valid: {size}")
    return weight_of(weight, bias)


def _describe_experts(entry: CLayer, shape: Shape, experts: ExpertWeights) -> None:
    """Fill in a layer's experts; their array is made once.

    Raises:
        ValueError: they are others than the shape's mixture has, or the layers are parallel.
    """
    mixture = shape.mixture
    if mixture is None or shape.parallel:
        raise ValueError("a layer has experts; valid: with a mixture, and layers that are serial")
    counts = (len(experts.gate_up), len(experts.down))
    if counts != (mixture.experts, mixture.experts):
        raise ValueError(f"experts are {counts}; valid: {mixture.experts} of each projection")
    router_size = (mixture.router_rows, shape.hidden)
    entry.router = _sized_weight("router", experts.router, router_size, experts.router_bias)
    if experts.router.data.dtype != torch.float32:
        raise ValueError(f"the router is {experts.router.data.dtype}; valid: float32")
    entry.router_bias = vector_address("the router's bias", experts.bias, mixture.experts)
    array = experts.c_experts
    if not isinstance(array, ctypes.Array):
        array = (CExpert * mixture.experts)()
        gate_up_size = (2 * mixture.inner, shape.hidden)
        down_size = (shape.hidden, mixture.inner)
        for number, expert in enumerate(array):
            mlp = experts.mlp(number)
            expert.gate_up = _sized_weight(
                "an expert's gate_up", mlp.gate_up, gate_up_size, mlp.gate_up_bias
            )
            expert.down = _sized_weight("an expert's down", mlp.down, down_size, mlp.down_bias)
        experts.c_experts = array
    entry.experts = ctypes.addressof(array)


def _weight_sizes(shape: Shape, layer: LayerWeights) -> dict[str, tuple[int, int]]:
    """Rows and columns of a layer's weights, by their names in `LayerWeights`."""
    query_rows = shape.heads * shape.width
    qkv_rows = query_rows + 2 * shape.kv_heads * shape.width
    shared = 0 if shape.mixture is None else shape.mixture.shared
    inner = shape.inner if layer.experts is None else shared
    if layer.recurrent is not None and shape.recurrence is not None:
        qkv_rows = shape.recurrence.projected
        query_rows = shape.recurrence.outputs
    return {
        "qkv": (qkv_rows, shape.hidden),
        "out": (shape.hidden, query_rows),
        "gate_up": (2 * inner, shape.hidden),
        "down": (shape.hidden, inner),
        "second_qkv": (qkv_rows, shape.hidden),
        "gate": (query_rows, shape.hidden),
    }


def _vector_lengths(shape: Shape) -> dict[str, int]:
    """Lengths of the weights of a layer's norms, by their names in `LayerWeights`."""
    hidden = ("norm", "mlp_norm", "out_norm", "down_norm", "second_norm")
    return {
        **dict.fromkeys(hidden, shape.hidden),
        "query_norm": shape.width * (shape.heads if shape.norm_all_heads else 1),
        "key_norm": shape.width * (shape.kv_heads if shape.norm_all_heads else 1),
    }
