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
from tokenswift.engine.detokenize import LoopGuard
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
