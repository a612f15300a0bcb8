"""Beside transformers' ``generate``: plain decoding with the very weights that it has, and with
those of the file; and what a type of numbers costs in perplexity."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from math import exp
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import PLAIN, Side, Trial, in_turns, spread
from tokenswift.config import SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.types import check_choice

FLOATS = ("float32", "bfloat16", "float16")  # what transformers computes in
WARM = 64  # tokens of a prompt that is read before
READ = 256  # tokens of a pass that reads a text


class _Clock:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Called with the prompt, then with every token."""
        self.times.append(perf_counter())

    def end(self) -> None:
        """Called at the end."""


def speed(trial: Trial) -> dict[str, Any]:
    """Tokens a second of each, in turns, with the bytes of weights that a token reads.

    Raises:
        InputError: a dtype that transformers does not compute in.
    """
    llm = trial.llm
    check_choice("dtype", llm.dtype, FLOATS)
    begun = trial.prompt()
    place: dict[str, Any] = {
        "dtype": llm.dtype,
        "device": llm.device,
        "weights": llm.dtype,
        "heads": "none",
    }
    forms = {"float": LLM(trial.config["model"], **place), "stored": llm}
    theirs: Any = LLM(trial.config["model"], **place).model
    figures = {
        "peer_weights_mb": sum(p.numel() * p.element_size() for p in theirs.parameters()) / 1e6
    }
    states = {}
    for name, form in forms.items():
        form.prefill(begun.ids[:WARM])
        states[name] = form.prefill(begun.ids)
        figures[f"{name}_prompt"] = len(begun.ids) / states[name].seconds
        figures[f"{name}_weights_mb"] = form.target.weight_bytes / 1e6
    generate, figures["peer_prompt"] = _generating(theirs, begun.ids, trial.new, trial.params)

    def plain(name: str) -> Side:
        return lambda: trial.generate(states[name], PLAIN).metrics.tokens_per_second

    found: Any = in_turns({"peer": generate, **{name: plain(name) for name in forms}}, trial.rounds)
    for name in found:
        figures |= spread(name, found[name])
        figures |= spread(f"{name}_over_peer", found[name] / found["peer"])
    return trial.row(figures, begun)


def _generating(model: Any, ids: list[int], new: int, params: SamplingParams) -> tuple[Side, float]:
    """What runs ``generate`` after a prompt that is in its cache already (tokens a second); tokens
    of the prompt a second. Its penalty looks at the whole text, and its text is not ours."""
    from transformers import DynamicCache

    given, cache = torch.tensor([ids], device=model.device), DynamicCache(config=model.config)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    how: dict[str, Any] = {} if params.greedy else {name: getattr(params, name) for name in names}
    how |= {"max_new_tokens": new, "min_new_tokens": new, "do_sample": not params.greedy}
    how |= {"pad_token_id": 0, "eos_token_id": None, "attention_mask": torch.ones_like(given)}
    with torch.inference_mode():
        model(given[:, :WARM], use_cache=True, logits_to_keep=1)
        begun = perf_counter()
        model(given[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        seconds = perf_counter() - begun

    def run() -> float:
        clock = _Clock()
        torch.manual_seed(params.seed)
        with torch.inference_mode():
            model.generate(given, past_key_values=deepcopy(cache), streamer=clock, **how)
        return (new - 1) / (clock.times[-1] - clock.times[1])

    return run, len(ids) / seconds


@torch.inference_mode()
def quality(trial: Trial) -> dict[str, Any]:
    """What a type of products, keys and values costs: perplexity over ``prefill`` tokens of each of
    ``novels`` texts, that of float32, their ratio, the mean divergence (nats a token) and the share
    of equal most probable tokens.

    Every text is read once by the model in the type and once in float32; a position's logits are
    those of a pass over all tokens before it, as in generation.
    """
    llm, config = trial.llm, trial.config
    exact = LLM(config["model"], dtype="float32", device=llm.device, heads="none")
    begun = [trial.prompt(index=index) for index in range(config["novels"])]
    sums, count = torch.zeros(4, dtype=torch.float64), 0
    for one in begun:
        after = torch.tensor(one.ids[1:])[:, None].split(READ)
        both = (_logits(each, one.ids)[:-1].split(READ) for each in (llm, exact))
        for ours, theirs, token in zip(*both, after, strict=True):
            ours, theirs = ours.log_softmax(-1), theirs.log_softmax(-1)
            sums[0] -= ours.gather(1, token).sum()
            sums[1] -= theirs.gather(1, token).sum()
            sums[2] += (theirs.exp() * (theirs - ours)).sum()
            sums[3] += (ours.argmax(1) == theirs.argmax(1)).sum()
            count += len(token)
    own, loss, far, same = (sums / count).tolist()
    figures = {
        "perplexity": exp(own),
        "perplexity_float32": exp(loss),
        "over_float32": exp(own - loss),
        "divergence": far,
        "same_best": same,
        "kv_bytes": llm.target.kv_bytes,
    }
    return {
        "prompt": {"name": ", ".join(one.name for one in begun), "tokens": config["prefill"]},
        "figures": {str(count): {name: round(value, 5) for name, value in figures.items()}},
    }


def _logits(llm: LLM, ids: list[int]) -> Tensor:
    """Logits of all positions [n, V], in double precision, pass by pass."""
    target, found = llm.target, []
    cache = target.new_cache(len(ids))
    for start, end in pairwise([*range(0, len(ids), READ), len(ids)]):
        tokens = torch.tensor(ids[start:end], device=target.device)
        positions = torch.arange(start, end, device=target.device)
        hidden = target.forward(tokens, positions, cache).hidden
        cache.commit(tuple(range(end - start)))
        found.append(target.logits(hidden).double().cpu())
    return torch.cat(found)
