"""Arguments of the Python calls: what is taken as it is, what is refused, and what comes back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from tests.chats import chat_tokenizer
from tests.conftest import tiny_model
from tests.lossless.test_tokens import random_heads
from tokenswift import LLM, Generation, InputError, SamplingParams
from tokenswift.config.sampling import ANSWERS

Options: TypeAlias = dict[str, Any]
HELLO = [{"role": "user", "content": "Hello"}]
TREE = {"tree": (2, 1), "ngrams": 2}
DRAFTED: Any = {"ignore_eos": True, "strategy": "tokenswift", "strategy_options": TREE}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.from_model(
        tiny_model(), chat_tokenizer(), heads=random_heads("conditioned", 32, 260)
    ) as opened:
        yield opened


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"sampling": {"seed": 1}},
            "sampling is {'seed': 1}; valid: None, or an object such as SamplingPar",
        ),
        ({"strategy_options": {"gamma": 2}}, "'gamma' is not an option of strategy auto"),
        ({"strategy_options": {"budget": 4.0}}, "budget is 4.0; valid: an integer"),
        ({"strategy": None}, "strategy is None; valid: auto, autoregressive"),
        (
            {"strategy": "magicdec", "strategy_options": {"draft_model": 5}},
            "draft_model 5 cannot be used: model type is '?'; valid: causal",
        ),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; valid: an integer of at least 1"),
        ({"stop": None}, "stop is None; valid: up to 1,024 texts"),
        ({"stop": ["x", ""]}, "stop is ['x', '']; valid: up to 1,024 texts"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'; valid: True, False"),
        ({"max_tokens": 3}, "'max_tokens' is not an argument; valid: prompt, "),
        ({"strategy": "magicdek"}, "strategy is 'magicdek'; valid: auto, "),
        ({"on_step": "print"}, "on_step is 'print'; valid: None, or a function"),
        ({"on_loop": None}, "on_loop is None; valid: report, stop, copies"),
        ({"temp": 0.5}, "'temp' is not an argument; valid: prompt, max_new_tokens"),
        (
            {"stop": ["y", "a\ud800b"]},
            "stop holds a lone surrogate (character 1, '\\ud800'); valid: ",
        ),
        ({"prompt": "a\ud800b"}, "prompt holds a lone surrogate (character 1, "),
    ],
    ids=repr,
)
def test_what_a_generation_refuses(llm: LLM, options: Options, words: str) -> None:
    with pytest.raises(InputError) as caught:
        llm.generate(**Options({"prompt": "abc", "max_new_tokens": 2}, **options))
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({"max_tokens": 3}, "did you mean max_new_tokens?"),
        ({"strategy": "magicdek"}, "did you mean magicdec?"),
        ({"on_loop": "stpo"}, "did you mean stop?"),
        ({"strategy_options": {"ngram": 3}}, "did you mean ngrams?"),
    ],
    ids=repr,
)
def test_a_refusal_says_what_was_probably_meant(llm: LLM, options: Options, ends: str) -> None:
    with pytest.raises(InputError) as caught:
        llm.generate("abc", **options)
    assert str(caught.value).endswith(ends)


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        (["abc", [999]], {}, "prompts[1] token id is 999"),
        ("abc", {}, "prompts is 'abc'; valid: a list of prompts"),
        (HELLO, {}, "prompts is [{"),
        (["abc"], {"run_dir": "x"}, "run_dir is not an argument of generate_many"),
        (["abc"], {"on_result": 3}, "on_result is 3; valid: None, or a function"),
    ],
    ids=repr,
)
def test_many_prompts_are_checked_before_the_first_is_run(
    llm: LLM, prompts: Any, options: Options, words: str
) -> None:
    seen: list[int] = []
    keywords: Options = {"on_result": lambda i, result: seen.append(i), **options}
    with pytest.raises(InputError) as caught:
        llm.generate_many(prompts, 6, **keywords)
    assert str(caught.value).startswith(words)
    assert seen == []


def test_a_stream_left_early_has_no_result_and_no_lock(llm: LLM, tmp_path: Path) -> None:
    how: Any = {"ignore_eos": True, "run_dir": tmp_path / "run"}
    with llm.stream("abc", 50, "autoregressive", **how) as stream:
        next(stream)
    assert next(stream, None) is None
    with pytest.raises(InputError, match="before the end"):
        _ = stream.result
    assert len(llm.generate("abc", 50, **how).token_ids) == 50


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model", 5, "model is of type int; valid: alias"),
        ("dtype", torch.int16, "dtype is 'int16'; valid: auto, float32"),
        ("device", torch.device("meta"), "device is 'meta'; valid: auto, cpu, cuda"),
        ("heads", 4, "heads is 4"),
        ("rope_scaling", {"type": "yarn"}, "rope_scaling is {'type': 'yarn'}; valid: none, yarn"),
    ],
)
def test_what_loading_refuses(tiny_folder: Any, name: str, value: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        LLM(**{"model": tiny_folder(), name: value})
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


# ---- chat ----------------------------------------------------------------------------------------


def test_messages_are_the_templates_token_ids(llm: LLM) -> None:
    assert llm.has_chat_template
    ids = llm.encode(HELLO)
    assert llm.tokenizer.decode(ids) == "<s>user: Hello\nassistant:"
    answer = llm.generate(HELLO, 16, ignore_eos=True)
    assert answer.prompt_tokens == len(ids)
    assert answer.token_ids == llm.generate(ids, 16, ignore_eos=True, sampling=ANSWERS).token_ids
    cold = SamplingParams(greedy=True)  # what is given counts
    assert llm.generate(HELLO, 16, ignore_eos=True, sampling=cold).token_ids != answer.token_ids


# ---- results -------------------------------------------------------------------------------------


def test_a_stream_ends_with_the_result(llm: LLM) -> None:
    stream = llm.stream("abc abc", 10, **DRAFTED)
    with pytest.raises(InputError, match="stream.result is not available before the end"):
        _ = stream.result
    steps = list(stream)
    expected = llm.generate("abc abc", 10, **DRAFTED)
    result = stream.result
    assert isinstance(result, Generation)
    assert result.finish_reason == "length"
    assert (
        result.token_ids
        == [token for step in steps for token in step.token_ids]
        == expected.token_ids
    )
    assert result.text == "".join(step.text for step in steps) == expected.text
    assert result.metrics.steps == len(steps)
    assert next(stream, None) is None  # and no second run


def test_many_prompts_in_order_with_progress(llm: LLM) -> None:
    prompts: list[Any] = ["abc", [5, 6, 7], HELLO]
    seen: list[tuple[int, list[int]]] = []
    many = llm.generate_many(
        prompts, 6, **DRAFTED, on_result=lambda i, r: seen.append((i, r.token_ids))
    )
    assert [r.token_ids for r in many] == [llm.generate(p, 6, **DRAFTED).token_ids for p in prompts]
    assert seen == list(enumerate(r.token_ids for r in many))
    assert llm.generate_many([], **DRAFTED) == []


# ---- heads, and what was used --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "options", "source", "kind"),
    [
        ("autoregressive", None, "none", None),
        ("auto", None, "heads, partial passes, text", "conditioned"),
        ("tokenswift", TREE | {"draft": "hidden"}, "heads, text", "conditioned"),
        ("tokenswift", {"ngrams": 0, "cache": "full"}, "heads", "conditioned"),
        ("magicdec", {"budget": 32}, "partial passes", None),
        (
            "triforce",
            {"budget": 32, "draft_budget": 32, "draft_model": tiny_model(seed=3)},
            "draft model LlamaForCausalLM",
            None,
        ),
    ],
)
def test_results_say_what_drafted(
    llm: LLM, strategy: str, options: Any, source: str, kind: str | None
) -> None:
    done = llm.generate("abc abc abc", 24, strategy, options, ignore_eos=True)
    assert done.draft_source == source
    assert done.heads == (None if kind is None else {"kind": kind, "file": ""})
    assert sum(done.token_sources.values()) == 24
    target_tokens = done.token_sources["target"]  # one a step, but for one that the length ended
    assert done.metrics.steps - 1 <= target_tokens <= done.metrics.steps
    assert set(done.token_sources) == {
        "target",
        "head",
        "ngram",
        "chain",
        "grammar",
        "eagle",
        "recycle",
    }
    if strategy == "autoregressive":
        assert done.token_sources["target"] == 24


def test_an_answer_may_have_the_rest_of_the_models_positions() -> None:
    """A continued text has 200 new tokens; both however the prompt comes."""
    model = tiny_model(max_position_embeddings=512)
    llm = LLM.from_model(model, chat_tokenizer())
    plain = {"strategy": "autoregressive", "ignore_eos": True}
    chat = [{"role": "user", "content": "hello"}]
    rest = 512 - len(llm.encode(chat))
    assert len(llm.generate(chat, **plain).token_ids) == rest > 200
    assert len(llm.chat(chat, **plain).generation.token_ids) == rest
    assert len(llm.prefill(chat).generate(**plain).token_ids) == rest
    assert [len(made.token_ids) for made in llm.generate_many([chat, "hello"], **plain)] == [
        rest,
        200,
    ]
    assert len(llm.generate("hello", **plain).token_ids) == 200


# ---- shorthands ----------------------------------------------------------------------------------


def test_keywords_are_the_sampling(llm: LLM) -> None:
    call: Options = {"max_new_tokens": 12, "ignore_eos": True}
    cases: list[Options] = [
        {"seed": 3},
        {"temperature": 0},
        {"temperature": 1.5, "seed": 3},
    ]
    for fields in cases:
        usual = replace(llm.default_sampling("abc abc"), **fields)
        wanted = llm.generate("abc abc", sampling=usual, **call).token_ids
        assert llm.generate("abc abc", **call, **fields).token_ids == wanted
        assert llm.prefill("abc abc").generate(**call, **fields).token_ids == wanted
        assert llm.generate_many(["abc abc"], **call, **fields)[0].token_ids == wanted
