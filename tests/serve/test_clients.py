"""Clients that others wrote on OpenAI's interface run unchanged, as docs/serve.md shows them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import pytest
from langchain_openai import ChatOpenAI
from openai import LengthFinishReasonError
from pydantic import BaseModel, Field

from tests.serve.conftest import ROOT, Running
from tokenswift import LLM

QUESTION = "What is a lighthouse?"
CHAT: list[Any] = [{"role": "user", "content": QUESTION}]
SEED, NEW = 7, 200  # of the page's examples


def alone(llm: LLM, prompt: Any, **more: Any) -> str:
    """The text of plain decoding."""
    return llm.generate(prompt, NEW, "autoregressive", seed=SEED, **more).text


def example(kind: str, start: str, server: Running) -> str:
    """A block of the page, which asks ``server`` and its model instead."""
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"^```{kind}\n({start}.*?)^```", page, re.DOTALL | re.MULTILINE)
    return block.replace("http://127.0.0.1:8000", server.url).replace("smollm2-135m", "chatty")


@pytest.fixture
def langchain(
    server: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[ChatOpenAI, str]:
    """The model of the page's example, and what the example prints; it tells nobody."""
    for name in ("LANGSMITH_TRACING", "LANGSMITH_TRACING_V2", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")
    names: dict[str, Any] = {}
    exec(example("python", "from langchain_openai", server), names)
    return names["model"], capsys.readouterr().out


def test_langchain(langchain: tuple[ChatOpenAI, str], llm: LLM) -> None:
    model, printed = langchain
    text = alone(llm, CHAT)
    assert printed == text
    whole = model.invoke(QUESTION)
    assert whole.content == text and whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] == NEW
    messages = [("system", "Be brief."), ("human", QUESTION)]
    assert model.invoke(messages).content == alone(llm, [{"role": "system", "content": "Be brief."}, *CHAT])


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
