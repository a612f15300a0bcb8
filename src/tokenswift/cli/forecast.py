"""What a run will take, ahead of it: memory by part, and time from a short measurement.

Memory is reckoned: what the process holds now, plus what the run adds. Time is extrapolated: a short run at
the prompt gives the seconds and the tokens of a step, passes at two lengths give how a pass grows with the
text. What only shows later (a draft that changes with length, more n-grams in a longer text) is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from tokenswift.cli.timer import level_times, times
from tokenswift.config import shown
from tokenswift.memory import Memory, largest, needs_of
from tokenswift.metrics import BEFORE
from tokenswift.types import Step

TABLES = 500  # bytes a token takes in lists, text and the n-gram table
PROBE, REACH = 256, 8192  # tokens of text that passes are timed behind
REPEATS = 5
SHORT, WARM = 96, 4  # tokens of the short run; steps of it that are not timed
DRIFT = 0.2  # what a busy machine changes, at least


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the memory: its name and bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Speed:
    """What a short run and a few passes showed.

    Attributes:
        step: seconds of a step behind ``at`` tokens of text.
        rate: tokens a step.
        slope: seconds that a step takes more for each token of text.
        prefill: seconds a token of the prompt, and
        prefill_slope: how they grow with each token before it.
        spread: greatest relative distance of a part of the short run from all of it.
    """

    at: int
    step: float
    rate: float
    slope: float
    prefill: float
    prefill_slope: float
    spread: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will take.

    Attributes:
        parts: memory that the process holds and will hold.
        peak: their sum.
        memory: of the device, None where the system does not tell.
        most: the most new tokens that fit, None likewise.
        seconds: prefill and decoding, expected; None when nothing was measured.
        range: least and most seconds.
        speed: what the expectation comes from.
        level: seconds of a pass of the EAGLE-3 drafter over one row, where there is one and it was measured.
    """

    parts: list[Part]
    peak: int
    memory: Memory | None
    most: int | None
    seconds: float | None
    range: tuple[float, float] | None
    speed: Speed | None
    level: float | None = None


def memory_parts(target: Any, strategy: Any, prompt: int, new: int, eagle: Any = None) -> list[Part]:
    """The parts of a run's memory, biggest of the process first.

    Args:
        target, strategy: of the run.
        prompt, new: tokens.
        eagle: the EAGLE-3 drafter that the process holds, if any.
    """
    weights = [Part("weights", target.weight_bytes + target.copied_bytes)]
    if eagle is not None:
        weights.append(Part("weights of the EAGLE-3 drafter", eagle.held_bytes))
    nodes, rest = strategy.max_nodes, target.backend.held() - sum(part.nbytes for part in weights)
    parts = [
        *weights,
        Part("program, libraries, work space", max(0, rest)),
        Part("full cache", (prompt + new + nodes) * target.kv_bytes),
    ]
    for need in needs_of(target, strategy, prompt, new)[2:]:
        if need.name in ("tree", "ngrams", "gamma", "inner_gamma"):
            continue  # their cache rows are in the full cache, their logits below
        if need.name == "eagle":
            parts.append(Part("cache of the EAGLE-3 drafter", need.nbytes))
        elif need.sure:
            parts.append(Part(f"partial cache ({need.name} {shown(need.value)})", need.nbytes))
    parts.append(Part("logits of a step", 3 * nodes * target.vocab_size * 4))
    parts.append(Part("lists and n-grams", (prompt + new) * TABLES))
    return parts


