"""Many concurrent texts: each is what it is alone, whoever joins, leaves, fails or is cancelled."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.planted import cast
from tests.tiny import FAMILIES, SIZES, VOCAB, build, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.engine import scheduler as scheduling
from tokenswift.engine.failures import QueueFull
from tokenswift.engine.many import run_all
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.engine.sequence import Sequence
from tokenswift.engine.step import prefill
from tokenswift.engine.ticket import Event, Ticket
from tokenswift.memory import Memory
from tokenswift.runs.folder import RunWriter
from tokenswift.speculation.fixed_tree import FixedTreeStrategy
from tokenswift.speculation.heads.config import HeadsConfig
from tokenswift.speculation.heads.modules import Heads
from tokenswift.speculation.sequence_state import SequenceState
from tokenswift.types import Cancelled, DraftTree, Generation, InputError, RunError, Step

STRATEGIES: tuple[tuple[str, dict[str, object]], ...] = (
    ("autoregressive", {}),
    ("auto", {}),
    ("auto", {"draft": "partial", "budget": 24, "sinks": 2}),
    ("tokenswift", {"tree": (2, 2), "ngrams": 3, "budget": 40, "sinks": 2, "draft": "partial"}),
    ("tokenswift", {"tree": (3, 1)}),
    ("magicdec", {"gamma": 3, "budget": 30, "sinks": 2}),
)
SHARED = [5, 9, 2, 7, 7, 3, 8, 1, 4, 6] * 9


def llm_of(dtype: torch.dtype = torch.float32, family: str = "llama") -> LLM:
    heads = Heads(HeadsConfig("conditioned", 2, 48, VOCAB, inner=8))
    model = tiny_model(family) if family in FAMILIES else build(family, SIZES, head_dim=8)
    return LLM.from_model(cast(model, dtype), heads=heads)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return llm_of()


def request_of(rnd: random.Random) -> Request:
    strategy, options = rnd.choice(STRATEGIES)
    shared = SHARED[: rnd.choice((0, 0, 40, 90))]
    prompt = [*shared, *(rnd.randrange(VOCAB) for _ in range(rnd.choice((1, 2, 17, 60, 120))))]
    sampling = SamplingParams(
        temperature=rnd.choice((0.0, 0.5, 1.0)),
        top_k=rnd.choice((0, 5)),
        repetition_penalty=rnd.choice((1.0, 1.2)),
        seed=rnd.randrange(1000),
    )
    ends = rnd.choice((True, False))
    return Request(prompt, rnd.choice((1, 5, 20, 40)), strategy, options, sampling, ignore_eos=ends)


def alone(llm: LLM, request: Request) -> Generation:
    return llm.start(replace(request, run_dir=None)).finish()


def joined(scheduler: Scheduler, requests: list[Request], rnd: random.Random) -> list[Ticket]:
    """Submit requests at random steps of those before them, and wait for all."""
    tickets: list[Ticket] = []
    left = list(requests)
    seen = [0]

    def on_event(event: Event) -> None:
        seen[0] += 1
        if left and (event is None or rnd.random() < 0.3):
            submit()

    def submit() -> None:
        tickets.append(scheduler.submit(left.pop(0)))
        tickets[-1].on_event(on_event)

    submit()
    while left or not all(ticket.is_over for ticket in tickets):
        assert tickets[-1].wait(60)
    return tickets


def check_batch(llm: LLM, seed: int) -> int:
    """A batch of 8, as drawn by a seed; returns the most rows of a pass."""
    rnd = random.Random(seed)
    requests = [request_of(rnd) for _ in range(8)]
    most = 0
    with Scheduler(llm, rnd.choice((3, 8))) as scheduler:
        for request, ticket in zip(requests, joined(scheduler, requests, rnd), strict=True):
            one = alone(llm, request)
            many = ticket.result
            assert many.token_ids == one.token_ids, (seed, request)
            assert (many.text, many.finish_reason) == (one.text, one.finish_reason)
        figures = scheduler.figures()
        most = figures.steps - figures.passes
    assert figures.ended == 8
    assert figures.failed == figures.cancelled == 0
    return most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_text_of_a_batch_is_what_it_is_alone(dtype: torch.dtype) -> None:
    llm = llm_of(dtype)
    assert llm.target.equal_bits
    assert sum(check_batch(llm, seed) for seed in range(4)) > 50  # passes were shared


@pytest.mark.parametrize("family", ["qwen3", "gemma"])
def test_a_batch_of_other_families(family: str) -> None:
    """Gemma 1 runs through transformers' own forward: each text in a pass of its own."""
    check_batch(llm_of(family=family), 3)


