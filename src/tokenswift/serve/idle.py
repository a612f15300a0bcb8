"""A program that has the machine while nobody waits for an answer.

It is stopped by the system the moment a request comes, wherever it is in its work, and goes on a
little after the last answer. It ends with the server, whatever ends that: it hears of it by a pipe,
and sees to it that the system tells it, too (`cli.idle_child`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from time import monotonic
from typing import IO, TypedDict

logger = logging.getLogger("tokenswift")
READY = "ready"  # its first line: from now on it may be stopped
IDLE_SECONDS = 2.0  # without a request, after which it goes on
LOOK = 0.1  # seconds between looks at what is under way
SAID_EACH = 0.1  # share of a stage after which the log has a line
END_SECONDS = 10.0  # for the reader to take what the program said last


class Progress(TypedDict):
    """How far a program is.

    Attributes:
        stage: "waiting" before it begins, then what it says ("load", "write", "train"); in the end
            "done" or "failed".
        share: of the stage, from 0 to 1.
        paused: whether somebody waits for an answer, and it does nothing.
    """

    stage: str
    share: float
    paused: bool


class IdleProgram:
    """The program, which is begun when nobody waits for the first time.

    Args:
        command: a program of Python's: what follows the interpreter. It is given the number of this
            process first.
        name: what it does, for the log.
        threads: of OpenMP that it may use; None: any number.
        on_done: called on the event loop after it has ended well, while nobody waits.
    """

    def __init__(
        self,
        command: Sequence[str],
        name: str,
        threads: int | None = None,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._command = command
        self._name = name
        self._threads = threads
        self._on_done = on_done
        self._process: subprocess.Popen[str] | None = None
        self._reader: Thread | None = None
        self._lock = Lock()  # guards the four below
        self._is_ready = False
        self._is_wanted = False
        self._stage = "waiting"
        self._share = 0.0
        self._said = 0.0  # share that the log has had
        self._under_way = 0  # requests that the scheduler may not know of yet
        self._last_busy = monotonic()
        self._is_over = False
        self._is_closed = False

    # ---- for the server --------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """How far it is."""
        with self._lock:
            paused = not self._is_wanted and not self._is_over
            return Progress(stage=self._stage, share=round(self._share, 4), paused=paused)

    @property
    def pid(self) -> int | None:
        """Number of its process; None before it has one."""
        return None if self._process is None else self._process.pid

    @contextmanager
    def held(self) -> Iterator[None]:
        """It does nothing inside, and a little longer."""
        self._under_way += 1
        self.pause()
        try:
            yield
        finally:
            self._under_way -= 1
            self._last_busy = monotonic()

    def pause(self) -> None:
        """Stop it now."""
        self._last_busy = monotonic()
        if self._is_wanted:
            self._want(False)

    async def watch(self, is_busy: Callable[[], bool]) -> None:
        """Have it run while nothing is under way, until it has ended.

        Args:
            is_busy: whether answers are written, or wait.
        """
        while not self._is_closed:
            await asyncio.sleep(LOOK)
            if self._under_way or is_busy():
                self.pause()
            elif monotonic() - self._last_busy >= IDLE_SECONDS:
                if self._process is None:
                    self._begin()
                if self._has_ended():
                    break
                if not self._is_wanted:
                    self._want(True)
        if self._stage == "done":
            self._on_done()

    def close(self) -> None:
        """End it."""
        self._is_closed = True
        process = self._process
        if process is None:
            return
        with suppress(OSError):
            process.kill()  # whatever it does, stopped or not
        process.wait()
        if self._reader is not None:
            self._reader.join(END_SECONDS)

    # ---- the process -----------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start it, with the modules of this process and none of the working folder."""
        paths = [os.path.abspath(path) for path in sys.path if path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        if self._threads is not None:
            environment["OMP_NUM_THREADS"] = str(self._threads)
        program, *arguments = self._command
        command = [sys.executable, "-P", "-m", program, str(os.getpid()), *arguments]
        self._want(True)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
                # a key that interrupts is not for it; and a group whose leader's parent has gone is
                # continued and hung up by the system, which ends it where it is stopped
                process_group=0,
            )
        except OSError as error:
            self._end(f"cannot be started ({error})")
            return
        output = self._process.stdout
        if output is not None:
            self._reader = Thread(
                target=self._read, args=(self._process, output), name="tokenswift-idle", daemon=True
            )
            self._reader.start()

    def _want(self, wanted: bool) -> None:
        """Have it run, or not; from its first line on the system sees to that."""
        with self._lock:
            self._is_wanted = wanted
            self._signal()

    def _signal(self) -> None:
        """Stop or continue it, as is wanted."""
        if self._process is not None and self._is_ready and not self._is_over:
            self._process.send_signal(signal.SIGCONT if self._is_wanted else signal.SIGSTOP)

    def _has_ended(self) -> bool:
        with self._lock:
            return self._is_over

    def _end(self, reason: str = "") -> None:
        """It is over; "" where all is done."""
        with self._lock:
            self._is_over = True
            self._stage = "failed" if reason else "done"
            self._share = 0.0 if reason else 1.0
        if reason:
            logger.warning("%s: it %s; the server goes on without", self._name, reason)
        else:
            logger.info("%s: done", self._name)

    def _read(self, process: subprocess.Popen[str], output: IO[str]) -> None:
        """Take what it says until it has ended; in a thread."""
        last = ""
        for line in output:
            last = line.strip() or last
            self._take(line.strip())
        code = process.wait()
        output.close()
        if process.stdin is not None:
            process.stdin.close()
        if self._is_closed:
            return
        if code == -signal.SIGKILL:
            self._end("was ended by a signal, as the system does where memory runs short")
        elif code:
            self._end(f"failed ({last.removeprefix('error: ')})")
        else:
            self._end()

    def _take(self, line: str) -> None:
        """Take a line of its."""
        if line == READY:
            with self._lock:
                self._is_ready = True
                self._signal()
        elif line.startswith('{"stage"'):
            self._take_progress(json.loads(line))
        elif line:
            logger.info("%s: %s", self._name, line)

    def _take_progress(self, progress: dict[str, str | float]) -> None:
        """Take how far it is, and say so now and then."""
        stage = str(progress["stage"])
        share = float(progress["share"])
        with self._lock:
            if stage != self._stage:
                self._said = 0.0
            self._stage = stage
            self._share = share
        if share >= self._said + SAID_EACH and share < 1:
            self._said = share
            logger.info("%s: %s, %.0f%%", self._name, stage, 100 * share)
