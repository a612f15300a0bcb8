"""The model writes its own training text: a batch of continuations, with their hidden states.

Continuations sampled as users sample are where the heads will be used, and the states that the
sampling computes anyway are the heads' training input, so one pass gives both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface

from tokenswift.config import SamplingParams
from tokenswift.loader.rope import Rotary
from tokenswift.models.generic import final_norm, final_norm_name, shaped_logits, shared_copy
from tokenswift.sampling.choice import recent_scores
from tokenswift.types import InputError

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
    *_: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Causal attention over whole texts, or of their newest tokens; (B, H, n, d) → (B, n, H, d).

    Query heads of one new token are packed per KV head, so that the cache is read once.
    """
    if softcap is not None or s_aux is not None:
        raise InputError("the model's attention has capped scores or sinks; training knows neither")
    batch, heads, n, width = query.shape
    length = key.shape[2]
    window = min(sliding_window or length, length)
    if n == 1:
        key, value = key[:, :, length - window :], value[:, :, length - window :]
        packed = query.view(batch, key.shape[1], heads // key.shape[1], width)
        out = F.scaled_dot_product_attention(packed, key, value, scale=scaling)
        return out.reshape(batch, 1, heads, width), None
    mask = None
    if window < length or n < length:
        at = torch.arange(length - n, length, device=query.device)[:, None]
        behind = at - torch.arange(length, device=query.device)
        mask = (behind >= 0) & (behind < window)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


class Backbone:
    """A transformers causal LM run for its hidden states *before* the final norm.

    It works on a copy that shares the model's tensors; the model itself is not touched.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        copied = shared_copy(model, Rotary(None, 1.0, None, model.config))
        copied.config._attn_implementation = ATTENTION
        self.body, self.norm = copied.base_model, final_norm(model)
        setattr(self.body, final_norm_name(model), torch.nn.Identity())

    @torch.no_grad()
    def hidden(self, tokens: Int[Tensor, "B n"], cache: BatchCache | None = None) -> Float[Tensor, "B n D"]:
        """States of the tokens; they are appended to ``cache``, whose texts they continue."""
        start = cache.length if cache is not None else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        made = self.body(
            input_ids=tokens,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        if cache is not None:
            cache.length += tokens.shape[1]
        return made.last_hidden_state

    @torch.no_grad()
    def logits(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """Final norm and LM head, in float32."""
        return shaped_logits(self.model.lm_head(self.norm(hidden)), self.model.config).float()


def chances(
    logits: Float[Tensor, "B V"], recent: Int[Tensor, "B L"], sampling: SamplingParams
) -> Float[Tensor, "B V"]:
    """The probabilities that continuations are drawn from; one-hot where ``sampling`` is greedy.

    Args:
        recent: the end of each text; its last W tokens are penalised.
    """
    scores = recent_scores(logits, recent, sampling)
    if sampling.greedy:
        return F.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
    return scores.softmax(-1)


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
        shares = chances(backbone.logits(hidden[:, -1]), text[:, -sampling.penalty_window :], sampling)
        fresh = shares.multinomial(1, generator=generator)
        yield fresh[:, 0], hidden
        text = torch.cat((text, fresh), dim=1)
