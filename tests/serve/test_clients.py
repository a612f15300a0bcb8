"""OpenAI's own helpers run unchanged, as docs/serve.md shows them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import pytest
from openai import LengthFinishReasonError
from pydantic import BaseModel, Field

from tests.serve.conftest import ROOT, Running
from tokenswift import LLM

QUESTION = "What is a lighthouse?"
CHAT: list[Any] = [{"role": "user", "content": QUESTION}]


def test_the_pages_example(server: Running, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """OpenAI's client, as docs/serve.md shows it."""
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    block = re.findall(
        r"^```python\n(from openai import OpenAI\n.*?)^```", page, re.DOTALL | re.MULTILINE
    )[0]
    block = block.replace("http://127.0.0.1:8000", server.url).replace("smollm2-135m", "chatty")
    exec(block.replace("max_tokens=4000", "max_tokens=200"), {})
    messages = [{"role": "user", "content": "Tell me a long story."}]
    assert capsys.readouterr().out == llm.generate(messages, 200, "autoregressive", seed=7).text


class Shop(BaseModel):
    town: Literal["Brest", "Zürich"]


class Verdict(BaseModel):
    """What somebody holds of something."""

    verdict: Literal["good", "bad"]
    stars: Annotated[int, Field(ge=1, le=5)]
    reasons: Annotated[list[Literal["price", "taste"]], Field(max_length=2)]
    shops: Annotated[list[Shop], Field(min_length=1, max_length=2)]


def test_parsed_answers(server: Running) -> None:
    """OpenAI's own helpers, by a class of pydantic that refers to another."""
    client = server.client()
    call: dict[str, Any] = {"model": "chatty", "temperature": 0}
    for chats in (client.chat.completions, client.beta.chat.completions):
        message = chats.parse(messages=CHAT, response_format=Verdict, **call).choices[0].message
        assert isinstance(message.parsed, Verdict)
        with chats.stream(messages=CHAT, response_format=Verdict, **call) as stream:
            parsed = stream.get_final_completion().choices[0].message.parsed
        assert parsed == message.parsed
    response = client.responses.parse(input=QUESTION, text_format=Verdict, **call)
    assert response.output_parsed == message.parsed
    with client.responses.stream(input=QUESTION, text_format=Verdict, **call) as events:
        assert events.get_final_response().output_parsed == message.parsed
    with pytest.raises(LengthFinishReasonError):
        client.chat.completions.parse(messages=CHAT, response_format=Verdict, **call, max_tokens=5)
