"""Passes of the engine: by their number of rows, against the machine's limits (Table 2), of several
texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median as middle
from time import perf_counter

import torch

from benchmarks.common import (
    AUTO,
    PLAIN,
    Trial,
    in_turns,
    median,
    pass_times,
    ratios,
    times,
)
from benchmarks.words import Measured
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.engine.stream import Prefilled
from tokenswift.engine.ticket import Event
from tokenswift.kv.memory import large_empty
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.target import Target
from tokenswift.turns import take_turns
from tokenswift.types import InputError, Step

ROWS = (1, 2, 4, 5, 8, 16, 41, 64)
SIDE = {"cpu": 2048, "cuda": 8192}  # of the square matrices multiplied to measure arithmetic
BLOCK = 1 << 29  # bytes read to measure bandwidth, more than caches hold
PLAIN_COUNTS = (1, 2, 4, 8, 16)  # texts at once by plain decoding
AUTO_COUNTS = (1, 2, 4, 8)  # and by adaptive drafting
PROMPTS = 4  # different ones of the texts


def passes(trial: Trial) -> Measured:
    """A pass of n rows (a chain) with its LM head, in ms, and over a pass of one row; in turns."""
    milliseconds: dict[int, list[float]] = {n: [] for n in ROWS}
    for _, n in take_turns(ROWS, range(trial.rounds)):
        milliseconds[n] += pass_times(trial.llm.target, trial.config["prefill"], n, 3)
    one = median(milliseconds[1])
    figures = {
        str(n): {"pass_ms": median(of_rows), "over_one_row": round(median(of_rows) / one, 3)}
        for n, of_rows in milliseconds.items()
    }
    return {"runs": len(milliseconds[1]), "figures": figures}


@torch.inference_mode()
def least(work: Callable[[], object]) -> float:
    """Seconds of the fastest call after a first one."""
    return min(times(work, 5, 0.1)) / 1e3


def weights_of(target: Target) -> Counter[str]:
    """How many weights of a loaded model a row is multiplied with, by what they are stored as."""
    counts: Counter[str] = Counter()
    if not isinstance(target, NativeTarget):
        counts[dtype_name(target.dtype)] = target.weight_bytes // target.dtype.itemsize
        return counts
    weights = [target.head, *(weight for layer in target.body.weights for weight in layer.packed())]
    for weight in weights:
        for part in weight.parts:
            name = dtype_name(part.data.dtype) if part.format is None else part.format.name
            counts[name] += part.rows * weight.columns
    return counts


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "float32"."""
    return str(dtype).removeprefix("torch.")


def machine(trial: Trial) -> Measured:
    """The least time that one token's pass takes, by bandwidth and arithmetic measured here; what
    it takes.

    The context is ``prefill`` tokens (made up: only their number matters). Method: Williams,
    Waterman and Patterson, "Roofline" (CACM 2009).
    """
    target = trial.llm.target
    context = trial.config["prefill"]
    side = SIDE[target.backend.kind]
    block = large_empty(BLOCK // 4, dtype=torch.float32, device=target.device).fill_(1.0)
    square = torch.randn(side, side, device=target.device, dtype=target.dtype)
    bytes_per_second = BLOCK / least(block.sum)
    operations_per_second = 2 * side**3 / least(lambda: square @ square)
    kv_bytes = target.cache_bytes(context)
    attention = 4 * target.layers * target.config.num_attention_heads * target.head_dim * context
    operations = 2 * weights_of(target).total() + attention
    figures = {
        "bandwidth": bytes_per_second / 1e9,
        "gflops": operations_per_second / 1e9,
        "weights_gb": target.weight_bytes / 1e9,
        "weights_ms": 1000 * target.weight_bytes / bytes_per_second,
        "kv_gb": kv_bytes / 1e9,
        "kv_ms": 1000 * kv_bytes / bytes_per_second,
        "operations": operations / 1e9,
        "compute_ms": 1000 * operations / operations_per_second,
        "pass_ms": min(pass_times(target, context, 1, 10)),
    }
    return {"figures": {str(context): {name: round(value, 3) for name, value in figures.items()}}}


def texts(trial: Trial) -> Measured:
    """Speed of several texts in each pass over one, and of adaptive drafting over plain decoding of
    as many.

    Speeds are those while all texts are under way, from forks of prompts that were read before.
    """
    states = [trial.llm.prefill(trial.prompt(index=i).ids) for i in range(PROMPTS)]
    written: dict[int, set[tuple[int, ...]]] = {}

    def side(strategy: str, count: int) -> float:
        speed, token_ids = _together(trial, states, strategy, count)
        for i, tokens in enumerate(token_ids):
            written.setdefault(i, set()).add(tokens)
        return speed

    plain = {f"{PLAIN} {count}": partial(side, PLAIN, count) for count in PLAIN_COUNTS}
    auto = {f"{AUTO} {count}": partial(side, AUTO, count) for count in AUTO_COUNTS}
    speeds = in_turns({**plain, **auto}, trial.rounds)
    one = speeds[f"{PLAIN} 1"]
    figures = {"plain_speed": middle(one)}
    for count in PLAIN_COUNTS[1:]:
        figures[f"plain_{count}"] = middle(ratios(speeds[f"{PLAIN} {count}"], one))
    for count in AUTO_COUNTS:
        same_count = speeds[f"{PLAIN} {count}"]
        figures[f"auto_{count}"] = middle(ratios(speeds[f"{AUTO} {count}"], same_count))
    return trial.row(figures, identical=all(len(each) == 1 for each in written.values()))


@dataclass(frozen=True, slots=True)
class Arrival:
    """New tokens of a step.

    Attributes:
        time: when they came, by `perf_counter`.
        count: how many.
    """

    time: float
    count: int


def _together(
    trial: Trial, states: list[Prefilled], strategy: str, count: int
) -> tuple[float, list[tuple[int, ...]]]:
    """Tokens a second while so many texts are under way, and the texts; seeds tell those of one
    prompt apart.

    Raises:
        InputError: a text ended before another had begun.
    """
    arrivals: list[list[Arrival]] = [[] for _ in range(count)]
    with Scheduler(trial.llm, count) as scheduler:
        tickets = []
        for i in range(count):
            state = states[i % len(states)]
            params = replace(trial.params, seed=trial.params.seed + i)
            request = Request(
                state.tokens, trial.new_tokens, strategy, None, params, ignore_eos=True
            )
            ticket = scheduler.submit(request, prefixes=state)
            ticket.on_event(partial(_note, arrivals[i]))
            tickets.append(ticket)
        for ticket in tickets:
            ticket.wait()
    start = max(of_text[0].time for of_text in arrivals)
    end = min(of_text[-1].time for of_text in arrivals)
    if end <= start:
        raise InputError(
            f"points is {trial.new_tokens}, so short that not all of {count} texts are under way "
            "at once; valid: more new tokens"
        )
    tokens = sum(
        arrival.count for of_text in arrivals for arrival in of_text if start < arrival.time <= end
    )
    return tokens / (end - start), [tuple(ticket.result.token_ids) for ticket in tickets]


def _note(arrivals: list[Arrival], event: Event) -> None:
    if isinstance(event, Step):
        arrivals.append(Arrival(time=perf_counter(), count=len(event.token_ids)))
