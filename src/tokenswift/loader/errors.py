"""Errors of the libraries that read a stranger's files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokenswift.files import line_of
from tokenswift.types import InputError, RunError


@contextmanager
def refused_as(what: str, valid: str = "") -> Iterator[None]:
    """Inside the block, what a library trips over is bad input: the errors of those of models are
    their own, and `tokenizers` panics, which is no Exception.

    Raises:
        InputError: ``what``, what the library says, and what is valid.
    """
    try:
        yield
    except (InputError, RunError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise InputError(f"{what} ({line_of(error)}){valid and f'; valid: {valid}'}") from error
