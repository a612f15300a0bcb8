"""Tokens a second, each side several times in turns: plain decoding and adaptive drafting, transformers with
the same float weights, weights as they are stored beside unpacked ones, and threads beside busy loops.

Every row of `rates` and `floats` says which bytes of weights a token of plain decoding reads, and what its KV
cache takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.common import AUTO, FLOATS, PLAIN, WARM, Side, Trial, in_turns, read, sizes, spread, spreads
from tokenswift.checks import check_choice
from tokenswift.config import SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.engine.peer import bytes_read, token_times
from tokenswift.types import InputError


def rates(trial: Trial) -> dict[str, Any]:
    """Plain decoding and, where the strategy is another, that beside it, after one prompt."""
    begun, strategy = trial.prompt(), trial.config["strategy"]
    state, prompts = read(trial.llm, begun.ids, trial.rounds)
    texts: set[tuple[int, ...]] = set()

    def side(strategy: str, options: dict[str, Any]) -> float:
        done = trial.write(state, strategy, options)
        texts.add(tuple(done.token_ids))
        return done.metrics.tokens_per_second

    sides: dict[str, Side] = {"plain": lambda: side(PLAIN, {})}
    if strategy != PLAIN:
        sides["auto"] = lambda: side(strategy, trial.options)
    found = in_turns(sides, trial.rounds)
    figures = spreads(found) | spread("reading", prompts) | sizes(trial.llm, len(begun.ids))
    if "auto" in found:
        times = found["auto"] / found["plain"]
        figures |= {"speedup": times.median(), "least": times.min(), "most": times.max()}
    return trial.row(figures, begun, identical=len(texts) == 1)


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
    if not llm.target.backend.panels or llm.target.weight_bytes * 2 > _dense(llm):
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


#: a program that computes for as long as its parent lives, on one core where one is named
LOOP = """
import os, sys
parent, *cores = map(int, sys.argv[1:])
if cores:
    os.sched_setaffinity(0, cores)
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextmanager
def busy_loops(count: int, *core: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """While entered, so many processes only compute; they end with this process, however it ends.

    Args:
        core: the one that all of them are bound to; none: they are free.
    """
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-IS", "-c", LOOP, *map(str, (os.getpid(), *core))]
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            loops.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet))
        yield loops
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def load(trial: Trial) -> dict[str, Any]:
    """How many times as fast plain decoding by the usual number of threads is as by one, on an idle machine,
    with a busy loop on one core, and with one on each.

    Numbers of threads take turns within a condition; before the clock runs, some tokens let the engine find
    the number that pays.

    Raises:
        InputError: processes cannot be bound to cores here, or there is one thread anyway.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise InputError("load is measured by binding processes to cores, which this system does not do")
    usual, cores = torch.get_num_threads(), sorted(os.sched_getaffinity(0))
    if usual < 2:
        raise InputError("threads is 1; valid for load: at least 2, to compare with one")
    state = trial.llm.prefill(trial.prompt().ids)

    def ms(tokens: int) -> float:
        done = state.generate(tokens, PLAIN, {}, trial.params, ignore_eos=True)
        return 1e3 / done.metrics.tokens_per_second

    conditions: dict[str, tuple[int, ...]] = {"idle": (0,), "one": (1, cores[-1]), "all": (len(cores),)}
    taken: dict[str, list[dict[int, float]]] = {name: [] for name in conditions}
    order = [usual, 1]
    try:
        for _ in range(trial.rounds):
            for name, loops in conditions.items():
                taken[name].append({})
                with busy_loops(*loops):
                    for threads in order:
                        torch.set_num_threads(threads)
                        ms(trial.config["warm"])
                        taken[name][-1][threads] = ms(trial.new)
            order.reverse()
    finally:
        torch.set_num_threads(usual)
    figures = {}
    for name, found in taken.items():
        figures[f"{name}_ms"] = median(one[usual] for one in found)
        figures[f"{name}_ratio"] = median(one[1] / one[usual] for one in found)
    return trial.row(figures, cores=len(cores))
