"""A run's folder: its lock, its journal, its text file, and the thread that writes them.

=============  ===========================================================================
``journal``    everything, see `runs.journal`
``text.txt``   the text, when it has ended
``text.old``   what stood there before, where it was no beginning of the text
``lock``       held by the process that writes; the system lets go of it when that one dies
=============  ===========================================================================

A folder may come from anybody: of these files, links and what is no regular file are refused.

A thread encodes and syncs, so that the decode loop waits for no disk, and so that a step that takes
long keeps no token waiting: what was accepted is on the disk within a second, or 64 tokens.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Thread
from threading import Lock as Mutex

from tokenswift.checks import counted, shown
from tokenswift.files import line_of
from tokenswift.runs import journal
from tokenswift.runs.records import (
    End,
    Header,
    Progress,
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

JOURNAL = "journal"
LOCK = "lock"
TEXT = "text.txt"
OLD_TEXT = "text.old"
LOCK_TRIES = 8  # somebody may look for a moment whether the lock is held
LOCK_PAUSE = 0.05  # seconds between them
SYNC_SECONDS = 1.0
SYNC_TOKENS = 64
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
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(LOCK_PAUSE)
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
    leftover = re.compile(rf"{LOCK}|{JOURNAL}\.[0-9a-f]+\.part")
    entries = sorted(os.listdir(folder)) if folder.is_dir() else []
    names = [name for name in entries if not leftover.fullmatch(name)]
    if names and JOURNAL not in names:
        raise InputError(
            f"run_dir is {str(folder)!r}: it holds {shown(names[0])} and no run; valid: a new or "
            "an empty folder, or a run's"
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
            f"the {before} good; valid: the file up to there (truncate -s {contents.good} {path})"
        )
    return state


def has_text(folder: Path, text: str) -> bool:
    """Whether the text file is there, and is not just a beginning of the text (the end of a shorter
    run).

    Raises: as :func:`write_text`.
    """
    data = text.encode("utf-8", errors="replace")
    with suppress(FileNotFoundError):
        written = read_regular(folder / TEXT)
        return written == data or not data.startswith(written)
    return False


def write_text(folder: Path, text: str) -> None:
    """Write the text of a run that has ended. Another one that is there, as somebody may have
    edited it, is kept beside it.

    Raises:
        InputError: something else than a regular file is there.
        OSError: as the system says.
    """
    path = folder / TEXT
    data = text.encode("utf-8", errors="replace")
    with suppress(FileNotFoundError):
        if not data.startswith(read_regular(path)):
            os.replace(path, folder / OLD_TEXT)
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
        with ExitStack() as releases:
            try:
                check_new(self.folder)
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = Lock(self.folder)
                releases.callback(self._lock.release)
                if has_run(self.folder):
                    self.state = load_whole(self.folder)
                    min_tokens = self.state.min_tokens
                    check_same(str(self.folder), self.state.header, header, min_tokens)
                    self.state.take_back_end(session.min_tokens)
            except OSError as error:
                line = f"run_dir {self.folder} cannot be written ({error.strerror or error})"
                raise InputError(f"{line}; valid: a writable folder") from error
            releases.pop_all()
        self._header = header
        self._session = session
        self._appender: journal.Appender | None = None
        self._thread: Thread | None = None
        self._wake = Event()
        self._writing = Mutex()
        self._pending: deque[tuple[Step, Progress]] = deque()
        self._texts = [] if self.state is None else [self.state.text]
        self._tokens_taken = 0 if self.state is None else len(self.state.tokens)
        self._tokens_on_disk = self._tokens_taken
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
        path = self.folder / JOURNAL
        state = self.state
        try:
            if state is not None and end is not None and end == state.end:
                if has_text(self.folder, state.text + end.tail):
                    return
            if state is None:
                journal.create(path, (self._header, self._session))
            self._appender = journal.Appender(path, journal.read(path))
            if state is not None:
                self._appender.append(self._session)
                if end != state.end and end is not None:
                    progress = Progress(state.seconds, state.passes, state.loop, end)
                    self._appender.append(_record([], progress))
        except OSError as error:
            self.close()
            raise self._failed(error) from error
        self._thread = Thread(target=self._watch, name="tokenswift-journal", daemon=True)
        self._thread.start()

    def add(self, step: Step, progress: Progress) -> None:
        """Take a step.

        Args:
            step: its tokens, their text and figures.
            progress: where the run stands after it.
        Raises:
            RunError: a write failed; everything up to then is kept.
        """
        self._pending.append((step, progress))
        self._tokens_taken += len(step.token_ids)
        waiting = self._tokens_taken - self._tokens_on_disk
        if waiting >= SYNC_TOKENS:
            self._wake.set()
        if waiting >= BEHIND:
            self._flush()
        self._check()

    def _flush(self) -> None:
        """Bring everything that was taken to the disk."""
        with self._writing:
            pending = [self._pending.popleft() for _ in range(len(self._pending))]
            if not pending or self._error is not None or self._appender is None:
                return
            try:
                _, newest = pending[-1]
                record = _record([step for step, _ in pending], newest)
                self._appender.append(record)
            # whatever it is: nothing may be written behind what is missing
            except Exception as error:
                self._error = error
                return
            self._tokens_on_disk += len(record.ids)
            self._texts.append(record.text)

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
                write_text(self.folder, "".join([*self._texts, tail]))
            except OSError as error:
                raise self._failed(error) from error

    def close(self) -> None:
        """Sync what can be synced and let go of the folder; never raises."""
        self._closed = True
        self._wake.set()
        self._flush()
        # a signal may have come before its start
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        if self._appender is not None:
            self._appender.close()
        self._lock.release()
        self._thread = None
        self._appender = None

    def _check(self) -> None:
        if self._error is not None:
            raise self._failed(self._error) from self._error

    def _failed(self, error: Exception) -> RunError:
        """How many tokens are safe and how to go on, in words."""
        safe = counted(self._tokens_on_disk, "token is", "tokens are")
        way_on = f"{safe} kept in {self.folder}; continue with: tokenswift resume {self.folder}"
        return RunError(f"writing in {self.folder} failed ({line_of(error)}); {way_on}")


def _record(steps: Sequence[Step], progress: Progress) -> Tokens:
    """Steps as one record, with where the run stands after the last of them."""
    return Tokens(
        ids=[token for step in steps for token in step.token_ids],
        sources="".join(map(sources_of, steps)),
        chars=[count for step in steps for count in step.chars],
        text="".join(step.text for step in steps),
        steps=[
            (
                len(step.token_ids),
                step.drafted,
                step.accepted,
                step.ngram_accepted,
                step.gamma,
                round(1000 * step.seconds),
            )
            for step in steps
        ],
        seconds=progress.seconds,
        passes=progress.passes,
        loop=progress.loop,
        end=progress.end,
        litany=progress.litany,
    )
