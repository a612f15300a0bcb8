"""What a server says of itself, how it begins, and that it ends whatever is under way."""

from __future__ import annotations

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.conftest import Call
from tests.serve.conftest import Launch, Running, Start, until
from tests.serve.test_going_on import CALL, Reader
from tokenswift import InputError
from tokenswift.engine import scheduler as scheduling
from tokenswift.serve.settings import Settings, bound, loading

KEY = "a-key-of-a-client"
LONG: dict[str, Any] = {**CALL, "max_output_tokens": 900, "background": True}


def health(server: Running) -> tuple[int, str]:
    found = server.get("/health")
    return found.status_code, found.json()["status"]


# ---- health -------------------------------------------------------------------------------------


def test_health_where_no_step_is_made(start: Start, slowed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that is a thousand times as fast as ours."""
    llm, slow = slowed
    monkeypatch.setattr(scheduling, "monotonic", lambda: 1000 * time.monotonic())
    server = start(llm)
    time.sleep(0.1)
    assert health(server) == (200, "ok"), "there is nothing to do"
    slow.pause = 0.3
    name = server.post("/v1/responses", LONG).json()["id"]
    assert until(lambda: health(server) == (503, "stalled"))
    slow.pause = 0.0
    server.post(f"/v1/responses/{name}/cancel")
    assert health(server) == (200, "ok")


def test_health_while_the_model_is_loaded(start: Start) -> None:
    """At the address that the server will have: it takes over what nobody has answered."""
    taken = bound(Settings(port=0))
    url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with loading(taken):
        found = httpx.get(f"{url}/health")
        assert (found.status_code, found.json()["status"]) == (503, "loading")
        asked = httpx.post(f"{url}/v1/completions", json={"prompt": "hello" * 100_000})
        assert asked.status_code == 503 and asked.headers["retry-after"] == "1"
        assert asked.json()["error"]["message"].startswith("the model is being loaded; valid: ")
        with socket.create_connection(taken.getsockname()):  # asks nothing, and holds nothing up
            assert httpx.head(f"{url}/").status_code == 503
    with ThreadPoolExecutor() as pool:
        early = pool.submit(httpx.get, f"{url}/health", timeout=60)
        server = start(taken=taken)
        assert server.url == url and early.result().json() == {"status": "ok"}


# ---- the end ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_signal_ends_a_server_that_hangs(launch: Launch) -> None:
    """In a pass of a minute; the answer goes on with the next server."""
    process, reader = launch(pause=0.01), Reader()
    reader.read(process.url, 8, background=True)
    process.hangs.touch()
    time.sleep(0.5)
    assert process.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert "error: not shut down within 8 seconds" in process.log.read_text()
    process.hangs.unlink()
    process = launch()
    reader.read(process.url, 10**6)
    assert process.end(signal.SIGTERM) == 0 and reader.end == "max_output_tokens"


# ---- what is taken up ---------------------------------------------------------------------------


# ---- the beginning ------------------------------------------------------------------------------


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing loads a model."""

    def load(*args: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("tokenswift.cli.options.load_model", load)


def test_what_is_taken_is_said_before_the_model_is_loaded(
    cli: Call, chatty: Path, start: Start, tmp_path: Path, unloaded: None
) -> None:
    server = start(run_dir=str(tmp_path / "answers"))
    port = server.url.rpartition(":")[2]
    done = cli("serve", "--model", chatty, "--port", port)
    assert done.code == 2 and done.error.startswith(f"--port is {port}: it cannot be opened on 127.0.0.1")
    done = cli("serve", "--model", chatty, "--port", "0", "--run-dir", tmp_path / "answers")
    assert done.code == 2 and "is being written by process" in done.error


def test_keys_by_option_and_environment(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("a-key-of-the-file\n")
    monkeypatch.setenv("TOKENSWIFT_API_KEY", "a-key-by-environment")
    settings = Settings(host="0.0.0.0", api_key=KEY, api_key_file=str(tmp_path / "keys"))
    assert settings.keys() == [KEY, "a-key-by-environment", "a-key-of-the-file"]
    assert Settings(host="0.0.0.0").keys() == ["a-key-by-environment"]
    server = start()
    assert server.get("/v1/models").status_code == 401
    shown = {"authorization": "Bearer a-key-by-environment"}
    assert server.get("/v1/models", headers=shown).status_code == 200
    monkeypatch.setenv("TOKENSWIFT_API_KEY", "")
    assert Settings().keys() == []
    with pytest.raises(InputError, match="^host is "):
        Settings(host="0.0.0.0")
