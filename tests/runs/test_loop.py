"""The loop guard: what repeats is found soon, sound text raises no alarm, a stop is every
strategy's."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift import LLM, SamplingParams
from tokenswift.engine import loops
from tokenswift.engine.loops import CopyGuard, LoopGuard
from tokenswift.types import Loop

SOUND = sorted((Path(__file__).parents[1] / "data" / "sound").iterdir())
PLAIN = SamplingParams(greedy=True, repetition_penalty=1.0)


def noise(count: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(10_000) for _ in range(count)]


def alarms(tokens: list[int]) -> list[tuple[int, Loop]]:
    guard = LoopGuard()
    loops = []
    for at, token in enumerate(tokens):
        if guard.push(token):
            assert guard.loop is not None
            loops.append((at, guard.loop))
    return loops


@pytest.mark.parametrize("size", [1, 2, 7, 53, 160, 512])
def test_a_loop_is_found_with_its_start(size: int) -> None:
    """After 160 tokens, or three copies of a long pattern, and not before."""
    before = noise(3000, 1)
    pattern = [20_000 + i for i in range(size)]
    loops = alarms(before + pattern * (1600 // size + 3))
    assert len(loops) == 1
    at, loop = loops[0]
    assert at == 3000 + max(160, 3 * size) - 1
    assert loop == Loop(3000, size, max(160, 3 * size))


@pytest.mark.parametrize("path", SOUND, ids=lambda path: path.name)
def test_sound_text_raises_no_alarm(path: Path) -> None:
    """Prose, ellipses, tables and code, in words and single signs."""
    words = re.findall(r"\w+|\s+|[^\w\s]", path.read_text(encoding="utf-8"))
    ids = {word: i for i, word in enumerate(dict.fromkeys(words))}
    assert len(words) > 200
    assert alarms([ids[word] for word in words]) == []
    assert alarm_of_copies([ids[word] for word in words]) is None


def alarm_of_copies(tokens: list[int]) -> tuple[int, Loop] | None:
    """After how many tokens pages are first noticed to be written again, and what is said."""
    guard = CopyGuard()
    for at, token in enumerate(tokens, 1):
        guard.push(token)
        if guard.loop is not None:
            return at, guard.loop
    return None


def test_pages_that_are_written_again_with_other_words_are_found() -> None:
    """As under a penalty over 1,024 tokens: no pattern of up to 512 tokens, and no exact copy."""
    page = noise(1200, 2)
    text = noise(500, 3)
    for copy in range(4):
        text += [30_000 + copy if i % 200 == 100 else token for i, token in enumerate(page)]
    assert alarms(text) == []
    alarm = alarm_of_copies(text)
    assert alarm is not None
    at, loop = alarm
    assert loop.size == 1200
    # from the second page on; four of a hundred tokens are behind a changed word
    assert 500 + 1200 + 1844 <= at <= 500 + 1200 + 2048
    assert abs(loop.start - 500) <= 200
    assert loop.start + loop.span == at


def test_new_text_ends_what_was_a_loop() -> None:
    page = noise(1200, 2)
    guard = CopyGuard()
    for token in page * 4:
        guard.push(token)
    assert guard.loop is not None
    for token in noise(400, 5):
        guard.push(token + 10_000)
    assert guard.loop is None


# ---- in a run ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def looping() -> LLM:
    """A tiny model that repeats one token for ever."""
    model = tiny_model()
    model.lm_head.weight.data[65] += 40 * model.lm_head.weight.data[65].sign()
    return LLM.from_model(model, tiny_tokenizer())


def test_stopping_is_the_same_whatever_drafts(looping: LLM) -> None:
    call: dict[str, Any] = {"sampling": PLAIN, "ignore_eos": True}
    long = looping.generate("hello", 220, **call, strategy="autoregressive")
    assert long.finish_reason == "length"  # reported, not stopped
    assert long.metrics.loop is not None
    stopped = [
        looping.generate(
            "hello", 220, **call, on_loop="stop", strategy=strategy, strategy_options=options
        )
        for strategy, options in (
            ("autoregressive", {}),
            ("tokenswift", {"ngrams": 2, "ngram_count": 1}),
            ("magicdec", {"gamma": 5, "budget": 24, "sinks": 2}),
        )
    ]
    assert {out.finish_reason for out in stopped} == {"loop"}
    assert len({tuple(out.token_ids) for out in stopped}) == 1
    loop = stopped[0].metrics.loop
    assert loop is not None
    assert len(stopped[0].token_ids) == loop.start + loop.span < 220
    assert long.token_ids[: len(stopped[0].token_ids)] == stopped[0].token_ids


def test_a_stopped_run_stays_stopped_and_may_go_on(looping: LLM, tmp_path: Path) -> None:
    import tokenswift

    call: dict[str, Any] = {"sampling": PLAIN, "ignore_eos": True}
    first = looping.generate("hello", 220, **call, on_loop="stop", run_dir=tmp_path / "run")
    again = tokenswift.resume(tmp_path / "run", llm=looping)
    assert (again.token_ids, again.metrics.loop) == (first.token_ids, first.metrics.loop)
    assert again.finish_reason == "loop"
    on = tokenswift.resume(tmp_path / "run", llm=looping, on_loop="report")
    assert on.finish_reason == "length"
    assert on.token_ids == looping.generate("hello", 220, **call).token_ids
    assert on.metrics.loop == first.metrics.loop


def test_pages_written_again_stop_where_a_stop_was_asked_for(
    looping: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers, which stop at copies, may say something twice; every loop is reported."""
    monkeypatch.setattr(loops, "COPIED_WINDOW", 64)
    call: dict[str, Any] = {"sampling": PLAIN, "ignore_eos": True}
    ends = {
        on_loop: looping.generate("hello", 220, **call, on_loop=on_loop)
        for on_loop in ("report", "copies", "stop")
    }
    assert [end.finish_reason for end in ends.values()] == ["length", "loop", "loop"]
    assert len(ends["stop"].token_ids) < 100
    assert len(ends["copies"].token_ids) >= 160
    found = {end.metrics.loop for end in ends.values()}
    assert len(found) == 1
    assert None not in found