def plain(prompt: list[int], new: int = 20, seed: int = 0, **more: Any) -> Request:
    return Request(
        prompt, new, "autoregressive", None, SamplingParams(seed=seed), ignore_eos=True, **more
    )


def over(*tickets: Ticket) -> None:
    for ticket in tickets:
        assert ticket.wait(60)


class Gate:
    """Holds the scheduler's thread in the first step of a text, until it is opened."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.ticket = scheduler.submit(plain([1, 2, 3], 5, on_progress=self))
        assert self.reached.wait(60)

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.reached.set()
        assert self.opened.wait(60)


# ---- tickets -------------------------------------------------------------------------------------


def test_steps_come_as_in_a_stream(llm: LLM) -> None:
    request = plain([3, 4, 5], 12)
    with Scheduler(llm) as scheduler:
        tickets = [scheduler.submit(request), scheduler.submit(plain([8, 8]))]
        steps = list(tickets[0].steps())
        over(*tickets)
        assert list(tickets[0].steps()) == []
        assert scheduler.figures().tokens == 32
    assert steps == list(llm.start(request))
    assert tickets[0].result.metrics.steps == len(steps)


def test_a_failure_is_not_lost_while_it_is_given(llm: LLM) -> None:
    """By the scheduler's thread, to who begins to listen."""

    class Late(Ticket):
        def on_event(self, callback: Any) -> None:
            super().on_event(lambda event: None)  # its turn comes later
            self.tell(RunError("planted"))

    with pytest.raises(RunError, match="planted"):
        list(Late(Sequence(llm.resources, plain([3], 2))).steps())


def test_asynchronous_programs_have_the_steps_too(llm: LLM) -> None:
    """Several at once; one whose steps nobody takes any more ends, and a failure comes to its
    reader."""
    requests = [plain([3, 4, 5], 12), plain([8, 8], 9)]

    async def taken(ticket: Ticket) -> list[Step]:
        return [step async for step in ticket]

    async def ask(scheduler: Scheduler) -> list[list[Step]]:
        left = asyncio.ensure_future(taken(scheduler.submit(plain([9, 9], 500))))
        results = await asyncio.gather(*(taken(scheduler.submit(one)) for one in requests))
        left.cancel()
        failing = scheduler.submit(plain([6] * 5, 9, on_progress=lambda *_: sys.exit("planted")))
        with pytest.raises(RunError, match="planted"):
            await taken(failing)
        with pytest.raises(asyncio.CancelledError):
            await left
        return results

    with Scheduler(llm) as scheduler:
        texts = asyncio.run(ask(scheduler))
        while scheduler.figures().running:
            time.sleep(0.01)
        assert scheduler.figures().cancelled == 1
        assert scheduler.figures().tokens < 500
    assert texts == [list(llm.start(one)) for one in requests]


