"""Keywords of ``LLM.generate`` and its siblings: an editor, ``help`` and the call know them.

A misspelt keyword is an error of the type checker, too: the comments below that silence it would be
errors themselves if it were none.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import get_type_hints

import pytest

from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift import LLM, InputError, Request, SamplingParams
from tokenswift.config.loading import LoadConfig, LoadOptions
from tokenswift.engine.arguments import GenerationArguments, SamplingArguments, SharedArguments
from tokenswift.engine.request import INNER, check_names
from tokenswift.engine.stream import Prefilled

HELLO = [{"role": "user", "content": "hello"}]
#: parameters of a request that come before its keywords
POSITIONAL = ("prompt", "max_new_tokens", "strategy", "strategy_options", "sampling")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with LLM.from_model(tiny_model(), tokenizer, heads=None) as opened:
        yield opened


MISSPELT: list[Callable[[LLM], object]] = [
    lambda llm: llm.generate("a", temperture=0.5),  # pyright: ignore[reportCallIssue]
    lambda llm: llm.stream("a", temperture=0.5),  # pyright: ignore[reportCallIssue]
    lambda llm: llm.generate_many(["a"], temperture=0.5),  # pyright: ignore[reportCallIssue]
    lambda llm: llm.prefill("a").generate(temperture=0.5),  # pyright: ignore[reportCallIssue]
    lambda llm: llm.prefill("a").stream(temperture=0.5),  # pyright: ignore[reportCallIssue]
    lambda llm: llm.chat(HELLO, temperture=0.5),  # pyright: ignore[reportCallIssue]
]


@pytest.mark.parametrize("call", MISSPELT)
def test_a_misspelt_keyword_says_what_was_probably_meant(
    llm: LLM, call: Callable[[LLM], object]
) -> None:
    with pytest.raises(InputError) as caught:
        call(llm)
    assert str(caught.value).startswith("'temperture' is not an argument; valid: ")
    assert str(caught.value).endswith("did you mean temperature?")


def test_a_misspelt_keyword_of_loading_says_what_was_probably_meant() -> None:
    with pytest.raises(InputError, match="'thread' is not an argument of LLM; .* threads"):
        LLM("no/model", thread=3)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (LLM.generate, GenerationArguments),
        (LLM.stream, GenerationArguments),
        (LLM.chat, GenerationArguments),
        (LLM.generate_many, SharedArguments),
        (Prefilled.generate, GenerationArguments),
        (Prefilled.stream, GenerationArguments),
        (LLM.__init__, LoadOptions),
    ],
)
def test_help_names_every_keyword(method: Callable[..., object], arguments: type) -> None:
    parameters = inspect.signature(method).parameters
    assert set(get_type_hints(arguments)) <= set(parameters)
    assert all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def test_the_keywords_are_those_that_a_request_takes() -> None:
    taken = {field.name for field in fields(Request) if field.init}
    expected = taken - {*POSITIONAL, *INNER} | {"response_format", *get_type_hints(SamplingParams)}
    assert set(get_type_hints(GenerationArguments)) == expected
    check_names(expected)


def test_several_texts_take_all_keywords_but_the_folder_of_a_run() -> None:
    assert set(get_type_hints(GenerationArguments)) - set(get_type_hints(SharedArguments)) == {
        "run_dir"
    }


def test_the_keywords_of_sampling_have_the_types_of_its_fields() -> None:
    assert get_type_hints(SamplingArguments) == get_type_hints(SamplingParams)


def test_the_keywords_of_loading_have_the_types_of_its_fields() -> None:
    types = get_type_hints(LoadConfig)
    assert get_type_hints(LoadOptions).items() <= types.items()
    assert set(types) - set(get_type_hints(LoadOptions)) == {"dtype", "device"}
