"""Prompts of commands: where they are read from, and whether they are answered or continued.

Text is answered where the model has a chat template, however it comes; token ids are continued.
``--continue`` has text continued, too; ``--system`` insists on an answer. Light: no torch in here.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tokenswift.config.fields import Option
from tokenswift.files import line_of
from tokenswift.types import InputError

if TYPE_CHECKING:
    from tokenswift.chat.prompts import Prompt
    from tokenswift.engine.llm import LLM

logger = logging.getLogger("tokenswift")


# ---- prompts: what is read -----------------------------------------------------------------------


def parse_token_ids(text: str) -> list[int]:
    """Token ids with commas or spaces between them.

    Raises:
        ValueError: something else, or negative ones.
    """
    token_ids = [int(token) for token in text.replace(",", " ").split()]
    if min(token_ids, default=0) < 0:
        raise ValueError
    return token_ids


TOKEN_IDS = Option("1,2,3", read=parse_token_ids, valid="integers such as 1,2,3, no negative ids")


def prompt_from(args: argparse.Namespace) -> str | list[int]:
    """The one prompt of the command line: text, the text of a file or of standard input (``-``, or
    nothing else), or token ids. What a pipe brings together with PROMPT stands before it.

    Raises:
        InputError: there is none, or several, or an empty one; or a file cannot be read.
    """
    text = args.prompt
    file = args.prompt_file
    if args.prompt == "-":
        text = None
        file = "-"
    sources = {"PROMPT": text, "--prompt-file": file, "--prompt-ids": args.prompt_ids}
    names = [name for name, value in sources.items() if value is not None]
    piped = piped_text(text is not None) if names in ([], ["PROMPT"]) else None
    if len(names) > 1 or (not names and piped is None):
        what = " and ".join(names) or "no prompt"
        valid = f"one of {', '.join(sources)}, or a pipe (- reads standard input)"
        raise InputError(f"{what} given; valid: {valid}")
    if file is not None:
        text = read_named(file, "--prompt-file")
    elif piped:
        text = f"{piped}\n\n{text}" if text else piped
    prompt = args.prompt_ids or text
    if not prompt:
        name = names[0] if names else "standard input"
        raise InputError(f"{name} is empty; valid: at least one token")
    return prompt


def piped_text(has_prompt: bool) -> str | None:
    """The text of a pipe or a file at standard input; None: it is a terminal, a device, or closed.

    Args:
        has_prompt: an argument is the prompt already. A socket, which programs that start this one
            may leave open for ever, is not read then.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return None
    waits = stat.S_ISFIFO(mode) or (stat.S_ISSOCK(mode) and not has_prompt)
    if waits and has_prompt:  # whoever started this may have left it open
        logger.info("reading standard input, which stands before PROMPT (</dev/null leaves it out)")
    return read_named("-", "standard input") if waits or stat.S_ISREG(mode) else None


def read_named(name: str, option: str) -> str:
    """The UTF-8 text of a file, or of standard input: without a byte order mark, CRLF as LF, and
    without the one line end that shells and editors put at the end."""
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        return content.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{option} {name} is not UTF-8 (byte {error.start}); valid: UTF-8 text"
        ) from error
    except (AttributeError, OSError, ValueError) as error:  # standard input may be closed
        valid = "valid: a UTF-8 text file"
        raise InputError(f"{option} {name} cannot be read ({line_of(error)}); {valid}") from error


# ---- prompts: how they are taken -----------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """What stands before a conversation.

    Attributes:
        system: system prompt; default: the chat template's own
        template_options: variables of the model's chat template, such as {"enable_thinking": false}
    """

    system: Annotated[str | None, Option("TEXT", shown=True)] = None
    template_options: Annotated[object, Option("JSON", read=json.loads, valid="a JSON object")] = (
        None
    )


def prompt_for_model(
    args: argparse.Namespace, llm: LLM, prompt: str | list[int]
) -> tuple[Prompt, str]:
    """The prompt as ``LLM.generate`` takes it, and a line that says how it was taken.

    Returns:
        chat messages when it is to be answered, else the prompt itself.
    Raises:
        InputError: there is a system prompt and the model has no chat template.
    """
    if not isinstance(prompt, str):
        return prompt, "prompt: token ids, continued as they are"
    if args.raw:
        return prompt, "prompt: continued as it is"
    if args.system is not None:
        check_template(llm, "--system")
    elif not llm.has_chat_template:
        return prompt, "prompt: continued as it is (the model has no chat template)"
    line = "prompt: answered, through the model's chat template (--continue continues it instead)"
    return conversation(args.system, prompt), line


def check_template(llm: LLM, what: str) -> None:
    """Refuse a model without a chat template; ``what`` needs one."""
    if not llm.has_chat_template:
        raise InputError(
            f"{what} needs a chat template, and the model {llm.name} has none; valid: a model "
            f"made for chat, or tokenswift generate --continue"
        )


def conversation(system: str | None, text: str) -> list[dict[str, str]]:
    """A conversation that begins with a text of the user, after the system prompt."""
    return [*system_messages(system), {"role": "user", "content": text}]


def system_messages(system: str | None) -> list[dict[str, str]]:
    """The messages that stand before a conversation."""
    return [] if system is None else [{"role": "system", "content": system}]
