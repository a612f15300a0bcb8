"""Errors of generations: what callers see of them, and keep without what was in memory."""

from __future__ import annotations

import traceback

import torch

from tokenswift.types import InputError, RunError

#: errors whose line says all; of others the places where they were raised are worth a note
PLAIN_ERRORS = (InputError, RunError)


class QueueFull(InputError):
    """The queue of waiting requests is full."""


def without_frames(error: BaseException) -> None:
    """Let go of what the frames of an error's traceback, and those of its causes, hold: tensors of
    a pass among it. Of an unexpected error a note keeps the places as text."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        chain += [one.__cause__, one.__context__]
        if one.__traceback__ is None:
            continue
        if not isinstance(one, PLAIN_ERRORS):
            places = "".join(traceback.format_tb(one.__traceback__))
            one.add_note(f"It was raised here:\n{places}")
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def failure(error: BaseException) -> Exception:
    """The exception that callers see for an error of a generation."""
    if isinstance(error, torch.OutOfMemoryError):
        ways = "fewer or shorter texts, or weights of fewer bits (weights=q8_0)"
        run_error = RunError(f"out of memory; valid: {ways}")
    elif isinstance(error, Exception):
        return error
    else:
        run_error = RunError(f"generation failed ({error!r})")  # a callback's sys.exit, say
    run_error.__cause__ = error
    return run_error
