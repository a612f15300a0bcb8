"""Tokens a second, each side several times in turns: plain decoding and automatic drafting on one text, and
transformers' ``generate`` with unpacked weights beside ours with the same weights.

Every row says which bytes of weights a token of plain decoding reads, and what its KV cache takes.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.prompts import Prompt, prompt
from tokenswift.config import SamplingParams, check_choice
from tokenswift.engine.llm import LLM
from tokenswift.engine.peer import bytes_read, token_times
from tokenswift.engine.prefill import Prefilled

PLAIN = "autoregressive"
SHORT = 2048  # tokens of a prompt up to which it is read once a round; a longer one is read once
FLOATS = ("float32", "bfloat16", "float16")  # what transformers computes in
WARM = 64  # tokens of a prompt that is read before
Side = Callable[[], float]


def in_turns(sides: dict[str, Side], rounds: int) -> dict[str, list[float]]:
    """What each side says in each round, forth and back; a first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for turn in range(rounds + 1):
        for name in order:
            value = sides[name]()
            if turn:
                found[name].append(value)
        order.reverse()
    return found


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Median, least and most under a name."""
    made = {name: median(values), f"{name}_least": min(values), f"{name}_most": max(values)}
    return {key: round(value, 4) for key, value in made.items()}


def measure(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """Plain decoding and, where the strategy is another, that beside it, after one prompt."""
    begun = _prompt(llm, config)
    state, prompts = _read(llm, begun.ids, config["rounds"])
    params, new = SamplingParams(**config["sampling"]), config["points"][-1]
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in config["options"].items()}
    texts: set[tuple[int, ...]] = set()

    def side(strategy: str, given: dict[str, Any]) -> float:
        done = state.generate(new, strategy, given, params, ignore_eos=True)
        texts.add(tuple(done.token_ids))
        return done.metrics.tokens_per_second

    sides: dict[str, Side] = {"plain": lambda: side(PLAIN, {})}
    if config["strategy"] != PLAIN:
        sides["auto"] = lambda: side(config["strategy"], options)
    found = in_turns(sides, config["rounds"])
    figures = {name: value for key, values in found.items() for name, value in spread(key, values).items()}
    figures |= spread("reading", prompts) | sizes(llm, len(begun.ids))
    if "auto" in found:
        times = [fast / slow for fast, slow in zip(found["auto"], found["plain"], strict=True)]
        figures |= {"speedup": round(median(times), 4), "least": min(times), "most": max(times)}
    return {
        "prompt": {"name": begun.name, "tokens": len(begun.ids), "digest": begun.digest},
        "runs": config["rounds"],
        "identical": len(texts) == 1,
        "figures": {str(new): figures},
    }


def against_transformers(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """transformers' ``generate``, plain decoding with the very weights that it has, and plain decoding with
    the weights as the file stores them.

    Raises:
        InputError: a dtype that transformers does not compute in.
    """
    check_choice("dtype", llm.dtype, FLOATS)
    begun, new = _prompt(llm, config), config["points"][-1]
    unpacked = LLM(config["model"], dtype=llm.dtype, device=llm.device, weights=llm.dtype, heads="none")
    theirs = LLM(config["model"], dtype=llm.dtype, device=llm.device, weights=llm.dtype, heads="none").model
    params = SamplingParams(**config["sampling"])
    forms = {"float": unpacked, "stored": llm}
    states = {name: _read(form, begun.ids, 1) for name, form in forms.items()}
    generate, prompt_speed = _generating(theirs, begun.ids, new, params)

    def plain(name: str) -> Side:
        state = states[name][0]
        return lambda: state.generate(new, PLAIN, {}, params, ignore_eos=True).metrics.tokens_per_second

    found = in_turns({"peer": generate, **{name: plain(name) for name in forms}}, config["rounds"])
    figures = {name: value for key, values in found.items() for name, value in spread(key, values).items()}
    for name, form in forms.items():
        times = [ours / slow for ours, slow in zip(found[name], found["peer"], strict=True)]
        figures |= spread(f"{name}_over_peer", times)
        figures |= {f"{name}_{key}": value for key, value in sizes(form, len(begun.ids)).items()}
        figures[f"{name}_prompt"] = round(median(states[name][1]), 4)
    figures |= {"peer_prompt": round(prompt_speed, 4), "peer_weights_mb": round(bytes_read(theirs) / 1e6, 2)}
    return {
        "prompt": {"name": begun.name, "tokens": len(begun.ids), "digest": begun.digest},
        "runs": config["rounds"],
        "figures": {str(new): figures},
    }


def sizes(llm: LLM, context: int) -> dict[str, float]:
    """MB of weights that a pass reads, and of keys and values after a context."""
    target = llm.target
    return {
        "weights_mb": round(target.weight_bytes / 1e6, 2),
        "kv_mb": round(target.kv_bytes * context / 1e6, 2),
    }


def _prompt(llm: LLM, config: dict[str, Any]) -> Prompt:
    return prompt(config["prompts"], llm.encode, config["text"], config["prefill"], llm.target.vocab_size)


def _read(llm: LLM, ids: list[int], rounds: int) -> tuple[Prefilled, list[float]]:
    """The state after a prompt; tokens of it a second, each time that it was read."""
    llm.prefill(ids[:WARM])
    states = [llm.prefill(ids) for _ in range(rounds if len(ids) <= SHORT else 1)]
    return states[-1], [len(ids) / state.seconds for state in states]


def _generating(model: Any, ids: list[int], new: int, params: SamplingParams) -> tuple[Side, float]:
    """What runs ``generate`` after a prompt that is in its cache already; tokens of the prompt a second."""
    from transformers import DynamicCache

    given, cache = torch.tensor([ids], device=model.device), DynamicCache(config=model.config)
    with torch.inference_mode():
        model(given[:, :WARM], use_cache=True, logits_to_keep=1)
        begun = perf_counter()
        model(given[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        seconds = perf_counter() - begun

    def run() -> float:
        times = token_times(model, ids, new, params, past_key_values=deepcopy(cache))
        return (new - 1) / (times[-1] - times[1])

    return run, len(ids) / seconds
