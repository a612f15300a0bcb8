"""Tokens a second, each side several times in turns: plain decoding and adaptive drafting, transformers with
the same float weights, and weights as they are stored beside unpacked ones.

Every row of `floats` says which bytes of weights a token of plain decoding reads, and what its KV
cache takes.
"""

from __future__ import annotations

from copy import deepcopy
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.common import AUTO, FLOATS, PLAIN, WARM, Side, Trial, in_turns, read, sizes, spread, spreads
from benchmarks.peer import bytes_read, token_times
from tokenswift.checks import check_choice
from tokenswift.config import SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.types import InputError


def floats(trial: Trial) -> dict[str, Any]:
    """transformers' ``generate``, plain decoding with the very weights that it has, and plain decoding with
    the weights as the file stores them.

    Raises:
        InputError: a dtype that transformers does not compute in.
    """
    llm = trial.llm
    check_choice("dtype", llm.dtype, FLOATS)
    begun = trial.prompt()
    place: dict[str, Any] = {"dtype": llm.dtype, "device": llm.device, "weights": llm.dtype, "heads": "none"}
    forms = {"float": LLM(trial.config["model"], **place), "stored": llm}
    theirs = LLM(trial.config["model"], **place).model
    states = {name: read(form, begun.ids, 1) for name, form in forms.items()}
    generate, prompt_speed = _generating(theirs, begun.ids, trial.new, trial.params)

    def plain(name: str) -> Side:
        return lambda: trial.write(states[name][0], PLAIN).metrics.tokens_per_second

    found = in_turns({"peer": generate, **{name: plain(name) for name in forms}}, trial.rounds)
    figures = spreads(found)
    for name, form in forms.items():
        figures |= spread(f"{name}_over_peer", found[name] / found["peer"])
        figures |= {f"{name}_{key}": value for key, value in sizes(form, len(begun.ids)).items()}
        figures[f"{name}_prompt"] = median(states[name][1])
    figures |= {"peer_prompt": prompt_speed, "peer_weights_mb": round(bytes_read(theirs) / 1e6, 2)}
    return trial.row(figures, begun)


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


def weights(trial: Trial) -> dict[str, Any]:
    """How many times as fast forms of one model are: weights as they are stored, unpacked, without heads, and
    in int8; each by plain decoding and by adaptive drafting. A ratio is the median over the rounds.

    Raises:
        InputError: the model's weights are not stored quantized, it does not run on the CPU kernels, or the
            dtype is none of float numbers.
    """
    llm, model, dtype = trial.llm, trial.config["model"], trial.llm.dtype
    check_choice("dtype", dtype, FLOATS)
    if not llm.target.backend.fused or llm.target.weight_bytes * 2 > _dense(llm):
        raise InputError(
            f"model {model} is not stored quantized here; valid: the default model or "
            "a GGUF file of low-bit weights, on the CPU kernels"
        )
    forms = {
        "stored": llm,
        "unpacked": LLM(model, dtype=dtype, device="cpu", weights=dtype),
        "bare": LLM(model, dtype=dtype, device="cpu", weights=dtype, heads="none"),
        "whole": LLM(model, dtype="int8", device="cpu"),
    }
    begun = trial.prompt()
    states = {name: form.prefill(begun.ids) for name, form in forms.items()}
    tokens: dict[bool, set[tuple[int, ...]]] = {False: set(), True: set()}
    lengths: dict[str, float] = {}

    def side(name: str, strategy: str) -> Side:
        def run() -> float:
            done = trial.write(states[name], strategy)
            tokens[name == "whole"].add(tuple(done.token_ids))
            if strategy == AUTO:
                lengths[f"{name}_length"] = round(trial.new / done.metrics.steps, 3)
            return done.metrics.tokens_per_second

        return run

    sides = {f"{name} {strategy}": side(name, strategy) for name in forms for strategy in (PLAIN, AUTO)}
    del sides[f"bare {PLAIN}"]  # the same as unpacked
    found = in_turns(sides, trial.rounds)

    def ratio(one: str, over: str) -> float:
        return (found[one] / found[over]).median()

    bases = {"stored": "stored", "unpacked": "unpacked", "bare": "unpacked", "whole": "whole"}
    figures = {
        "stored": ratio(f"stored {PLAIN}", f"unpacked {PLAIN}"),
        "whole": ratio(f"whole {PLAIN}", f"stored {PLAIN}"),
        **{f"auto_{name}": ratio(f"{name} {AUTO}", f"{base} {PLAIN}") for name, base in bases.items()},
        "stored_speed": found[f"stored {PLAIN}"].median(),
        **lengths,
    }
    return trial.row(figures, identical=all(len(texts) == 1 for texts in tokens.values()))


def _dense(llm: LLM) -> int:
    """Bytes that the weights of a pass would take unpacked."""
    shape, target = llm.target.body.shape, llm.target
    kv = 2 * shape.kv_heads * shape.width
    layer = shape.hidden * (2 * shape.heads * shape.width + kv + 3 * shape.inner)
    return (shape.layers * layer + target.vocab_size * shape.hidden) * target.dtype.itemsize
