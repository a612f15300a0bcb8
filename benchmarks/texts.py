"""Many texts in one pass: how much faster they come together, what drafting adds, who waits how long.

Speeds are those while all texts are under way, from forks of prompts that were read before, in turns; what is
told is the median over the rounds. Times between steps are taken where they are told, on the scheduler's
thread.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median as middle
from time import perf_counter
from typing import Any

from benchmarks.prompts import prompt
from tokenswift.config import SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.engine.prefill import Prefilled
from tokenswift.engine.prefixes import Prefixes
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Event, Scheduler
from tokenswift.roofline.timer import median
from tokenswift.types import Step

PLAIN, AUTO = "autoregressive", "auto"
TOGETHER, DRAFTED = (1, 2, 4, 8, 16), (1, 2, 4, 8)
LONG = 8  # times the prompt that is read beside a text under way
TURN = 10  # a turn of a chat is the prompt's length over this
ANSWER = 20  # tokens of an answer


def measure(llm: LLM, config: dict[str, Any]) -> dict[str, Any]:
    """Speeds of several texts over one, of automatic drafting over plain decoding of as many, and waits."""
    length, new, params = config["prefill"], config["points"][-1], SamplingParams(**config["sampling"])
    size = llm.target.vocab_size
    states = [llm.prefill(prompt(config["prompts"], llm.encode, i, length, size).ids) for i in range(4)]
    runs = [*((PLAIN, count) for count in TOGETHER), *((AUTO, count) for count in DRAFTED)]
    speeds: dict[tuple[str, int], list[float]] = {run: [] for run in runs}
    written: dict[int, set[tuple[int, ...]]] = {}
    for turn in range(config["rounds"] + 1):  # the first is not counted
        for run in runs:
            speed, texts = _together(llm, states, new, params, *run)
            for i, tokens in enumerate(texts):
                written.setdefault(i, set()).add(tokens)
            if turn:
                speeds[run].append(speed)
        runs.reverse()

    def ratio(one: tuple[str, int], other: tuple[str, int]) -> float:
        return median([a / b for a, b in zip(speeds[one], speeds[other], strict=True)])

    long = (states[0].tokens * LONG)[: LONG * length]
    figures = {
        "plain_speed": median(speeds[PLAIN, 1]),
        **{f"plain_{count}": ratio((PLAIN, count), (PLAIN, 1)) for count in TOGETHER[1:]},
        **{f"auto_{count}": ratio((AUTO, count), (PLAIN, count)) for count in DRAFTED},
        "wait": median([_wait(llm, states[0], long, params) for _ in range(config["rounds"])]),
        **_second_turn(llm, config, params),
    }
    same = all(len(texts) == 1 for texts in written.values())
    return {"runs": config["rounds"], "identical": same, "figures": {str(new): figures}}


def _together(
    llm: LLM, states: list[Prefilled], new: int, params: SamplingParams, strategy: str, count: int
) -> tuple[float, list[tuple[int, ...]]]:
    """Tokens a second while so many texts are under way, and the texts; seeds tell those of one prompt
    apart."""
    seen: list[list[tuple[float, int]]] = [[] for _ in range(count)]
    with Scheduler(llm, count) as scheduler:
        tickets = []
        for i in range(count):
            state = states[i % len(states)]
            sampling = replace(params, seed=params.seed + i)
            request = Request(state.tokens, new, strategy, None, sampling, ignore_eos=True, prefilled=state)
            tickets.append(scheduler.submit(request))
            tickets[-1].on_event(lambda event, told=seen[i]: _note(told, event))
        for ticket in tickets:
            ticket.wait()
    begun, ended = max(told[0][0] for told in seen), min(told[-1][0] for told in seen)
    tokens = sum(made for told in seen for at, made in told if begun < at <= ended)
    return tokens / (ended - begun), [tuple(ticket.result.token_ids) for ticket in tickets]


def _note(told: list[tuple[float, int]], event: Event) -> None:
    if isinstance(event, Step):
        told.append((perf_counter(), len(event.token_ids)))


def _wait(llm: LLM, state: Prefilled, long: list[int], params: SamplingParams) -> float:
    """The longest time between two steps of a text while a long prompt is read, over its step's time."""
    told: list[tuple[float, int]] = []
    with Scheduler(llm) as scheduler:
        room = len(long) - len(state.tokens)
        text = scheduler.submit(
            Request(state.tokens, room, PLAIN, None, params, ignore_eos=True, prefilled=state)
        )
        steps = text.steps()
        for _ in range(30):
            next(steps)
            told.append((perf_counter(), 1))
        before = len(told)
        text.on_event(lambda event: _note(told, event))
        other = scheduler.submit(Request(long, 1, PLAIN, None, params, ignore_eos=True))
        other.wait()
        text.cancel()
        text.wait()
    gaps = [b[0] - a[0] for a, b in pairwise(told)]
    return max(gaps[before:]) / middle(gaps[: before - 1])


def _second_turn(llm: LLM, config: dict[str, Any], params: SamplingParams) -> dict[str, float]:
    """Time to the first token of a chat's second turn, over reading its new part behind what is there and
    a step, and over the same without what is there."""
    length = config["prefill"]
    turn = max(2, length // TURN)
    ids = prompt(config["prompts"], llm.encode, config["text"], length + turn, llm.target.vocab_size).ids
    part: list[float] = []
    whole: list[float] = []
    for _ in range(config["rounds"]):
        prefixes = Prefixes(1 << 40)
        first = Request(ids[:length], ANSWER, PLAIN, None, params, ignore_eos=True)
        answer = llm.start(first, prefixes).finish().token_ids
        state = llm.prefill([*ids[:length], *answer])
        turned = [*state.tokens, *ids[length:]]
        second = Request(turned, 1, PLAIN, None, params, ignore_eos=True)
        told, fresh = _first(llm, second, prefixes), _first(llm, second, None)
        sequence = state.fork(len(turned) + 1, llm.target.sampler(params))
        begun = perf_counter()
        llm.target.prefill(turned[len(state.tokens) - 1 : -1], sequence.cache)
        part.append(told / (perf_counter() - begun))
        whole.append(told / fresh)
    return {"second_turn": median(part), "second_turn_over_whole": median(whole)}


def _first(llm: LLM, request: Request, prefixes: Prefixes | None) -> float:
    """Seconds to the first token."""
    begun = perf_counter()
    with llm.start(request, prefixes) as steps:
        next(steps)
        return perf_counter() - begun
