"""How long texts stay readable, by sampling: the figures of texts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.samplers import CANDIDATES, Ending, ending, figures, parse_options
from tests.chats import chat_tokenizer
from tests.conftest import tiny_model
from tokenswift import LLM, SamplingParams
from tools import summaries


def ending_of(loop: int | None = None, litany: int | None = None) -> Ending:
    return Ending(loop=loop, litany=litany, distinct_4=0.5, perplexity=4.0, words=0.75)


@pytest.mark.parametrize(
    ("loop", "litany", "readable"), [(None, None, None), (7, None, 7), (None, 5, 5), (7, 5, 5)]
)
def test_a_text_is_readable_until_it_loops_or_becomes_a_litany(
    loop: int | None, litany: int | None, readable: int | None
) -> None:
    assert ending_of(loop, litany).readable == readable


def test_a_samplings_figures_are_those_of_all_its_texts() -> None:
    row = figures([ending_of(), ending_of(loop=7), ending_of(litany=5)], 9)
    assert (row["texts"], row["loops"], row["litanies"]) == (3, 1, 1)
    assert row["readable"] == [9, 7, 5]


def test_a_text_of_one_token_again_and_again() -> None:
    llm = LLM.from_model(tiny_model("qwen2", max_position_embeddings=512), chat_tokenizer())
    prompt = llm.encode("Once upon a time")
    token = prompt[-1]
    sampling = SamplingParams(logit_bias={token: 100.0}, greedy=True, repetition_penalty=1.0)
    text = llm.generate(prompt, 200, sampling=sampling, ignore_eos=True)
    assert set(text.token_ids) == {token}
    written = llm.tokenizer.decode(text.token_ids).lower()
    end = ending(llm, prompt, text, {written})
    assert written.isalpha()
    assert end.loop is not None
    assert end.distinct_4 < 0.01
    assert end.words == 1.0


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({}, "nothing"),
        ({"min_p": 0.05, "temperature": 0.7}, "temperature 0.7, min-p 0.05"),
        ({"min_p": 0.02, "dry_multiplier": 0.8}, "min-p 0.02, DRY 0.8"),
    ],
)
def test_a_sampling_in_words(sampling: dict[str, object], words: str) -> None:
    assert summaries.sampling_words(sampling) == words


def test_one_of_the_samplings_is_the_default_of_continued_texts() -> None:
    words = [summaries.sampling_words(sampling) for sampling in CANDIDATES]
    assert [text for text in words if text.endswith("(default)")] == [
        "**min-p 0.02, DRY 0.8** (default)"
    ]


def test_samplings_may_be_named_at_once_or_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["samplers", "m.gguf", "books", "--sampling", "1", "2", "--sampling", "3"]
    monkeypatch.setattr(sys, "argv", command)
    assert parse_options().sampling == ["1", "2", "3"]


def test_the_table_has_the_newest_row_of_each_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {"model": "a-model", "dtype": "int8", "tokens": 9, "commit": "abc"}
    sampling = {"sampling": {"min_p": 0.05}}
    rows = [
        {**common, **sampling, **figures([ending_of(loop=5)], 9)},
        {**common, **sampling, **figures([ending_of(), ending_of(loop=7), ending_of(litany=5)], 9)},
    ]
    file = tmp_path / "samplers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.setattr(summaries, "SAMPLERS", file)
    table = summaries.samplers()
    cells = ["a-model", "min-p 0.05", "1 of 3", "1 of 3", "7", "0.50", "4.0", "75.0%"]
    assert table.body == [cells]
    assert "3 texts of 9 tokens" in table.below
    monkeypatch.setattr(summaries, "SAMPLERS", tmp_path / "none.jsonl")
    assert "Not measured yet" in summaries.samplers().below
