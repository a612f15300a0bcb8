"""What a command shows and keeps: text, records, streams as shells leave them, signals, progress,
tables."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import RLock
from types import FrameType
from typing import IO, Any

from tokenswift.files import line_of, replacing
from tokenswift.types import Generation, InputError, RunError, counted

# ---- text that commands nothing ------------------------------------------------------------------

#: control characters but line end and tab, DEL, C1; what turns the direction of writing; separators
#: that are line ends to some; deprecated, annotation and tag characters, which hide text
COMMANDING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """The text with characters that command a terminal written as JSON writes them: ``\\u001b``.

    Each character is looked at by itself, so a text may come in any pieces; JSON stays the same
    JSON.
    """
    return COMMANDING.sub(lambda found: json.dumps(found[0])[1:-1], text)


def shown_on(stream: IO[str], text: str) -> str:
    """The text as a stream is to get it: visible on a terminal, elsewhere as it is."""
    return visible(text) if stream.isatty() else text


class LogHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Log lines on standard error as it is now (above a line of progress, say); they command no
    terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return shown_on(sys.stderr, super().format(record))


# ---- streams -------------------------------------------------------------------------------------

#: words of torch's and the system's errors when memory ran out
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "Unable to allocate",
)


def say(text: str) -> None:
    """Write to standard output, flushed; it commands no terminal.

    Raises:
        BrokenPipeError: nobody reads it any more.
        RunError: it cannot be written.
    """
    try:
        sys.stdout.write(shown_on(sys.stdout, text))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(f"writing standard output failed ({line_of(error)})") from error


def usable_streams() -> bool:
    """Make both output streams usable; whether standard output is open."""
    is_open = sys.stdout is not None
    while (null := os.open(os.devnull, os.O_RDWR)) < 3:
        # closed by the shell: a file of the run would get the number, and what libraries print
        pass
    os.close(null)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a terminal that lacks a character is no reason to stop
    return is_open


def flush() -> None:
    """Throw away what cannot be written of standard output: the interpreter would fail at its
    exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


# ---- signals -------------------------------------------------------------------------------------

#: signal → how the error line begins
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class Interrupted(KeyboardInterrupt):
    """A signal ended the run between two steps.

    Args:
        number: of the signal.
        kept: what is kept, in words.

    Attributes:
        code: the exit code, 128 + the signal's number.
    """

    def __init__(self, number: int, kept: str = "") -> None:
        super().__init__("; ".join(filter(None, (WORDS[signal.Signals(number)], kept))))
        self.number, self.code = number, 128 + number


