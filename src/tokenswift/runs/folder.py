"""A run's folder: its lock, its journal, its text file, and the thread that writes them.

=============  ===========================================================================
``journal``    everything, see `runs.journal`
``text.txt``   the text, when it has ended
``text.old``   what stood there before, where it was no beginning of the text
``lock``       held by the process that writes; the system lets go of it when that one dies
=============  ===========================================================================

A folder may come from anybody: of these files, links and what is no regular file are refused.

A thread of its own encodes and syncs, so that the decode loop waits for no disk, and so that a step
that takes long keeps no token waiting: what was accepted is on the disk within a second, or 64
    tokens.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Thread
from threading import Lock as Mutex
from typing import Any

from tokenswift.checks import counted, shown
from tokenswift.files import line_of
from tokenswift.runs import journal
from tokenswift.runs.records import (
    End,
    Header,
    Record,
    RunState,
    Session,
    Tokens,
    check_readable,
    check_same,
    replay,
    sources_of,
)
from tokenswift.runs.regular_files import check_regular, open_regular, read_regular, write_whole
from tokenswift.types import InputError, RunError, Step

JOURNAL, LOCK, TEXT, OLD = "journal", "lock", "text.txt", "text.old"
TRIES, PAUSE = 8, 0.05  # somebody may look for a moment whether the lock is held
SYNC_SECONDS, SYNC_TOKENS = 1.0, 64
BEHIND = 4096  # tokens that may wait for a slow disk before the decode loop waits too


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
            f"run_dir {folder} is being written by another process; valid: another, or wait for "
            f"its end"
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
    """Refuse a folder that holds other things than a run (or what is left of one that died at
    once), or links in place of its files.

    Raises:
        InputError: naming what is there.
        OSError: as the system says.
    """
    for name in (JOURNAL, LOCK, TEXT):
        check_regular(folder / name)
    left = re.compile(rf"{LOCK}|{JOURNAL}\.[0-9a-f]+\.part")
    found = sorted(os.listdir(folder)) if folder.is_dir() else []
    names = [name for name in found if not left.fullmatch(name)]
    if names and JOURNAL not in names:
        raise InputError(
            f"run_dir is {str(folder)!r}: it holds {shown(names[0])} and no run; valid: a new or "
            f"an empty "
            f"folder, or a run's"
        )


def load(folder: Path) -> tuple[journal.Contents, RunState]:
    """Journal and state of a run's folder, as far as the journal's records are whole.

    Raises:
        InputError: no such run, one of another version, or a folder or a journal that no run
            writes.
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
            f"{path} is damaged at byte {contents.good} (record {len(contents.records) + 1}); "
            f"the {before} "
            f"good; valid: the file up to there (truncate -s {contents.good} {path})"
        )
    return state


def has_text(folder: Path, text: str) -> bool:
    """Whether the text file is there, and is not just a beginning of the text (the end of a shorter
    run).

    Raises: as :func:`write_text`.
    """
    data = text.encode("utf-8", errors="replace")
    with suppress(FileNotFoundError):
        found = read_regular(folder / TEXT)
        return found == data or not data.startswith(found)
    return False


def write_text(folder: Path, text: str) -> None:
    """Write the text of a run that has ended. Another one that is there, as somebody may have
    edited it, is kept beside it.

    Raises:
        InputError: something else than a regular file is there.
        OSError: as the system says.
    """
    path, data = folder / TEXT, text.encode("utf-8", errors="replace")
    with suppress(FileNotFoundError):
        if not data.startswith(read_regular(path)):
            os.replace(path, folder / OLD)
    write_whole(path, data)


