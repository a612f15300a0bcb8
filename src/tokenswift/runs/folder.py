"""A run's folder: its lock, its journal and its text files.

====================  ===========================================================================
``journal``           everything, see `runs.journal`
``text.txt``          the text; ``text.unfinished.txt`` until the end
``text.2.txt``        what was added after the user had changed ``text.txt``; and so on
``lock``              held by the process that writes; the system lets go of it when that one dies
====================  ===========================================================================

A folder may come from anybody: links in it, and what is no regular file, are refused.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from pathlib import Path

from tokenswift.config import shown
from tokenswift.files import sync
from tokenswift.runs import journal
from tokenswift.runs.journal import (
    check_entries,
    open_regular,
    read_regular,
    sync_folder,
    write_all,
    write_whole,
)
from tokenswift.runs.state import RunState, replay
from tokenswift.types import InputError
from tokenswift.words import counted

JOURNAL, LOCK = "journal", "lock"
TRIES, PAUSE = 8, 0.05  # somebody may look for a moment whether the lock is held


class Busy(InputError):
    """Another process writes in the folder now."""


class Lock:
    """The right to write in a run's folder.

    Raises:
        Busy: another process (or another run of this one) has it.
        InputError: the file is none of ours.
        OSError: as the system says.
    """

    def __init__(self, folder: Path) -> None:
        self._file = -1
        self._file = open_regular(folder / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            self._take(folder)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, b"%d\n" % os.getpid(), 0)
        except BaseException:
            self.release()
            raise

    def _take(self, folder: Path) -> None:
        for attempt in range(TRIES):
            holder = self._holder(folder)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if attempt + 1 == TRIES:
                    raise Busy(
                        f"run_dir {folder} is being written by process {holder or '?'}; valid: a folder "
                        f"that no process writes, or wait for its end"
                    ) from None
                time.sleep(PAUSE)

    def _holder(self, folder: Path) -> str:
        """The process that the file names, "" for none."""
        found = re.fullmatch(rb"(\d{0,20})\s*", os.pread(self._file, 64, 0))
        if found is None:
            raise InputError(f"run_dir {folder} holds a file {LOCK} of another kind; valid: a run's folder")
        return found[1].decode()

    def release(self) -> None:
        """Let go; harmless when done before."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.release()


def is_locked(folder: Path) -> bool:
    """Whether a process writes in a folder now. A lock file left by a dead one says nothing."""
    try:
        handle = open_regular(folder / LOCK, os.O_RDONLY)
    except (OSError, InputError):
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
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
        more = f" and {len(names) - 1} more" if names[1:] else ""
        raise InputError(
            f"run_dir is {str(folder)!r}: it holds {shown(names[0])}{more} and no run; valid: a new or "
            f"an empty folder, or a run's"
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


def check_whole(folder: Path, contents: journal.Contents, state: RunState) -> None:
    """Refuse a damaged journal.

    Raises:
        InputError: what is good, and what --drop-damaged would drop.
    """
    if contents.damaged:
        before = counted(len(state.tokens), "token before it is", "tokens before it are")
        raise InputError(
            f"{folder / JOURNAL} is damaged at byte {contents.good} (record {len(contents.records) + 1}); "
            f"the {before} good; valid: --drop-damaged goes on from there "
            f"and keeps the {counted(contents.damaged, 'byte')} behind it in a file of their own"
        )


def drop_damaged(folder: Path, contents: journal.Contents) -> None:
    """Cut a damaged journal after its last good record; what is behind goes to ``journal.damaged-N``."""
    path = folder / JOURNAL
    data = read_regular(path)
    number = 1
    while os.path.lexists(kept := folder / f"{JOURNAL}.damaged-{number}"):
        number += 1
    write_whole(kept, data[contents.good :])
    write_whole(path, data[: contents.good])
    contents.damaged = 0


class TextFile:
    """The text of a run as a file, written behind the journal.

    Args:
        folder: the run's.
        number: which of its text files; the first is 1.
        start: the first character of the run's text that belongs into it.
    """

    def __init__(self, folder: Path, number: int, start: int) -> None:
        self.folder, self.number, self.start = folder, number, start
        self._file = -1
        self._size = 0

    @property
    def path(self) -> Path:
        """The finished file."""
        return self.folder / ("text.txt" if self.number == 1 else f"text.{self.number}.txt")

    @property
    def unfinished(self) -> Path:
        """The file until then."""
        return self.path.with_name(self.path.stem + ".unfinished.txt")

    def bytes_of(self, text: str) -> bytes:
        """What of the run's text belongs into the file."""
        return text[self.start :].encode("utf-8", errors="replace")

    def is_ours(self, state: RunState) -> bool:
        """Whether what is there is what the journal says: nobody has edited it."""
        whole = self.bytes_of(state.text + state.tail)
        for path, least in ((self.unfinished, state.before_last), (self.path, len(state.text))):
            try:
                found = read_regular(path)
            except FileNotFoundError:
                continue
            if not whole.startswith(found) or len(found) < len(self.bytes_of(state.text[:least])):
                return False
        return True

    def next_free(self, start: int) -> TextFile:
        """A text file of a number that no file has."""
        made = TextFile(self.folder, self.number + 1, start)
        while os.path.lexists(made.path) or os.path.lexists(made.unfinished):
            made.number += 1
        return made

    def begin(self, text: str) -> None:
        """Write the text so far as unfinished, and go on behind it."""
        data = self.bytes_of(text)
        write_whole(self.unfinished, data)
        self.path.unlink(missing_ok=True)
        self._file = open_regular(self.unfinished, os.O_WRONLY | os.O_APPEND)
        self._size = len(data)

    def write(self, text: str) -> None:
        """Append text."""
        data = text.encode("utf-8", errors="replace")
        write_all(self._file, data)
        self._size += len(data)

    def finish(self, text: str) -> Path:
        """Mark the file as finished; where somebody has changed it meanwhile, a new one gets the text.

        Args:
            text: the whole text of the run.
        Returns:
            the finished file.
        """
        sync(self._file)
        try:
            same = os.path.samestat(os.fstat(self._file), os.lstat(self.unfinished))
        except FileNotFoundError:
            same = False
        if same and os.fstat(self._file).st_size == self._size and not os.path.lexists(self.path):
            os.replace(self.unfinished, self.path)
            sync_folder(self.folder)
            return self.path
        other = self.next_free(self.start)
        write_whole(other.path, self.bytes_of(text))
        self.number = other.number
        return other.path

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