def test_cancelled_texts_end_and_the_others_go_on(llm: LLM) -> None:
    """One that is written, one whose prompt is read, one that waits."""
    with Scheduler(llm, 3) as scheduler:
        long = scheduler.submit(plain([9, 9], 300))
        next(long.steps())
        gate = Gate(scheduler)
        other = scheduler.submit(plain([5, 6], 30))
        waits = scheduler.submit(plain([7]))
        for ticket in (long, gate.ticket, waits):
            ticket.cancel()
        gate.opened.set()
        over(long, gate.ticket, other, waits)
        figures = scheduler.figures()
        long.cancel()  # nothing is left to be cancelled
    assert [t.result.finish_reason for t in (long, gate.ticket, waits)] == ["cancelled"] * 3
    assert 0 < len(long.result.token_ids) < 300
    assert waits.result.token_ids == []
    assert other.result.token_ids == alone(llm, plain([5, 6], 30)).token_ids
    assert (figures.cancelled, figures.ended) == (3, 1)
    assert (figures.running, figures.reading, figures.waiting) == (0, 0, 0)


def test_close_ends_what_is_under_way(llm: LLM, tmp_path: Path) -> None:
    scheduler = Scheduler(llm)
    request = plain([9, 9], 200, run_dir=tmp_path / "run")
    ticket = scheduler.submit(request)
    next(ticket.steps())
    scheduler.close()
    scheduler.close()
    assert ticket.result.finish_reason == "cancelled"
    with pytest.raises(InputError, match="the scheduler is closed"):
        scheduler.submit(request)
    resumed = llm.start(request).finish()
    assert resumed.token_ids == alone(llm, request).token_ids
    assert resumed.token_ids[: len(ticket.result.token_ids)] == ticket.result.token_ids


def test_a_queue_that_is_full(llm: LLM) -> None:
    with Scheduler(llm, 1, queue=2) as scheduler:
        gate = Gate(scheduler)
        waiting = [scheduler.submit(plain([4], 3, seed)) for seed in (1, 2)]
        with pytest.raises(QueueFull, match="2 requests wait already; valid: up to queue 2"):
            scheduler.submit(plain([4], 3))
        assert scheduler.figures().waiting == 2
        gate.opened.set()
        over(gate.ticket, *waiting)


def test_an_owner_does_not_wait_for_all_texts_of_another(llm: LLM) -> None:
    ended: list[str] = []
    with Scheduler(llm, 1) as scheduler:
        gate = Gate(scheduler)
        tickets = []
        for name in ("a1", "a2", "a3", "b1"):
            tickets.append(scheduler.submit(plain([4], 3), owner=name[0]))
            tickets[-1].on_event(lambda event, name=name: event is None and ended.append(name))
        gate.opened.set()
        over(gate.ticket, *tickets)
    assert ended == ["a1", "b1", "a2", "a3"]


def test_an_owner_with_a_text_under_way_lets_others_go_first(llm: LLM) -> None:
    ended: list[str] = []
    with Scheduler(llm, 2) as scheduler:
        gate = Gate(scheduler)
        tickets = []
        for name, length in (("a1", 60), ("a2", 3), ("a3", 3), ("b1", 3), ("b2", 3)):
            tickets.append(scheduler.submit(plain([4], length), owner=name[0]))
            tickets[-1].on_event(lambda event, name=name: event is None and ended.append(name))
        gate.opened.set()
        over(gate.ticket, *tickets)
    assert ended == ["b1", "b2", "a2", "a3", "a1"]


def test_past_events_are_told_too(llm: LLM) -> None:
    seen: list[Event] = []
    with Scheduler(llm) as scheduler:
        ticket = scheduler.submit(plain([3, 4, 5], 4))
        over(ticket)
        ticket.on_event(seen.append)
    assert [type(event) for event in seen] == [Step] * 4 + [type(None)]


def test_there_is_no_result_before_the_end(llm: LLM) -> None:
    with Scheduler(llm) as scheduler:
        gate = Gate(scheduler)
        with pytest.raises(InputError, match="ticket.result is not available before the end"):
            _ = gate.ticket.result
        assert not gate.ticket.wait(0.01)
        gate.opened.set()
        over(gate.ticket)
    assert len(gate.ticket.result.token_ids) == 5


def test_a_callback_may_close_the_scheduler(llm: LLM) -> None:
    scheduler = Scheduler(llm)
    gate = Gate(scheduler)
    ticket = scheduler.submit(plain([4], 400))
    ticket.on_event(lambda event: scheduler.close())
    gate.opened.set()
    assert ticket.wait(20)
    scheduler.close()
    assert ticket.result.finish_reason == "cancelled"


