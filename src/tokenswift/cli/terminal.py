"""What a terminal shows: text that commands nothing, streams as shells leave them, tables."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from collections.abc import Container, Iterable, Sequence
from copy import copy
from typing import IO, TextIO

from tokenswift.files import line_of
from tokenswift.types import RunError

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
    return COMMANDING.sub(lambda character: json.dumps(character[0])[1:-1], text)


def on_one_line(text: str) -> str:
    """:func:`visible`, with line ends and tabs written so too: names in messages and lists."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def shown_on(stream: IO[str], text: str) -> str:
    """The text as a stream is to get it: visible on a terminal, elsewhere as it is."""
    return visible(text) if stream.isatty() else text


class LogHandler(logging.StreamHandler[TextIO]):
    """Log lines on standard error as it is now (above a line of progress, say). They command no
    terminal, also where a file of them is read on one later, and a name in a line cannot look like
    another line."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        safe_record = copy(record)
        if isinstance(record.args, tuple):
            safe_record.args = tuple(
                arg if isinstance(arg, int | float) else on_one_line(str(arg))
                for arg in record.args
            )
        return visible(super().format(safe_record))


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
    handle = os.open(os.devnull, os.O_RDWR)
    while handle < 3:
        # a stream that the shell closed: a file of the run would get its number, and what libraries
        # print; so the number stays taken
        handle = os.open(os.devnull, os.O_RDWR)
    os.close(handle)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            # a terminal that lacks a character is no reason to stop
            stream.reconfigure(errors="replace")
    return is_open


def flush() -> None:
    """Write what standard output still holds, or throw it away: at its exit the interpreter would
    fail."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


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

    rich_table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column, name in enumerate(head):
        rich_table.add_column(name, justify="right" if column in right else "left", no_wrap=True)
    for row in rows:
        rich_table.add_row(*map(on_one_line, row))
    console = Console(width=10_000, color_system=None, markup=False, emoji=False)
    with console.capture() as shown:
        console.print(rich_table)
    return "\n".join(line.rstrip() for line in shown.get().splitlines())
