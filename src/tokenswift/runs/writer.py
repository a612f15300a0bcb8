"""Writes a run as it goes: its tokens to the journal at a bounded interval, and its text when it has ended.

A thread of its own encodes and syncs, so that the decode loop waits for no disk, and so that a step that
takes long keeps no token waiting: what was accepted is on the disk within a second, or 64 tokens.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from threading import Event, Lock, Thread

from tokenswift.runs import folder as folders
from tokenswift.runs import journal
from tokenswift.runs.journal import Record
from tokenswift.runs.state import RunState, check_same, sources_of
from tokenswift.types import InputError, RunError, Step
from tokenswift.words import counted

SYNC_SECONDS, SYNC_TOKENS = 1.0, 64
BEHIND = 4096  # tokens that may wait for a slow disk before the decode loop waits too


class RunWriter:
    """The one writer of a run's folder; made by :func:`open_run`.

    Attributes:
        folder: the run's folder.
        state: the run as it was found; None for a new one.
        was_over: whether its text had ended before.
    """

    def __init__(self, folder: Path, lock: folders.Lock, state: RunState | None, *first: Record) -> None:
        self.folder, self.state, self.was_over = folder, state, False
        self._first, self._lock = first, lock
        self._appender: journal.Appender | None = None
        self._thread: Thread | None = None
        self._wake, self._writing = Event(), Lock()
        self._pending: deque[tuple[Step, Record]] = deque()
        self._text = [] if state is None else [state.text]
        self._kept = self._taken = 0 if state is None else len(state.tokens)
        self._closed = False
        self._error: OSError | None = None

    @property
    def kept(self) -> str:
        """How many tokens are safe and how to go on, in words."""
        kept = counted(self._kept, "token is", "tokens are")
        return f"{kept} kept in {self.folder}; continue with: tokenswift resume {self.folder}"

    def begin(self) -> None:
        """Make or go on with the journal, unless it has its end already; called right before the prefill.

        Raises:
            RunError: the disk says no.
        """
        path, state = self.folder / folders.JOURNAL, self.state
        if self.was_over and state is not None and state.end and os.path.lexists(self.folder / folders.TEXT):
            return
        try:
            if state is None:
                journal.create(path, self._first)
            self._appender = journal.Appender(path, journal.read(path))
            if state is not None:
                self._appender.append(*self._first[1:])
        except OSError as error:
            self.close()
            raise self._failed(error) from error
        self._thread = Thread(target=self._watch, name="tokenswift-journal", daemon=True)
        self._thread.start()

    def add(self, step: Step, newest: Record) -> None:
        """Take a step.

        Args:
            step: its tokens, their text and figures.
            newest: of the run after it: ``seconds`` by phase, draft ``passes``, state of the detokeniser
                (``stream``), and the first ``loop`` seen.
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
            record = _record([step for step, _ in pending], pending[-1][1])
            try:
                self._appender.append(record)
            except OSError as error:
                self._error = error
                return
            self._kept += len(record["ids"])
            self._text.append(record["text"])

    def _watch(self) -> None:
        while not self._closed:
            self._wake.wait(SYNC_SECONDS)
            self._wake.clear()
            self._flush()

    def finish(self, reason: str, tail: str) -> None:
        """Write the end, and the text file.

        Raises:
            RunError: they cannot be written.
        """
        self._flush()
        self._check()
        if self._appender is None:
            return
        end = {"kind": "end", "reason": reason, "tail": tail, "time": time.time()}
        before = "" if self.state is None else self.state.text + self.state.tail
        try:
            self._appender.append(end)
            folders.write_text(self.folder, "".join([*self._text, tail]), before)
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

    def _failed(self, error: OSError) -> RunError:
        return RunError(f"writing in {self.folder} failed ({error.strerror or error}); {self.kept}")


def _record(steps: list[Step], newest: Record) -> Record:
    """Steps as one record, see `runs.state.Tokens`."""
    loop = newest["loop"]
    return {
        "kind": "tokens",
        "ids": [token for step in steps for token in step.token_ids],
        "sources": "".join(map(sources_of, steps)),
        "chars": [count for step in steps for count in step.chars],
        "text": "".join(step.text for step in steps),
        "steps": [
            [len(s.token_ids), s.drafted, s.accepted, s.ngram_accepted, s.gamma, round(1000 * s.seconds)]
            for s in steps
        ],
        **newest,
        "seconds": {name: round(spent, 4) for name, spent in newest["seconds"].items()},
        "loop": None if loop is None else asdict(loop),
    }


def open_run(name: str | Path, header: Record, session: Record, drop_damaged: bool = False) -> RunWriter:
    """Take a run's folder for writing: a new one, or one with a run of the same identity.

    Args:
        name: the folder; made when it is not there.
        header: the first record of a new journal: with prompt and identity (see `loader.identity`), with
            sampling and the other settings that decide the tokens.
        session: the record of this process.
        drop_damaged: go on from the last good record of a damaged journal.
    Raises:
        InputError: it cannot be written, another process writes it, or it holds another run, a damaged one,
            one of another version, files that are no run's, or links.
    """
    folder, state = Path(name).expanduser(), None
    with ExitStack() as held:
        try:
            folders.check_new(folder)
            folder.mkdir(parents=True, exist_ok=True)
            lock = folders.Lock(folder)
            held.callback(lock.release)
            if folders.has_run(folder):
                if drop_damaged:
                    folders.drop_damaged(folder)
                state = folders.load_whole(folder)
                check_same(str(folder), state.header, header)
        except OSError as error:
            reason = error.strerror or error
            raise InputError(
                f"run_dir {folder} cannot be written ({reason}); valid: a writable folder"
            ) from error
        held.pop_all()
    return RunWriter(folder, lock, state, header, session)