def test_a_scheduler_that_makes_no_step_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as there is something to do; the clock is ours."""
    now = [0.0]
    monkeypatch.setattr(scheduling, "monotonic", lambda: now[0])
    with Scheduler(llm) as scheduler:
        now[0] = 1000.0
        assert scheduler.stalled == 0.0
        gate = Gate(scheduler)
        now[0] = 1070.0
        assert 0.0 < scheduler.stalled <= 70.0
        gate.opened.set()
        over(gate.ticket)
        assert scheduler.stalled == 0.0


@pytest.mark.parametrize("at_once", [0, -1, "all", 1.5, None])
def test_wrong_numbers_of_texts_are_refused(llm: LLM, at_once: Any) -> None:
    with pytest.raises(InputError, match="at_once is .*; valid: auto, or an integer"):
        Scheduler(llm, at_once)
    with pytest.raises(InputError, match="at_once is .*; valid: "):
        llm.generate_many([[1]], at_once=at_once)


def test_a_wrong_request_is_refused_at_once(llm: LLM) -> None:
    with pytest.raises(InputError, match="queue is -1"):
        Scheduler(llm, queue=-1)
    with Scheduler(llm) as scheduler, pytest.raises(InputError, match="prompt is empty"):
        scheduler.submit(plain([]))


# ---- failures ------------------------------------------------------------------------------------


def test_a_text_that_fails_ends_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By its drafter, by rows that do not fit, by its journal, by a callback, by its reading."""
    draft = FixedTreeStrategy.draft
    add = RunWriter.add

    def failing(self: Any, sequence: Any) -> DraftTree:
        seed = sequence.sampler.params.seed
        if len(sequence.tokens) > 8 and seed == 13:
            raise RunError("the drafter fails")
        if len(sequence.tokens) > 8 and seed == 14:
            tokens = (sequence.tokens[-1], *[1] * 400)
            return DraftTree(tokens, (-1, *range(400)), tuple(range(401)), ("target",) * 401, 400)
        return draft(self, sequence)

    def full(self: RunWriter, *args: Any) -> None:
        add(self, *args)
        if self.folder.name == "full" and self._tokens_taken > 3:
            raise RunError("writing failed (No space left on device)")

    def broken(*args: object) -> None:
        sys.exit("the callback fails")  # which is no Exception

    requests = [plain([2, 3, 4], 25, seed) for seed in range(4)]
    expected = [alone(llm, request).token_ids for request in requests]
    monkeypatch.setattr(FixedTreeStrategy, "draft", failing)
    monkeypatch.setattr(RunWriter, "add", full)
    bad = {
        "the drafter fails": plain([2, 3, 4], 25, 13),
        "needs more room": plain([2, 3, 4], 25, 14),
        "No space left": plain([2, 3, 4], 25, run_dir=tmp_path / "full"),
        "the callback fails": plain([2, 3, 4], 25, on_progress=broken),
    }
    with Scheduler(llm) as scheduler:
        gate = Gate(scheduler)
        tickets = [scheduler.submit(request) for request in requests]
        failed = [scheduler.submit(request) for request in bad.values()]
        failed.append(scheduler.submit(plain([6], 25)))
        failed[-1].on_event(broken)
        gate.opened.set()
        over(*tickets, *failed)
        assert scheduler.figures().failed == 5
    assert [ticket.result.token_ids for ticket in tickets] == expected
    for words, ticket in zip([*bad, "the callback fails"], failed, strict=True):
        with pytest.raises(Exception, match=words):
            _ = ticket.result
    with pytest.raises(RunError, match="No space left"):
        list(failed[2].steps())
    monkeypatch.undo()
    resumed = llm.start(bad["No space left"]).finish()
    assert resumed.token_ids == alone(llm, bad["No space left"]).token_ids


