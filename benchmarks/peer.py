"""transformers' own ``generate`` with our model and sampling settings, for comparison of speed."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from tokenswift.config import SamplingParams


class _Clock:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Called with the prompt, then with every token."""
        self.times.append(perf_counter())

    def end(self) -> None:
        """Called at the end."""


def settings(sampling: SamplingParams) -> dict[str, Any]:
    """Arguments of ``generate`` that mean the same (its penalty looks at the whole text)."""
    p = sampling
    given: dict[str, Any] = {"do_sample": not p.greedy, "repetition_penalty": p.repetition_penalty}
    if p.greedy:
        return given
    given |= {"temperature": p.temperature, "top_k": p.top_k, "top_p": p.top_p}
    if p.min_p:
        given["min_p"] = p.min_p
    if p.eta_cutoff:
        given["eta_cutoff"] = p.eta_cutoff
    return given


def token_times(
    model: Any, prompt: list[int], tokens: int, sampling: SamplingParams, **more: Any
) -> list[float]:
    """When each token of transformers' ``generate`` came, in seconds; the first entry is the prompt's.

    Args:
        model: a transformers causal LM.
        prompt: token ids.
        tokens: how many to write; the text is not ours (another random generator).
        more: further arguments of ``generate``; with prompt look-up an entry stands for a step.
    """
    ids = torch.tensor([prompt], device=model.device)
    clock = _Clock()
    torch.manual_seed(sampling.seed)
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
            eos_token_id=None,
            streamer=clock,
            **settings(sampling),
            **more,
        )
    return clock.times


def bytes_read(model: Any) -> int:
    """Bytes of weights that a pass of a transformers model reads: of an embedding that is no LM head as well,
    one row."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    apart = head is not None and head.weight is not table.weight
    return whole - (table.weight.numel() * table.weight.element_size() if apart else 0)
