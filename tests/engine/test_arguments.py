"""Wrong arguments of the Python interface: an InputError of one line, naming the argument, its
value and what is valid."""

# pyright: reportArgumentType=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tokenswift
from tests.chats import chat_tokenizer
from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift import LLM, InputError, SamplingParams


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_model(tiny_model(), tiny_tokenizer())


HELLO = [{"role": "user", "content": "Hello"}]
#: what is called, and how its error begins
CALLS: list[tuple[Callable[[LLM], object], str]] = [
    (lambda llm: llm.generate(None), "prompt is None; valid: text, a list of token ids, or"),
    (lambda llm: llm.generate(b"a"), "prompt is b'a'; valid: text"),
    (lambda llm: llm.generate([[1]]), "prompt holds [1]; valid: text"),
    (lambda llm: llm.generate([]), "prompt is empty; valid: at least one token"),
    (lambda llm: llm.generate(""), "prompt is empty; valid: at least one token"),
    (lambda llm: llm.generate([-1]), "prompt token id is -1; valid: 0 to 259"),
    (lambda llm: llm.generate([10**30]), f"prompt token id is {10**30}; valid: 0 to 259"),
    (lambda llm: llm.generate("\udce9"), "prompt holds a lone surrogate (character 0"),
    (lambda llm: llm.generate("a", 0), "max_new_tokens is 0; valid: an integer of at least 1"),
    (lambda llm: llm.generate("a", True), "max_new_tokens is True; valid: an integer"),
    (lambda llm: llm.generate("a", 2000), "prompt and new tokens are 2001 tokens; valid: up to"),
    (lambda llm: llm.generate("a", 2, 3), "strategy is 3; valid: auto"),
    (lambda llm: llm.generate("a", 2, "auto", 3), "strategy_options is 3; valid: a dict of"),
    (lambda llm: llm.generate("a", 2, "magicdec", {3: 3}), "3 is not an option of strategy"),
    (
        lambda llm: llm.generate("a", temprature=3),  # pyright: ignore[reportCallIssue]
        "'temprature' is not an argument; valid: ",
    ),
    (lambda llm: llm.generate("a", sampling=3), "sampling is 3; valid: None, or an object"),
    (
        lambda llm: llm.generate("a", sampling=SamplingParams(), seed=3),
        "sampling is given together with seed; valid: one of the two",
    ),
    (lambda llm: llm.generate("a", seed="x"), "seed is 'x'; valid: an integer from 0"),
    (lambda llm: llm.generate("a", logit_bias={999: 1}), "logit_bias: token id is 999; valid: "),
    (lambda llm: llm.generate("a", stop=None), "stop is None; valid: up to 1,024 texts"),
    (lambda llm: llm.generate("a", on_loop="x"), "on_loop is 'x'; valid: report, stop, copies"),
    (lambda llm: llm.generate("a", ignore_eos="x"), "ignore_eos is 'x'; valid: True, False"),
    (lambda llm: llm.generate("a", run_dir=5), "run_dir is 5; valid: None, or the path of"),
    (lambda llm: llm.generate("a", logprobs=99), "logprobs is 99; valid: an integer from 0"),
    (
        lambda llm: llm.generate("a", logprobs=1, run_dir="r"),
        "logprobs are not kept in a run_dir; valid: one of the two",
    ),
    (lambda llm: llm.generate("a", response_format=3), "response_format is 3; valid: "),
    (lambda llm: llm.generate("a", template_options=3), "template_options is 3; valid: a dict"),
    (lambda llm: llm.generate("a", 2, on_step=3), "on_step is 3; valid: None, or a function"),
    (lambda llm: llm.generate("a", on_progress=3), "on_progress is 3; valid: None, or a"),
    (lambda llm: llm.generate_many("abc"), "prompts is 'abc'; valid: a list of prompts"),
    (
        lambda llm: llm.generate_many(["a"], run_dir="r"),  # pyright: ignore[reportCallIssue]
        "run_dir is not an argument of generate_m",
    ),
    (lambda llm: llm.generate_many(["a"], at_once=0), "at_once is 0; valid: auto, or"),
    (lambda llm: llm.generate_many(["a"], on_result=3), "on_result is 3; valid: None, or a"),
    (lambda llm: llm.chat("hi"), "messages is not a list of messages; valid: "),
    (lambda llm: llm.chat(HELLO), "messages is a list of messages, but the model has no chat tem"),
    (lambda llm: LLM(5), "model is of type int; valid: alias, folder or hub id (LLM.from_model"),
    (lambda llm: LLM("a\0b"), r"model is 'a\x00b': no such folder or file; valid: "),
    (
        lambda llm: LLM("x/y", thread=3),  # pyright: ignore[reportCallIssue]
        "'thread' is not an argument of LLM; valid: heads",
    ),
    (lambda llm: LLM.from_model("smollm2-135m"), "model is 'smollm2-135m'; valid: a loaded tr"),
    (lambda llm: LLM.from_model(tiny_model(), 5), "tokenizer is 5; valid: None, or a tokenizer"),
    (lambda llm: LLM.from_model(tiny_model(), heads=5), "heads is 5; valid: auto, none"),
    (lambda llm: tokenswift.resume(None), "run_dir is None; valid: the path of a run's folder"),
]