def test_a_fault_that_ends_all_ends_each_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where letting go of one of them fails, as it is ended."""
    real = Sequence.close

    def broken(self: Sequence) -> None:
        real(self)
        if self.prompt == [7]:
            raise OSError("planted, too")

    def fault(self: Scheduler) -> None:
        raise ValueError("planted")

    events: list[Event] = []
    with Scheduler(llm, 1) as scheduler:
        gate = Gate(scheduler)
        tickets = [scheduler.submit(plain([word], 3)) for word in (7, 8)]
        for ticket in (gate.ticket, *tickets):
            ticket.on_event(events.append)
        monkeypatch.setattr(Sequence, "close", broken)
        monkeypatch.setattr(Scheduler, "_step", fault)
        gate.opened.set()
        over(gate.ticket, *tickets)
        assert scheduler.figures().failed == 3
    assert [type(event) for event in events].count(ValueError) == len(events) == 3


class Held:
    """An object that a frame holds, as it would a tensor."""


@pytest.mark.parametrize("kind", [RunError, ValueError, SystemExit])
def test_a_failed_ticket_keeps_no_frames(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """What a step had in memory goes with the text; the error keeps its words."""
    known: list[weakref.ref[Held]] = []

    def draft(self: object, sequence: object) -> DraftTree:
        held = Held()
        known.append(weakref.ref(held))
        try:
            raise kind("planted")
        except BaseException as error:
            raise RunError(f"{error}, with a cause") from error

    monkeypatch.setattr(FixedTreeStrategy, "draft", draft)
    with Scheduler(llm) as scheduler:
        ticket = scheduler.submit(plain([2, 3], 9))
        over(ticket)
    gc.collect()
    assert len(known) == 1
    assert known[0]() is None
    with pytest.raises(RunError, match="planted, with a cause"):
        _ = ticket.result


def test_an_unexpected_error_says_where_it_was_raised(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draft(self: object, sequence: object) -> DraftTree:
        raise KeyError("planted")

    monkeypatch.setattr(FixedTreeStrategy, "draft", draft)
    with Scheduler(llm) as scheduler:
        ticket = scheduler.submit(plain([2, 3], 9))
        with pytest.raises(KeyError) as caught:
            list(ticket.steps())
    assert "in draft" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("where", ["on_progress", "on_event", "draft"])
def test_cancelled_that_a_callback_raises_cancels(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """And the others go on."""

    def leave(*args: object) -> None:
        if not (args and args[0] is None):
            raise Cancelled

    with Scheduler(llm) as scheduler:
        gate = Gate(scheduler)
        request = plain([2, 3, 4], 9, on_progress=leave if where == "on_progress" else None)
        ticket = scheduler.submit(request)
        other = scheduler.submit(plain([7, 8], 9))
        if where == "on_event":
            ticket.on_event(leave)
        if where == "draft":
            draft = FixedTreeStrategy.draft
            taken = ticket.sequence.tokens

            def left(self: FixedTreeStrategy, sequence: SequenceState) -> DraftTree:
                if sequence.tokens is taken:
                    raise Cancelled
                return draft(self, sequence)

            monkeypatch.setattr(FixedTreeStrategy, "draft", left)
        gate.opened.set()
        over(gate.ticket, ticket, other)
        assert scheduler.figures().cancelled == 1
    assert ticket.result.finish_reason == "cancelled"
    assert other.result.finish_reason == "length"


# ---- strategies that do not give way -------------------------------------------------------------


@pytest.mark.parametrize("several", [1, 3])
def test_drafts_that_do_not_give_way_take_half_of_the_time(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, several: int
) -> None:
    """Of all such texts together: the others' steps go on while these wait. A plain step takes 2 ms
    at least, so that on any machine its 120 leave time for drafts of 40 ms."""
    draft = FixedTreeStrategy.draft

    def slow(self: FixedTreeStrategy, sequence: SequenceState) -> DraftTree:
        time.sleep(0.04 if self.max_nodes > 1 else 0.002)
        return draft(self, sequence)

    monkeypatch.setattr(FixedTreeStrategy, "draft", slow)
    options = {"tree": (3, 1)}
    happened: list[str] = []

    def on_event(name: str, event: Event) -> None:
        happened.append(name)

    with Scheduler(llm) as scheduler:
        gate = Gate(scheduler)
        fixed = [
            scheduler.submit(
                replace(plain([5, 6], 200, seed), strategy="tokenswift", strategy_options=options)
            )
            for seed in range(several)
        ]
        victim = scheduler.submit(plain([2, 3], 120))
        for ticket in fixed:
            ticket.on_event(partial(on_event, "fixed"))
        victim.on_event(partial(on_event, "victim"))
        gate.opened.set()
        over(victim)
        for ticket in fixed:
            ticket.cancel()
    steps = happened.count("fixed") / several
    assert steps >= 2
    assert happened.count("victim") > 3 * steps


def test_drafts_that_do_not_give_way_need_not_alone(llm: LLM) -> None:
    """A text beside one of its kind, or alone, takes every step."""
    options = {"tree": (3, 1)}
    with Scheduler(llm) as scheduler:
        gate = Gate(scheduler)
        tickets = [
            scheduler.submit(
                replace(plain([5, 6], 20, seed), strategy="tokenswift", strategy_options=options)
            )
            for seed in range(2)
        ]
        gate.ticket.cancel()
        gate.opened.set()
        over(gate.ticket, *tickets)
        figures = scheduler.figures()
    assert figures.steps > figures.passes


# ---- memory and order ----------------------------------------------------------------------------


def test_texts_wait_in_order_for_memory(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    need = 23 * llm.target.kv_bytes + 4 * VOCAB  # 22 tokens, and a pass of one row
    monkeypatch.setattr(
        type(llm.target.backend), "memory", lambda self: Memory(5 * need // 2, 10 * need)
    )
    order: list[int] = []
    most = 0

    def on_event(number: int, event: Event) -> None:
        nonlocal most
        if gate.ticket.is_over:  # it needs less than the others
            most = max(most, scheduler.figures().running + scheduler.figures().reading)
        if event is None:
            order.append(number)

    with Scheduler(llm) as scheduler:
        with pytest.raises(InputError, match="the run needs"):
            scheduler.submit(plain([1], 400))
        gate = Gate(scheduler)
        tickets = [scheduler.submit(plain([2, seed], 20, seed)) for seed in range(6)]
        for number, ticket in enumerate(tickets):
            ticket.on_event(lambda event, number=number: on_event(number, event))
        gate.opened.set()
        over(*tickets)
    assert order == list(range(6))
    assert most == 2
    for seed, ticket in enumerate(tickets):
        assert ticket.result.token_ids == alone(llm, plain([2, seed], 20, seed)).token_ids


def test_a_long_prompt_is_read_beside_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of it, with a step of the other text between any two, and a short one is not kept
    waiting."""
    monkeypatch.setattr(scheduling, "PREFILL_STEPS", 0.0)
    happened: list[str] = []
    with Scheduler(llm) as scheduler:
        first = scheduler.submit(plain([4, 5], 400))
        next(first.steps())
        first.on_event(lambda event: happened.append("step"))
        far = {"part": 0, "short": 0}

        def on_progress(what: str, stage: str, done: int, total: int) -> None:
            if done > far[what]:
                far[what] = done
                happened.append(what)

        requests = [plain(list(range(90)) * 3, 3, on_progress=partial(on_progress, "part"))]
        requests.append(plain([7] * 40, 3, on_progress=partial(on_progress, "short")))
        tickets = [scheduler.submit(request) for request in requests]
        over(first, *tickets)
    assert happened.count("part") > 20
    parts = [i for i, what in enumerate(happened) if what == "part"]
    assert all("step" in happened[a:b] for a, b in pairwise(parts))
    assert happened.index("short") < parts[-1]
    for request, ticket in zip(requests, tickets, strict=True):
        assert ticket.result.token_ids == alone(llm, replace(request, on_progress=None)).token_ids


