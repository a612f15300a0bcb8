"""Arguments of the Python calls: what is taken as it is, what is refused, and what comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.chats import chat_tokenizer
from tests.conftest import tiny_model
from tests.lossless.test_tokens import random_heads
from tokenswift import (
    LLM,
    Generation,
    InputError,
    LoopOptions,
    MagicDecOptions,
    MedusaOptions,
    SamplingParams,
    Step,
    TokenSwiftOptions,
    TriForceOptions,
    resume,
)
from tokenswift.config import ANSWERS
from tokenswift.loader.identity import base_of
from tokenswift.memory import Memory, default_length
from tokenswift.spec.heads.checkpoint import save_heads

HELLO = [{"role": "user", "content": "Hello"}]
TREE = {"tree": (2, 1), "ngrams": 2}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.from_model(tiny_model(), chat_tokenizer(), heads=random_heads("conditioned", 32, 260)) as made:
        yield made


def test_options_as_a_dataclass_are_options_by_name(llm: LLM, tmp_path: Path) -> None:
    call: dict[str, Any] = {"max_new_tokens": 12, "strategy": "tokenswift", "ignore_eos": True}
    by_name = llm.generate("abc abc", **call, strategy_options=TREE)
    made = llm.generate("abc abc", **call, strategy_options=TokenSwiftOptions(**TREE), run_dir=tmp_path / "r")
    assert made.metrics.steps == by_name.metrics.steps and made.token_ids == by_name.token_ids
    assert made.drafting is None  # a fixed tree, so the options did arrive
    longer = resume(tmp_path / "r", max_new_tokens=20, llm=llm)
    assert longer.drafting is None and longer.token_ids[:12] == made.token_ids
    assert sum(longer.token_sources.values()) == 20  # earlier sessions included


def test_numbers_and_places_of_numpy_and_torch(llm: LLM, tiny_folder: Any) -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        seed=np.int64(3),  # type: ignore[arg-type]
        greedy=np.bool_(False),  # type: ignore[arg-type]
        top_k=torch.tensor(7),  # type: ignore[arg-type]
    )
    assert params == SamplingParams(temperature=0.5, seed=3, top_k=7)
    assert [type(v) for v in (params.temperature, params.seed, params.greedy)] == [float, int, bool]
    options = TokenSwiftOptions(tree=[np.int32(2), 1], ngrams=np.int8(2))  # type: ignore[arg-type]
    assert options == TokenSwiftOptions(**TREE) and type(options.tree[0]) is int  # type: ignore[index]
    assert LoopOptions(min_count=np.int64(3)) == LoopOptions()  # type: ignore[arg-type]
    done = llm.generate("abc", np.int16(3), "tokenswift", options, sampling=params)  # type: ignore[arg-type]
    assert len(done.token_ids) <= 3
    with LLM(tiny_folder(), dtype=torch.float32, device=torch.device("cpu"), heads=None) as loaded:
        assert (loaded.dtype, loaded.device) == ("float32", "cpu")
        assert loaded.loading is not None and loaded.loading["dtype"] == "float32"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sampling": {"seed": 1}}, "sampling is {'seed': 1}; valid: None, or an object such as SamplingPar"),
        (
            {"loop": {"min_count": 3}},
            "loop is {'min_count': 3}; valid: None, or an object such as LoopOptions(",
        ),
        (
            {"strategy_options": ["tree"]},
            "strategy_options is ['tree']; valid for strategy auto: a dict",
        ),
        ({"strategy_options": MedusaOptions()}, "strategy_options is MedusaOptions(tree=(1, 3, 3, 3)"),
        ({"strategy_options": {"gamma": 2}}, "'gamma' is not an option of strategy auto"),
        ({"strategy_options": {1: 2}}, "1 is not an option of strategy auto"),
        ({"strategy_options": {"budget": 4.0}}, "budget is 4.0; valid: an integer"),
        ({"strategy": None}, "strategy is None; valid: auto, autoregressive"),
        ({"strategy": ["tokenswift"]}, "strategy is ['tokenswift']; valid: auto, autoregressive"),
        ({"strategy": "magicdec", "strategy_options": {"draft_model": 5}}, "draft_model is 5; valid: alias"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; valid: an integer of at least 1"),
        ({"max_new_tokens": 5.0}, "max_new_tokens is 5.0; valid: an integer"),
        ({"max_new_tokens": "5"}, "max_new_tokens is '5'; valid: an integer"),
        ({"max_new_tokens": True}, "max_new_tokens is True; valid: an integer"),
        ({"stop": None}, "stop is None; valid: text, or a list of texts"),
        ({"stop": [b"x"]}, "stop is [b'x']; valid: text"),
        ({"stop": ["x", ""]}, "stop is ['x', '']; valid: text"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'; valid: True, False"),
        ({"drop_damaged": 1}, "drop_damaged is 1; valid: True, False"),
        ({"run_dir": 5}, "run_dir is 5; valid: None, or the path"),
        ({"on_step": "print"}, "on_step is 'print'; valid: None, or a function"),
        ({"on_progress": 1}, "on_progress is 1; valid: None, or a function"),
        ({"on_loop": None}, "on_loop is None; valid: report, stop"),
        ({"temp": 0.5}, "'temp' is not an argument; valid: prompt, max_new_tokens"),
    ],
    ids=repr,
)
def test_what_a_generation_refuses(llm: LLM, given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        llm.generate("abc", **dict[str, Any]({"max_new_tokens": 2}, **given))
    assert str(caught.value).startswith(words) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model", 5, "model is of type int; valid: alias"),
        ("model", None, "model is of type NoneType; valid: alias"),
        ("model", b"x", "model is of type bytes; valid: alias"),
        ("dtype", None, "dtype is None; valid: auto, float32"),
        ("dtype", torch.int16, "dtype is 'int16'; valid: auto, float32"),
        ("device", 0, "device is 0; valid: auto, cpu, cuda"),
        ("device", torch.device("meta"), "device is 'meta'; valid: auto, cpu, cuda"),
        ("heads", 4, "heads is 4; valid: auto, none"),
        ("rope_scaling", {"type": "yarn"}, "rope_scaling is {'type': 'yarn'}; valid: None, yarn"),
        ("on_progress", 3, "on_progress is 3; valid: None, or a function"),
    ],
)
def test_what_loading_refuses(tiny_folder: Any, name: str, value: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        LLM(**{"model": tiny_folder(), name: value})
    assert str(caught.value).startswith(words) and "\n" not in str(caught.value)


def test_what_wrapping_refuses(llm: LLM) -> None:
    cases: list[tuple[tuple[Any, ...], str]] = [
        (("smollm2-135m",), "model is 'smollm2-135m'; valid: a loaded transformers model"),
        ((None,), "model type is '?'"),
        ((llm.model, "tokenizer"), "tokenizer is 'tokenizer'; valid: None"),
        ((llm.model, None, "auto", 3), "rope_scaling is 3; valid"),
    ]
    for given, words in cases:
        with pytest.raises(InputError) as caught:
            LLM.from_model(*given)
        assert str(caught.value).startswith(words)
    with pytest.raises(InputError, match="^model is of type LlamaForCausalLM; valid: .*from_model"):
        LLM(llm.model)


# ---- chat -------------------------------------------------------------------------------------------------


def test_messages_are_the_templates_token_ids(llm: LLM) -> None:
    assert llm.has_chat_template
    ids = llm.encode(HELLO)
    assert llm.tokenizer.decode(ids) == "<s>user: Hello\nassistant:"
    answer = llm.generate(HELLO, 16, ignore_eos=True)
    assert answer.prompt_tokens == len(ids)
    assert answer.token_ids == llm.generate(ids, 16, ignore_eos=True, sampling=ANSWERS).token_ids
    cold = SamplingParams(greedy=True)  # what is given counts
    assert llm.generate(HELLO, 16, ignore_eos=True, sampling=cold).token_ids != answer.token_ids


def test_a_journal_of_a_chat_holds_its_token_ids(llm: LLM, tmp_path: Path) -> None:
    call: dict[str, Any] = {"ignore_eos": True, "run_dir": tmp_path / "run"}
    first = llm.generate(HELLO, 8, **call)
    again = llm.generate(HELLO, 12, **call)  # the same run, gone on with
    assert again.token_ids[:8] == first.token_ids
    assert resume(tmp_path / "run", 16, llm).token_ids[:12] == again.token_ids
    with pytest.raises(InputError, match="the prompt differs"):
        llm.generate("Hello", 20, **call, sampling=ANSWERS)


# ---- results ----------------------------------------------------------------------------------------------


def test_a_stream_ends_with_the_result(llm: LLM) -> None:
    call: dict[str, Any] = {
        "max_new_tokens": 10,
        "ignore_eos": True,
        "strategy": "tokenswift",
        "strategy_options": TREE,
    }
    stream = llm.stream("abc abc", **call)
    with pytest.raises(InputError, match="stream.result is not there before the end"):
        _ = stream.result
    steps = list(stream)
    whole = llm.generate("abc abc", **call)
    result = stream.result
    assert isinstance(result, Generation) and result.finish_reason == "length"
    assert result.token_ids == [token for step in steps for token in step.token_ids] == whole.token_ids
    assert result.text == "".join(step.text for step in steps) == whole.text
    assert result.metrics.steps == len(steps)
    assert next(stream, None) is None  # and no second run

    def returned() -> Any:
        return (yield from llm.stream("abc abc", **call))

    values = returned()
    with pytest.raises(StopIteration) as ended:
        while True:
            assert isinstance(next(values), Step)
    assert ended.value.value.token_ids == whole.token_ids


def test_a_stream_left_early_has_no_result(llm: LLM, tmp_path: Path) -> None:
    with llm.stream("abc", 50, "autoregressive", ignore_eos=True, run_dir=tmp_path / "r") as stream:
        next(stream)
    assert next(stream, None) is None
    with pytest.raises(InputError, match="before the end"):
        _ = stream.result
    assert len(llm.generate("abc", 50, ignore_eos=True, run_dir=tmp_path / "r").token_ids) == 50  # unlocked


def test_many_prompts_in_order_with_progress(llm: LLM) -> None:
    prompts: list[Any] = ["abc", [5, 6, 7], HELLO]
    seen: list[tuple[int, list[int]]] = []
    call: dict[str, Any] = {
        "max_new_tokens": 6,
        "ignore_eos": True,
        "strategy": "tokenswift",
        "strategy_options": TREE,
    }
    many = llm.generate_many(prompts, **call, on_result=lambda i, r: seen.append((i, r.token_ids)))
    assert [r.token_ids for r in many] == [llm.generate(p, **call).token_ids for p in prompts]
    assert seen == list(enumerate(r.token_ids for r in many))
    assert llm.generate_many([], **call) == []


def test_many_prompts_are_checked_before_the_first_is_run(llm: LLM) -> None:
    seen: list[int] = []
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (["abc", [999]], {}, r"^prompts\[1\] token id is 999"),
        (["abc", "x" * 250], {}, "prompt and new tokens are 257 tokens"),
        ("abc", {}, "^prompts is 'abc'; valid: a list of prompts"),
        (HELLO, {}, "^prompts is .*valid: a list of prompts"),
        (["abc"], {"run_dir": "x"}, "^run_dir is not an argument of generate_many"),
        (["abc"], {"on_result": 3}, "^on_result is 3; valid: None, or a function"),
    ]
    for prompts, more, words in cases:
        given: dict[str, Any] = {"on_result": lambda i, r: seen.append(i), **more}
        with pytest.raises(InputError, match=words):
            llm.generate_many(prompts, 6, **given)
    assert seen == []


# ---- heads, and what was used -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "options", "source", "kind"),
    [
        ("autoregressive", None, "none", None),
        ("auto", None, "heads, partial passes, text", "conditioned"),
        ("tokenswift", None, "heads, partial passes, text", "conditioned"),
        ("tokenswift", TREE | {"draft": "hidden"}, "heads, text", "conditioned"),
        ("tokenswift", TokenSwiftOptions(ngrams=0, cache="full"), "heads", "conditioned"),
        ("magicdec", MagicDecOptions(budget=32), "partial passes", None),
        ("magicdec", {"budget": 32, "draft_model": tiny_model(seed=3)}, "draft model LlamaForCausalLM", None),
        (
            "triforce",
            TriForceOptions(budget=32, draft_budget=32, draft_model=tiny_model(seed=3)),
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
    own = done.token_sources["target"]  # one a step, but for one that the length ended
    assert done.metrics.steps - 1 <= own <= done.metrics.steps
    assert set(done.token_sources) == {"target", "head", "ngram", "chain", "grammar", "eagle"}
    if strategy == "autoregressive":
        assert done.token_sources["target"] == 24


def test_an_answer_may_have_the_rest_of_the_models_positions() -> None:
    """A continued text has 200 new tokens; both however the prompt comes."""
    model = tiny_model(max_position_embeddings=512)
    llm, plain = LLM.from_model(model, chat_tokenizer()), {"strategy": "autoregressive", "ignore_eos": True}
    chat = [{"role": "user", "content": "hello"}]
    rest = 512 - len(llm.encode(chat))
    assert len(llm.generate(chat, **plain).token_ids) == rest > 200
    assert len(llm.chat(chat, **plain).generation.token_ids) == rest
    assert len(llm.prefill(chat).generate(**plain).token_ids) == rest
    assert [len(made.token_ids) for made in llm.generate_many([chat, "hello"], **plain)] == [rest, 200]
    assert len(llm.generate("hello", **plain).token_ids) == 200


def test_an_answer_by_default_takes_a_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM.from_model(tiny_model(), chat_tokenizer())
    kv = llm.target.kv_bytes
    monkeypatch.setattr(llm.target.backend, "memory", lambda: Memory(0, 16 * 5000 * kv))
    monkeypatch.setattr(llm.target, "rotary", SimpleNamespace(limit=100_000))
    assert default_length(llm.target, True, 10) == 5000
    monkeypatch.setattr(llm.target.backend, "memory", lambda: Memory(0, 16 * kv))
    assert default_length(llm.target, True, 10) == 1024
    assert default_length(llm.target, True, 99_900) == 100
    assert default_length(llm.target, False, 99_900) == 200


def test_heads_name_their_file(tmp_path: Path) -> None:
    model, file = tiny_model(), tmp_path / "x.heads.safetensors"
    save_heads(random_heads("linear", 32, 260), file, base_of(model))
    done = LLM.from_model(model, heads=file).generate([1, 2, 3], 4)
    assert done.heads == {"kind": "linear", "file": str(file)}


@pytest.mark.slow
@pytest.mark.model
def test_a_wrapped_default_model_finds_its_heads(embedded: str, embedded_tokenizer: Any) -> None:
    from tokenswift.loader.load import load

    model = load(embedded, device="cpu").model
    llm = LLM.from_model(model, embedded_tokenizer)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.generate(question, 20)
    assert answer.heads == {"kind": "conditioned", "file": "smollm2-135m.heads.safetensors (shipped)"}
    assert "Paris" in answer.text and answer.finish_reason == "eos"
    assert llm.encode(question).count(llm.tokenizer.bos_token_id) == 3  # one a message: the template's own


def test_what_was_probably_meant(llm: LLM) -> None:
    generate: Any = llm.generate
    sampling: Any = SamplingParams
    for call, ends in (
        (lambda: generate("x", max_tokens=3), "did you mean max_new_tokens?"),
        (lambda: generate("x", strategy="magicdek"), "did you mean magicdec?"),
        (lambda: generate("x", on_loop="stpo"), "valid: report, stop; did you mean stop?"),
        (lambda: generate("x", strategy_options={"ngram": 3}), "did you mean ngrams?"),
        (lambda: sampling(top=0.5), "did you mean top_k?"),
        (lambda: LLM("./none", torch_dtype=1), "; did you mean dtype?"),  # type: ignore[call-arg]
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert str(caught.value).endswith(ends), caught.value
