"""How long texts stay readable, by sampling: the figures of texts."""

from __future__ import annotations

import pytest

from benchmarks.samplers import Ending, ending, figures
from tests.chats import chat_tokenizer
from tests.conftest import tiny_model
from tokenswift import LLM, SamplingParams


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