def unread(llm: LLM, tokens: list[int]) -> SequenceState:
    """A text of which nothing was read."""
    sampler = llm.target.sampler(SamplingParams())
    cache = llm.target.new_cache(300)
    return SequenceState(list(tokens), len(tokens), cache, llm.target, sampler)


@pytest.mark.parametrize("rows", [1, 31, 70])
def test_parts_of_a_prompt_leave_what_the_whole_leaves(llm: LLM, rows: int) -> None:
    """Bits of keys, values, and of the rows that drafting starts from."""
    tokens = [*SHARED, *range(7)]
    at_once = unread(llm, tokens)
    parts = unread(llm, tokens)
    for text, part in ((at_once, None), (parts, rows)):
        while prefill(text, None, part):
            pass
    assert at_once.last_pass is not None
    assert parts.last_pass is not None
    assert torch.equal(at_once.cache.data[:, :, :96], parts.cache.data[:, :, :96])
    assert at_once.last_row == parts.last_row == 31
    assert torch.equal(at_once.last_pass.hidden, parts.last_pass.hidden)
    for one, other in zip(at_once.last_pass.queries, parts.last_pass.queries, strict=True):
        assert torch.equal(one, other)


# ---- beginnings that are shared ------------------------------------------------------------------


def test_a_beginning_is_read_once(llm: LLM) -> None:
    """Samples of one prompt at the same time, another turn behind one of them, and a text that
    differs."""
    samples = [plain(SHARED, 10, seed) for seed in range(4)]
    with Scheduler(llm) as scheduler:
        gate = Gate(scheduler)
        tickets = [scheduler.submit(request) for request in samples]
        gate.opened.set()
        over(*tickets)
        figures = scheduler.figures()
        assert figures.reused == 3 * (len(SHARED) - 1 - 32)
        assert figures.read == 2 + len(SHARED) - 1 + 3 * 32
        turn = plain([*SHARED, *tickets[2].result.token_ids, *range(40)], 10)
        other = plain([*SHARED[:50], 90, *SHARED[51:]], 10)
        more = [scheduler.submit(turn), scheduler.submit(other)]
        over(*more)
        assert scheduler.figures().reused - figures.reused == len(SHARED) + 9 + 50
    for request, ticket in zip([*samples, turn, other], [*tickets, *more], strict=True):
        assert ticket.result.token_ids == alone(llm, request).token_ids


