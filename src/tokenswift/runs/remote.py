"""Runs at an address of fsspec, such as ``s3://bucket/texts``: written in a folder here, and copied there.

A store of objects has neither locks nor files that grow, so a copy is the whole journal. While it grows it is
copied every ten seconds at most, and once more at its end, with the text: one copy at a time, so that none of
an earlier state comes behind a later one. A journal is valid wherever it was
cut, so that any copy can be resumed. Two that write the same run at once write the same text.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any
from weakref import finalize, ref

from tokenswift.loader.find import cache_dir
from tokenswift.runs import folder as folders
from tokenswift.runs import journal
from tokenswift.runs.state import replay
from tokenswift.types import InputError, RunError

COPY_SECONDS = 10.0
logger = logging.getLogger("tokenswift")


def open_address(address: str) -> tuple[Any, str]:
    """The fsspec file system of an address, one of its own, and the path there.

    Raises:
        InputError: no such file system, or it cannot be had.
    """
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(address, skip_instance_cache=True)
    except (ImportError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{address} cannot be used ({reason}); valid: a path, or an address of fsspec"
        ) from error


class Copies:
    """The runs at an address that this process writes.

    Args:
        address: of all runs; each is below it, by its name.

    Attributes:
        folder: where they are written: of this user, on this machine.
    Raises:
        InputError: as :func:`open_address`.
    """

    def __init__(self, address: str) -> None:
        self._fs, self._root = open_address(address)
        key = hashlib.sha256(f"{self._fs.protocol} {self._root}".encode()).hexdigest()[:16]
        self.folder = cache_dir() / "copied" / key
        self._address = address
        self._sizes: dict[str, int] = {}  # of journals that grow: bytes that were copied
        self._copying = Lock()
        gone = Event()
        finalize(self, gone.set)
        Thread(target=_watch, args=(ref(self), gone), name="tokenswift-copies", daemon=True).start()

    def begin(self, name: str) -> None:
        """Have a run here as far as it is there, unless more of it is here already.

        Raises:
            RunError: the address cannot be read.
        """
        here = self.folder / name
        if folders.is_locked(here):
            return
        path = f"{self._root}/{name}/{folders.JOURNAL}"
        try:
            data = self._fs.cat_file(path) if self._fs.exists(path) else b""
        except OSError as error:
            raise RunError(f"{self._address}/{name} cannot be read ({error})") from error
        if data and _tokens(data) >= _tokens_here(here):
            shutil.rmtree(here, ignore_errors=True)  # its text file may be behind the journal
            here.mkdir(parents=True)
            journal.write_whole(here / folders.JOURNAL, data)
        self._sizes[name] = len(data)

    def end(self, name: str, text: str) -> None:
        """Copy a finished run, and forget it here.

        Args:
            name: the run.
            text: its text, for where neither place has it.
        Raises:
            RunError: it cannot be copied; it stays here.
        """
        here = self.folder / name
        try:
            with self._copying:
                copied = self._sizes.pop(name, 0)
                if not any(here.glob("text*.txt")) and not self._fs.exists(f"{self._root}/{name}/text.txt"):
                    (here / "text.txt").write_text(text, "utf-8", errors="replace", newline="")
                for path in here.glob("text*.txt"):
                    self._copy(name, path.name)
                if (here / folders.JOURNAL).stat().st_size != copied:
                    self._copy(name, folders.JOURNAL)
        except OSError as error:
            raise RunError(
                f"copying to {self._address}/{name} failed ({error}); it is kept in {here}"
            ) from error
        shutil.rmtree(here)

    def copy(self) -> None:
        """Copy the journals that have grown."""
        for name in list(self._sizes):
            with self._copying:
                if name in self._sizes:  # or it has ended
                    self._copy_grown(name)

    def _copy_grown(self, name: str) -> None:
        try:
            size = (self.folder / name / folders.JOURNAL).stat().st_size
            if size > self._sizes[name]:
                self._copy(name, folders.JOURNAL)
                self._sizes[name] = size
        except FileNotFoundError:  # it is not begun
            pass
        except OSError as error:
            logger.warning("copying to %s/%s failed (%s); tried again", self._address, name, error)

    def _copy(self, name: str, file: str) -> None:
        """Copy a file, whole or not at all."""
        data = (self.folder / name / file).read_bytes()
        path = f"{self._root}/{name}/{file}"
        self._fs.makedirs(f"{self._root}/{name}", exist_ok=True)
        if "file" not in self._fs.protocol:  # stores of objects write them whole
            self._fs.pipe_file(path, data)
            return
        self._fs.pipe_file(f"{path}.part", data)
        self._fs.mv(f"{path}.part", path)


def _watch(copies: ref[Copies], gone: Event) -> None:
    """Copy until nobody holds the copies any more."""
    while not gone.wait(COPY_SECONDS):
        if (held := copies()) is not None:
            held.copy()
            del held


def fetch(address: str, folder: Path) -> None:
    """Copy the journals of all runs at an address into folders of their names.

    Raises:
        InputError: it cannot be read.
    """
    fs, root = open_address(address)
    try:
        for path in fs.glob(f"{root}/*/{folders.JOURNAL}"):
            here = folder / Path(path).parent.name
            here.mkdir()
            (here / folders.JOURNAL).write_bytes(fs.cat_file(path))
            with suppress(NotImplementedError):  # not every store tells
                written = fs.modified(path).timestamp()
                os.utime(here / folders.JOURNAL, (written, written))
    except OSError as error:
        raise InputError(f"{address} cannot be read ({error}); valid: an address with runs") from error


def _tokens(data: bytes) -> int:
    """New tokens in a journal; -1: it is none, or a damaged one."""
    try:
        contents = journal.decode(data)
        return -1 if contents.damaged else len(replay(contents.records).tokens)
    except InputError:
        return -1


def _tokens_here(folder: Path) -> int:
    return _tokens((folder / folders.JOURNAL).read_bytes()) if folders.has_run(folder) else -2
