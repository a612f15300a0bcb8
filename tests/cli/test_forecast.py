"""What a run will take: memory by part, the largest length that fits, time from what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import tiny_model, tiny_tokenizer
from tests.spec.eagle_drafters import random_eagle
from tests.tiny import tiny_model as wide_model
from tokenswift import LLM, InputError, memory
from tokenswift.cli import forecast
from tokenswift.cli.forecast import Part, Plan, Speed, expected, plan, plan_many
from tokenswift.engine.request import Request
from tokenswift.engine.run import Run
from tokenswift.memory import Memory, largest, needs_of, resident

OPTIONS: dict[str, Any] = {"tree": (2, 2), "ngrams": 3, "budget": 60, "sinks": 2, "draft": "partial"}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_model(tiny_model(max_position_embeddings=100_000), tiny_tokenizer())


def run_of(llm: LLM, new: int) -> Run:
    return Run(llm, Request([1, 2, 3], new, "tokenswift", OPTIONS, ignore_eos=True))


@pytest.mark.parametrize("free", [0, 10_000, 100_000, 333_333, 5_000_000])
def test_the_largest_length_fits_and_one_more_does_not(llm: LLM, free: int) -> None:
    """Also around the budget, where a partial cache joins in."""
    run = run_of(llm, 5)
    most = largest(llm.target, run.strategy, 3, free)

    def needed(new: int) -> int:
        return sum(n.nbytes for n in needs_of(llm.target, run.strategy, 3, new) if n.sure)

    assert needed(most + 1) > free and (most == 0 or needed(most) <= free)


def test_a_run_that_does_not_fit_is_told_what_would(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: Memory(3_000_000, 10**9))
    with pytest.raises(InputError, match=r"valid: max_new_tokens up to \d+, a dtype of two bytes$") as caught:
        run_of(llm, 90_000)
    most = int(str(caught.value).rsplit("up to ", 1)[1].split(",")[0])
    assert run_of(llm, most).max_new_tokens == most
    with pytest.raises(InputError, match=f"up to {most},"):
        run_of(llm, most + 1)
    monkeypatch.setattr(memory, "host_memory", lambda: Memory(100, 10**9))
    with pytest.raises(InputError, match="valid: a smaller ngrams"):  # the tree's rows alone are too many
        run_of(llm, 1)


def test_the_parts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is there once: the sum is what the process holds and what the run adds."""
    monkeypatch.setattr(memory, "resident", lambda: 50_000_000)
    run = run_of(llm, 500)
    found = plan(run, None)
    parts = {part.name: part.nbytes for part in found.parts}
    row, nodes = llm.target.kv_bytes, run.strategy.max_nodes
    assert parts["full cache"] == (503 + nodes) * row
    assert parts["partial cache (budget 60)"] == 61 * row
    assert parts["logits of a step"] == 3 * nodes * 260 * 4
    assert parts["weights"] + parts["program, libraries, work space"] == 50_000_000
    assert found.peak == sum(parts.values()) and len(parts) == 6
    assert found.seconds is None and found.most is not None and found.most > 500
    short = {part.name for part in plan(run_of(llm, 5), None).parts}
    assert "partial cache (budget 60)" not in short  # the text never gets that long


def test_an_eagle_drafters_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights, of which those that the model lends are none, its cache, and what a level takes."""
    monkeypatch.setattr(memory, "resident", lambda: 50_000_000)
    eagle = random_eagle(names=41, own=False, window=20)
    llm = LLM.from_model(wide_model("llama"), heads=None, eagle=eagle)
    request = Request([1, 2, 3], 500, "auto", {"draft": "hidden"}, ignore_eos=True)
    run = Run(llm, request)
    found = plan(run, None)
    parts = {part.name: part.nbytes for part in found.parts}
    layer = 4 * (48 * 96 + 2 * 24 * 96 + 48 * 48 + 3 * 80 * 48)
    drafter, fc = llm.resources.eagle, 4 * 48 * 144
    assert drafter is not None and eagle.d2t is not None
    rows = llm.target.head_rows(eagle.d2t).nbytes
    assert drafter.level_bytes >= layer + rows > drafter.level_bytes * 0.8  # panels
    assert parts["weights of the EAGLE-3 drafter"] == drafter.held_bytes >= layer + rows + fc
    assert parts["cache of the EAGLE-3 drafter"] == (20 + 512 + 32) * 2 * 2 * 12 * 4 + 20 * 3 * 48 * 4
    assert found.peak == sum(parts.values()) and found.level is None
    measured = plan(run, lambda new: Run(llm, replace(request, max_new_tokens=new)))
    assert measured.level is not None
    plain = plan(Run(llm, replace(request, strategy="autoregressive", strategy_options={})), None)
    assert "cache of the EAGLE-3 drafter" not in {part.name for part in plain.parts}


def test_the_expected_time() -> None:
    """By hand: 1,000 tokens at 2 a step; a step takes 10 ms at 100 tokens and 2 µs more for each other."""
    speed = Speed(at=100, step=0.010, rate=2.0, slope=2e-6, prefill=0.001, prefill_slope=1e-6, spread=0.1)
    middle = 0.010 + 2e-6 * (100 + 500 - 100)
    assert expected(speed, 100, 1000) == pytest.approx(500 * middle + 100 * (0.001 + 1e-6 * 50))


def test_a_measured_plan(llm: LLM) -> None:
    """The measurement is a run of the same kind, shorter; it leaves the model as it was."""
    before = llm.generate([1, 2, 3], 20, ignore_eos=True).token_ids
    asked: list[int] = []

    def again(new: int) -> Run:
        asked.append(new)
        return run_of(llm, new)

    found = plan(run_of(llm, 2000), again)
    assert asked == [forecast.SHORT] and found.speed is not None and found.speed.at == 3
    assert found.seconds is not None and found.range is not None
    assert 0 < found.range[0] < found.seconds < found.range[1]
    assert found.seconds == expected(found.speed, 3, 2000) and 1.0 <= found.speed.rate <= 7
    assert llm.generate([1, 2, 3], 20, ignore_eos=True).token_ids == before


def test_resident_memory_grows_with_what_is_held() -> None:
    before = resident()
    if not before:
        pytest.skip("the system does not tell")
    held = bytearray(b"x") * 200_000_000
    assert resident() - before > 150_000_000 and len(held)


def test_many_texts_share_nodes() -> None:
    """Side by side at twice the speed of one alone; never less than the longest text takes beside others."""
    speed = Speed(at=0, step=0.1, rate=2.0, slope=0.0, prefill=0.0, prefill_slope=0.0, spread=0.0)
    longest = Plan([Part("weights", 100)], 100, None, None, 50.0, (40.0, 60.0), speed)
    sizes = [(10, 1000)] * 8  # 50 s each
    one = plan_many(longest, sizes, 1, 4, 7, 40.0)
    assert one.seconds == pytest.approx(200.0) and one.rate == pytest.approx(40.0)
    assert (one.texts, one.prompt, one.new, one.peak) == (8, 80, 8000, 100 + 3 * 7)
    assert plan_many(longest, sizes, 2, 4, 7, 40.0).seconds == pytest.approx(100.0)
    assert plan_many(longest, sizes, 8, 4, 7, 40.0).seconds == pytest.approx(100.0)  # 50 s, at half the speed
    assert plan_many(longest, sizes, 8, 1, 7, 20.0).seconds == pytest.approx(50.0)
    assert one.range is not None and one.range[0] < 200.0 < one.range[1]
    unmeasured = plan_many(replace(longest, speed=None), sizes, 4, 2, 7, None)
    assert (unmeasured.seconds, unmeasured.range) == (None, None)
