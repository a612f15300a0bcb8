"""The native families' forward in plain torch, a layer at a time: what models from files are checked with.

Nothing is packed, fused or kept: each weight is unpacked to float32 where it is used. It serves the check of
a model whose own forward would have to be imported and filled first, which takes longer than writing a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenswift.kernels.formats.format import Stored
from tokenswift.loader.checkpoint import EMBEDDING, HEAD, NORM, Weights
from tokenswift.loader.rope import Rotary

ROWS = 8192  # of the LM head that are unpacked at a time


def dense(weight: Tensor | Stored, device: torch.device | None = None) -> Tensor:
    """A weight in float32, on a device or where it is."""
    if isinstance(weight, Stored):
        return (weight if device is None else Stored(weight.format, weight.blocks.to(device))).decode()
    return weight.to(device, torch.float32)


@torch.inference_mode()
def logits(weights: Weights, rotary: Rotary, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
    """Logits after each token of a tree, (n, V) float32.

    Args:
        weights: of a native family's model.
        rotary: its positions.
        parents: of each token, an earlier one; -1 for one that begins a text.
    """
    device = rotary.single().device
    sees = torch.eye(len(tokens), dtype=torch.bool, device=device)
    for token, parent in enumerate(parents):
        if parent >= 0:
            sees[token] |= sees[parent]
    at = sees.sum(1) - 1
    cos, sin = (part[:, None] for part in rotary.angles(at))
    layout, eps = weights.layout, weights.layout.eps

    def get(name: str) -> Tensor:
        found = weights.get(name)
        assert found is not None, name
        return dense(found, device)

    def linear(name: str, states: Tensor) -> Tensor:
        bias = weights.get(f"{name}.bias")
        return F.linear(states, get(f"{name}.weight"), None if bias is None else dense(bias, device))

    def heads(name: str, states: Tensor) -> Tensor:
        """(n, D) → (n, H, d)."""
        made = linear(f"{name}_proj", states).unflatten(1, (-1, layout.head_dim))
        norm = weights.get(f"{name}_norm.weight")
        return made if norm is None else _norm(made, dense(norm, device), eps)

    states = _rows(weights, EMBEDDING, torch.tensor(list(tokens)), device)
    for number, window in enumerate(layout.windows):
        layer = f"model.layers.{number}."
        normed = _norm(states, get(f"{layer}input_layernorm.weight"), eps)
        q, k, v = (heads(f"{layer}self_attn.{name}", normed) for name in "qkv")
        near = (at[:, None] - at < window) & sees if window else sees
        mixed = F.scaled_dot_product_attention(
            _turned(q, cos, sin).transpose(0, 1)[None],
            _turned(k, cos, sin).transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=near,
            scale=layout.scale,
            enable_gqa=True,
        )
        states = states + linear(f"{layer}self_attn.o_proj", mixed[0].transpose(0, 1).flatten(1))
        normed = _norm(states, get(f"{layer}post_attention_layernorm.weight"), eps)
        inner = F.silu(linear(f"{layer}mlp.gate_proj", normed)) * linear(f"{layer}mlp.up_proj", normed)
        states = states + linear(f"{layer}mlp.down_proj", inner)
        weights.rest()
    states = _norm(states, get(NORM), eps)
    parts = torch.arange(layout.vocab_size).split(ROWS)
    return torch.cat([F.linear(states, _rows(weights, HEAD, rows, device)) for rows in parts], -1)


def _rows(weights: Weights, name: str, rows: Tensor, device: torch.device) -> Tensor:
    """Rows of a weight, float32."""
    found = weights.get(name)
    assert found is not None, name
    return dense(found.take(rows) if isinstance(found, Stored) else found[rows], device)


def _norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(states, weight.shape, weight, eps)


def _turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotated by its positions: the first half of a head's dimensions pairs with the second."""
    a, b = states.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
