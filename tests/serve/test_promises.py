"""What the page on serving promises and no other test holds."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import GenerationConfig

from tests.chats import chat_tokenizer, thinking_model, thinking_tokenizer
from tests.cli.conftest import Call
from tests.conftest import tiny_model, tiny_tokenizer
from tests.serve.conftest import Running, Slow, Start, until
from tests.serve.test_openai import streamed
from tokenswift import LLM
from tokenswift.cli.declare import add_options
from tokenswift.config.sampling import ANSWERS
from tokenswift.engine.scheduler import Scheduler
from tokenswift.memory import Memory
from tokenswift.serve import openai as openai_forms
from tokenswift.serve.answer import Answer
from tokenswift.serve.answers import Answers
from tokenswift.serve.settings import Settings

NEW = 24
HELLO: list[dict[str, object]] = [{"role": "user", "content": "Hello!"}]
IGNORE: dict[str, object] = {"tokenswift": {"ignore_eos": True}}
CHAT: dict[str, object] = {"messages": HELLO, "max_tokens": NEW, "seed": 5, **IGNORE}
TEXT: dict[str, object] = {"prompt": "hello", "max_tokens": NEW, "seed": 5, **IGNORE}
RESPONSE: dict[str, object] = {"input": "Hello!", "max_output_tokens": NEW, "seed": 5, **IGNORE}
LONG: dict[str, object] = {**RESPONSE, "max_output_tokens": 400, "background": True}
KEY = "a-key-of-a-client"
OTHER = "another-key-of-one"


def text_of(reply: httpx.Response) -> str:
    """The text of an answer of any endpoint."""
    body = reply.json()
    if "output" in body:
        return body["output"][-1]["content"][0]["text"]
    choice = body["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def authorised(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---- what a request means ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"prompt": [1, 2, 3]}, {"prompt": [1, 2, 3]}),
        ({"prompt": ["hello"]}, {}),
        ({"min_p": 0, "logit_bias": {"258": 6}}, {"min_p": 0, "logit_bias": {258: 6}}),
        ({"dry_multiplier": 0}, {}),
        ({"repetition_penalty": 1.3, "presence_penalty": 1}, None),
        ({"background": True, "tools": [5], "reasoning": 5, "chat_template_kwargs": 5}, {}),
        ({"user": "me", "n": 1, "logprobs": None}, {}),
    ],
    ids=lambda part: str(part)[:40],
)
def test_completions_are_the_texts_of_generate(
    server: Running, llm: LLM, fields: dict[str, object], arguments: dict[str, object] | None
) -> None:
    """Fields of another endpoint mean nothing here."""
    body: Any = {"prompt": "hello", "seed": 5, "ignore_eos": True}
    body |= fields if arguments is None else arguments
    wanted = llm.generate(max_new_tokens=NEW, strategy="autoregressive", **body)
    assert text_of(server.post("/v1/completions", {**TEXT, **fields})) == wanted.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_an_answer_before_it(server: Running, llm: LLM, stream: bool) -> None:
    full_text = llm.generate("hello", NEW, "autoregressive", seed=5, ignore_eos=True).text
    stop = full_text[10:13]
    body = {**TEXT, "stop": [stop, ""]}
    if stream:
        chunks = [json.loads(line) for line in streamed(server, "/v1/completions", body)[:-1]]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = server.post("/v1/completions", body).json()["choices"][0]
        text = choice["text"]
        reason = choice["finish_reason"]
    assert text == full_text[: full_text.index(stop)]
    assert reason == "stop"


@pytest.mark.parametrize("named", [{}, {"temperature": 1.1, "top_k": 7, "do_sample": True}])
def test_sampling_that_is_not_given_is_the_models(start: Start, named: dict[str, object]) -> None:
    model = tiny_model(max_position_embeddings=1024)
    model.generation_config = GenerationConfig(**named)
    with LLM.from_model(model, chat_tokenizer(), heads=None) as llm:
        server = start(llm)
        usual = llm.default_sampling(HELLO)
        assert (usual == ANSWERS) is not bool(named)
        for more in ({}, {"temperature": 0.3}):
            sampling = replace(usual, seed=5, **more)
            wanted = llm.generate(HELLO, NEW, sampling=sampling, ignore_eos=True).text
            assert text_of(server.post("/v1/chat/completions", {**CHAT, **more})) == wanted
            assert text_of(server.post("/v1/responses", {**RESPONSE, **more})) == wanted


def test_a_response_of_a_model_without_a_template_is_continued_text(start: Start) -> None:
    model = tiny_model(max_position_embeddings=1024)
    with LLM.from_model(model, tiny_tokenizer(), heads=None) as llm:
        wanted = llm.generate("Hello!", NEW, seed=5, ignore_eos=True).text
        assert text_of(start(llm).post("/v1/responses", RESPONSE)) == wanted


def test_system_messages_may_come_anywhere(server: Running, llm: LLM) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        *HELLO,
        {"role": "system", "content": "Be kind."},
    ]
    reply = server.post("/v1/chat/completions", {**CHAT, "messages": messages}).json()
    plain = [{**one, "role": str(one["role"]).replace("developer", "system")} for one in messages]
    assert reply["usage"]["prompt_tokens"] == len(llm.encode(plain))


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("completions", TEXT, "max_tokens"),
        ("responses", RESPONSE, "max_output_tokens"),
        ("chat/completions", CHAT, "max_tokens"),
    ],
)
def test_errors_of_the_memory_name_fields_of_the_request(
    server: Running,
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, object],
    field: str,
) -> None:
    monkeypatch.setattr(llm.target.backend, "memory", lambda: Memory(1000, 1 << 40))
    error = server.post(f"/v1/{path}", {**fields, field: 900}).json()["error"]
    assert "bytes of memory" in error["message"]
    assert error["message"].startswith(f"{field} is too large; the run needs ")
    assert "max_new_tokens" not in error["message"]
    assert error["param"] == field


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/embeddings"), ("HEAD", "/v1/completions"), ("PUT", "/v1/models")],
)
def test_what_there_is_not(server: Running, method: str, path: str) -> None:
    assert httpx.request(method, f"{server.url}{path}", timeout=60).status_code in (404, 405)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000 + "]" * 5000, "1" * 400 + ".5"])
def test_bodies_that_python_cannot_read(server: Running, value: str) -> None:
    body = f'{{"prompt": "x", "seed": {value}}}'
    headers = {"content-type": "application/json"}
    reply = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)
    assert reply.status_code == 400
    assert len(reply.json()["error"]["message"]) < 400


# ---- where an answer stands ----------------------------------------------------------------------


def test_headers_and_comments_come_before_the_text(
    start: Start, slowed: tuple[LLM, Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, slow = slowed
    monkeypatch.setattr(openai_forms, "QUIET", 0.05)
    server = start(llm)
    slow.pause = 0.3
    body = {**TEXT, "max_tokens": 2, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
        lines = list(reply.iter_lines())
    slow.pause = 0.0
    first = next(i for i, line in enumerate(lines) if line.startswith("data: "))
    assert lines[:first].count(": ping") > 2


def test_answers_in_memory_are_few(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenswift.serve.answers.MOST_IDLE", 2)
    for run_dir in (str(tmp_path / "answers"), None):
        server = start(run_dir=run_dir)
        names = [server.post("/v1/responses", RESPONSE).json()["id"] for _ in range(5)]
        assert len(server.answers.known) <= 3
        states = [server.get(f"/v1/responses/{name}").status_code for name in names]
        assert states[-2:] == [200, 200]
        assert set(states[:2]) == ({200} if run_dir else {404})


def test_an_answer_that_waits_for_the_next_server_is_queued(
    start: Start, slowed: tuple[LLM, Slow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, slow = slowed
    slow.pause = 0.01
    server = start(llm, run_dir=str(tmp_path / "answers"))
    name = server.post("/v1/responses", LONG).json()["id"]
    server.close()
    slow.pause = 0.0
    may_resume = threading.Event()
    resume = Answers._resume

    async def later(self: Answers, left: list[Answer]) -> None:
        while not may_resume.is_set():
            await asyncio.sleep(0.01)
        await resume(self, left)

    monkeypatch.setattr(Answers, "_resume", later)
    again = start(llm, run_dir=str(tmp_path / "answers"))
    assert again.get(f"/v1/responses/{name}").json()["status"] == "queued"
    may_resume.set()
    ended = ("incomplete", "completed")
    assert until(lambda: again.get(f"/v1/responses/{name}").json()["status"] in ended)


def test_a_strategy_that_was_allowed_is_resumed(
    start: Start, slowed: tuple[LLM, Slow], tmp_path: Path
) -> None:
    llm, slow = slowed
    slow.pause = 0.01
    folder = str(tmp_path / "answers")
    server = start(llm, run_dir=folder, allow_strategies=True)
    settings = {"tokenswift": {"ignore_eos": True, "strategy": "magicdec"}}
    name = server.post("/v1/responses", {**LONG, **settings}).json()["id"]
    server.close()
    slow.pause = 0.0
    again = start(llm, run_dir=folder)
    path = f"/v1/responses/{name}"
    assert until(lambda: again.get(path).json()["status"] in ("incomplete", "failed"))
    assert again.get(path).json()["status"] == "incomplete"


def test_an_answer_of_another_model_says_that_it_failed(
    start: Start, slowed: tuple[LLM, Slow], tmp_path: Path
) -> None:
    """What was open cannot be resumed; everything else is served."""
    llm, slow = slowed
    slow.pause = 0.01
    server = start(llm, run_dir=str(tmp_path / "answers"))
    name = server.post("/v1/responses", LONG).json()["id"]
    server.close()
    slow.pause = 0.0
    other = LLM.from_model(tiny_model(seed=4, max_position_embeddings=1024), chat_tokenizer())
    again = start(other, run_dir=str(tmp_path / "answers"))
    assert until(lambda: again.get(f"/v1/responses/{name}").json()["status"] == "failed", 20)
    assert again.get(f"/v1/responses/{name}").json()["error"]["message"]
    assert again.post("/v1/completions", TEXT).status_code == 200


def test_a_cancelled_answer_says_so_to_its_readers(start: Start, slowed: tuple[LLM, Slow]) -> None:
    llm, slow = slowed
    slow.pause = 0.02
    server = start(llm)
    body = {**LONG, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body, timeout=60) as reader:
        name = reader.headers["x-answer-id"]
        assert server.post(f"/v1/responses/{name}/cancel").status_code == 200
        lines = [line for line in reader.iter_lines() if line.startswith("data: ")]
    slow.pause = 0.0
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "cancelled"
    assert last["response"]["incomplete_details"] is None


def test_an_answer_belongs_to_its_key_after_a_restart_too(start: Start, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n{OTHER}\n")
    keys = str(tmp_path / "keys")
    folder = str(tmp_path / "answers")
    server = start(api_key_file=keys, run_dir=folder)
    name = server.post("/v1/responses", RESPONSE, headers=authorised(KEY)).json()["id"]
    server.close()
    again = start(api_key_file=keys, run_dir=folder)
    path = f"/v1/responses/{name}"
    assert again.get(path, headers=authorised(OTHER)).status_code == 404
    assert again.get(path, headers=authorised(KEY)).status_code == 200
    again.close()
    written = "".join(file.read_text() for file in Path(folder).rglob("*.json"))
    assert KEY not in written
    assert start(run_dir=folder).get(path).status_code == 404, "now nobody has a key"


def test_an_answer_that_is_read_again_tells_its_thought_apart(start: Start, tmp_path: Path) -> None:
    with LLM.from_model(thinking_model(), thinking_tokenizer(), heads=None) as thinking:
        folder = str(tmp_path / "answers")
        first = start(thinking, run_dir=folder)
        body = {"input": "Hi", "temperature": 0, "max_output_tokens": 60}
        name = first.post("/v1/responses", body).json()["id"]
        first.close()
        output = start(thinking, run_dir=folder).get(f"/v1/responses/{name}").json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]


# ---- the end -------------------------------------------------------------------------------------


def test_a_server_that_cannot_generate_any_more_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()

    def fault(self: Scheduler) -> None:
        raise ValueError("a fault of the scheduler")

    monkeypatch.setattr(Scheduler, "_admit", fault)
    server.post("/v1/completions", TEXT)
    assert until(lambda: server.get("/health").status_code == 503)
    assert server.get("/health").json() == {"status": "failed"}
    reply = server.post("/v1/completions", TEXT)
    assert reply.status_code == 503
    assert "can no longer generate" in reply.json()["error"]["message"]


def test_connections_that_do_not_end_hold_no_server_up(start: Start) -> None:
    """A head and a body of which only a part has come, and a client that reads nothing."""
    server = start()
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    body = json.dumps({**TEXT, "max_tokens": 900, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    requests = (
        head,
        f"{head}content-length: 1000000\r\n\r\n{body}",
        f"{head}content-length: {len(body)}\r\n\r\n{body}",
    )
    with ExitStack() as clients:
        for sent in requests:
            client = clients.enter_context(socket.create_connection(address, 10))
            client.sendall(sent.encode())
        time.sleep(0.1)
        begun = time.monotonic()
        server.close()
        assert time.monotonic() - begun < 10


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--allowed-host", "a:80"), "--allowed-host is 'a:80'; valid: a name or address "),
        (("--cors", "*"), "--cors is '*'; valid: a site such as https://a.example"),
        (("--max-connections", "0"), "--max-connections is 0; valid: "),
        (("--max-connections-per-address", "0"), "--max-connections-per-address is 0; valid: "),
        (("--max-body", "x"), "--max-body is 'x'; valid: an integer"),
        (("--api-key", "short"), "a key has 5 characters; valid: at least 16"),
        (
            ("--host", "0.0.0.0"),
            "--host is '0.0.0.0', which other machines reach; valid: with a key",
        ),
    ],
)
def test_wrong_options_are_refused_before_the_model_is_loaded(
    cli: Call,
    chatty: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, str],
    line: str,
) -> None:
    def load_model(*args: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("tokenswift.cli.options.load_model", load_model)
    done = cli("serve", "--model", chatty, "--port", "0", *arguments)
    assert done.code == 2
    assert done.error.startswith(line)


def test_options_that_are_given_several_times() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, Settings)
    words = "--allowed-host a --allowed-host b --allow-strategies --cors https://c.example"
    arguments = vars(parser.parse_args(words.split()))
    assert arguments["allowed_host"] == ["a", "b"]
    assert arguments["allow_strategies"] is True
    settings = Settings(**arguments)
    assert settings.allowed_hosts == ("a", "b", "c.example")
