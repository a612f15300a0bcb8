"""Writes a run as it goes: tokens to the journal, then text to the text file, at a bounded interval.

A thread of its own encodes and syncs, so that the decode loop waits for no disk, and so that a step that
takes long keeps no token waiting: what was accepted is on the disk within a second, or 64 tokens.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Any

from tokenswift.runs import folder as folders
from tokenswift.runs import journal
from tokenswift.runs.journal import Record
from tokenswift.runs.state import RunState, check_same, sources_of
from tokenswift.types import InputError, Metrics, RunError, Step
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")
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
        self._header, self._session = first
        self._lock: folders.Lock | None = lock
        self._appender: journal.Appender | None = None
        self._file: folders.TextFile | None = None
        self._thread: Thread | None = None
        self._wake = Condition()
        self._writing = Lock()
        self._pending: list[tuple[Step, Sequence[str], int]] = []
        self._waiting = 0  # tokens in it
        self._oldest = 0.0
        self._newest: dict[str, Any] = {}
        self._closed = False
        self._error: OSError | None = None
        self._kept = len(state.tokens) if state else 0
        self._text = state.text if state else ""
        self._more: list[str] = []
        self._started: float | None = None

    @property
    def kept(self) -> str:
        """How many tokens are safe and how to go on, in words."""
        kept = counted(self._kept, "token is", "tokens are")
        return f"{kept} kept in {self.folder}; continue with: tokenswift resume {self.folder}"

    def _is_kept(self) -> bool:
        """Whether the end of the run was in its journal before, and its text file has its name."""
        if not self.was_over or self.state is None or self.state.end is None:
            return False
        return not os.path.lexists(self._last_file(self.state).unfinished)

    def begin(self) -> None:
        """Make or go on with journal and text file; called right before the prefill.

        Raises:
            RunError: the disk says no.
        """
        if self._is_kept():
            return
        path = self.folder / folders.JOURNAL
        try:
            state = self.state
            file = folders.TextFile(self.folder, 1, 0) if state is None else self._text_file(state)
            self._file = file
            session = {**self._session, "number": file.number, "start": file.start}
            if state is None:
                journal.create(path, [self._header, session])
            self._appender = journal.Appender(path, journal.read(path))
            if state is not None:
                self._appender.append(session)
            file.begin(self._text)
        except OSError as error:
            self.close()
            raise self._failed(error) from error
        self._thread = Thread(target=self._watch, name="tokenswift-journal", daemon=True)
        self._thread.start()

    def _last_file(self, state: RunState) -> folders.TextFile:
        """The text file that was written last."""
        return folders.TextFile(self.folder, (state.end or state.session).number, state.session.start)

    def _text_file(self, state: RunState) -> folders.TextFile:
        """The text file to go on with: the last one, unless somebody has edited it."""
        file = self._last_file(state)
        if file.is_ours(state):
            return file
        edited = file.unfinished if os.path.lexists(file.unfinished) else file.path
        other = file.next_free(len(state.text))
        logger.warning(
            f"{edited} was changed since it was written: it stays; the continuation goes to {other.path}, "
            f"and the whole text is written by: tokenswift text {self.folder}"
        )
        return other

    def add(self, step: Step, pieces: Sequence[str], newest: dict[str, Any]) -> None:
        """Take a step.

        Args:
            step: its tokens and figures.
            pieces: the text that each of its tokens released.
            newest: of the run after it: ``seconds`` by phase, draft ``passes``, state of the detokeniser
                (``stream``), and the first ``loop`` seen.
        Raises:
            RunError: a write failed; everything up to then is kept.
        """
        begun = time.perf_counter()
        if self._started is None:
            self._started = begun
        with self._wake:
            self._pending.append((step, pieces, round(1000 * (begun - self._started))))
            self._newest = newest
            self._waiting += len(step.token_ids)
            if len(self._pending) == 1:
                self._oldest = time.monotonic()
                self._wake.notify()
            elif self._waiting >= SYNC_TOKENS:
                self._wake.notify()
        if self._waiting >= BEHIND:
            self.sync()
        self._check()

    def sync(self) -> None:
        """Bring everything that was taken to the disk: the journal first, then the text.

        Raises:
            RunError: it cannot be written; everything up to then is kept.
        """
        self._flush()
        self._check()

    def _flush(self) -> None:
        with self._writing:
            with self._wake:
                pending, newest = self._pending, self._newest
                self._pending, self._waiting = [], 0
            if not pending or self._error is not None or self._appender is None or self._file is None:
                return
            record = _record(pending, newest, self.state)
            try:
                self._appender.append(record)
                self._kept += len(record["ids"])
                self._more.append(record["text"])
                self._file.write(record["text"])
            except OSError as error:
                self._error = error

    def _watch(self) -> None:
        """Sync whenever a token has waited long enough, or enough of them wait."""
        while True:
            with self._wake:
                while not self._closed and self._waiting < SYNC_TOKENS:
                    left = self._oldest + SYNC_SECONDS - time.monotonic() if self._pending else None
                    if left is not None and left <= 0:
                        break
                    self._wake.wait(left)
                if self._closed:
                    return
            self._flush()

    def finish(self, reason: str, tail: str, metrics: Metrics) -> None:
        """Write the end, and give the text file its name.

        Raises:
            RunError: it cannot be written.
        """
        self.sync()
        if self._appender is None or self._file is None:
            return
        record = {"kind": "end", "reason": reason, "tail": tail, "number": self._file.number}
        record |= {"time": time.time(), "metrics": asdict(metrics)}
        with self._writing:
            try:
                self._appender.append(record)
                self._file.write(tail)
                self._file.finish(self._text + "".join(self._more) + tail)
                if self._file.number != record["number"]:
                    self._appender.append({**record, "number": self._file.number})
            except OSError as error:
                raise self._failed(error) from error

    def close(self) -> None:
        """Sync what can be synced and let go of the folder; never raises."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        with suppress(OSError):
            self._flush()
        if self._thread is not None and self._thread.is_alive():  # a signal may have come before its start
            self._thread.join()
        for part in (self._appender, self._file):
            if part is not None:
                part.close()
        if self._lock is not None:
            self._lock.release()
        self._thread = self._appender = self._file = self._lock = None

    def _check(self) -> None:
        if self._error is not None:
            raise self._failed(self._error) from self._error

    def _failed(self, error: OSError) -> RunError:
        return RunError(f"writing in {self.folder} failed ({error.strerror or error}); {self.kept}")