def measure(run: Callable[[int], Any], target: Any, total: int) -> Speed:
    """Time a short run, and passes at two lengths.

    Args:
        run: makes a run of some new tokens (see `engine.run.Run`), ready to be iterated.
        target: its model.
        total: tokens of prompt and output.
    """
    short = run(SHORT)
    steps: list[Step] = []
    stamps = [time.perf_counter()]
    for step in short:
        stamps.append(time.perf_counter())
        steps.append(step)
    taken = [after - before for before, after in pairwise(stamps)]
    taken[0] = max(0.0, taken[0] - sum(short.meter.seconds.get(phase, 0.0) for phase in BEFORE))
    tokens = [len(step.token_ids) for step in steps]
    rate = sum(tokens) / len(tokens)
    warm = min(WARM, len(taken) // 4)  # the first steps make what later ones find
    taken, tokens = taken[warm:], tokens[warm:]

    far = max(PROBE, min(REACH, total))
    rows = 1 + round(sum(step.drafted for step in steps) / len(steps))
    chunk = min(getattr(target, "prefill_chunk", 512), 512)

    def growth(rows: int, repeats: int) -> float:
        """Seconds that a pass takes more for each token of text."""
        grown = _pass(target, far, rows, repeats) - _pass(target, PROBE, rows, repeats)
        return max(0.0, grown) / max(1, far - PROBE)

    middle = len(taken) // 2
    halves = [slice(0, middle), slice(middle, None)] if len(taken) > 3 else [slice(None)]
    whole = sum(taken) / sum(tokens)
    spread = max(abs(sum(taken[half]) / max(1, sum(tokens[half])) / whole - 1) for half in halves)
    return Speed(
        at=len(short.prompt),
        step=sum(taken) / len(taken),
        rate=rate,
        slope=growth(rows, REPEATS),
        prefill=short.meter.seconds["prefill"] / max(1, len(short.prompt) - 1),
        prefill_slope=growth(chunk, 1) / chunk if len(short.prompt) > chunk else 0.0,
        spread=spread,
    )


def _pass(target: Any, length: int, rows: int, repeats: int) -> float:
    """Seconds of a pass of some rows behind a text of a length (made up: only its size matters)."""
    cache = target.new_cache(length + rows)
    cache.fill_random()
    cache.commit(tuple(range(length)))
    tokens = torch.arange(rows, device=target.device) % target.vocab_size
    positions = torch.arange(length, length + rows, device=target.device)
    return median(times(lambda: target.forward(tokens, positions, cache), repeats)) / 1e3


def plan(run: Any, again: Callable[[int], Any] | None) -> Plan:
    """What a run will take.

    Args:
        run: the run, made but not begun (so it is known to fit what is free).
        again: makes a run of the same kind with some new tokens, for the measurement; None: no measurement.
    """
    target, prompt, new = run.target, len(run.prompt), run.max_new_tokens
    speed = None if again is None else measure(again, target, prompt + new)
    eagle = run.llm.resources.eagle
    parts = memory_parts(target, run.strategy, prompt, new, eagle)
    memory, limit = target.backend.memory(), target.rotary.limit
    most = None if memory is None else largest(target, run.strategy, prompt, memory.free)
    if limit is not None and most is not None:
        most = min(most, limit - prompt)
    seconds = span = level = None
    if speed is not None:
        seconds = expected(speed, prompt, new)
        span = _around(seconds, speed)
        level = None if eagle is None else median(level_times(eagle, REPEATS)) / 1e3
    return Plan(parts, sum(part.nbytes for part in parts), memory, most, seconds, span, speed, level)


def _around(seconds: float, speed: Speed) -> tuple[float, float]:
    """Least and most seconds."""
    off = 1 + max(DRIFT, speed.spread)
    return seconds / off, seconds * off


@dataclass(frozen=True, slots=True)
class ManyPlan:
    """What the texts of many prompts will take on some nodes like this machine.

    Attributes:
        texts, prompt, new: how many, and their tokens of prompt and at most of output.
        nodes: machines.
        at_once: concurrent texts on each.
        parts, peak: memory of a node, as if all texts were as long as the longest.
        memory: of this machine, None where the system does not tell.
        rate: tokens a second of a node; None when nothing was measured.
        seconds: expected; None likewise.
        range: least and most seconds.
    """

    texts: int
    prompt: int
    new: int
    nodes: int
    at_once: int
    parts: list[Part]
    peak: int
    memory: Memory | None
    rate: float | None
    seconds: float | None
    range: tuple[float, float] | None


def plan_many(
    longest: Plan,
    sizes: Sequence[tuple[int, int]],
    nodes: int,
    at_once: int,
    more: int,
    rate: float | None,
) -> ManyPlan:
    """What many texts will take. A node's speed with concurrent texts is taken for constant but for how a
    step grows with the text, and the last texts are taken to end together, unless one alone takes longer.

    Args:
        longest: the plan of the longest of them, alone.
        sizes: tokens of prompt and output of each.
        nodes, at_once: see `ManyPlan`.
        more: bytes of a further text.
        rate: tokens a second that ``at_once`` short texts were written with; None: nothing was measured.
    """
    beside = Part(f"caches of {at_once - 1} more texts", (at_once - 1) * more)
    parts = [*longest.parts, *([beside] if at_once > 1 else [])]
    seconds = span = None
    if longest.speed is not None and rate is not None:
        speed = longest.speed
        gain = rate * speed.step / speed.rate  # over one text alone
        each = [expected(speed, prompt, new) for prompt, new in sizes]
        seconds = max(sum(each) / gain / nodes, max(each) * max(1.0, at_once / gain))
        span = _around(seconds, speed)
        rate = sum(new for _, new in sizes) / (sum(each) / gain)
    return ManyPlan(
        len(sizes),
        sum(prompt for prompt, _ in sizes),
        sum(new for _, new in sizes),
        nodes,
        at_once,
        parts,
        sum(part.nbytes for part in parts),
        longest.memory,
        rate,
        seconds,
        span,
    )


def expected(speed: Speed, prompt: int, new: int) -> float:
    """Seconds of prefill and decoding."""
    prefill = prompt * (speed.prefill + speed.prefill_slope * prompt / 2)
    middle = prompt + new / 2 - speed.at
    return prefill + new / speed.rate * max(speed.step / 2, speed.step + speed.slope * middle)
