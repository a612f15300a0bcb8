"""Copies of runs at an address: a journal while it grows, all of it in the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenswift.runs import remote


def test_a_journal_is_copied_while_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TOKENSWIFT_CACHE", str(tmp_path / "cache"))
    copies, there = remote.Copies(f"file://{tmp_path / 'there'}"), tmp_path / "there" / "a" / "journal"
    copies.begin("a")
    journal = copies.folder / "a" / "journal"
    journal.parent.mkdir(parents=True)
    journal.write_bytes(b"half")
    copies.grow("a")
    assert not there.exists()  # too soon
    monkeypatch.setattr(remote, "COPY_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(copies._fs, "pipe_file", lambda *_: (_ for _ in ()).throw(OSError("gone")))
        copies.grow("a")
    assert "failed (gone); tried again" in caplog.text
    copies.grow("a")
    assert there.read_bytes() == b"half"
    journal.write_bytes(b"half and the end")
    copies.end("a")
    assert there.read_bytes() == b"half and the end" and not journal.parent.exists()
