"""What sampling a request has that names none: answers the model's own or ours, completions the paper's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from tests.chats import chat_tokenizer
from tests.conftest import tiny_model
from tests.serve.conftest import Running, Start
from tokenswift import LLM, SamplingParams
from tokenswift.config import ANSWERS
from tokenswift.serve.schemas import KINDS
from tokenswift.serve.settings import Settings

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
NEW = 16
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": NEW},
    "/v1/responses": {"input": "Hello", "max_output_tokens": NEW},
    "/v1/completions": {"prompt": "Hello", "max_tokens": NEW},
}


def said(server: Running, path: str, **more: Any) -> str:
    found = server.post(path, {**BODIES[path], "seed": 5, "tokenswift": {"ignore_eos": True}, **more}).json()
    if path == "/v1/responses":
        return found["output"][0]["content"][0]["text"]
    choice = found["choices"][0]
    return choice["text"] if path == "/v1/completions" else choice["message"]["content"]


@pytest.mark.parametrize("named", [{}, {"temperature": 1.4, "top_k": 3, "repetition_penalty": 1.3}])
def test_requests_that_name_no_sampling(start: Start, tmp_path: Path, named: dict[str, Any]) -> None:
    model = tiny_model(max_position_embeddings=1024)
    model.generation_config = GenerationConfig(**named)
    with LLM.from_model(model, chat_tokenizer(), heads=None) as llm:
        usual = llm.model_sampling() if named else ANSWERS
        server = start(llm)
        for path in BODIES:
            chat = path != "/v1/completions"
            sampling = replace(usual if chat else SamplingParams(), seed=5)
            prompt: Any = HELLO if chat else "Hello"
            wanted = llm.generate(prompt, NEW, sampling=sampling, ignore_eos=True).text
            assert said(server, path) == wanted, path
            other = replace(sampling, temperature=0.3)
            wanted = llm.generate(prompt, NEW, sampling=other, ignore_eos=True).text
            assert said(server, path, temperature=0.3) == wanted, path


def test_an_answer_may_have_the_rest_of_the_models_positions() -> None:
    bodies = {"chat": {"messages": HELLO}, "response": {"input": "Hello"}, "completion": {"prompt": "Hello"}}
    with LLM.from_model(tiny_model(max_position_embeddings=4096), chat_tokenizer(), heads=None) as llm:
        rest = 4096 - len(llm.encode(HELLO))
        for kind, wanted in {"chat": rest, "response": rest, "completion": 1024}.items():
            body = KINDS[kind][0].model_validate(bodies[kind])
            (made,) = body.requests(llm, Settings(), 0)
            assert made.max_new_tokens == wanted, kind
            (made,) = body.requests(llm, Settings(max_tokens=2000), 0)
            assert made.max_new_tokens == min(wanted, 2000), kind
