"""Many texts in one pass: how much faster they come together, what drafting adds, who waits how long.

Speeds are those while all texts are under way, from forks of prompts that were read before, in turns; what is
told is the median over the rounds. Times between steps are taken where they are told, on the scheduler's
thread.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.common import AUTO, PLAIN, Trial, in_turns
from tokenswift.engine.llm import LLM
from tokenswift.engine.prefix_cache import Prefixes
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Event, Scheduler
from tokenswift.engine.sequence import Prefilled
from tokenswift.types import Step

TOGETHER, DRAFTED = (1, 2, 4, 8, 16), (1, 2, 4, 8)
LONG = 8  # times the prompt that is read beside a text under way
TURN = 10  # a turn of a chat is the prompt's length over this
ANSWER = 20  # tokens of an answer


def measure(trial: Trial) -> dict[str, Any]:
    """Speeds of several texts over one, of adaptive drafting over plain decoding of as many, and waits."""
    states = [trial.llm.prefill(trial.prompt(index=i).ids) for i in range(4)]
    written: dict[int, set[tuple[int, ...]]] = {}

    def side(strategy: str, count: int) -> float:
        speed, texts = _together(trial, states, strategy, count)
        for i, tokens in enumerate(texts):
            written.setdefault(i, set()).add(tokens)
        return speed

    runs = [*((PLAIN, count) for count in TOGETHER), *((AUTO, count) for count in DRAFTED)]
    sides = {f"{strategy} {count}": partial(side, strategy, count) for strategy, count in runs}
    found = in_turns(sides, trial.rounds)
    one = found[f"{PLAIN} 1"]
    long = (states[0].tokens * LONG)[: LONG * trial.config["prefill"]]
    figures = {
        "plain_speed": one.median(),
        **{f"plain_{n}": (found[f"{PLAIN} {n}"] / one).median() for n in TOGETHER[1:]},
        **{f"auto_{n}": (found[f"{AUTO} {n}"] / found[f"{PLAIN} {n}"]).median() for n in DRAFTED},
        "wait": median(_wait(trial, states[0], long) for _ in range(trial.rounds)),
        **_second_turn(trial),
    }
    return trial.row(figures, identical=all(len(texts) == 1 for texts in written.values()))


def _together(
    trial: Trial, states: list[Prefilled], strategy: str, count: int
) -> tuple[float, list[tuple[int, ...]]]:
    """Tokens a second while so many texts are under way, and the texts; seeds tell those of one prompt
    apart."""
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


def _wait(trial: Trial, state: Prefilled, long: list[int]) -> float:
    """The longest time between two steps of a text while a long prompt is read, over its step's time."""
    told: list[tuple[float, int]] = []
    with Scheduler(trial.llm) as scheduler:
        room = len(long) - len(state.tokens)
        plain = partial(Request, sampling=trial.params, ignore_eos=True)
        text = scheduler.submit(plain(state.tokens, room, PLAIN, None), prefixes=state)
        steps = text.steps()
        for _ in range(30):
            next(steps)
            told.append((perf_counter(), 1))
        before = len(told)
        text.on_event(partial(_note, told))
        scheduler.submit(plain(long, 1, PLAIN, None)).wait()
        text.cancel()
        text.wait()
    gaps = [b[0] - a[0] for a, b in pairwise(told)]
    return max(gaps[before:]) / median(gaps[: before - 1])


def _second_turn(trial: Trial) -> dict[str, float]:
    """Time to the first token of a chat's second turn, over reading its new part behind what is there and
    a step, and over the same without what is there."""
    llm, length = trial.llm, trial.config["prefill"]
    ids = trial.prompt(length + max(2, length // TURN)).ids
    plain = partial(Request, sampling=trial.params, ignore_eos=True)
    part, whole = list[float](), list[float]()
    for _ in range(trial.rounds):
        prefixes = Prefixes(1 << 40)
        answer = llm.start(plain(ids[:length], ANSWER, PLAIN, None), prefixes).finish().token_ids
        state = llm.prefill([*ids[:length], *answer])
        turned = [*state.tokens, *ids[length:]]
        second = plain(turned, 1, PLAIN, None)
        told, fresh = _first(llm, second, prefixes), _first(llm, second, None)
        cache = state.sequence.cache.fork(len(turned) + 1)
        begun = perf_counter()
        llm.target.prefill(turned[len(state.tokens) - 1 : -1], cache)
        part.append(told / (perf_counter() - begun))
        whole.append(told / fresh)
    return {"second_turn": median(part), "second_turn_over_whole": median(whole)}


def _first(llm: LLM, request: Request, prefixes: Prefixes | None) -> float:
    """Seconds to the first token."""
    begun = perf_counter()
    with llm.start(request, prefixes) as steps:
        next(steps)
        return perf_counter() - begun
