"""Whether the native decoder can run a transformers model."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from tokenswift.kernels.cpu.structs import TYPES
from tokenswift.loader.config import activation_of
from tokenswift.loader.experts import CHOICE_BIAS
from tokenswift.loader.families import FAMILIES
from tokenswift.loader.fused import FUSED, UNFUSED
from tokenswift.loader.layout import HEAD, Layout, layout_of, rotated_width
from tokenswift.loader.recurrent import their_name
from tokenswift.loader.rope import positions_name
from tokenswift.loader.weights import ModuleWeights
from tokenswift.models.packing import linears_of


def fits(model: Any) -> bool:
    """Whether the native decoder can run a transformers causal LM: its modules are plain layers of
    one type, as its config says."""
    config = model.config
    head = model.lm_head
    if config.model_type not in FAMILIES or getattr(config, "use_bidirectional_attention", None):
        return False
    fixed = FAMILIES[config.model_type].fixed
    if any(getattr(config, name, None) not in (value, None) for name, value in fixed.items()):
        return False
    layout = layout_of(config)
    layers = model.model.layers
    linears = [head, *_linears(layers, layout)]
    norms = _norms(layers, layout)
    frequencies = _frequencies(model.model)
    return (
        activation_of(config) == layout.family.activation
        and _are_plain(linears)
        and (layout.mixture is None or _has_experts(model, layout))
        and isinstance(model.model.embed_tokens, nn.Embedding)
        and head.out_features == layout.vocab_size
        and all(
            getattr(norm, "variance_epsilon", getattr(norm, "eps", 0)) == layout.eps
            for norm in norms
        )
        and all(
            layer.self_attn.scaling == layout.scale
            for number, layer in enumerate(layers)
            if number not in layout.recurrent
        )
        and (layout.recurrence is None or not any(size % 2 for size in layout.product_sizes()))
        and {2 * len(turns) for turns in frequencies} == {rotated_width(config)}
    )


def _linears(layers: Iterable[nn.Module], layout: Layout) -> list[nn.Module]:
    """The projections of all layers, by the names that transformers has for them."""
    linears: list[nn.Module] = []
    for number, layer in enumerate(layers):
        recurrence = layout.recurrence if number in layout.recurrent else None
        parts = linears_of(layout.experts_of(number), recurrence).values()
        names = [their_name(name, layout.family) for part in parts for name in part]
        if layout.family.fused:
            names = [*FUSED, *UNFUSED]
        linears += [attrgetter(name)(layer) for name in names]
    return linears


def _norms(layers: Iterable[nn.Module], layout: Layout) -> list[object]:
    """The norms of all layers."""
    return [
        getattr(layer, their_name(name, layout.family))
        for layer in layers
        for name in layout.family.norms
        if name is not None
    ]


def _frequencies(body: nn.Module) -> list[Tensor]:
    """The sets of rotary frequencies of a model's body, (d/2) each."""
    rotary = getattr(body, positions_name(body) or "")
    return [tensor for name, tensor in rotary.named_buffers() if name.endswith("inv_freq")]


def _are_plain(linears: Iterable[nn.Module]) -> bool:
    """Whether projections are plain layers of even inputs, in one type that kernels take."""
    dtypes: set[torch.dtype] = set()
    for linear in linears:
        if type(linear) is not nn.Linear or linear.in_features % 2:
            return False
        dtypes.add(linear.weight.dtype)
    return len(dtypes) == 1 and dtypes <= TYPES.keys()


def _has_experts(model: nn.Module, layout: Layout) -> bool:
    """Whether a model's experts are those of its config, in the type of its other weights; biases
    of their choice may stay in float32."""
    weights = ModuleWeights(model, layout)
    dtype = attrgetter(HEAD)(model).dtype
    for name, shape in layout.shapes().items():
        if ".mlp." not in name:
            continue
        values = weights.get(name)
        if values is None or values.shape != shape:
            return False
        if values.dtype != dtype and not name.endswith(CHOICE_BIAS):
            return False
    return not any(size % 2 for size in layout.product_sizes())
