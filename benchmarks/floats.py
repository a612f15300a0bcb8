"""Beside transformers' ``generate``: plain decoding with the very weights that it has, and with
those of the file."""

from __future__ import annotations

from copy import deepcopy
from time import perf_counter
from typing import Any

import torch

from benchmarks.common import PLAIN, Side, Trial, in_turns, spread
from tokenswift.checks import check_choice
from tokenswift.config.sampling import SamplingParams
from tokenswift.engine.llm import LLM

FLOATS = ("float32", "bfloat16", "float16")  # what transformers computes in
WARM = 64  # tokens of a prompt that is read before


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