# ---- by its definition ---------------------------------------------------------------------------


def repeats_itself(tokens: list[int]) -> bool:
    """Whether a text ends in copies of a pattern: 3 of 1 to 512 tokens, of 160 tokens or more."""
    for size in range(1, 513):
        copies = max(3, -(-160 // size))
        end = tokens[-size:] * copies
        span = max(3 * size, 160)
        if len(tokens) >= span and tokens[-span:] == end[-span:]:
            return True
    return False


@pytest.mark.parametrize("seed", range(6))
def test_a_loop_is_what_the_docs_call_one_at_every_token(seed: int) -> None:
    """Random texts of few tokens and long repetitions, whose ends are spoilt now and then."""
    chance = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < 900:
        pattern = [chance.randrange(3) for _ in range(chance.choice((1, 2, 3, 40, 70)))]
        tokens += pattern * chance.choice((1, 2, 4, 90 // len(pattern) + 1, 200 // len(pattern)))
    guard = LoopGuard()
    for at, token in enumerate(tokens, 1):
        guard.push(token)
        if at % 7 == 0 or at > 880:
            assert (guard.loop is not None) == repeats_itself(tokens[:at]), at


@pytest.mark.parametrize("seed", range(6))
def test_copies_are_what_the_docs_call_so_at_every_token(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a window of 60 tokens instead of 2,048."""
    monkeypatch.setattr(loops, "COPIED_WINDOW", 60)
    chance = random.Random(seed)
    pages = [noise(chance.randrange(20, 90), seed + page) for page in range(3)]
    tokens: list[int] = []
    while len(tokens) < 900:
        tokens += chance.choice(pages) * chance.choice((1, 2, 3))
        tokens += [20_000 + len(tokens)] * chance.choice((0, 1, 6))
    guard = CopyGuard()
    seen: set[tuple[int, ...]] = set()
    is_copy: list[bool] = []
    alarms = 0
    for at, token in enumerate(tokens, 1):
        run = tuple(tokens[max(0, at - 8) : at])
        is_copy.append(run in seen)
        seen.add(run)
        guard.push(token)
        alarms += guard.loop is not None
        assert (guard.loop is not None) == (sum(is_copy[-60:]) >= 0.9 * 60), at
    assert 0 < alarms < len(tokens)
