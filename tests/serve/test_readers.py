"""Readers of answers, and the server's ways: who leaves takes nothing from others, an answer keeps
the prompt that it began with, and what is only odd is served."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Running, Slow, Start, until
from tokenswift import LLM, InputError
from tokenswift.serve.server import Server
from tokenswift.serve.settings import Settings

NEW = 120
BODY: dict[str, Any] = {
    "input": [{"role": "user", "content": "Tell me all."}],
    "max_output_tokens": NEW,
    "seed": 7,
    "background": True,
    "tokenswift": {"ignore_eos": True},
}


@pytest.fixture
def slow_llm(slowed: tuple[LLM, Slow]) -> Iterator[LLM]:
    """A model whose passes take a while, in this test."""
    llm, slow = slowed
    slow.pause = 0.01
    yield llm
    slow.pause = 0.0


def text_of(llm: LLM) -> str:
    """The text of plain decoding."""
    return llm.generate(BODY["input"], NEW, "autoregressive", seed=7, ignore_eos=True).text


def pieces(response: httpx.Response) -> Iterator[str]:
    """The text of a stream of events, as it comes."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if event["type"] == "response.output_text.delta":
                yield event["delta"]


def status(server: Running, name: str) -> str:
    return server.get(f"/v1/responses/{name}").json()["status"]


def written(server: Running, name: str) -> str:
    """The text of an answer once it has ended."""
    assert until(lambda: status(server, name) not in ("queued", "in_progress"))
    (message,) = server.get(f"/v1/responses/{name}").json()["output"]
    return message["content"][0]["text"]


def test_a_reader_that_leaves_takes_nothing_from_another(start: Start, slow_llm: LLM) -> None:
    server = start(slow_llm)
    name = server.post("/v1/responses", BODY).json()["id"]
    url = f"{server.url}/v1/responses/{name}?stream=true"
    with httpx.stream("GET", url, timeout=60) as staying:
        texts = pieces(staying)
        begin = next(texts)
        with httpx.stream("GET", url, timeout=60) as leaving:
            assert next(pieces(leaving)).startswith(begin)
        text = begin + "".join(texts)
    assert text == text_of(slow_llm)


def test_an_answer_goes_on_with_the_prompt_that_it_began_with(
    start: Start, slow_llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the template makes of the messages then: some write the day."""
    expected = text_of(slow_llm)
    server = start(slow_llm, run_dir=str(tmp_path / "answers"))
    name = server.post("/v1/responses", BODY).json()["id"]
    with httpx.stream("GET", f"{server.url}/v1/responses/{name}?stream=true") as response:
        next(pieces(response))
    server.close()
    tokenizer: Any = slow_llm.source.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "another day" + tokenizer.chat_template)
    assert text_of(slow_llm) != expected
    again = start(slow_llm, run_dir=str(tmp_path / "answers"))
    assert written(again, name) == expected


@pytest.mark.parametrize("host", ["127.0.0.1", "LOCALHOST:5", "[::1]", "[::1]:8000", "localhost:"])
def test_this_machine_has_several_names(server: Running, host: str) -> None:
    assert server.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_this_machine_alone_needs_no_key(host: str) -> None:
    settings = Settings(host=host)
    assert settings.is_local
    assert settings.keys() == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org"])
def test_an_address_of_other_machines_demands_a_key(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENSWIFT_API_KEY", raising=False)
    with pytest.raises(
        InputError, match="host is .*, which other machines reach; valid: with a key"
    ):
        Settings(host=host)
    key = "a-key-of-a-client"
    assert Settings(host=host, api_key=key).keys() == [key]


def test_any_number_of_unknown_fields_is_left_out(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names some of them."""
    caplog.set_level("INFO", "tokenswift")
    unknown = {f"field{number}": [1] for number in range(50_000)}
    reply = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 2, **unknown})
    assert reply.status_code == 200
    (line,) = [one for one in caplog.messages if "left out of a request" in one]
    assert "field19" in line
    assert "field20" not in line


def test_a_second_signal_does_not_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    server = Server.__new__(Server)
    server.number = 0
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit
    assert codes == []
    server.handle_exit(signal.SIGINT, None)
    assert codes == [128 + signal.SIGINT]


def test_an_answer_that_cannot_be_kept_is_refused_and_others_are_served(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk; nothing is left of it."""
    folder = tmp_path / "answers"
    server = start(run_dir=str(folder))
    before = sorted(path.name for path in folder.iterdir())

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tokenswift.files.os.replace", full)
        reply = server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 2})
        assert reply.status_code == 500, reply.text
    assert sorted(path.name for path in folder.iterdir()) == before
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
