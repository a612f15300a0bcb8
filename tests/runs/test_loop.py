"""The loop guard: what repeats is found soon, sound text raises no alarm, a stop is every strategy's."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift import LLM, InputError, LoopOptions, SamplingParams, Step
from tokenswift.runs.loop import LoopGuard
from tokenswift.types import Loop

SOUND = sorted((Path(__file__).parents[1] / "data" / "sound").iterdir())
BOOKS = Path(__file__).parents[3] / "shared" / "data" / "books"
PLAIN = SamplingParams(greedy=True, repetition_penalty=1.0)


def noise(count: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(10_000) for _ in range(count)]


def alarms(tokens: list[int], options: LoopOptions | None = None) -> list[tuple[int, Loop]]:
    guard = LoopGuard(options)
    found = []
    for at, token in enumerate(tokens):
        if guard.push(token):
            assert guard.loop is not None
            found.append((at, guard.loop))
    return found


def by_definition(tokens: list[int], o: LoopOptions) -> bool:
    """Whether a text ends in copies of a pattern, looked up copy by copy."""
    for size in range(o.min_pattern_size, o.max_pattern_size + 1):
        count = max(o.min_count, -(-o.min_tokens // size))
        span = max(size * o.min_count, o.min_tokens)
        if len(tokens) < span:
            continue
        tail = tokens[-span:]
        if all(tail[i] == tail[i - size] for i in range(size, span)) and count:
            return True
    return False


@pytest.mark.parametrize("size", [1, 2, 7, 53, 160, 512])
def test_a_loop_is_found_with_its_start(size: int) -> None:
    """After 160 tokens, or three copies of a long pattern, and not before."""
    before, pattern = noise(3000, 1), [20_000 + i for i in range(size)]
    found = alarms(before + pattern * (1600 // size + 3))
    assert len(found) == 1
    at, loop = found[0]
    assert at == 3000 + max(160, 3 * size) - 1
    assert loop == Loop(3000, size, max(160, 3 * size), "pattern")


def test_it_agrees_with_the_definition_at_every_token() -> None:
    """Random texts of few tokens, with and without loops, small sizes and counts."""
    chance = random.Random(5)
    hits = 0
    for trial in range(60):
        o = LoopOptions(
            chance.randint(1, 3), chance.randint(3, 9), chance.randint(2, 4), chance.randint(1, 14)
        )
        tokens: list[int] = []
        while len(tokens) < 90:
            piece = [chance.randrange(3) for _ in range(chance.randint(1, 6))]
            tokens += piece * chance.randint(1, 6)
        guard = LoopGuard(o)
        for at, token in enumerate(tokens):
            guard.push(token)
            expected = by_definition(tokens[: at + 1], o)
            hits += expected
            assert (guard.loop is not None) == expected, (trial, at, o)
    assert hits > 100


def test_going_on_is_like_never_having_stopped() -> None:
    tokens = noise(5000) + [1, 2, 3] * 40 + noise(20, 2) + [7, 8] * 200
    whole = alarms(tokens)
    for cut in (10, 5100, 5119, 5160, 5300, len(tokens) - 1):
        guard = LoopGuard()
        guard.restore(tokens[:cut], None)
        late = [(at, guard.loop) for at, token in enumerate(tokens[cut:], cut) if guard.push(token)]
        assert late == [found for found in whole if found[0] >= cut]


def test_a_text_that_changes_a_little_every_time_is_reported_once() -> None:
    """No pattern repeats, but n-grams of the text are accepted without exception."""
    step = Step((1, 2, 3, 4, 5), drafted=4, accepted=4, ngram_accepted=4, gamma=4)
    poor = Step((1, 2), drafted=4, accepted=1, ngram_accepted=1, gamma=4)
    for steps, expected in (([step] * 200, 1), ([step, poor] * 300, 0), ([poor] * 500, 0), ([step] * 90, 0)):
        guard = LoopGuard()
        seen = 0
        for one in steps:
            for token in noise(len(one.token_ids), guard.count):
                guard.push(token)
            seen += guard.observe(one)
        assert seen == expected and (guard.first is not None) == bool(expected)
        if guard.first is not None:
            assert guard.first.sign == "n-grams" and guard.loop is None


@pytest.mark.parametrize("path", SOUND, ids=lambda path: path.name)
def test_sound_text_raises_no_alarm(path: Path) -> None:
    """Prose, ellipses, tables and code, in words and single signs."""
    words = re.findall(r"\w+|\s+|[^\w\s]", path.read_text(encoding="utf-8"))
    ids = {word: i for i, word in enumerate(dict.fromkeys(words))}
    assert len(words) > 200
    assert alarms([ids[word] for word in words]) == []


@pytest.mark.model
def test_sound_text_in_the_tokens_of_the_default_model(embedded_tokenizer: Any) -> None:
    for path in SOUND:
        assert alarms(embedded_tokenizer(path.read_text(encoding="utf-8"))["input_ids"]) == [], path.name


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(not BOOKS.is_dir(), reason="the novels are not here")
def test_novels_raise_no_alarm(embedded_tokenizer: Any) -> None:
    books = sorted(BOOKS.glob("*.txt"))
    assert len(books) == 8
    for book in books:
        assert alarms(embedded_tokenizer(book.read_text(encoding="utf-8-sig"))["input_ids"]) == [], book.name


@pytest.mark.slow
@pytest.mark.model
def test_the_greedy_loop_of_the_default_model(embedded: str) -> None:
    """Without a penalty it loops; it is found within 200 tokens of the first copy, and stopped there."""
    with LLM("smollm2-135m", dtype="float32", device="cpu") as llm:
        prompt = "The lamp at Sallow Point"
        found = llm.generate(prompt, 400, sampling=PLAIN, ignore_eos=True, on_loop="stop")
        loop = found.metrics.loop
        assert found.finish_reason == "loop" and loop is not None and loop.sign == "pattern"
        assert len(found.token_ids) == loop.start + loop.span and loop.span <= 200
        copy = found.token_ids[loop.start : loop.start + loop.size]
        assert found.token_ids[loop.start + loop.size : loop.start + 2 * loop.size] == copy


# ---- in a run ---------------------------------------------------------------------------------------------


SMALL = LoopOptions(1, 32, 3, 24)


@pytest.fixture(scope="module")
def looping() -> LLM:
    """A tiny model that repeats one token for ever."""
    model = tiny_model()
    model.lm_head.weight.data[65] += 40 * model.lm_head.weight.data[65].sign()
    return LLM.from_model(model, tiny_tokenizer())


def test_stopping_is_the_same_whatever_drafts(looping: LLM) -> None:
    call: dict[str, Any] = {"sampling": PLAIN, "ignore_eos": True, "loop": SMALL}
    long = looping.generate("hello", 120, **call, strategy="autoregressive")
    assert long.finish_reason == "length" and long.metrics.loop is not None  # reported, not stopped
    stopped = [
        looping.generate("hello", 120, **call, on_loop="stop", strategy=strategy, strategy_options=options)
        for strategy, options in (("autoregressive", {}), ("tokenswift", {"ngrams": 2, "ngram_count": 1}),
                                  ("magicdec", {"gamma": 5, "budget": 24, "sinks": 2}))
    ]  # fmt: skip
    assert {out.finish_reason for out in stopped} == {"loop"}
    assert len({tuple(out.token_ids) for out in stopped}) == 1
    loop = stopped[0].metrics.loop
    assert loop is not None and len(stopped[0].token_ids) == loop.start + loop.span < 60
    assert long.token_ids[: len(stopped[0].token_ids)] == stopped[0].token_ids


def test_a_stopped_run_stays_stopped_and_may_go_on(looping: LLM, tmp_path: Path) -> None:
    import tokenswift

    call: dict[str, Any] = {"sampling": PLAIN, "ignore_eos": True, "loop": SMALL}
    first = looping.generate("hello", 90, **call, on_loop="stop", run_dir=tmp_path / "run")
    again = tokenswift.resume(tmp_path / "run", llm=looping)
    assert (again.finish_reason, again.token_ids, again.metrics.loop) == (
        "loop",
        first.token_ids,
        first.metrics.loop,
    )
    on = tokenswift.resume(tmp_path / "run", llm=looping, on_loop="report")
    assert on.finish_reason == "length" and on.token_ids == looping.generate("hello", 90, **call).token_ids
    assert on.metrics.loop == first.metrics.loop


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ((0, 5, 3), "min_pattern_size is 0; valid: an integer of at least 1"),
        ((5, 4, 3), r"max_pattern_size is 4; valid: 5 \(min_pattern_size\) to 65536"),
        ((1, 10**9, 3), "max_pattern_size is 1000000000; valid: 1"),
        ((1, 5, 1), "min_count is 1; valid: an integer of at least 2"),
        ((1, 5, 3, 0), "min_tokens is 0; valid: an integer of at least 1"),
    ],
)
def test_bad_sizes_are_refused(values: tuple[int, ...], line: str) -> None:
    with pytest.raises(InputError, match=line):
        LoopOptions(*values)
