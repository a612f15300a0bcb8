"""``tokenswift generate --prompts … --ray``: what is refused before any work, and what is told at the end."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call
from tokenswift.cli import on_ray

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def listener() -> Iterator[str]:
    """The address of something that listens and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def closed_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_an_address_without_ray_is_one_line_within_seconds(
    cli: Call, listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenswift.distributed import cluster

    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 0.3)
    Path("p").write_text('{"prompt": "a"}\n', encoding="utf-8")
    for address, words in (
        (closed_port(), "no Ray answers there (Connection refused)"),
        (listener, "no Ray answers there (timed out)"),
        ("nowhere", "valid: local, auto"),
        ("127.0.0.1:port", "valid: local, auto"),
        ("ray://127.0.0.1:1", "valid: local, auto"),
    ):
        done = cli("generate", "--prompts", "p", "--out", "out", "--ray", address)
        assert done.code == 2 and done.error.startswith(f"--ray is '{address}'"), done
        assert words in done.error and done.files == ["p"]


@pytest.mark.parametrize(
    "argv,words",
    [
        (("--actors", "2"), "--actors is given without --ray; valid: both"),
        (("--actor-gpus", "1"), "--actor-gpus is given without --ray; valid: both"),
        (("--ray", "local", "--actors", "0"), "--actors is 0; valid: "),
        (("--ray", "local", "--out", "p"), "--out is 'p': it is not a folder"),
        (("--ray", "local", "--out", "nosuch://x"), "nosuch://x cannot be used (Protocol not known"),
        (("--out", "file:///x"), "--out is 'file:///x': an address; valid: a folder, or the same with --ray"),
    ],
)
def test_bad_options(cli: Call, argv: tuple[str, ...], words: str) -> None:
    Path("p").write_text('{"prompt": "a"}\n', encoding="utf-8")
    done = cli("generate", "--prompts", "p", "--out", "out", *argv)
    assert done.code == 2 and done.error.startswith(words), done


def test_without_ray_the_extra_is_named(cli: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "find_spec", lambda name: None)
    Path("p").write_text('{"prompt": "a"}\n', encoding="utf-8")
    done = cli("generate", "--prompts", "p", "--out", "out", "--ray", "local")
    assert (done.code, done.error) == (
        2,
        "the package ray is not installed; valid: pip install 'tokenswift-exact[ray]'",
    )


def test_the_table_of_nodes() -> None:
    def row(node: str, tokens: int | None, at: int | None, error: str | None = None) -> dict[str, Any]:
        return {"node": node, "new_tokens": tokens, "went_on_at": at, "error": error}

    rows = [row("b", 400, 0), row("b", 400, 150), row("a", 400, 400), row("b", None, None, "too long")]
    *_, first, second = on_ray.by_node(rows).splitlines()
    assert first.split() == ["a", "1", "0", "0", "0"]
    assert second.split() == ["b", "2", "650", "1", "1"]
