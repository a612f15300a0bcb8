"""Which layers of a model keep their keys in 16 bits, where the KV cache keeps whole numbers.

A key in int8 has one scale for all dimensions of a head. Where single channels stick out, as by the
biases of keys in Qwen2 (358 beside a median of 3), nothing is left of the others. What counts is
how far the rounding moves attention scores: by σ = step · |q| · s / √12 in standard deviations,
with the step between two numbers of a key, the length of a query and the scale s of scores. The
divergence of the attention weights is about σ² / 2 where σ is small, and less where it is large.
So a layer's σ is measured once, when the model is loaded, over tokens spread over the vocabulary:
32 of them give half to twice the figures that texts give, and the same on every processor.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.kv.cache import FullCache
from tokenswift.kv.passes import Pass

#: tokens that are looked at
TOKENS = 32
#: the standard deviation of scores from which on a layer's keys are of 16 bits
MOST_ERROR = 0.045
LEVELS = 127  # of a number in int8


class FloatPasses(Protocol):
    """A model whose passes keep keys in float32."""

    vocab_size: int

    def forward(self, tokens: Tensor, positions: Tensor, cache: FullCache) -> Pass:
        """Run tokens of a chain; queries of all layers are kept."""
        ...


def score_error(
    keys: Float[Tensor, "K n d"], queries: Float[Tensor, "H n d"], scale: float
) -> float:
    """What keys in int8 add to attention scores: the standard deviation, of the worst KV head.

    Args:
        scale: of scores.
    """
    kv_heads = len(keys)
    steps = keys.float().abs().amax(-1) / LEVELS
    step = steps.square().mean(-1).sqrt()
    lengths = queries.float().norm(dim=-1).reshape(kv_heads, -1)
    length = lengths.square().mean(-1).sqrt()
    return float((step * length).max()) * scale / math.sqrt(12)


@torch.inference_mode()
def score_errors(model: FloatPasses, cache: FullCache, scale: float) -> list[float]:
    """The :func:`score_error` of each layer.

    Args:
        cache: an empty one in float32 with room for :data:`TOKENS` tokens.
        scale: of scores.
    """
    tokens = torch.arange(TOKENS) * model.vocab_size // TOKENS
    queries = model.forward(tokens, torch.arange(TOKENS), cache).queries
    cache.commit(tuple(range(TOKENS)))
    layers = range(cache.layers)
    return [score_error(cache.keys(layer), queries[layer], scale) for layer in layers]


def needs_wide_keys(error: float) -> bool:
    """Whether a layer with this :func:`score_error` keeps its keys in 16 bits."""
    return not error <= MOST_ERROR  # NaN, too
