"""The model writes its own training text: a batch of continuations, with their hidden states.

Continuations sampled as users sample are where the heads will be used, and the states that the
sampling computes anyway are the heads' training input, so one pass gives both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface

from tokenswift.config import SamplingParams

ATTENTION = "tokenswift_batched"


class BatchCache:
    """Preallocated keys and values of a batch of equally long texts."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append (B, K, n, d) to a layer and return all its entries."""
        if layer_idx not in self.layers:
            shape = (*key_states.shape[:2], self.capacity, key_states.shape[3])
            self.layers[layer_idx] = (key_states.new_empty(shape), value_states.new_empty(shape))
        keys, values = self.layers[layer_idx]
        end = self.length + key_states.shape[2]
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Entries written before the pass under way."""
        return self.length


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Causal attention over whole texts, or of one new token each; query heads packed per KV head."""
    batch, heads, n, width = query.shape
    if n == 1:
        packed = query.view(batch, key.shape[1], heads // key.shape[1], width)
        out = torch.nn.functional.scaled_dot_product_attention(packed, key, value, scale=scaling)
        return out.reshape(batch, 1, heads, width), None
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


class Backbone:
    """A transformers causal LM run for its hidden states *before* the final norm."""

    def __init__(self, model: Any) -> None:
        AttentionInterface.register(ATTENTION, _attention)
        self.model = model
        self.model.set_attn_implementation(ATTENTION)
        self.body = model.base_model
        self.norm = self.body.norm
        self._hidden: Tensor | None = None
        self._hook = self.norm.register_forward_pre_hook(self._keep)

    def close(self) -> None:
        """Take the hook off the model again."""
        self._hook.remove()

    def _keep(self, module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        self._hidden = args[0]

    @torch.no_grad()
    def hidden(self, tokens: Int[Tensor, "B n"], cache: BatchCache | None = None) -> Float[Tensor, "B n D"]:
        """States of the tokens; they are appended to ``cache``, whose texts they continue."""
        start = cache.length if cache is not None else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        self.body(
            input_ids=tokens,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        if cache is not None:
            cache.length += tokens.shape[1]
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        return hidden

    @torch.no_grad()
    def logits(self, hidden: Float[Tensor, "B D"]) -> Float[Tensor, "B V"]:
        """Final norm and LM head, in float32."""
        return self.model.lm_head(self.norm(hidden)).float()


def chances(
    logits: Float[Tensor, "B V"], recent: Int[Tensor, "B W"] | None, sampling: SamplingParams
) -> Float[Tensor, "B V"]:
    """Penalty, temperature and min-p: the probabilities that continuations are drawn from."""
    if recent is not None and recent.shape[1] and sampling.repetition_penalty != 1.0:
        seen = logits.gather(1, recent)
        theta = sampling.repetition_penalty
        logits = logits.scatter(1, recent, torch.where(seen > 0, seen / theta, seen * theta))
    logits = logits / sampling.temperature
    if sampling.min_p > 0:
        floor = logits.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits.softmax(-1)


@torch.no_grad()
def continuations(
    backbone: Backbone, prompts: Int[Tensor, "B P"], new_tokens: int, sampling: SamplingParams, seed: int
) -> Iterator[tuple[Int[Tensor, " B"], Float[Tensor, "B n D"]]]:
    """Sample ``new_tokens`` for every prompt: yields each new token with the states before it.

    The first states are those of the whole prompt (n = P), the later ones of one token (n = 1).
    """
    generator = torch.Generator(prompts.device).manual_seed(seed)
    cache = BatchCache(prompts.shape[1] + new_tokens)
    text, fresh = prompts, prompts
    for _ in range(new_tokens):
        hidden = backbone.hidden(fresh, cache)
        recent = text[:, -sampling.penalty_window :]
        mass = chances(backbone.logits(hidden[:, -1]), recent, sampling).cumsum(-1)
        aim = torch.rand(len(mass), 1, generator=generator, device=mass.device) * mass[:, -1:]
        token = torch.searchsorted(mass, aim, right=True).clamp_max(mass.shape[1] - 1).squeeze(1)
        yield token, hidden
        fresh = token[:, None]
        text = torch.cat((text, fresh), dim=1)
