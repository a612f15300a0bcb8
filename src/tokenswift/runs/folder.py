"""A run's folder: its lock, its journal and its text file.

=============  ===========================================================================
``journal``    everything, see `runs.journal`
``text.txt``   the text, when it has ended
``text.old``   what stood there before, where it was no beginning of the text
``lock``       held by the process that writes; the system lets go of it when that one dies
=============  ===========================================================================

A folder may come from anybody: of these files, links and what is no regular file are refused.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from tokenswift.config import shown
from tokenswift.runs import journal
from tokenswift.runs.journal import check_regular, open_regular, read_regular, write_whole
from tokenswift.runs.state import Record, RunState, replay
from tokenswift.types import InputError
from tokenswift.words import counted

JOURNAL, LOCK, TEXT, OLD = "journal", "lock", "text.txt", "text.old"
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
    """Whether a folder holds a journal, whatever is in it."""
    return os.path.lexists(folder / JOURNAL)


def check_new(folder: Path) -> None:
    """Refuse a folder that holds other things than a run (or what is left of one that died at once), or links
    in place of its files.

    Raises:
        InputError: naming what is there.
        OSError: as the system says.
    """
    for name in (JOURNAL, LOCK, TEXT):
        check_regular(folder / name)
    left = re.compile(rf"{LOCK}|{JOURNAL}\.\d+\.part")
    found = sorted(os.listdir(folder)) if folder.is_dir() else []
    names = [name for name in found if not left.fullmatch(name)]
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
    contents = journal.read(path, Record)
    return contents, replay(contents.records, str(path))


def load_whole(folder: Path) -> RunState:
    """The state of a run whose journal is not damaged.

    Raises:
        InputError: as :func:`load`; or what is good of it, and how to keep that.
    """
    contents, state = load(folder)
    if contents.damaged:
        path = folder / JOURNAL
        before = counted(len(state.tokens), "token before it is", "tokens before it are")
        raise InputError(
            f"{path} is damaged at byte {contents.good} (record {len(contents.records) + 1}); the {before} "
            f"good; valid: the file up to there (truncate -s {contents.good} {path})"
        )
    return state


def has_text(folder: Path, text: str) -> bool:
    """Whether the text file is there, and is not just a beginning of the text (the end of a shorter run).

    Raises: as :func:`write_text`.
    """
    data = text.encode("utf-8", errors="replace")
    with suppress(FileNotFoundError):
        found = read_regular(folder / TEXT)
        return found == data or not data.startswith(found)
    return False


def write_text(folder: Path, text: str) -> None:
    """Write the text of a run that has ended. Another one that is there, as somebody may have edited it, is
    kept beside it.

    Raises:
        InputError: something else than a regular file is there.
        OSError: as the system says.
    """
    path, data = folder / TEXT, text.encode("utf-8", errors="replace")
    with suppress(FileNotFoundError):
        if not data.startswith(read_regular(path)):
            os.replace(path, folder / OLD)
    write_whole(path, data)
