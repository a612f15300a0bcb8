"""What a command reads: prompts, token ids, files and pipes. Light: no torch in here."""

from __future__ import annotations

import argparse
import logging
import os
import select
import stat
import sys
from pathlib import Path

from tokenswift.types import InputError
from tokenswift.words import counted

PATIENCE = 2.0  # seconds without a word from a pipe until that is said
logger = logging.getLogger("tokenswift")


def token_ids(text: str) -> list[int]:
    """An argparse type: token ids with commas or spaces between them."""
    try:
        ids = [int(token) for token in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; valid: integers such as 1,2,3") from None
    for token in ids:
        if token < 0:
            raise argparse.ArgumentTypeError(f"is {text!r}; valid: no negative ids")
    return ids


def prompt_from(args: argparse.Namespace) -> str | list[int]:
    """The one prompt given: text, the text of a file or of standard input (``-``, or nothing else), or token
    ids. What a pipe brings beside an argument stands before it."""
    given = {"PROMPT": args.prompt, "--prompt-file": args.prompt_file, "--prompt-ids": args.prompt_ids}
    names = [name for name, value in given.items() if value is not None]
    beside = names == ["PROMPT"] and args.prompt != "-"
    piped = piped_text(beside) if beside or not names else None
    if len(names) != 1 and (names or piped is None):
        what = "no prompt given" if not names else f"{' and '.join(names)} given"
        raise InputError(f"{what}; valid: one of {', '.join(given)}, or a pipe (- reads standard input)")
    if args.prompt_ids is not None:
        prompt: str | list[int] = args.prompt_ids
    elif args.prompt_file is not None:
        prompt = read_named(args.prompt_file, "--prompt-file")
    elif args.prompt == "-":
        prompt = read_named("-", "PROMPT")
    else:
        prompt = piped or args.prompt or ""
    if not prompt:
        raise InputError(f"{names[0] if names else 'standard input'} is empty; valid: at least one token")
    if beside and piped:
        logger.info("standard input (%s) is put before PROMPT", counted(len(piped), "character"))
        return f"{piped}\n\n{args.prompt}"
    return prompt


def piped_text(beside: bool) -> str | None:
    """The text of a pipe or a file at standard input; None: it is a terminal, a device, or closed.

    Args:
        beside: an argument is the prompt already. A socket, which programs that start this one may leave
            open for ever, is not read then.
    """
    try:
        handle = sys.stdin.fileno()
        mode = os.fstat(handle).st_mode
    except (AttributeError, OSError, ValueError):
        return None
    waits = stat.S_ISFIFO(mode) or (stat.S_ISSOCK(mode) and not beside)
    if not waits and not stat.S_ISREG(mode):
        return None
    if waits and not select.select([handle], [], [], PATIENCE)[0]:
        without = " (</dev/null leaves it out)" if beside else ""
        logger.info("waiting for the end of standard input, a pipe%s", without)
    return read_named("-", "PROMPT")


def read_named(name: str, option: str) -> str:
    """The UTF-8 text of a file, or of standard input: without a byte order mark, CRLF as LF, and without
    the one line end that shells and editors put at the end."""
    if name == "-" and sys.stdin is None:
        raise InputError(f"{option} - cannot be read (standard input is closed); valid: a UTF-8 text")
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{option} {name} cannot be read ({reason}); valid: a UTF-8 text file") from error
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{option} {name} is not UTF-8 (byte {error.start}); valid: UTF-8 text") from error
