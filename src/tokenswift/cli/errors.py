"""What is wrong, told to a user: arguments that are no text, and memory that ran out."""

from __future__ import annotations

import argparse

from tokenswift.types import InputError

#: words of torch's and the system's errors when memory ran out
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "Cannot allocate memory", "Unable to allocate")


def check_utf8(word: str) -> None:
    """Refuse an argument that is no UTF-8 (Python keeps its bytes as surrogates)."""
    if any("\ud800" <= letter <= "\udfff" for letter in word):
        shown = word.encode("utf-8", "replace").decode()
        raise InputError(f"the argument {shown[:80]!r} is not UTF-8; valid: UTF-8 text")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch, numpy or Python says that memory ran out."""
    text = str(error)
    return isinstance(error, MemoryError) or any(words in text for words in OUT_OF_MEMORY)


def at_most(args: argparse.Namespace) -> str:
    """What to make smaller when memory ran out, by the options that a command has."""
    sizes = ("max_new_tokens", "budget", "write_batch", "sequence_length", "batch", "window", "positions")
    names = [f"--{name.replace('_', '-')}" for name in sizes if hasattr(args, name)]
    return f"; valid: a smaller {' or '.join(names[:3])}" if names else ""
