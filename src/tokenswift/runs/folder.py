"""A run's folder: its lock, its journal and its text file.

====================  ===========================================================================
``journal``           everything, see `runs.journal`
``text.txt``          the text, when it has ended
``text.edited-1.txt`` what the user had made of it, when the run wrote it anew; and so on
``lock``              held by the process that writes; the system lets go of it when that one dies
====================  ===========================================================================

A folder may come from anybody: links in it, and what is no regular file, are refused.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from tokenswift.config import shown
from tokenswift.runs import journal
from tokenswift.runs.journal import check_entries, open_regular, read_regular, write_whole
from tokenswift.runs.state import RunState, replay
from tokenswift.types import InputError
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")
JOURNAL, LOCK, TEXT = "journal", "lock", "text.txt"
TRIES, PAUSE = 8, 0.05  # somebody may look for a moment whether the lock is held


class Busy(InputError):
    """Another process writes in the folder now."""


class Lock:
    """The right to write in a run's folder.

    Raises:
        Busy: another process (or another run of this one) has it.
        InputError: there is something else than a regular file.
        OSError: as the system says.
    """

    def __init__(self, folder: Path) -> None:
        self._file = open_regular(folder / LOCK, os.O_RDWR | os.O_CREAT)
        for _ in range(TRIES):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(PAUSE)
        self.release()
        raise Busy(
            f"run_dir {folder} is being written by another process; valid: another, or wait for its end"
        )

    def release(self) -> None:
        """Let go; harmless when done before."""
        self._file.close()


def is_locked(folder: Path) -> bool:
    """Whether a process writes in a folder now. A lock file left by a dead one says nothing."""
    with suppress(OSError, InputError), open_regular(folder / LOCK, os.O_RDONLY) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def has_run(folder: Path) -> bool:
    """Whether a folder holds a journal, whatever is in it.

    Raises:
        InputError: it cannot be read, or holds something else than files and folders.
    """
    try:
        return JOURNAL in check_entries(folder)
    except NotADirectoryError:
        return False
    except OSError as error:
        raise InputError(
            f"run_dir {folder} cannot be read ({error.strerror or error}); valid: a run's folder"
        ) from error


def check_new(folder: Path) -> None:
    """Refuse a folder for a new run that holds anything (but what is left of a run that died at once).

    Raises:
        InputError: naming what is there.
        OSError: as the system says.
    """
    left = re.compile(rf"{LOCK}|{JOURNAL}\.\d+\.part")
    names = [name for name in check_entries(folder) if not left.fullmatch(name)]
    if names and JOURNAL not in names:
        raise InputError(
            f"run_dir is {str(folder)!r}: it holds {shown(names[0])} and no run; valid: a new or an empty "
            f"folder, or a run's"
        )


def load(folder: Path) -> tuple[journal.Contents, RunState]:
    """Journal and state of a run's folder, as far as the journal's records are whole.

    Raises:
        InputError: no such run, one of another version, or a folder or a journal that no run writes.
    """
    path = folder / JOURNAL
    if not has_run(folder):
        raise InputError(f"run_dir {folder} holds no run; valid: a folder made with --run-dir")
    contents = journal.read(path)
    return contents, replay(contents.records, str(path))


def load_whole(folder: Path) -> RunState:
    """The state of a run whose journal is not damaged.

    Raises:
        InputError: as :func:`load`; or what is good of it, and what --drop-damaged would drop.
    """
    contents, state = load(folder)
    if contents.damaged:
        before = counted(len(state.tokens), "token before it is", "tokens before it are")
        raise InputError(
            f"{folder / JOURNAL} is damaged at byte {contents.good} (record {len(contents.records) + 1}); "
            f"the {before} good; valid: --drop-damaged goes on from there "
            f"and keeps the {counted(contents.damaged, 'byte')} behind it in a file of their own"
        )
    return state


def drop_damaged(folder: Path) -> None:
    """Cut a damaged journal after its last good record; what is behind goes to ``journal.damaged-N``."""
    path, contents = folder / JOURNAL, load(folder)[0]
    if contents.damaged:
        data = read_regular(path)
        write_whole(_unused(folder, "journal.damaged-{}"), data[contents.good :])
        write_whole(path, data[: contents.good])


def _unused(folder: Path, name: str) -> Path:
    """A path with a number in its name that no file has."""
    paths = (folder / name.format(number) for number in count(1))
    return next(path for path in paths if not os.path.lexists(path))


def write_text(folder: Path, text: str, before: str) -> None:
    """Write the text of a run that has ended. A file that somebody has edited is kept under another name.

    Args:
        folder: the run's.
        text: all of it.
        before: what an earlier end of the run wrote.
    Raises:
        InputError: something else than a regular file is there.
        OSError: as the system says.
    """
    path, data = folder / TEXT, text.encode("utf-8", errors="replace")
    with suppress(FileNotFoundError):
        found = read_regular(path)
        if not data.startswith(found) and found != before.encode("utf-8", errors="replace"):
            kept = _unused(folder, "text.edited-{}.txt")
            os.rename(path, kept)
            logger.warning("%s was changed since it was written: it is kept as %s", path, kept)
    write_whole(path, data)
