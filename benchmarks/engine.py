"""Passes of the engine: by their number of rows, against the machine's limits (Table 2), of several
texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from benchmarks.common import AUTO, PLAIN, Trial, in_turns, median, pass_times, times
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.engine.stream import Prefilled
from tokenswift.engine.ticket import Event
from tokenswift.kv.memory import large_empty
from tokenswift.types import Step

ROWS = (1, 2, 4, 5, 8, 16, 41, 64)
SIDE = {"cpu": 2048, "cuda": 8192}  # of the square matrices multiplied to measure arithmetic
BLOCK = 1 << 29  # bytes read to measure bandwidth, more than caches hold
TOGETHER, DRAFTED = (
    (1, 2, 4, 8, 16),
    (1, 2, 4, 8),
)  # texts at once, plainly and by adaptive drafting


def passes(trial: Trial) -> dict[str, Any]:
    """A pass of n rows (a chain) with its LM head, in ms, and over a pass of one row; in turns."""
    taken: dict[int, list[float]] = {n: [] for n in ROWS}
    for _ in range(trial.rounds):
        for n, found in taken.items():
            found += pass_times(trial.llm.target, trial.config["prefill"], n, 3)
    one = median(taken[1])
    figures = {
        str(n): {"pass_ms": median(found), "over_one_row": round(median(found) / one, 3)}
        for n, found in taken.items()
    }
    return {"runs": len(taken[1]), "figures": figures}


@torch.inference_mode()
def least(work: Callable[[], object]) -> float:
    """Seconds of the fastest call after a first one."""
    return min(times(work, 5, 0.1)) / 1e3


def weights_of(target: Any) -> Counter[str]:
    """How many weights of a loaded model a row is multiplied with, by what they are stored as."""
    found: Counter[str] = Counter()
    if target.layout is None:
        found[str(target.dtype).removeprefix("torch.")] = (
            target.weight_bytes // target.dtype.itemsize
        )
        return found
    for weight in (target.head, *(w for layer in target.body.weights for w in layer.packed())):
        for part in weight.parts:
            kind = (
                str(part.data.dtype).removeprefix("torch.")
                if part.format is None
                else part.format.name
            )
            found[kind] += part.rows * weight.columns
    return found


def machine(trial: Trial) -> dict[str, Any]:
    """The least time that one token's pass takes, by bandwidth and arithmetic measured here; what
    it takes.

    The context is ``prefill`` tokens (made up: only their number matters). Method: Williams,
        Waterman and
    Patterson, "Roofline" (CACM 2009).
    """
    target, context = trial.llm.target, trial.config["prefill"]
    side = SIDE[target.backend.kind]
    block = large_empty(BLOCK // 4, dtype=torch.float32, device=target.device).fill_(1.0)
    square = torch.randn(side, side, device=target.device, dtype=target.dtype)
    reads, flops = BLOCK / least(block.sum), 2 * side**3 / least(lambda: square @ square)
    kv = target.cache_bytes(context)
    attention = 4 * target.layers * target.config.num_attention_heads * target.head_dim * context
    operations = 2 * weights_of(target).total() + attention
    figures = {
        "bandwidth": reads / 1e9,
        "gflops": flops / 1e9,
        "weights_gb": target.weight_bytes / 1e9,
        "weights_ms": 1000 * target.weight_bytes / reads,
        "kv_gb": kv / 1e9,
        "kv_ms": 1000 * kv / reads,
        "operations": operations / 1e9,
        "compute_ms": 1000 * operations / flops,
        "pass_ms": min(pass_times(target, context, 1, 10)),
    }
    return {"figures": {str(context): {name: round(value, 3) for name, value in figures.items()}}}


def texts(trial: Trial) -> dict[str, Any]:
    """Speed of several texts in each pass over one, and of adaptive drafting over plain decoding of
    as many.

    Speeds are those while all texts are under way, from forks of prompts that were read before.
    """
    states = [trial.llm.prefill(trial.prompt(index=i).ids) for i in range(4)]
    written: dict[int, set[tuple[int, ...]]] = {}

    def side(strategy: str, count: int) -> float:
        speed, done = _together(trial, states, strategy, count)
        for i, tokens in enumerate(done):
            written.setdefault(i, set()).add(tokens)
        return speed

    runs = [*((PLAIN, count) for count in TOGETHER), *((AUTO, count) for count in DRAFTED)]
    found: Any = in_turns({f"{way} {n}": partial(side, way, n) for way, n in runs}, trial.rounds)
    one = found[f"{PLAIN} 1"]
    figures = {
        "plain_speed": one.median(),
        **{f"plain_{n}": (found[f"{PLAIN} {n}"] / one).median() for n in TOGETHER[1:]},
        **{f"auto_{n}": (found[f"{AUTO} {n}"] / found[f"{PLAIN} {n}"]).median() for n in DRAFTED},
    }
    return trial.row(figures, identical=all(len(each) == 1 for each in written.values()))


def _together(
    trial: Trial, states: list[Prefilled], strategy: str, count: int
) -> tuple[float, list[tuple[int, ...]]]:
    """Tokens a second while so many texts are under way, and the texts; seeds tell those of one
    prompt apart."""
    seen: list[list[tuple[float, int]]] = [[] for _ in range(count)]
    with Scheduler(trial.llm, count) as scheduler:
        tickets = []
        for i in range(count):
            state = states[i % len(states)]
            params = replace(trial.params, seed=trial.params.seed + i)
            request = Request(state.tokens, trial.new, strategy, None, params, ignore_eos=True)
            tickets.append(scheduler.submit(request, prefixes=state))
            tickets[-1].on_event(partial(_note, seen[i]))
        for ticket in tickets:
            ticket.wait()
    begun, ended = max(told[0][0] for told in seen), min(told[-1][0] for told in seen)
    tokens = sum(made for told in seen for at, made in told if begun < at <= ended)
    return tokens / (ended - begun), [tuple(ticket.result.token_ids) for ticket in tickets]


def _note(told: list[tuple[float, int]], event: Event) -> None:
    if isinstance(event, Step):
        told.append((perf_counter(), len(event.token_ids)))