@pytest.mark.parametrize(("call", "line"), CALLS, ids=[line[:40] for _, line in CALLS])
def test_a_wrong_argument_is_told_in_a_line(
    llm: LLM, call: Callable[[LLM], object], line: str
) -> None:
    with pytest.raises(InputError) as caught:
        call(llm)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "prompt"),
    [
        ("generate", "a"),
        ("stream", "a"),
        ("prefill", "a"),
        ("encode", "a"),
        ("generate_many", ["a"]),
        ("chat", HELLO),
    ],
)
def test_a_closed_llm_says_so(method: str, prompt: object) -> None:
    llm = LLM.from_model(tiny_model(), tiny_tokenizer())
    llm.close()
    with pytest.raises(InputError, match="^the LLM is closed; valid: one that was not closed$"):
        getattr(llm, method)(prompt)


def test_the_model_of_a_program_has_to_be_given_again(llm: LLM, tmp_path: Path) -> None:
    llm.generate("hello", 5, run_dir=tmp_path / "run", ignore_eos=True)
    line = r"llm is not given, and the run's model .* came from a program; valid: resume\(run_dir"
    with pytest.raises(InputError, match=line):
        tokenswift.resume(tmp_path / "run", max_new_tokens=9)
    assert len(tokenswift.resume(tmp_path / "run", 9, llm=llm).token_ids) == 9


def test_closing_twice_does_no_harm() -> None:
    llm = LLM.from_model(tiny_model(), tiny_tokenizer())
    llm.close()
    llm.close()
    assert "closed" in repr(llm)


# ---- what is taken -------------------------------------------------------------------------------


def test_numbers_and_places_may_be_numpys_and_torchs(
    llm: LLM, tiny_folder: Callable[..., Path]
) -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        seed=np.int64(3),  # type: ignore[arg-type]
        greedy=np.bool_(False),  # type: ignore[arg-type]
        top_k=torch.tensor(7),  # type: ignore[arg-type]
    )
    assert params == SamplingParams(temperature=0.5, seed=3, top_k=7)
    assert [type(one) for one in (params.temperature, params.seed, params.greedy)] == [
        float,
        int,
        bool,
    ]
    options = {"tree": [np.int32(2), 1], "ngrams": np.int8(2)}
    done = llm.generate("abc", np.int16(3), "tokenswift", options, sampling=params)
    assert len(done.token_ids) <= 3
    with LLM(tiny_folder(), dtype=torch.float32, device=torch.device("cpu"), heads=None) as loaded:
        assert (loaded.dtype, loaded.device) == ("float32", "cpu")


def test_keywords_are_kept_by_a_journal(llm: LLM, tmp_path: Path) -> None:
    """Said as keywords or as parameters, it is the same run."""
    llm.generate("abc", 6, ignore_eos=True, seed=3, run_dir=tmp_path / "run")
    params = replace(llm.default_sampling(""), seed=3)
    journalled = llm.generate("abc", 12, ignore_eos=True, sampling=params, run_dir=tmp_path / "run")
    assert journalled.token_ids == llm.generate("abc", 12, ignore_eos=True, seed=3).token_ids
    assert journalled.token_ids != llm.generate("abc", 12, ignore_eos=True).token_ids
    with pytest.raises(InputError, match="holds another run: seed is 4, was 3"):
        llm.generate("abc", 12, ignore_eos=True, seed=4, run_dir=tmp_path / "run")


def test_answers_keep_their_sampling_with_another_seed() -> None:
    llm = LLM.from_model(tiny_model(), chat_tokenizer())
    params = replace(llm.default_sampling(HELLO), seed=3)
    expected = llm.generate(HELLO, 12, ignore_eos=True, sampling=params).token_ids
    assert llm.generate(HELLO, 12, ignore_eos=True, seed=3).token_ids == expected
    assert llm.prefill(HELLO).generate(12, ignore_eos=True, seed=3).token_ids == expected
    (one,) = llm.generate_many([HELLO], 12, ignore_eos=True, seed=3)
    assert one.token_ids == expected


def test_threads_are_the_process_and_change_no_token(tiny_folder: Callable[..., Path]) -> None:
    before = torch.get_num_threads()
    other = 1 if before > 1 else 2
    try:
        with LLM(tiny_folder(), heads=None) as llm:
            expected = llm.generate([5, 6], 12, ignore_eos=True).token_ids
            assert torch.get_num_threads() == before
        with LLM(tiny_folder(), heads=None, threads=other) as llm:
            assert torch.get_num_threads() == other
            assert llm.generate([5, 6], 12, ignore_eos=True).token_ids == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [0, -2, 10**6, "2", 2.0, True])
def test_threads_are_checked_before_loading(value: object) -> None:
    with pytest.raises(InputError, match=r"^threads is .*; valid: 1 to \d+ "):
        LLM("nobody/nothing", threads=value)
