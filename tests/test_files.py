"""Files are replaced whole, and only regular ones; a model that cannot fit is refused before it is
read."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tokenswift import files
from tokenswift.cli.results import check_writable, write_text
from tokenswift.files import replacing
from tokenswift.loader.load import load
from tokenswift.memory import Memory
from tokenswift.types import InputError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_nothing_but_a_regular_file_is_replaced(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    if kind == "folder":
        target.mkdir()
    elif kind == "pipe":
        os.mkfifo(target)
    else:
        target.symlink_to("/dev/null")
    before = target.stat().st_mode
    with pytest.raises(OSError, match="not a regular file"), replacing(target) as part:
        part.write_text("new")
    assert target.stat().st_mode == before
    assert names(tmp_path) == ["target"]


def test_a_link_stays_and_leads_to_the_new_file(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with replacing(tmp_path / "link") as part:
        part.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    write_text(tmp_path / "link", "newer")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "newer"
    assert names(tmp_path) == ["link", "real"]


def test_a_new_file_is_readable_by_whom_the_user_says(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_text(tmp_path / "record", "private")
    finally:
        os.umask(before)
    assert (tmp_path / "record").stat().st_mode & 0o777 == 0o600


def test_places_are_tried_and_left_as_they_were(tmp_path: Path) -> None:
    for kind in ("file", "regular file"):
        with pytest.raises(
            InputError, match="^--out .*/a/b/c cannot be written .No such file or directory"
        ):
            check_writable("--out", tmp_path / "a/b/c", kind)
    assert check_writable("--work", tmp_path / "a/b", "folder") == tmp_path / "a/b"
    (tmp_path / "file").write_text("")
    for name in ("", tmp_path / "file", tmp_path / "file/x", "/proc/x"):
        with pytest.raises(InputError, match="^--work .* cannot be written"):
            check_writable("--work", name, "folder")
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(("dtype", "factor"), [("auto", 1), ("float32", 1), ("bfloat16", 0.5)])
def test_a_model_larger_than_the_memory_is_refused(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, dtype: str, factor: float
) -> None:
    folder = tiny_folder()
    needed = int(
        4 * factor * sum(part.numel() for part in load_file(folder / "model.safetensors").values())
    )
    monkeypatch.setattr("tokenswift.memory.host_memory", lambda: Memory(needed - 1, 10**9))
    with pytest.raises(InputError) as caught:
        load(folder, dtype=dtype, device="cpu")
    line = (
        f"model {folder} needs {needed:,} bytes of memory for its weights, {needed - 1:,} "
        f"bytes are available"
    )
    assert str(caught.value).startswith(line)
    monkeypatch.setattr("tokenswift.memory.host_memory", lambda: Memory(needed, 10**9))
    assert load(folder, dtype=dtype, device="cpu").model is not None


#: the files of handles are found there
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="no /proc here")


@needs_proc
def test_what_is_written_is_on_the_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is synced, then renamed, then the folder is synced."""
    calls: list[tuple[str, str]] = []
    replace = os.replace

    def sync(handle: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{handle}"))
        kind = "folder" if target.is_dir() else target.suffix
        calls.append((f"sync {kind}", "" if target.is_dir() else target.read_text()))

    def rename(part: Path, path: Path) -> None:
        calls.append(("rename", path.name))
        replace(part, path)

    monkeypatch.setattr(files, "sync", sync)
    monkeypatch.setattr(os, "replace", rename)
    with replacing(tmp_path / "record") as part:
        part.write_text("new")
    assert calls == [("sync .part", "new"), ("rename", "record"), ("sync folder", "")]


def test_a_file_that_cannot_be_synced_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle: int) -> None:
        raise OSError(errno.EIO, "it broke")

    (tmp_path / "record").write_text("old")
    monkeypatch.setattr(files, "sync", fail)
    with pytest.raises(OSError, match="it broke"), replacing(tmp_path / "record") as part:
        part.write_text("new")
    assert (tmp_path / "record").read_text() == "old"
    assert names(tmp_path) == ["record"]


@needs_proc
def test_a_folder_that_cannot_be_synced_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, "no folder is synced here")

    monkeypatch.setattr(files, "sync", fail)
    with replacing(tmp_path / "record") as part:
        part.write_text("new")
    assert names(tmp_path) == ["record"]
