"""Clients that others wrote on OpenAI's interface run unchanged, as docs/serve.md shows them."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from click.testing import CliRunner
from langchain_openai import ChatOpenAI
from llm import get_model
from llm.cli import cli as llm_command
from openai import LengthFinishReasonError
from pydantic import BaseModel, Field, SecretStr

from tests.serve.conftest import ROOT, Running
from tests.serve.offline import offline as offline
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
def langchain(server: Running, capsys: pytest.CaptureFixture[str]) -> tuple[ChatOpenAI, str]:
    """The model of the page's example, and what the example prints."""
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


def test_langchain_streams(langchain: tuple[ChatOpenAI, str], llm: LLM) -> None:
    model, _ = langchain
    text = alone(llm, CHAT)
    pieces = list(model.stream(QUESTION, stream_usage=True))
    assert "".join(str(piece.content) for piece in pieces) == text
    assert len(pieces) >= 4  # role, text, end, usage; without a stream all are one
    (usage,) = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert usage["input_tokens"] == len(llm.encode(CHAT)) and usage["output_tokens"] == NEW


def test_langchain_asynchronous(langchain: tuple[ChatOpenAI, str], llm: LLM) -> None:
    model, _ = langchain

    async def ask() -> tuple[Any, str]:
        whole = await model.ainvoke(QUESTION)
        pieces = [str(piece.content) async for piece in model.astream(QUESTION)]
        await model.root_async_client.close()  # its connections, which LangChain keeps, are this loop's
        return whole.content, "".join(pieces)

    assert asyncio.run(ask()) == (alone(llm, CHAT), alone(llm, CHAT))


def test_langchain_seed_and_stop(langchain: tuple[ChatOpenAI, str], llm: LLM) -> None:
    model, _ = langchain
    text = alone(llm, CHAT)
    stop = text[10:13]
    cut = text[: text.index(stop)]
    found = model.invoke(QUESTION, stop=[stop])
    assert found.content == cut and found.response_metadata["finish_reason"] == "stop"
    assert "".join(str(piece.content) for piece in model.stream(QUESTION, stop=[stop])) == cut
    other = llm.generate(CHAT, NEW, "autoregressive", seed=SEED + 1).text
    assert model.invoke(QUESTION, seed=SEED + 1).content == other != text


def test_langchain_on_responses(server: Running, llm: LLM) -> None:
    model = ChatOpenAI(
        base_url=f"{server.url}/v1", api_key=SecretStr("none"), model="chatty", max_completion_tokens=NEW,
        use_responses_api=True, extra_body={"seed": SEED},
    )  # fmt: skip
    text = alone(llm, CHAT)
    assert model.invoke(QUESTION).text == text
    assert "".join(piece.text for piece in model.stream(QUESTION)) == text


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


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_langchain_structured(server: Running, method: Any, responses: bool) -> None:
    model = ChatOpenAI(
        base_url=f"{server.url}/v1", api_key=SecretStr("none"), model="chatty", temperature=0,
        max_completion_tokens=NEW, use_responses_api=responses,
    )  # fmt: skip
    asked = model.with_structured_output(Verdict, method=method, include_raw=True).invoke(QUESTION)
    assert isinstance(asked, dict)
    if method == "json_mode":  # any JSON object, in which no class is found
        assert asked["raw"].text.startswith("{")
    else:
        assert isinstance(asked["parsed"], Verdict) and asked["parsing_error"] is None


@pytest.fixture
def llm_folder(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of llm's settings, with the page's model and the same one that goes on from a text."""
    model = example("yaml", "", server)
    more = model.replace("model_id: tokenswift", "model_id: goes-on") + "  completion: true\n"
    (tmp_path / "extra-openai-models.yaml").write_text(model + more, encoding="utf-8")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["tokenswift", "goes-on"])
def test_llm(llm_folder: Path, llm: LLM, name: str, stream: bool) -> None:
    text = alone(llm, QUESTION if name == "goes-on" else CHAT)
    model = get_model(name)
    response = model.prompt(QUESTION, stream=stream, seed=SEED, max_tokens=NEW)
    assert "".join(response) == text
    if name == "tokenswift":
        assert response.response_json is not None
        assert response.response_json["object"] == "chat.completion" + (".chunk" if stream else "")
        assert response.input_tokens == len(llm.encode(CHAT)) and response.output_tokens == NEW
    stop = text[10:13]
    cut = model.prompt(QUESTION, stream=stream, seed=SEED, max_tokens=NEW, stop=stop)
    assert cut.text() == text[: text.index(stop)]


@pytest.mark.parametrize("more", [[], ["--no-stream"]])
def test_llm_command(llm_folder: Path, server: Running, llm: LLM, more: list[str]) -> None:
    """The command of the page; its log would stay open."""
    _, *words = shlex.split(example("sh", "llm ", server))
    done = CliRunner().invoke(llm_command, [*words, "--no-log", *more], catch_exceptions=False)
    assert (done.exit_code, done.stdout_bytes.decode()) == (0, alone(llm, CHAT) + "\n")


def test_llm_conversation(llm_folder: Path, llm: LLM) -> None:
    """A second question carries the first one and its answer."""
    conversation = get_model("tokenswift").conversation()
    options: Any = {"seed": SEED, "max_tokens": NEW}
    first = conversation.prompt(QUESTION, system="Be brief.", **options).text()
    second = conversation.prompt("And a buoy?", **options).text()
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert first == alone(llm, chat)
    chat += [{"role": "assistant", "content": first}, {"role": "user", "content": "And a buoy?"}]
    assert second == alone(llm, chat)
