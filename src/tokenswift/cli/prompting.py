"""Prompts: where they come from, and whether they are answered or continued.

Text is answered where the model has a chat template, however it comes; token ids are continued.
``--continue`` (``--raw`` before) has text continued, too; ``--chat`` and ``--system`` insist on an answer.
Light: no torch in here.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenswift.cli.declare import RARE, option, reader
from tokenswift.loader.prompts import check_template_options
from tokenswift.types import InputError
from tokenswift.words import counted

PATIENCE = 2.0  # seconds without a word from a pipe until that is said
logger = logging.getLogger("tokenswift")

# ---- what is read ------------------------------------------------------------------------------------------


def _ids(text: str) -> list[int]:
    ids = [int(token) for token in text.replace(",", " ").split()]
    if min(ids, default=0) < 0:
        raise ValueError
    return ids


#: an argparse type: token ids with commas or spaces between them
token_ids = reader(_ids, "integers such as 1,2,3, no negative ids")


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


# ---- how it is taken ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chat:
    """Whether a prompt is answered.

    Attributes:
        raw: continue the prompt as it is; default: a model that has a chat template answers it, whether it
            comes as an argument, by a pipe or from a file
        chat: answer the prompt; refused where the model has no chat template
    """

    raw: bool = option(False, names=("--continue",))
    chat: bool = option(False, level=RARE)


def template_option(text: str) -> tuple[str, Any]:
    """An argparse type: a variable of a chat template and its value, JSON or else text."""
    name, found, value = text.partition("=")
    if not name or not found:
        valid = "a name and a value, such as enable_thinking=false"
        raise argparse.ArgumentTypeError(f"is {text!r}; valid: {valid}")
    try:
        check_template_options({name: value})
        return name, json.loads(value)
    except InputError as error:
        valid = str(error).partition("; ")[2]
        raise argparse.ArgumentTypeError(f"is {text!r}; {valid}") from error
    except (ValueError, RecursionError):
        return name, value


@dataclass(frozen=True)
class System:
    """What stands before a conversation.

    Attributes:
        system: system prompt; default: the chat template's own
        template_option: variable of the model's chat template, such as enable_thinking=false; the value is
            JSON or text; may be given several times
    """

    system: str | None = option(None, "TEXT")
    template_option: list[tuple[str, Any]] = option(
        (), "NAME=VALUE", type=template_option, action="append", level=RARE
    )


def prepare(args: argparse.Namespace) -> None:
    """Start what renders chat templates before the model is loaded, where it may be needed."""
    if not args.raw and args.prompt_ids is None:
        from tokenswift.loader.template import prepare

        prepare()


def check_chat_options(args: argparse.Namespace) -> None:
    """What can be checked without the model.

    Raises:
        InputError: options that contradict each other.
    """
    for name in ("chat", "system", "template_option"):
        if getattr(args, name) in (None, False, []):
            continue
        option = f"--{name.replace('_', '-')}"
        if args.raw and args.prompts is None:
            raise InputError(
                f"--continue and {option} given; valid: one of them (--continue uses no chat template)"
            )
        if args.prompt_ids is not None:
            raise InputError(f"--prompt-ids and {option} given; valid: {option} with text")


def shaped(args: argparse.Namespace, llm: Any, prompt: str | list[int]) -> tuple[Any, str]:
    """The prompt as ``LLM.generate`` takes it, and a line that says how it was taken.

    Returns:
        chat messages when it is to be answered, else the prompt itself.
    Raises:
        InputError: a chat is asked for and the model has no template.
    """
    if not isinstance(prompt, str):
        return prompt, "prompt: token ids, continued as they are"
    if args.raw:
        return prompt, "prompt: continued as it is"
    if args.chat or args.system is not None:
        check_template(llm, "--chat" if args.chat else "--system")
    elif not llm.has_chat_template:
        return prompt, "prompt: continued as it is (the model has no chat template)"
    told = "prompt: answered, through the model's chat template (--continue continues it instead)"
    return [*system_messages(args.system), {"role": "user", "content": prompt}], told


def check_template(llm: Any, what: str) -> None:
    """Refuse a model without a chat template; ``what`` asks for one."""
    if not llm.has_chat_template:
        raise InputError(
            f"{what} needs a chat template, and the model {llm.name} has none; valid: a model made for chat, "
            f"or tokenswift generate --continue"
        )


def system_messages(text: str | None) -> list[dict[str, str]]:
    """The messages that a conversation begins with."""
    return [] if text is None else [{"role": "system", "content": text}]