def test_owners_share_no_beginnings(llm: LLM) -> None:
    """Neither while a text is written nor when its cache is kept."""
    each = len(SHARED) - 1 - 32
    with Scheduler(llm) as scheduler:
        for number, owner in enumerate(("", "one", "other"), start=1):
            gate = Gate(scheduler)
            tickets = [scheduler.submit(plain(SHARED, 10, seed), owner) for seed in range(2)]
            gate.opened.set()
            over(gate.ticket, *tickets)
            assert scheduler.figures().reused == number * each
        stranger = scheduler.submit(plain([*SHARED, *range(40)], 5), "third")
        over(stranger)
        assert scheduler.figures().reused == 3 * each


# ---- several prompts -----------------------------------------------------------------------------


def test_requests_are_submitted_as_they_can_run(llm: LLM) -> None:
    """Of a thousand prompts a few wait; a wrong one is told in its place."""
    submitted = 0

    def requests() -> Iterator[Request]:
        nonlocal submitted
        for number in range(30):
            submitted += 1
            yield plain([] if number == 4 else [2, number], 3)

    with Scheduler(llm, 2) as scheduler:
        seen: dict[int, Any] = {}
        for number, result in run_all(scheduler, requests()):
            seen[number] = result
            assert submitted - len(seen) <= 5
    assert sorted(seen) == list(range(30))
    assert isinstance(seen.pop(4), InputError)
    assert all(len(one.token_ids) == 3 for one in seen.values())
