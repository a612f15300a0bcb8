"""Masks that take long: they are made beside the other texts, nothing is drafted meanwhile, and a
text whose masks take too long ends alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from threading import Event, current_thread

import pytest

from tests.lossless.test_grammar import GRAMMARS, GREEDY, SEEDED, byte_llm
from tests.lossless.test_tokens import same
from tokenswift import LLM, Grammar
from tokenswift.engine.many import run_all
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.sampling import masks
from tokenswift.sampling.masks import TOO_SLOW, Masks, NoMask

#: ways to read a text grow with its square, and so do times of masks
AMBIGUOUS = replace(SEEDED, grammar=Grammar.lark("start: x\nx: /[a-z ]/ | x x"))
FORCING = replace(GREEDY, grammar=GRAMMARS["schema"])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with byte_llm() as opened:
        yield opened


@pytest.fixture
def always_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "SLOW_SECONDS", -1.0)


def test_a_text_whose_masks_take_too_long_ends_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = Request("b", 30, sampling=SEEDED)
    alone = llm.generate("b", 30, sampling=SEEDED)
    monkeypatch.setattr(masks, "TEXT_SECONDS", 0.0)
    monkeypatch.setattr(masks, "TOKEN_SECONDS", 0.0)
    never_ending = replace(AMBIGUOUS, logit_bias={257: -100.0})
    with Scheduler(llm, 2) as scheduler:
        results = dict(run_all(scheduler, [Request("a", 60, sampling=never_ending), free]))
    assert isinstance(results[0], NoMask)
    assert str(results[0]) == f"the grammar gives no mask for position 2 ({TOO_SLOW})"
    assert not isinstance(results[1], Exception)
    assert same(alone, results[1])


@pytest.mark.usefixtures("always_slow")
def test_slow_masks_change_no_token(llm: LLM) -> None:
    requests = [
        Request("abc", 40, sampling=replace(SEEDED, grammar=grammar))
        for grammar in (None, *GRAMMARS.values())
    ]
    alone = [llm.generate("abc", 40, "autoregressive", sampling=one.sampling) for one in requests]
    with Scheduler(llm, 3) as scheduler:
        for number, result in run_all(scheduler, requests):
            assert not isinstance(result, Exception)
            assert same(alone[number], result), number


def test_nothing_is_drafted_where_masks_are_slow(llm: LLM, request: pytest.FixtureRequest) -> None:
    drafted = llm.generate("abc", 60, sampling=FORCING)
    request.getfixturevalue("always_slow")
    slow = llm.generate("abc", 60, sampling=FORCING)
    assert slow.token_ids == drafted.token_ids
    assert drafted.token_sources["grammar"] > slow.token_sources["grammar"]


@pytest.mark.usefixtures("always_slow")
def test_other_texts_go_on_while_a_mask_is_made(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    is_begun = Event()
    is_made = Event()
    makers: set[str] = set()
    prepare = Masks.prepare

    def wait_and_prepare(self: Masks, history: list[int]) -> None:
        makers.add(current_thread().name)
        is_begun.set()
        assert is_made.wait(60)
        prepare(self, history)

    alone = llm.generate("abc", 60, sampling=FORCING)
    monkeypatch.setattr(Masks, "prepare", wait_and_prepare)
    with Scheduler(llm, 2) as scheduler:
        slow = scheduler.submit(Request("abc", 60, sampling=FORCING))
        assert is_begun.wait(30)
        free = scheduler.submit(Request("b", 30, sampling=SEEDED))
        others_go_on = free.wait(30)
        is_made.set()
        assert others_go_on
        assert slow.wait(30)
    assert slow.result.token_ids == alone.token_ids
    assert "tokenswift-masks_0" in makers


@pytest.mark.usefixtures("always_slow")
def test_a_fault_beside_the_scheduler_ends_one_text(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a fault of the library")

    monkeypatch.setattr(Masks, "prepare", fail)
    with Scheduler(llm, 2) as scheduler:
        requests = [Request("abc", 60, sampling=FORCING), Request("b", 30, sampling=SEEDED)]
        results = dict(run_all(scheduler, requests))
    assert isinstance(results[0], ValueError)
    assert not isinstance(results[1], Exception)
