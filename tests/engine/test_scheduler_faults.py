"""Faults around a scheduler: of callbacks, of what is only kept for later, and of the scheduler
itself. None leaves anybody waiting, and none takes the texts of others."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import pytest

from tests.tiny import tiny_model
from tokenswift import LLM
from tokenswift.engine import prefix_cache
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.engine.ticket import Event, Ticket
from tokenswift.types import Generation, InputError


@pytest.fixture
def llm() -> LLM:
    return LLM.from_model(tiny_model("llama"), heads=None)


def request(word: int, count: int = 9) -> Request:
    return Request([word, 3, 4], count, "autoregressive", ignore_eos=True)


def wait_for(*tickets: Ticket) -> None:
    for ticket in tickets:
        assert ticket.wait(60)


def test_a_callback_that_fails_at_the_end_leaves_its_result(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(event: Event) -> None:
        if event is None:
            sys.exit("planted")

    with Scheduler(llm) as scheduler:
        failing = scheduler.submit(request(5))
        failing.on_event(leave)
        other = scheduler.submit(request(6))
        wait_for(failing, other)
        assert scheduler.figures().ended == 2
    assert len(failing.result.token_ids) == 9
    assert len(other.result.token_ids) == 9
    assert "a callback failed at the end of its text (planted)" in caplog.text


def test_a_callback_may_close_the_llm(llm: LLM) -> None:
    """The scheduler goes on with the model that it was made of."""
    requests = [request(word) for word in (5, 6, 7, 8)]
    expected = [llm.start(one).finish().token_ids for one in requests]
    with Scheduler(llm, 2) as scheduler:
        are_submitted = threading.Event()
        first = replace(requests[0], on_progress=lambda *_: are_submitted.wait(60))
        tickets = [scheduler.submit(one) for one in (first, *requests[1:])]
        tickets[0].on_event(lambda event: llm.close())
        are_submitted.set()
        wait_for(*tickets)
    assert [ticket.result.token_ids for ticket in tickets] == expected
    with pytest.raises(InputError, match="^the LLM is closed; valid: one that was not closed$"):
        llm.generate([1], 2)


def test_a_text_goes_on_whose_callback_closes_the_llm(llm: LLM) -> None:
    expected = llm.generate([5, 3, 4], 9, ignore_eos=True)
    result = llm.generate([5, 3, 4], 9, ignore_eos=True, on_step=lambda step: llm.close())
    assert result.token_ids == expected.token_ids


def test_a_request_in_the_moment_of_a_fault_is_refused(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would wait for ever: the scheduler's thread has ended."""

    def fault(self: Scheduler) -> None:
        raise ValueError("planted")

    refusals: list[str] = []
    with Scheduler(llm) as scheduler:

        def submit_another(event: Event) -> None:
            with pytest.raises(InputError) as caught:
                scheduler.submit(request(6))
            refusals.append(str(caught.value))

        monkeypatch.setattr(Scheduler, "_step", fault)
        ticket = scheduler.submit(request(5))
        ticket.on_event(submit_another)
        wait_for(ticket)
    with pytest.raises(ValueError, match="planted"):
        _ = ticket.result
    (refusal,) = refusals
    assert "the scheduler is closed" in refusal


def test_a_cache_that_cannot_be_kept_for_later_ends_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("planted: no memory")

    monkeypatch.setattr(prefix_cache, "CachedPrefix", fail)
    prompt = [9] * 40
    with Scheduler(llm) as scheduler:
        requests = [replace(request(5, count), prompt=[5, *prompt]) for count in (3, 20)]
        tickets = [scheduler.submit(one) for one in requests]
        wait_for(*tickets)
        after = scheduler.submit(replace(request(7), prompt=[7, *prompt]))
        wait_for(after)
    assert [len(ticket.result.token_ids) for ticket in (*tickets, after)] == [3, 20, 9]
    assert "is not kept for reuse (planted: no memory)" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_callback_that_fails_ends_a_list_of_prompts(llm: LLM, error: type[BaseException]) -> None:
    def fail(number: int, result: Generation) -> None:
        raise error

    with pytest.raises(error):
        llm.generate_many([[1], [2]], 5, on_result=fail)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("tokenswift-scheduler")]
