"""Standard output and standard error as shells leave them: closed, full, or unable to show a letter."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

#: the name in an OSError of a failed write to it
STANDARD_OUTPUT = "standard output"


class Closed(io.TextIOBase):
    """Standard output that the shell has closed (``>&-``): nothing can be written."""

    def write(self, text: str) -> int:
        """Refuse.

        Raises:
            BrokenPipeError: in every case.
        """
        raise BrokenPipeError(errno.EPIPE, "it was closed")


class Named:
    """Standard output, whose errors carry its name.

    Attributes:
        failed: whether something could not be written.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self.failed = stream, False

    def write(self, text: str) -> int:
        """Write.

        Raises:
            OSError: a BrokenPipeError where nobody reads any more; with :data:`STANDARD_OUTPUT` as its
                ``filename``.
        """
        return self._named(self._stream.write, text)

    def flush(self) -> None:
        """Flush; raises as :meth:`write`."""
        self._named(self._stream.flush)

    def _named(self, call: Any, *args: str) -> Any:
        try:
            return call(*args)
        except OSError as error:
            self.failed = True
            raise OSError(error.errno, error.strerror or str(error), STANDARD_OUTPUT) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def usable_streams() -> Iterator[bool]:
    """Make both output streams usable while entered; whether standard output is open.

    What could not be written of standard output is thrown away at the end, so that the interpreter does not
    fail once more at its exit.
    """
    before = sys.stdout, sys.stderr
    for number, stream in enumerate(before, 1):
        if stream is None:  # closed by the shell
            _point(number, os.O_RDWR)  # or a file of the run gets the number, and what libraries print
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
    first: Any = before[0] or Closed()
    out: Any = Named(first)
    sys.stdout = out
    if before[1] is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        yield before[0] is not None
    finally:
        if out.failed and before[0] is not None:
            _point(1, os.O_WRONLY)
        sys.stdout, sys.stderr = before


def _point(number: int, flags: int) -> None:
    """Make a descriptor one of the null device."""
    null = os.open(os.devnull, flags)
    if null != number:
        os.dup2(null, number)
        os.close(null)
