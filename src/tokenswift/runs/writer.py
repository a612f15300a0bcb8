"""Writes a run as it goes: its tokens to the journal at a bounded interval, and its text when it has ended.

A thread of its own encodes and syncs, so that the decode loop waits for no disk, and so that a step that
takes long keeps no token waiting: what was accepted is on the disk within a second, or 64 tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from tokenswift.files import line_of
from tokenswift.runs import folder as folders
from tokenswift.runs import journal
from tokenswift.runs.state import End, Header, RunState, Session, Tokens, check_same, sources_of
from tokenswift.types import InputError, RunError, Step
from tokenswift.words import counted

SYNC_SECONDS, SYNC_TOKENS = 1.0, 64
BEHIND = 4096  # tokens that may wait for a slow disk before the decode loop waits too


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
        InputError: it cannot be written, another process writes it, or it holds another run, a damaged one,
            one of another version, files that are no run's, or links.
    """

    def __init__(self, folder: Path, header: Header, session: Session) -> None:
        self.folder = folder.expanduser()
        self.state: RunState | None = None
        with ExitStack() as held:
            try:
                folders.check_new(self.folder)
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = folders.Lock(self.folder)
                held.callback(self._lock.release)
                if folders.has_run(self.folder):
                    self.state = folders.load_whole(self.folder)
                    check_same(str(self.folder), self.state.header, header)
            except OSError as error:
                line = f"run_dir {self.folder} cannot be written ({error.strerror or error})"
                raise InputError(f"{line}; valid: a writable folder") from error
            held.pop_all()
        self._first = (header, session)
        self._appender: journal.Appender | None = None
        self._thread: Thread | None = None
        self._wake, self._writing = Event(), Lock()
        self._pending: deque[tuple[Step, dict[str, Any]]] = deque()
        self._text = [] if self.state is None else [self.state.text]
        self._kept = self._taken = 0 if self.state is None else len(self.state.tokens)
        self._closed = False
        self._error: Exception | None = None

    def begin(self, end: End | None) -> None:
        """Make or go on with the journal, unless it has its end already; called right before the prefill.

        Args:
            end: how the text ended already; None: it goes on.
        Raises:
            RunError: the disk says no.
        """
        path, state = self.folder / folders.JOURNAL, self.state
        try:
            if state is not None and end is not None and end == state.end:
                if folders.has_text(self.folder, state.text + end.tail):
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

    def add(self, step: Step, newest: dict[str, Any]) -> None:
        """Take a step.

        Args:
            step: its tokens, their text and figures.
            newest: of the run after it, the other fields of `runs.state.Tokens`.
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
            except Exception as error:  # whatever it is: nothing may be written behind what is missing
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
                folders.write_text(self.folder, "".join([*self._text, tail]))
            except OSError as error:
                raise self._failed(error) from error

    def close(self) -> None:
        """Sync what can be synced and let go of the folder; never raises."""
        self._closed = True
        self._wake.set()
        self._flush()
        if self._thread is not None and self._thread.is_alive():  # a signal may have come before its start
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
        kept, line = counted(self._kept, "token is", "tokens are"), f"writing in {self.folder} failed"
        more = f"{kept} kept in {self.folder}; continue with: tokenswift resume {self.folder}"
        return RunError(f"{line} ({line_of(error)}); {more}")


def _record(steps: Sequence[Step], newest: dict[str, Any]) -> Tokens:
    """Steps as one record."""
    return Tokens(
        ids=[token for step in steps for token in step.token_ids],
        sources="".join(map(sources_of, steps)),
        chars=[count for step in steps for count in step.chars],
        text="".join(step.text for step in steps),
        steps=[
            (len(s.token_ids), s.drafted, s.accepted, s.ngram_accepted, s.gamma, round(1000 * s.seconds))
            for s in steps
        ],
        **newest,
    )