class RunWriter:
    """The one writer of a run's folder: takes a new one, or one with a run of the same identity.

    Args:
        folder: the folder; made when it is not there.
        header: the first record of a new journal.
        session: the record of this process.

    Attributes:
        folder: the run's folder.
        state: the run as it was found; None for a new one.
    Raises:
        InputError: it cannot be written, another process writes it, or it holds another run, a
            damaged one, one of another version, files that are no run's, or links.
    """

    def __init__(self, folder: Path, header: Header, session: Session) -> None:
        self.folder = folder.expanduser()
        self.state: RunState | None = None
        check_readable(str(self.folder), (header, session))
        with ExitStack() as held:
            try:
                check_new(self.folder)
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = Lock(self.folder)
                held.callback(self._lock.release)
                if has_run(self.folder):
                    self.state = load_whole(self.folder)
                    min_tokens = self.state.min_tokens
                    check_same(str(self.folder), self.state.header, header, min_tokens)
                    self.state.take_back_end(session.min_tokens)
            except OSError as error:
                line = f"run_dir {self.folder} cannot be written ({error.strerror or error})"
                raise InputError(f"{line}; valid: a writable folder") from error
            held.pop_all()
        self._first = (header, session)
        self._appender: journal.Appender | None = None
        self._thread: Thread | None = None
        self._wake, self._writing = Event(), Mutex()
        self._pending: deque[tuple[Step, Mapping[str, Any]]] = deque()
        self._text = [] if self.state is None else [self.state.text]
        self._kept = self._taken = 0 if self.state is None else len(self.state.tokens)
        self._closed = False
        self._error: Exception | None = None

    def begin(self, end: End | None) -> None:
        """Make or go on with the journal, unless it has its end already; called right before the
        prefill.

        Args:
            end: how the text ended already; None: it goes on.
        Raises:
            RunError: the disk says no.
        """
        path, state = self.folder / JOURNAL, self.state
        try:
            if state is not None and end is not None and end == state.end:
                if has_text(self.folder, state.text + end.tail):
                    return
            if state is None:
                journal.create(path, self._first)
            self._appender = journal.Appender(path, journal.read(path))
            if state is not None:
                self._appender.append(self._first[1])
                if end != state.end and end is not None:
                    ended = Tokens([], "", [], "", [], state.seconds, state.passes, state.loop, end)
                    self._appender.append(ended)
        except OSError as error:
            self.close()
            raise self._failed(error) from error
        self._thread = Thread(target=self._watch, name="tokenswift-journal", daemon=True)
        self._thread.start()

    def add(self, step: Step, newest: Mapping[str, Any]) -> None:
        """Take a step.

        Args:
            step: its tokens, their text and figures.
            newest: of the run after it, the other fields of `runs.records.Tokens`.
        Raises:
            RunError: a write failed; everything up to then is kept.
        """
        self._pending.append((step, newest))
        self._taken += len(step.token_ids)
        if self._taken - self._kept >= SYNC_TOKENS:
            self._wake.set()
        if self._taken - self._kept >= BEHIND:
            self._flush()
        self._check()

    def _flush(self) -> None:
        """Bring everything that was taken to the disk."""
        with self._writing:
            pending = [self._pending.popleft() for _ in range(len(self._pending))]
            if not pending or self._error is not None or self._appender is None:
                return
            try:
                record = _record([step for step, _ in pending], pending[-1][1])
                self._appender.append(record)
            except (
                Exception
            ) as error:  # whatever it is: nothing may be written behind what is missing
                self._error = error
                return
            self._kept += len(record.ids)
            self._text.append(record.text)

    def _watch(self) -> None:
        while not self._closed:
            self._wake.wait(SYNC_SECONDS)
            self._wake.clear()
            self._flush()

    def finish(self, tail: str) -> None:
        """Write what is left, and the text file.

        Raises:
            RunError: they cannot be written.
        """
        self._flush()
        self._check()
        if self._appender is not None:
            try:
                write_text(self.folder, "".join([*self._text, tail]))
            except OSError as error:
                raise self._failed(error) from error

    def close(self) -> None:
        """Sync what can be synced and let go of the folder; never raises."""
        self._closed = True
        self._wake.set()
        self._flush()
        if (
            self._thread is not None and self._thread.is_alive()
        ):  # a signal may have come before its start
            self._thread.join()
        if self._appender is not None:
            self._appender.close()
        self._lock.release()
        self._thread = self._appender = None

    def _check(self) -> None:
        if self._error is not None:
            raise self._failed(self._error) from self._error

    def _failed(self, error: Exception) -> RunError:
        """How many tokens are safe and how to go on, in words."""
        kept, line = (
            counted(self._kept, "token is", "tokens are"),
            f"writing in {self.folder} failed",
        )
        more = f"{kept} kept in {self.folder}; continue with: tokenswift resume {self.folder}"
        return RunError(f"{line} ({line_of(error)}); {more}")


def _record(steps: Sequence[Step], newest: Mapping[str, Any]) -> Tokens:
    """Steps as one record."""
    return Tokens(
        ids=[token for step in steps for token in step.token_ids],
        sources="".join(map(sources_of, steps)),
        chars=[count for step in steps for count in step.chars],
        text="".join(step.text for step in steps),
        steps=[
            (
                len(s.token_ids),
                s.drafted,
                s.accepted,
                s.ngram_accepted,
                s.gamma,
                round(1000 * s.seconds),
            )
            for s in steps
        ],
        **newest,
    )
