"""Models that compute something else than transformers' own code, the same in every pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from tokenswift import LLM
from tokenswift.models.decoder import PREFILL_CHUNK
from tokenswift.models.source import FromModel

Prefill = Callable[[Any, list[int], Any], Any]


def cast(model: Any, dtype: torch.dtype) -> Any:
    """The weights in a dtype; rotary frequencies stay in float32, as in a loaded checkpoint."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def prefilled(llm: LLM, prefill: Prefill) -> LLM:
    """The same with another prefill: ``prefill(real, tokens, cache)``."""
    real = llm.target.prefill
    llm.target.prefill = lambda tokens, cache, *_, **__: prefill(real, tokens, cache)  # type: ignore[method-assign]
    return llm


def second_part_shifted(at: int, by: int = 7) -> Prefill:
    """The prompt from token ``at`` on is run ``by`` positions off."""

    def prefill(real: Any, tokens: list[int], cache: Any) -> Any:
        result = real(tokens[:at], cache)
        rest = torch.tensor(tokens[at:])
        if len(rest):
            result = real.__self__.forward(rest, torch.arange(len(rest)) + at + by, cache)
            cache.commit(tuple(range(len(rest))))
        return result

    return prefill


def second_chunk_shifted(model: Any) -> LLM:
    """The second chunk of the prefill is run seven positions off."""
    return prefilled(LLM.from_model(model), second_part_shifted(PREFILL_CHUNK))


def entries_lost(real: Any, tokens: list[int], cache: Any) -> Any:
    """Ten entries of the prompt are another token's."""
    return real([*tokens[:-20], *([0] * 10), *tokens[-10:]], cache)


def windowless(model: Any) -> LLM:
    """The same weights without sliding windows, beside the model that has them."""
    blind = copy.deepcopy(model)
    blind.config.sliding_window = None
    if getattr(blind.config, "layer_types", None):
        blind.config.layer_types = ["full_attention"] * len(blind.model.layers)
        blind.model.has_sliding_layers = False
    for layer in blind.model.layers:
        layer.self_attn.sliding_window = None
    llm = LLM.from_model(blind)
    source = llm.source
    assert isinstance(source, FromModel)
    source._model = model
    return llm
