"""transformers' own ``generate`` with our sampling settings, for comparison of speed."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from tokenswift.config import SamplingParams

if TYPE_CHECKING:
    from tokenswift.llm import LLM


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
    import torch

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


def generate_rate(llm: LLM, prompt: list[int], tokens: int, sampling: SamplingParams, **more: Any) -> float:
    """Tokens a second of transformers' ``generate`` on the same model, from the first new token on.

    The model's weights exist twice from then on (`LLM.model`). Arguments as of :func:`token_times`; at
    least 2 tokens.
    """
    times = token_times(llm.model, prompt, tokens, sampling, **more)
    return (tokens - 1) / (times[-1] - times[1])
