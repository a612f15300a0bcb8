"""Filling in over HTTP: ``suffix`` of completions, and llama.cpp's ``/infill``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engine.test_infill import filling
from tests.serve.conftest import Running, Slow
from tests.serve.test_openai import streamed
from tokenswift import LLM
from tokenswift.loader.infill_marks import FAMILIES

NEW = 20


@pytest.fixture(scope="module")
def coder() -> LLM:
    return filling(FAMILIES["Qwen-Coder"])


@pytest.fixture(scope="module")
def coding(coder: LLM) -> Iterator[Running]:
    running = Running(coder)
    yield running
    running.close()


def test_suffix_of_a_completion(coding: Running, coder: LLM) -> None:
    """With OpenAI's client: whole, as a stream, several texts, with log-probabilities."""
    create: Any = coding.client().completions.create
    usual = {"model": "m", "prompt": "def f(", "suffix": "):", "max_tokens": NEW}
    wanted = coder.infill("def f(", "):", NEW, "autoregressive")
    completion = create(**usual)
    assert completion.choices[0].text == wanted.text
    assert completion.usage.prompt_tokens == wanted.prompt_tokens
    stream = create(**usual, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == wanted.text
    several = create(**usual, n=2, temperature=1.0, seed=3, logprobs=1)
    texts = [coder.infill("def f(", "):", NEW, temperature=1.0, seed=seed).text for seed in (3, 4)]
    assert [choice.text for choice in several.choices] == texts
    assert several.choices[0].logprobs.tokens


def test_infill_as_llama_cpp_has_it(coding: Running, coder: LLM) -> None:
    """Other files and the beginning of the text; the fields that plugins read."""
    extra = [{"filename": "x.py", "text": "one"}]
    body = {"input_prefix": "def f(", "input_suffix": "):", "input_extra": extra, "prompt": "a"}
    reply = coding.post("/infill", {**body, "n_predict": NEW, "cache_prompt": True}).json()
    assert reply["stop"] is True
    assert reply["stop_type"] in ("eos", "limit", "word")
    assert reply["tokens_predicted"] <= NEW
    assert reply["timings"]["prompt_n"] == reply["tokens_evaluated"]
    plain = coder.infill("def f(", "):", NEW, extra=[("x.py", "one")])
    assert reply["tokens_evaluated"] == plain.prompt_tokens + 1
    fields = {"response_fields": ["content", "timings/prompt_n", "no/such"]}
    cut = coding.post("/infill", {**body, "n_predict": NEW, **fields}).json()
    assert cut == {"content": reply["content"], "timings/prompt_n": reply["tokens_evaluated"]}


def test_infill_as_a_stream(coding: Running, coder: LLM) -> None:
    body = {"input_prefix": "def f(", "input_suffix": "):", "n_predict": NEW}
    events = [json.loads(line) for line in streamed(coding, "/infill", body)]
    wanted = coder.infill("def f(", "):", NEW).text
    assert "".join(event["content"] for event in events) == wanted
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]


def test_a_prompt_may_be_read_alone(coding: Running) -> None:
    """What plugins do before they ask for text."""
    reply = coding.post("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 0})
    assert reply.json()["content"] == ""
    assert reply.json()["tokens_predicted"] == 0


def test_a_text_ends_when_nobody_waits_longer(coder: LLM) -> None:
    """Once it has a line, as llama.cpp has it."""
    llm = filling(FAMILIES["Qwen-Coder"])
    Slow(llm.target, 0.05)
    running = Running(llm)
    try:
        newline = llm.encode("\n")[0]
        body = {"input_prefix": "a", "input_suffix": "b", "n_predict": 200, "t_max_predict_ms": 300}
        body["logit_bias"] = {str(newline): 100}
        begun = time.monotonic()
        reply = running.post("/infill", body).json()
        assert time.monotonic() - begun < 5
        assert 0 < reply["tokens_predicted"] < 200
        assert reply["stop_type"] == "limit"
        assert set(reply["content"]) == {"\n"}
    finally:
        running.close()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "completions",
        {"prompt": [1, 2], "suffix": "b"},
        "suffix is given together with token ids; valid: ",
    ),
    (
        "completions",
        {"prompt": "a", "suffix": "b", "echo": True},
        "echo is true together with suffix; valid: one of the two",
    ),
]


@pytest.mark.parametrize(("path", "body", "message"), REFUSED)
def test_what_is_refused(coding: Running, path: str, body: dict[str, Any], message: str) -> None:
    reply = coding.post(f"/v1/{path}", body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(message)


def test_a_model_without_marks(server: Running) -> None:
    """One clear line, for either path."""
    for path, body in (
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ):
        reply = server.post(path, body)
        assert reply.status_code == 400
        assert "the model has no marks for filling in" in reply.json()["error"]["message"]
        assert reply.json()["error"]["param"] == "suffix"


def test_many_files_are_refused_at_once(coding: Running) -> None:
    extra = [{"filename": "x", "text": "y" * 30_000}] * 5
    reply = coding.post("/infill", {"input_prefix": "a", "input_extra": extra})
    assert reply.status_code == 400
    assert "characters" in reply.json()["error"]["message"]
    assert httpx.get(f"{coding.url}/health", timeout=60).status_code == 200