class Signals:
    """Ctrl-C, SIGTERM and a closed terminal: while entered, signals set a flag that :meth:`check`
    raises, so that the step is finished first; before the first check they raise at once, and a
    second one ends at once.

    A signal that is ignored (``nohup``, background jobs of a shell) stays ignored.

    Attributes:
        number: the signal that came, 0 when none did.
    """

    def __init__(self) -> None:
        self.number = 0
        self._stepping = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in WORDS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Called after each step.

        Raises:
            Interrupted: a signal has come.
        """
        self._stepping = True
        if self.number:
            raise Interrupted(self.number)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number
        if not self._stepping:
            raise Interrupted(number)


def reason(error: BaseException) -> str:
    """Why a run failed, in one line."""
    if isinstance(error, RunError):
        return str(error)
    if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
        return "out of memory"
    if isinstance(error, OSError):
        return ": ".join(filter(None, (error.filename, line_of(error))))
    return f"the run failed ({type(error).__name__}: {line_of(error)}); --debug shows where"


@contextmanager
def keeping(kept: Callable[[], str]) -> Iterator[Signals]:
    """Hear signals inside, and have whatever ends the block early say what is kept.

    Raises:
        Interrupted: by a signal.
        RunError: of anything else but bad input and a pipe that is closed.
    """
    with Signals() as signals:
        try:
            yield signals
        except InputError:
            raise
        except (KeyboardInterrupt, Exception) as error:
            if signals.number or isinstance(
                error, KeyboardInterrupt
            ):  # a hung up terminal takes no text
                raise Interrupted(signals.number or signal.SIGINT, kept()) from None
            if isinstance(error, BrokenPipeError) or "kept" in str(error):
                raise
            raise RunError(f"{reason(error)}; {kept()}") from error


# ---- progress ------------------------------------------------------------------------------------

#: stages (`types.OnProgress`) whose names say too little
STAGES = {"prompt": "prefill", "write": "the model writes"}


class Stages:
    """A moving line on standard error, where that is a terminal, that says how far the work is;
    called as `types.OnProgress` says. The line goes away when its stage ends.

    Args:
        quiet: show nothing.
        doing: what a ``with`` block shows before its first stage.
    """

    def __init__(self, quiet: bool = False, doing: str = "working") -> None:
        plain = os.environ.get("TERM") == "dumb" or bool(os.environ.get("NO_COLOR"))
        self._shown, self._doing = sys.stderr.isatty() and not quiet and not plain, doing
        self._line, self._lock = None, RLock()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if total is not None and done >= total:
            return self.end()
        of = "" if total is None else f" of {total:,}"
        text = STAGES.get(stage, stage) + (f": {done:,}{of}" if done or of else "")
        with self._lock:  # files of a model are read in several threads
            if self._shown and self._line is None:
                self._line = _moving_line()
            if self._line is not None:
                self._line.update(
                    self._line.task_ids[0], completed=done, total=total, description=text
                )

    def end(self) -> None:
        """Take the line away; what is told next has a new one."""
        with self._lock, suppress(OSError):  # the terminal may be gone
            line, self._line = self._line, None
            if line is not None:
                line.stop()

    def __enter__(self) -> Stages:
        self(self._doing, 0, None)
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()


def _moving_line() -> Any:
    """A line of rich's: a bar, a text, and the time. The cursor stays: a second signal ends the
    program at once."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(file=sys.stderr, highlight=False)
    console.show_cursor = lambda show=True: False  # type: ignore[method-assign]
    columns = BarColumn(16), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    line = Progress(
        *columns, TimeRemainingColumn(), console=console, redirect_stdout=False, transient=True
    )
    line.add_task("")
    line.start()
    return line


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Container[int] = ()) -> str:
    """Rows of cells as text.

    Args:
        head: of the columns.
        rows: cells, as many in each.
        right: columns whose cells stand at the right, such as numbers.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, name in enumerate(head):
        made.add_column(name, justify="right" if place in right else "left", no_wrap=True)
    for row in rows:
        made.add_row(*map(visible, row))
    console = Console(width=10_000, color_system=None, markup=False, emoji=False)
    with console.capture() as shown:
        console.print(made)
    return "\n".join(line.rstrip() for line in shown.get().splitlines())


# ---- what a run leaves behind --------------------------------------------------------------------


#: what ``--json -`` stands for
STDOUT = Path("-")
#: finish reason → in words
ENDINGS = {
    "length": "stopped at the limit of its length; --max-new-tokens sets another",
    "eos": "the model ended the text",
    "stop": "ended at a stop text",
    "loop": "stopped, it began to repeat itself",
}
READING_SECONDS = 1.0  # that a prompt takes to be worth a word


def check_writable(option: str, name: str | Path, kind: str = "file") -> Path:
    """The path behind ``name``, after making sure that it can be written (nothing is left).

    Args:
        kind: "file" (a pipe, a character device or :data:`STDOUT` will do), "regular file" (whose
            place another takes), or "folder" (which need not be there yet).
    Raises:
        InputError: naming the option, the path and the reason; a file's folder may be missing,
            which is not made.
    """
    path = Path(name).expanduser()
    if path == STDOUT:
        return path
    try:
        if not str(name):
            raise OSError(0, "it is empty")
        if kind == "folder":
            TemporaryFile(
                dir=next(one for one in (path, *path.absolute().parents) if one.exists())
            ).close()
        elif kind == "regular file" or not (path.is_fifo() or path.is_char_device()):
            if path.exists() and not path.is_file():
                raise OSError(0, "it is not a regular file")
            TemporaryFile(dir=Path(os.path.realpath(path)).parent).close()
            if path.exists():
                path.open("ab").close()
    except (OSError, ValueError) as error:
        why = f"{line_of(error)}); valid: a writable {kind}"
        raise InputError(f"{option} {name} cannot be written ({why}") from error
    return path


def check_record(name: str | None, option: str = "--json") -> Path | None:
    """The path of --json, writable, if there is one."""
    return None if name is None else check_writable(option, name)


class TextSink:
    """Writes the text to standard output and to a file as it comes; the file is opened at the first
    write.

    Args:
        path: the file, if there is to be one.
        echo: write to standard output too.

    Attributes:
        text: all that it was given.
        kept: where the text so far is, in words.
    """

    def __init__(self, path: Path | None, echo: bool = True) -> None:
        self.text = ""
        self.kept = "the text so far is on standard output" if echo else "no text was kept"
        self._path, self._echo, self._last = path, echo, "\n"
        self._file: IO[str] | None = None

    def write(self, text: str, again: bool = False) -> None:
        """Pass on a piece of text, flushed.

        Args:
            again: it is of an earlier session: for the file alone.
        Raises:
            RunError: the file cannot be written any more (no space left, say).
            BrokenPipeError: as :func:`say`.
        """
        self.text += text
        if self._path is not None:
            self._keep(self._path, text)
        if text and self._echo and not again:
            self._last = "\n"  # until it is written
            say(text)
            self._last = text

    def _keep(self, path: Path, text: str) -> None:
        try:
            if self._file is None:
                self._file = path.open("w", encoding="utf-8", newline="")
                self.kept = f"the text so far is in {path}"
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            raise RunError(
                f"writing {path} failed ({line_of(error)}); what fitted in it was kept"
            ) from error

    def close(self) -> None:
        """End the last line on standard output and close the file."""
        if self._file is not None:
            self._file.close()
        if not self._last.endswith("\n"):
            self._last = "\n"
            say("\n")


def give(record: Path | None, made: Mapping[str, Any], text: str) -> None:
    """Write a record where one is asked for, and the text unless the record takes its place.

    Raises: as :func:`write_json`.
    """
    if record is not None:
        write_json(record, made)
    if record != STDOUT:
        say(text + "\n")


def write_json(path: Path, *records: Mapping[str, Any]) -> None:
    """Write records, a line each; into a file whole or not at all.

    Raises:
        RunError: no space left or no right to write; what was on standard output stays there.
        BrokenPipeError: as :func:`say`.
    """
    lines = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    write_text(path, "".join(lines))


def write_text(path: Path, text: str) -> None:
    """Write a whole text: to standard output, into a pipe or a device, or over a regular file or
    none.

    Raises: as :func:`write_json`.
    """
    if path == STDOUT:
        say(text)
        return
    try:
        if path.is_fifo() or path.is_char_device():
            path.write_text(text, "utf-8", "replace", "")
            return
        with replacing(path) as part:
            part.write_text(text, "utf-8", "replace", "")
    except OSError as error:
        raise RunError(
            f"writing {path} failed ({line_of(error)}); what was there before was kept"
        ) from error


def drafted(result: Generation) -> str:
    """What drafted, tokens a pass, and how many times as fast as passes without drafts that was,
    where there were some; "" where no draft was accepted."""
    counts = sorted(result.token_sources.items(), key=lambda source: -source[1])
    names = [name for name, count in counts if count and name != "target"]
    if not names:
        return ""
    text = f"; {' and '.join(names)}: {result.metrics.mean_acceptance_length:.1f} tokens a pass"
    gain = (result.drafting or {}).get("gain")
    return text if gain is None else f"{text}, {gain:.2f} × plain"


def summary(result: Generation, verbose: bool = False) -> str:
    """One line about a finished run: tokens, seconds, why it ended; says so when it was not
    lossless.

    Args:
        verbose: prefill, passes, acceptance and why it was drafted so, too.
    """
    m = result.metrics
    text = counted(len(result.token_ids), "token")
    text += f" in {m.seconds:.1f} s ({m.tokens_per_second:.1f} tokens/s)"
    if verbose or m.prefill_seconds >= READING_SECONDS:
        text += (
            f", after {m.prefill_seconds:.1f} s for a prompt of "
            f"{counted(result.prompt_tokens, 'token')}"
        )
    text += f"; {ENDINGS[result.finish_reason]}{drafted(result)}"
    if verbose:
        text += f"; {counted(m.steps, 'pass', 'passes')}, acceptance rate {m.acceptance_rate:.2f} "
        text += f"(n-grams {m.ngram_acceptance_rate:.2f})"
        if result.drafting is not None:
            text += f"; {result.drafting['summary']}"
    if m.loop is not None:
        pattern = f"{counted(m.loop.size, 'token')} again and again"
        text += f"; the text repeats itself from token {m.loop.start} on ({pattern})"
    return text if result.lossless else f"{text}; NOT LOSSLESS (published acceptance rule)"
