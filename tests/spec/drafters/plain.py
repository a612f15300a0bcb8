"""A Llama's forward by hand, one row at a time, so that a row can be told what it sees.

Layers, projections and norms are called on the transformers model; positions, attention and the order of
things are written out. For models without sliding windows and without norms of queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Row:
    """What one token left behind.

    Attributes:
        hidden: state before the final norm, (D,).
        queries: by layer, turned, (H, d); keys and values: by layer, (K, d), the keys turned.
    """

    hidden: Tensor
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]


#: rows that a token sees, by layer and KV head, besides itself
Seen = list[list[list[Row]]]


def turned(vectors: Tensor, position: int, theta: float) -> Tensor:
    """Rotary position: pairs (i, i + d/2) of (heads, d) turned by the position times their frequency."""
    half = vectors.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half) / half)
    first, second = vectors[:, :half], vectors[:, half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1)


@torch.no_grad()
def run(model: Any, token: int, position: int, seen: Seen) -> Row:
    """One token through the model, over the rows that each layer and KV head sees."""
    config = model.config
    theta = config.rope_parameters["rope_theta"]
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    state = model.model.embed_tokens.weight[token]
    row = Row(state, [], [], [])
    for number, layer in enumerate(model.model.layers):
        normed = layer.input_layernorm(state)
        attention = layer.self_attn
        queries = turned(attention.q_proj(normed).view(heads, -1), position, theta)
        keys = turned(attention.k_proj(normed).view(kv_heads, -1), position, theta)
        values = attention.v_proj(normed).view(kv_heads, -1)
        row.queries.append(queries)
        row.keys.append(keys)
        row.values.append(values)
        outputs = []
        for head in range(heads):
            own = head * kv_heads // heads
            rows = [*seen[number][own], row]
            all_keys = torch.stack([r.keys[number][own] for r in rows])
            all_values = torch.stack([r.values[number][own] for r in rows])
            scores = all_keys @ queries[head] * queries.shape[1] ** -0.5
            outputs.append(scores.softmax(0) @ all_values)
        state = state + attention.o_proj(torch.cat(outputs))
        state = state + layer.mlp(layer.post_attention_layernorm(state))
    row.hidden = state
    return row


class Text:
    """The rows of a text that only grows: each token sees all before it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.rows: list[Row] = []

    def extend(self, tokens: list[int]) -> None:
        """Run the tokens that are new in ``tokens``, the whole text so far."""
        assert tokens[: len(self.tokens)] == self.tokens
        for token in tokens[len(self.tokens) :]:
            self.rows.append(run(self.model, token, len(self.tokens), self.all(len(self.tokens))))
            self.tokens.append(token)

    def all(self, count: int) -> Seen:
        """The first ``count`` rows, for every layer and head."""
        config = self.model.config
        return [[self.rows[:count]] * config.num_key_value_heads] * config.num_hidden_layers

    def held(self, places: list[list[list[int]]]) -> Seen:
        """The rows at these positions, by layer and KV head."""
        return [[[self.rows[t] for t in own] for own in layer] for layer in places]


@torch.no_grad()
def logits(model: Any, hidden: Tensor) -> Tensor:
    """The final norm and the LM head on a state (D,) → (V,)."""
    return model.lm_head(model.model.norm(hidden)).float()
