"""``tokenswift chat``: a conversation with a model, and its commands.

In a terminal lines are edited with prompt_toolkit. Elsewhere each line of standard input is a
message, and nothing but the answers goes to standard output.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from tokenswift.chat.saved import read_messages
from tokenswift.cli import options
from tokenswift.cli.call import Text
from tokenswift.cli.conversation import Chat, Method
from tokenswift.cli.declare import Parser, Subparsers, add_options, command
from tokenswift.cli.prompts import System, check_template, conversation
from tokenswift.cli.signals import Signals
from tokenswift.config.fields import Option
from tokenswift.config.sampling import ANSWERS
from tokenswift.loader.chat_template import check_template_options
from tokenswift.types import InputError, RunError

logger = logging.getLogger("tokenswift")


@dataclass(frozen=True)
class Resumed:
    """Where a conversation begins.

    Attributes:
        resume: continue the conversation in this file, which /save wrote; --system replaces its
            system prompt
    """

    resume: Annotated[Path | None, Option("FILE", shown=True)] = None


def add_parser(subparsers: Subparsers) -> None:
    """Register the subcommand."""
    parser = command(subparsers, "chat", run, "talk with a model")
    group = parser.add_argument_group("conversation")
    add_options(group, Resumed)
    add_options(group, System)
    add_options(group, Text, only=("max_new_tokens",))
    options.add_model_options(parser)
    options.add_strategy_options(parser)
    title = "sampling (defaults if the model names none; a new seed each time)"
    options.add_sampling_options(parser, title, **{**asdict(ANSWERS), "seed": None})
    add_options(parser.add_argument_group("verbosity"), options.Shown)


def run(args: argparse.Namespace) -> int:
    """Talk with a model through its chat template; /help lists the commands of the chat. Answers
    stream to standard output. In a terminal, lines can be edited and earlier ones brought back;
    Ctrl-C stops an answer and keeps what has been written of it, Ctrl-D ends the chat. Without a
    terminal, each line of standard input is a message."""
    options.sampling_from(args)
    options.check_model_options(args)
    method: Method = {
        "strategy": args.strategy,
        "strategy_options": options.strategy_options_from(args),
        "template_options": check_template_options(args.template_options),
    }
    file: Path | None = None if args.resume is None else args.resume.expanduser()
    saved = None if file is None else read_messages(file, f"--resume {file}")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with Signals():
        read_message = editor() if is_terminal else read_line
        llm = options.load_model(args)
        check_template(llm, "chat")
        sampling = options.sampling_from(args, llm.default_sampling(conversation(None, "?")))
        if args.seed is None:  # a chat need not begin like the one before
            sampling = replace(sampling, seed=secrets.randbits(31))
    seed = f"; --seed {sampling.seed} repeats the answers" if args.verbose else ""
    logger.info("/help lists the commands%s", seed)
    chat = Chat(llm, sampling, args, method)
    if file is not None and saved is not None:
        chat.resume(saved, file, f"--resume {file}")
    talk(chat, args.parser, read_message, is_terminal)
    return 0


def talk(chat: Chat, parser: Parser, read_message: Callable[[], str], is_terminal: bool) -> None:
    """Take messages to the end of the chat.

    Raises:
        InputError, RunError, KeyboardInterrupt: something failed, or a signal came, where no
            terminal is.
    """
    while True:
        try:
            with Signals():  # a signal raises, so that the terminal is left as it was
                line = read_message()
            chat.take(line)
        except EOFError:
            return
        except KeyboardInterrupt as interrupt:
            if not is_terminal or getattr(interrupt, "number", signal.SIGINT) != signal.SIGINT:
                raise
            logger.info("Ctrl-D or /exit ends the chat")
        except (InputError, RunError) as error:  # the conversation is as it was before
            if not is_terminal:
                raise
            logger.error("error: %s", parser.in_words(str(error)))


# ---- where messages come from --------------------------------------------------------------------


def editor() -> Callable[[], str]:
    """What reads a message from the terminal."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    keys = KeyBindings()
    keys.add("c-j")(begin_line)
    keys.add("escape", "enter")(begin_line)
    session: PromptSession[str] = PromptSession(key_bindings=keys, prompt_continuation="  ")
    return lambda: session.prompt("\n> ").encode("utf-8", "replace").decode("utf-8")


def read_line() -> str:
    """A message of standard input: its next line.

    Raises:
        EOFError: there is none.
        InputError: it is not UTF-8.
    """
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"a line of standard input is not UTF-8 ({line[:60]!r}); valid: UTF-8 text"
        ) from error
