"""What is wrong, in words of the command line: options by name, arguments that are no text, memory."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

from tokenswift.checks import meant
from tokenswift.cli.declare import KEY, RARE, level_of
from tokenswift.cli.terminal import shown_on
from tokenswift.types import InputError

MEANT = "; did you mean "
#: words of torch's and the system's errors when memory ran out
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "Cannot allocate memory", "Unable to allocate")


def say(message: str) -> None:
    """The line of an error."""
    with suppress(OSError):  # the terminal may be gone
        print(shown_on(sys.stderr, f"error: {message}"), file=sys.stderr, flush=True)


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


def option_names(parser: argparse.ArgumentParser, typed: Collection[str] = ()) -> dict[str, str]:
    """Field name → option of a subcommand: ``{"top_p": "--top-p", …}``; an earlier name gives the one of now.

    Args:
        typed: options of the command line; what goes by ``--method-option`` has its own name where that was
            typed.
    """
    shown: dict[str, str] = {}
    other: dict[str, str] = {}
    for option in parser._actions:
        level = level_of(option)
        own = next((name for name in option.option_strings if name in typed), None)
        if option.option_strings and (option.help != argparse.SUPPRESS or level == RARE):
            shown[option.dest] = long_name(option.option_strings)
        elif level == KEY or own is not None:
            shown.setdefault(option.dest, own or f"--method-option {option.dest}")
        for name in option.option_strings:
            other[name.lstrip("-").replace("-", "_")] = option.dest
    return {**{name: shown[dest] for name, dest in other.items() if dest in shown}, **shown}


def long_name(names: Sequence[str]) -> str:
    """The name of an option that messages use: ``--seed`` of ``-s`` and ``--seed``."""
    return next((name for name in names if name.startswith("--")), names[0])


def with_option_name(message: str, options: dict[str, str]) -> str:
    """The message with fields written as the options that set them: the one that it begins with, names with
    an underscore anywhere. Keys of --method-option in a list of valid ones stay as they are."""
    found = re.match(r"(?!out of )'?(\w+)'?(?=[ :])", message)  # not --out of memory
    if found and found[1] in options:
        message = options[found[1]] + message[found.end() :]
    if " is not an option of " in message:
        return message
    if "dtype" in options:
        message = re.sub(r"(?<=or )dtype (?=b?float)", f"{options['dtype']} ", message)
    if "weights" in options:
        message = re.sub(r"(?<=or )weights (?=q\d_\d)", f"{options['weights']} ", message)
    return re.sub(r"(?<![\w./-])\w+_\w+(?![\w./-])", lambda name: options.get(name[0], name[0]), message)


def with_suggestion(message: str, options: Iterable[str] = ()) -> str:
    """The message of a refusal, and what was probably meant, where something valid is written alike.

    Args:
        message: as this library or argparse words it.
        options: of the subcommand, for one that it does not know.
    """
    if MEANT in message:
        return message
    value = re.search(r" is '([^']*)'.*?; valid: (.*)$", message)
    unknown = re.match(r"unknown option (--[\w-]+)", message)
    wrong = re.match(r"'?([\w-]+)'? is not an option of .*?; valid: (.*)$", message)
    if found := value or wrong:
        given, words = found[1], [word.strip(" '") for word in found[2].split(",")]
    elif unknown:
        given, words = unknown[1], list(options)
    else:
        return message
    return message + meant(given, [word for word in words if word and " " not in word])