def _record(
    pending: list[tuple[Step, Sequence[str], int]], newest: dict[str, Any], before: RunState | None
) -> Record:
    """Steps as one record (see `runs.state`), with seconds and passes since the session began."""
    spent, passes = ({}, 0) if before is None else (before.seconds, before.passes)
    texts = [piece for _, pieces, _ in pending for piece in pieces]
    loop = newest["loop"]
    return {
        "kind": "tokens",
        "ids": [token for step, _, _ in pending for token in step.token_ids],
        "sources": "".join(sources_of(step) for step, _, _ in pending),
        "chars": [len(text) for text in texts],
        "text": "".join(texts),
        "steps": [
            [len(step.token_ids), step.drafted, step.accepted, step.ngram_accepted, step.gamma, ms]
            for step, _, ms in pending
        ],
        "seconds": {name: round(s - spent.get(name, 0.0), 4) for name, s in newest["seconds"].items()},
        "passes": newest["passes"] - passes,
        "stream": newest["stream"],
        "loop": asdict(loop) if loop is not None else None,
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
    folder = Path(name).expanduser()
    lock: folders.Lock | None = None
    state: RunState | None = None
    try:
        folders.check_new(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lock = folders.Lock(folder)
        if folders.has_run(folder):
            contents, state = folders.load(folder)
            if drop_damaged and contents.damaged:
                folders.drop_damaged(folder, contents)
            folders.check_whole(folder, contents, state)
            check_same(str(folder), state.identity, {**header["identity"], "prompt": header["prompt"]})
        return RunWriter(folder, lock, state, header, session)
    except BaseException as error:
        if lock is not None:
            lock.release()
        if isinstance(error, OSError):
            raise InputError(
                f"run_dir {folder} cannot be written ({error.strerror or error}); valid: a writable folder"
            ) from error
        raise
