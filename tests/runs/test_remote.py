"""Copies of runs at an address: the newest state is what lies there in the end."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from tokenswift.runs import remote


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSWIFT_CACHE", str(tmp_path / "cache"))


def test_a_slow_copy_of_an_earlier_state_does_not_replace_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = remote.Copies(f"file://{tmp_path / 'there'}")
    copies.begin("a")
    (copies.folder / "a").mkdir(parents=True)
    journal = copies.folder / "a" / "journal"
    journal.write_bytes(b"half")
    reached, goes_on, pipe = threading.Event(), threading.Event(), copies._fs.pipe_file

    def slow(path: str, data: bytes) -> None:
        if data == b"half":
            reached.set()
            assert goes_on.wait(60)
        pipe(path, data)

    monkeypatch.setattr(copies._fs, "pipe_file", slow)
    growing = threading.Thread(target=copies.copy, daemon=True)
    growing.start()
    assert reached.wait(60)
    journal.write_bytes(b"half and the end")
    ending = threading.Thread(target=copies.end, args=("a", "text"), daemon=True)
    ending.start()
    ending.join(0.3)  # it waits, or would have copied by then
    goes_on.set()
    growing.join(60)
    ending.join(60)
    assert (tmp_path / "there" / "a" / "journal").read_bytes() == b"half and the end"
    assert not (copies.folder / "a").exists()
    copies.copy()
    assert (tmp_path / "there" / "a" / "journal").read_bytes() == b"half and the end"


def test_nothing_copies_for_copies_that_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "COPY_SECONDS", 0.01)
    before = set(threading.enumerate())
    copies: Any = remote.Copies(f"file://{tmp_path / 'there'}")
    (thread,) = set(threading.enumerate()) - before
    del copies
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
