"""A model of the hub: what is fetched, from a small hub on this machine; what is refused."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.gguf_files import small, write
from tokenswift import LLM
from tokenswift.loader.find import locate
from tokenswift.loader.load import load
from tokenswift.types import InputError

NAME = "someone/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

UNWANTED = ("pytorch_model.bin", "original/weights.safetensors", "README.md")


class Hub(BaseHTTPRequestHandler):
    """Answers for one repository; ``asked`` collects the files that were fetched."""

    files: dict[str, bytes] = {}
    fetched: list[str] = []

    def _send(self, code: int, content: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if path == "/":
            return self._send(200, b"")
        if path.startswith(f"/api/models/{NAME}/tree"):
            tree = [
                {"type": "file", "path": name, "size": len(data)}
                for name, data in self.files.items()
            ]
            tree = [
                {**one, "oid": hashlib.sha1(self.files[str(one["path"])]).hexdigest()}
                for one in tree
            ]
            return self._send(200, json.dumps(tree).encode(), Content_Type="application/json")
        if path.startswith(f"/api/models/{NAME}"):
            entries = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            info = {"id": NAME, "sha": COMMIT, "siblings": entries, "private": False, "tags": []}
            return self._send(200, json.dumps(info).encode(), Content_Type="application/json")
        name = path.rpartition("/resolve/")[2].partition("/")[2]
        if path.startswith(f"/{NAME}/resolve/") and name in self.files:
            data = self.files[name]
            tag = hashlib.sha1(data).hexdigest()
            if self.command == "GET":
                self.fetched.append(name)
            return self._send(200, data, ETag=f'"{tag}"', X_Repo_Commit=COMMIT)
        return self._send(404, b"", X_Error_Code="RepoNotFound")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def served(
    tmp_path: Path, tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[type]:
    """The hub, with a tiny model; an empty cache of the hub's."""
    Hub.files = {path.name: path.read_bytes() for path in tiny_folder().iterdir()}
    Hub.files |= {
        "pytorch_model.bin": b"twice",
        "original/weights.safetensors": b"thrice",
        "README.md": b"hi",
    }
    Hub.fetched = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    where = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", where)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", where + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", where)
    yield Hub
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_model_is_fetched_once_and_weights_once(
    served: type,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.WARNING, "tokenswift")
    loaded = load(NAME, device="cpu")
    assert loaded.model.config.model_type == "llama"
    assert loaded.tokenizer("a")["input_ids"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(Hub.fetched)
    assert not set(UNWANTED) & set(Hub.fetched)
    assert len(Hub.fetched) == len(set(Hub.fetched))
    assert "fetching someone/tiny from the hub" in caplog.text
    assert "\x1b" not in capfd.readouterr().err  # no terminal: no escape codes
    caplog.clear()
    Hub.fetched.clear()
    assert load(NAME, device="cpu").name == NAME
    assert Hub.fetched == []
    assert "fetching" not in caplog.text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load(NAME, device="cpu").name == NAME
    with pytest.raises(InputError, match="^model someone/other .*HF_HUB_OFFLINE.*a local folder"):
        load("someone/other", device="cpu")


def test_one_file_of_a_repository(
    served: type, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "tokenswift")
    write(tmp_path / "a.gguf", small())
    Hub.files |= {"a.Q4_0.gguf": (tmp_path / "a.gguf").read_bytes(), "b.gguf": b"other"}
    loaded = load(f"{NAME}:a.Q4_0.gguf", device="cpu")
    assert Hub.fetched == ["a.Q4_0.gguf"]
    assert loaded.model.config.model_type == "llama"
    assert "fetching someone/tiny:a.Q4_0.gguf from the hub" in caplog.text
    caplog.clear()
    assert load(f"{NAME}:a.Q4_0.gguf", device="cpu").name == f"{NAME}:a.Q4_0.gguf"
    assert len(Hub.fetched) == 1
    assert "fetching" not in caplog.text
    with pytest.raises(InputError) as caught:
        load(f"{NAME}:c.gguf", device="cpu")
    assert (
        str(caught.value)
        == f"model {NAME} on the hub has no file c.gguf; valid: a.Q4_0.gguf, b.gguf"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load(f"{NAME}:a.Q4_0.gguf", device="cpu").model.config.model_type == "llama"
    with pytest.raises(InputError, match="b.gguf cannot be fetched from the hub .*HF_HUB_OFFLINE"):
        load(f"{NAME}:b.gguf", device="cpu")


def test_a_file_by_its_format_in_a_folder(
    served: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.gguf", small())
    content = (tmp_path / "a.gguf").read_bytes()
    Hub.files |= {
        "a-Q4_K_M.gguf": content,
        "b.Q4_K_S.gguf": b"",
        "mmproj-Q4_K_M.gguf": b"",
        "Q8/x-Q8_0.gguf": b"x",
    }
    for name, file in (("Q4_K_M", "a-Q4_K_M.gguf"), ("q8_0", "Q8/x-Q8_0.gguf")):
        Hub.fetched.clear()
        assert str(locate(f"{NAME}:{name}")).endswith(file)
        assert Hub.fetched == [file]
    assert LLM(f"{NAME}:Q4_K_M", device="cpu", heads="none").name == f"{NAME}:Q4_K_M"
    for name in ("Q4_K", "a/b.gguf"):
        with pytest.raises(InputError, match=f"has no file {name}; valid: .*a-Q4_K_M.gguf"):
            locate(f"{NAME}:{name}")
    Hub.files |= {"other-Q4_K_M.gguf": content}
    with pytest.raises(
        InputError, match="several files Q4_K_M; valid: a-Q4_K_M.gguf, other-Q4_K_M.gguf"
    ):
        locate(f"{NAME}:Q4_K_M")
    with pytest.raises(InputError, match="no such folder or file"):
        locate(f"{NAME}:../x.gguf")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate(f"{NAME}:Q8_0").is_file()
    assert locate(f"{NAME}:a-Q4_K_M.gguf").is_file()


def test_what_is_here_is_taken_where_the_hub_does_not_answer(
    served: type, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = locate(NAME)
    caplog.clear()
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert locate(NAME) == folder
    with pytest.raises(InputError, match="^model someone/other cannot be fetched from the hub"):
        locate("someone/other")


def test_all_parts_of_a_file_are_fetched(
    served: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a-Q4_0.gguf", small(), split=12)
    parts = sorted(path.name for path in tmp_path.glob("*.gguf"))
    assert len(parts) == 2
    Hub.files |= {f"Q4_0/{name}": (tmp_path / name).read_bytes() for name in parts}
    for name in ("Q4_0", f"Q4_0/{parts[1]}"):
        assert locate(f"{NAME}:{name}").name == parts[0]
    assert sorted(Hub.fetched) == [f"Q4_0/{part}" for part in parts]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load(f"{NAME}:Q4_0", device="cpu").name == f"{NAME}:Q4_0"


def test_a_part_that_a_repository_lacks_is_named(served: type) -> None:
    Hub.files |= {"a-Q4_0-00002-of-00003.gguf": b"", "a-Q4_0-00003-of-00003.gguf": b""}
    with pytest.raises(InputError, match="on the hub lacks a-Q4_0-00001-of-00003.gguf, one of the"):
        locate(f"{NAME}:Q4_0")


def test_refusals(served: type) -> None:
    files_before = dict(Hub.files)
    for files, line in (
        (
            {**files_before, "adapter_config.json": b"{}"},
            "holds an adapter; valid: the model that it was",
        ),
        (
            {"adapter_config.json": b"{}", "adapter_model.safetensors": b""},
            "on the hub holds an adapter; valid: the model that it was merged into",
        ),
        (
            {"a.gguf": b"", "config.json": b"{}"},
            f"no checkpoint .*: {NAME}:FILE with one of a.gguf",
        ),
        (
            {"model.safetensors": b""},
            "no checkpoint of .*; valid: one with config.json and weights",
        ),
    ):
        Hub.files = files
        with pytest.raises(InputError, match=line):
            load(NAME, device="cpu")
    with pytest.raises(InputError, match="^model nobody/nothing cannot be fetched from the hub"):
        load("nobody/nothing", device="cpu")
