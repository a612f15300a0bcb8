"""Fields of SamplingParams as keywords of a generation, threads, and mistakes that were raw TypeErrors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.chats import chat_tokenizer
from tests.conftest import tiny_model
from tokenswift import (
    LLM,
    InputError,
)

WARM = {"temperature": 1.5, "seed": 3}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.from_model(tiny_model(), chat_tokenizer(), heads=None) as made:
        yield made


def ids(llm: LLM, prompt: Any = "abc abc", **more: Any) -> list[int]:
    return llm.generate(prompt, 12, ignore_eos=True, **more).token_ids


# ---- shorthands -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [{"seed": 3}, {"temperature": 1}, {"temperature": 0}, {"greedy": True}, WARM]
)
def test_keywords_are_the_sampling(llm: LLM, given: dict[str, Any]) -> None:
    usual = llm.default_sampling("abc abc")
    wanted = ids(llm, sampling=replace(usual, **given))
    assert ids(llm, **given) == wanted
    steps = llm.stream("abc abc", 12, ignore_eos=True, **given)
    assert [token for step in steps for token in step.token_ids] == wanted
    assert llm.prefill("abc abc").generate(12, ignore_eos=True, **given).token_ids == wanted
    many = llm.generate_many(["abc abc", [5, 6]], 12, ignore_eos=True, **given)
    assert [r.token_ids for r in many] == [wanted, ids(llm, [5, 6], sampling=replace(usual, **given))]


# ---- mistakes that were raw errors ------------------------------------------------------------------------


LONE = "a\ud800b"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda llm: llm.generate(LONE, 2),
            "prompt holds a lone surrogate (character 1, '\\ud800'); valid: ",
        ),
        (lambda llm: llm.encode(LONE), "prompt holds a lone surrogate (character 1,"),
        (lambda llm: llm.prefill(LONE), "prompt holds a lone surrogate (character 1,"),
        (lambda llm: llm.generate_many(["x", LONE], 2), "prompts[1] holds a lone surrogate (character 1,"),
        (
            lambda llm: llm.generate([{"role": "user", "content": LONE}], 2),
            "prompt[0]['content'] holds a lone surrogate (character 1,",
        ),
        (lambda llm: llm.generate("x", 2, stop=["y", LONE]), "stop holds a lone surrogate (character 1,"),
    ],
)
def test_text_that_is_none(llm: LLM, call: Callable[[LLM], object], words: str) -> None:
    with pytest.raises(InputError) as caught:
        call(llm)
    assert str(caught.value).startswith(words) and str(caught.value).isascii()
