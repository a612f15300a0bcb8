"""Runs at an address of fsspec, such as ``s3://bucket/texts``: written in a folder here, and copied there.

A store of objects has neither locks nor files that grow, so a copy is the whole journal, every ten seconds at
most while it grows, and at its end, with the text. A journal is valid wherever it was cut, so any copy can be
resumed. Two that write the same run at once write the same text.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from contextlib import suppress
from typing import Any

from tokenswift.loader.find import cache_dir
from tokenswift.runs import folder as folders
from tokenswift.runs.journal import write_whole
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
        valid = "valid: a path, or an address of fsspec"
        raise InputError(f"{address} cannot be used ({reason}); {valid}") from error


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
        self._copied: dict[str, float] = {}  # when, by run

    def begin(self, name: str) -> None:
        """Have a run here as far as it is there, unless more of it is here already.

        Raises:
            OSError: the address cannot be read.
        """
        here = self.folder / name
        if folders.is_locked(here):
            return
        with suppress(FileNotFoundError):
            data = self._fs.cat_file(f"{self._root}/{name}/{folders.JOURNAL}")
            here.mkdir(parents=True, exist_ok=True)
            if not folders.has_run(here) or (here / folders.JOURNAL).stat().st_size < len(data):
                write_whole(here / folders.JOURNAL, data)

    def grow(self, name: str) -> None:
        """Copy a journal, unless that was done lately; where it fails it is tried again."""
        now = time.monotonic()
        if now - self._copied.setdefault(name, now) > COPY_SECONDS:
            self._copied[name] = now
            try:
                self._copy(name, folders.JOURNAL)
            except OSError as error:
                logger.warning("copying to %s failed (%s); tried again", self._root, error)

    def end(self, name: str) -> None:
        """Copy a finished run, and forget it here.

        Raises:
            RunError: it cannot be copied; it stays here.
        """
        here = self.folder / name
        try:
            for path in (*here.glob("text*.txt"), here / folders.JOURNAL):
                self._copy(name, path.name)
        except OSError as error:
            there = f"{self._root}/{name}"
            raise RunError(f"copying to {there} failed ({error}); it is kept in {here}") from error
        shutil.rmtree(here)

    def _copy(self, name: str, file: str) -> None:
        """Copy a file, whole or not at all."""
        data, path = (self.folder / name / file).read_bytes(), f"{self._root}/{name}/{file}"
        self._fs.makedirs(f"{self._root}/{name}", exist_ok=True)
        if "file" not in self._fs.protocol:  # stores of objects write them whole
            self._fs.pipe_file(path, data)
            return
        self._fs.pipe_file(f"{path}.part", data)
        self._fs.mv(f"{path}.part", path)
