"""Weights as they are stored beside unpacked ones, and drafts in few bits: forms of one model, in turns.

Every form writes the same text from the same prompt, once by plain decoding and once by automatic drafting; a
ratio is that of two neighbours of one round, and what is told is the median over the rounds.
"""

from __future__ import annotations

from typing import Any

from benchmarks.prompts import prompt
from benchmarks.rates import FLOATS
from tokenswift.config import SamplingParams, check_choice
from tokenswift.engine.llm import LLM
from tokenswift.roofline.timer import median
from tokenswift.types import InputError

AUTO, PLAIN = "auto", "autoregressive"


def measure(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """How many times as fast the forms are.

    Raises:
        InputError: the model's weights are not stored in few bits, it does not run on the CPU kernels, or the
            dtype is none of float numbers.
    """
    dtype = llm.dtype
    check_choice("dtype", dtype, FLOATS)
    if not llm.target.backend.panels or llm.target.weight_bytes * 2 > _dense(llm):
        raise InputError(
            f"model {config['model']} is not stored in few bits here; valid: the default model or "
            "a GGUF file of low-bit weights, on the CPU kernels"
        )
    forms = {
        "stored": llm,
        "unpacked": LLM(config["model"], dtype=dtype, device="cpu", weights=dtype),
        "bare": LLM(config["model"], dtype=dtype, device="cpu", weights=dtype, heads="none"),
        "whole": LLM(config["model"], dtype="int8", device="cpu"),
    }
    size = llm.target.vocab_size
    ids = prompt(config["prompts"], llm.encode, config["text"], config["prefill"], size).ids
    states = {name: form.prefill(ids) for name, form in forms.items()}
    params, new = SamplingParams(**config["sampling"]), config["points"][-1]
    runs = [
        (name, strategy)
        for name in forms
        for strategy in (PLAIN, AUTO)
        if (name, strategy) != ("bare", PLAIN)
    ]
    speeds: dict[tuple[str, str], list[float]] = {run: [] for run in runs}
    tokens: dict[str, set[tuple[int, ...]]] = {"exact": set(), "whole": set()}
    lengths: dict[str, float] = {}
    for turn in range(config["rounds"] + 1):  # the first is not counted
        for name, strategy in runs:
            done = states[name].generate(new, strategy, {}, params, ignore_eos=True)
            tokens["whole" if name == "whole" else "exact"].add(tuple(done.token_ids))
            if turn:
                speeds[name, strategy].append(done.metrics.tokens_per_second)
            if strategy == AUTO:
                lengths[f"{name}_length"] = round(new / done.metrics.steps, 3)
        runs.reverse()

    def ratio(one: tuple[str, str], other: tuple[str, str]) -> float:
        return median([a / b for a, b in zip(speeds[one], speeds[other], strict=True)])

    figures = {
        "stored": ratio(("stored", PLAIN), ("unpacked", PLAIN)),
        "whole": ratio(("whole", PLAIN), ("stored", PLAIN)),
        "auto_stored": ratio(("stored", AUTO), ("stored", PLAIN)),
        "auto_unpacked": ratio(("unpacked", AUTO), ("unpacked", PLAIN)),
        "auto_bare": ratio(("bare", AUTO), ("unpacked", PLAIN)),
        "auto_whole": ratio(("whole", AUTO), ("whole", PLAIN)),
        "stored_speed": median(speeds["stored", PLAIN]),
        **lengths,
    }
    same = all(len(texts) == 1 for texts in tokens.values())
    return {"runs": config["rounds"], "identical": same, "figures": {str(new): figures}}


def _dense(llm: LLM) -> int:
    """Bytes that the weights of a pass would take unpacked."""
    shape, target = llm.target.body.shape, llm.target
    kv = 2 * shape.kv_heads * shape.width
    layer = shape.hidden * (2 * shape.heads * shape.width + kv + 3 * shape.inner)
    return (shape.layers * layer + target.vocab_size * shape.hidden) * target.dtype.itemsize
