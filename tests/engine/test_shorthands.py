"""Fields of SamplingParams as keywords of a generation, threads, and mistakes that were raw TypeErrors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from tests.chats import chat_tokenizer
from tests.conftest import tiny_model
from tokenswift import (
    LLM,
    AutoOptions,
    InputError,
    LoopOptions,
    MagicDecOptions,
    MedusaOptions,
    SamplingParams,
    TokenSwiftOptions,
    TriForceOptions,
)
from tokenswift.config import ANSWERS
from tokenswift.engine.request import SamplingFields

HELLO = [{"role": "user", "content": "Hello"}]
WARM = {"temperature": 1.5, "seed": 3}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.from_model(tiny_model(), chat_tokenizer(), heads=None) as made:
        yield made


def ids(llm: LLM, prompt: Any = "abc abc", **more: Any) -> list[int]:
    return llm.generate(prompt, 12, ignore_eos=True, **more).token_ids


# ---- shorthands -------------------------------------------------------------------------------------------


def test_the_keywords_are_the_fields_of_the_parameters() -> None:
    assert get_type_hints(SamplingFields) == get_type_hints(SamplingParams)


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


def test_keywords_change_the_text_at_all(llm: LLM) -> None:
    assert ids(llm, seed=3) != ids(llm)


def test_answers_keep_their_sampling_with_another_seed(llm: LLM) -> None:
    wanted = ids(llm, HELLO, sampling=replace(ANSWERS, seed=3))
    assert ids(llm, HELLO, seed=3) == wanted
    assert llm.generate_many([HELLO], 12, ignore_eos=True, seed=3)[0].token_ids == wanted
    assert llm.prefill(HELLO).generate(12, ignore_eos=True, seed=3).token_ids == wanted


def test_a_journal_knows_the_keywords(llm: LLM, tmp_path: Path) -> None:
    run: dict[str, Any] = {"run_dir": tmp_path / "run"}
    short = llm.generate("abc abc", 6, ignore_eos=True, seed=3, **run).token_ids
    whole = ids(
        llm, sampling=replace(llm.default_sampling(""), seed=3), **run
    )  # said the other way: the same run
    assert whole[:6] == short and whole == ids(llm, seed=3)
    with pytest.raises(InputError, match="holds another run: seed is 4, was 3"):
        ids(llm, seed=4, **run)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"sampling": SamplingParams(), "seed": 3, "top_k": 2},
            "sampling is given beside seed and top_k; valid: either, as in sampling=SamplingParams(seed=3, "
            "top_k=2)",
        ),
        ({"seed": -1}, "seed is -1; valid: an integer from 0"),
        ({"temperature": "hot"}, "temperature is 'hot'; valid: 0 (greedy"),
        ({"top_p": None}, "top_p is None; valid: in (0, 1]"),
        ({"typical_p": 1}, "'typical_p' is not an argument; valid: prompt, max_new_tokens"),
        ({"sampling_fields": {}}, "'sampling_fields' is not an argument"),
    ],
    ids=repr,
)
def test_keywords_that_are_refused(llm: LLM, given: dict[str, Any], words: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: llm.generate("abc", 2, **given),
        lambda: llm.stream("abc", 2, **given),
        lambda: llm.generate_many(["abc"], 2, **given),
        lambda: llm.prefill("abc").generate(2, **given),
    ]
    for call in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert str(caught.value).startswith(words), caught.value


# ---- threads ----------------------------------------------------------------------------------------------


def test_threads_of_the_process(tiny_folder: Any) -> None:
    before = torch.get_num_threads()
    other = 1 if before > 1 else 2
    try:
        with LLM(tiny_folder(), heads=None) as made:
            wanted = ids(made, [5, 6])
            assert torch.get_num_threads() == before
        with LLM(tiny_folder(), heads=None, threads=other) as made:
            assert torch.get_num_threads() == other and ids(made, [5, 6]) == wanted
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [0, -2, 10**6, "2", 2.0, True])
def test_threads_are_checked_before_loading(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("tokenswift.engine.llm.open_model", load)
    before = torch.get_num_threads()
    with pytest.raises(InputError, match=r"^threads is .*; valid: 1 to \d+ "):
        LLM("smollm2-135m", threads=value)
    assert torch.get_num_threads() == before


# ---- mistakes that were raw errors ------------------------------------------------------------------------

KINDS = (
    SamplingParams,
    LoopOptions,
    AutoOptions,
    TokenSwiftOptions,
    MedusaOptions,
    MagicDecOptions,
    TriForceOptions,
)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_fields_of_options(kind: Any) -> None:
    names = ", ".join(field.name for field in fields(kind))
    with pytest.raises(InputError) as caught:
        kind(length_penalty=1)
    probably = "; did you mean presence_penalty?" if kind.__name__ == "SamplingParams" else ""
    assert (
        str(caught.value) == f"'length_penalty' is not a field of {kind.__name__}; valid: {names}{probably}"
    )
    assert caught.value.field == "length_penalty"
    with pytest.raises(InputError, match=f"^{kind.__name__} got .* values; valid: at most .*, by name "):
        kind(*range(99))
    first = fields(kind)[0]
    with pytest.raises(InputError, match=f"^{first.name} is given twice to {kind.__name__}; valid: once$"):
        kind(first.default, **{first.name: first.default})
    assert list(inspect.signature(kind).parameters) == [field.name for field in fields(kind)]


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


def test_a_prefilled_prompt_is_no_prompt(llm: LLM) -> None:
    made = llm.prefill("abc")
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: llm.generate(made, 2), "prompt"),  # type: ignore[arg-type]
        (lambda: llm.stream(made, 2), "prompt"),  # type: ignore[arg-type]
        (lambda: llm.encode(made), "prompt"),  # type: ignore[arg-type]
        (lambda: llm.prefill(made), "prompt"),  # type: ignore[arg-type]
        (lambda: llm.generate_many(["abc", made], 2), "prompts[1]"),  # type: ignore[list-item]
    ]
    for call, name in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert str(caught.value) == (
            f"{name} is what LLM.prefill returned; valid: a prompt, or its own generate(…) and stream(…), "
            f"which take none"
        )


def test_python_errors_name_no_options(llm: LLM) -> None:
    with pytest.raises(InputError, match="or more with rope_scaling yarn$") as caught:
        llm.generate("abc", 10_000)
    assert "--" not in str(caught.value)
