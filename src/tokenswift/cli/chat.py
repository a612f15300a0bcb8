"""``tokenswift chat``: a conversation with a model, and its commands.

In a terminal lines are edited with prompt_toolkit. Elsewhere each line of standard input is a
message, and nothing but the answers goes to standard output.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenswift.checks import counted
from tokenswift.cli import options
from tokenswift.cli.call import Text
from tokenswift.cli.declare import Subparsers, add_options, command
from tokenswift.cli.prompts import System, check_template, conversation, system_messages
from tokenswift.cli.results import TextSink, summary
from tokenswift.cli.signals import Interrupted, Signals
from tokenswift.cli.terminal import table
from tokenswift.cli.write import stream
from tokenswift.config.sampling import ANSWERS, SamplingParams
from tokenswift.files import line_of
from tokenswift.loader.chat_template import check_template_options
from tokenswift.types import InputError, RunError

if TYPE_CHECKING:
    from tokenswift.engine.llm import LLM

KEYS = (
    "Enter sends; Ctrl-J (or Alt-Enter) begins a new line; Ctrl-C stops an answer and keeps "
    "what there is."
)
logger = logging.getLogger("tokenswift")


def add_parser(subparsers: Subparsers) -> None:
    """Register the subcommand."""
    parser = command(subparsers, "chat", run, "talk with a model")
    group = parser.add_argument_group("conversation")
    add_options(group, System)
    add_options(group, Text, only=("max_new_tokens",))
    options.add_model_options(parser)
    options.add_strategy_options(parser)
    title = "sampling (where the model names no settings; a new seed each time)"
    options.add_sampling_options(parser, title, **{**asdict(ANSWERS), "seed": None})
    add_options(parser.add_argument_group("verbosity"), options.Shown)


def run(args: argparse.Namespace) -> int:
    """Talk with a model through its chat template; /help lists the commands of the chat. Answers
    stream to standard output. In a terminal, lines can be edited and earlier ones brought back;
    Ctrl-C stops an answer and keeps what there is of it, Ctrl-D ends the chat. Without a terminal,
    each line of standard input is a message."""
    options.sampling_from(args)
    options.check_model_options(args)
    settings = {
        "strategy": args.strategy,
        "strategy_options": options.strategy_options_from(args),
        "template_options": check_template_options(args.template_options),
    }
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
    chat = Chat(llm, sampling, args, settings)
    while True:
        try:
            with Signals():  # a signal raises, so that the terminal is left as it was
                line = read_message()
            chat.take(line)
        except EOFError:
            return 0
        except KeyboardInterrupt as interrupt:
            if not is_terminal or getattr(interrupt, "number", signal.SIGINT) != signal.SIGINT:
                raise
            logger.info("Ctrl-D or /exit ends the chat")
        except (InputError, RunError) as error:  # the conversation is as it was before
            if not is_terminal:
                raise
            logger.error("error: %s", args.parser.in_words(str(error)))


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


# ---- the conversation ----------------------------------------------------------------------------


class Chat:
    """A conversation. ``/NAME`` calls the method ``do_NAME``, whose docstring /help shows.

    Args:
        llm: a model with a chat template.
        sampling: how answers' tokens are chosen.
        args: options of the command: system, max_new_tokens, quiet, verbose.
        settings: other arguments of `Request`: its strategy, and ``template_options``.

    Attributes:
        messages: the conversation, oldest first.
        prefixes: earlier parts of the conversation, so that an answer's prefill is of new text
            alone.
    """

    def __init__(
        self,
        llm: LLM,
        sampling: SamplingParams,
        args: argparse.Namespace,
        settings: Mapping[str, Any],
    ) -> None:
        from tokenswift.engine.prefix_cache import PrefixCache

        self._llm = llm
        self._sampling = sampling
        self._args = args
        self._settings = settings
        self.prefixes = PrefixCache.for_model(llm.target)
        self.messages = system_messages(args.system)

    def take(self, line: str) -> None:
        """Do what a line says, a command or a message.

        Raises:
            InputError, RunError: a command or an answer failed; the conversation is as it was
                before.
            Interrupted: a signal other than Ctrl-C ended the answer.
            EOFError: the chat is to end.
        """
        text = line.strip()
        command_line = re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", text, re.DOTALL)
        if command_line is not None:
            self._do(command_line[1], command_line[2] or "")
        elif text:
            self.answer(text)

    def _do(self, name: str, argument: str) -> None:
        """Do a command."""
        method = getattr(self, f"do_{name}", None)
        if method is None:
            raise InputError(f"/{name} is not a command; valid: {', '.join(self.commands())}")
        method(argument)

    def commands(self) -> dict[str, str]:
        """What each command does."""
        return {
            f"/{name[3:]}": str(getattr(self, name).__doc__)
            for name in dir(self)
            if name[:3] == "do_"
        }

    def answer(self, text: str) -> None:
        """Answer a message; what Ctrl-C left of the answer is kept."""
        from tokenswift.engine.request import Request

        messages = [*self.messages, {"role": "user", "content": text}]
        request = Request(
            messages,
            self._answer_length(messages),
            sampling=self._sampling,
            on_loop="copies",
            **self._settings,
        )
        sink = TextSink(None)
        try:
            result = stream(self._llm, request, sink, self._args.quiet, prefixes=self.prefixes)
            note = summary(result, self._args.verbose)
        except Interrupted as error:
            if error.number != signal.SIGINT:
                raise
            note = "stopped"
        if sink.text:
            self.messages = [*messages, {"role": "assistant", "content": sink.text}]
        logger.info("(%s)", note)

    def _answer_length(self, messages: list[dict[str, str]]) -> int | None:
        """New tokens of an answer, at most: fewer than the option says where the model's positions
        end; None where the option says nothing."""
        max_new_tokens: int | None = self._args.max_new_tokens
        limit = self._llm.target.rotary.limit
        if limit is None or max_new_tokens is None:
            return max_new_tokens
        template_options = self._settings["template_options"]
        prompt_length = len(self._llm.encode(messages, template_options=template_options))
        return max(1, min(max_new_tokens, limit - prompt_length))

    # ---- commands

    def do_clear(self, _: str) -> None:
        """begin a new conversation; the system prompt stays"""
        self.messages = system_messages(self._args.system)
        logger.info("a new conversation")

    def do_exit(self, _: str) -> None:
        """end the chat, as Ctrl-D does"""
        raise EOFError

    def do_help(self, _: str) -> None:
        """show this list"""
        logger.info(f"{table(('command', 'what it does'), self.commands().items())}\n{KEYS}")

    def do_save(self, name: str) -> None:
        """save the conversation in a new file, as JSON: /save FILE"""
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                json.dump(self.messages, file, ensure_ascii=False, indent=1)
        except (OSError, ValueError) as error:
            reason = line_of(error)
            raise InputError(
                f"/save {name} cannot be written ({reason}); valid: a new file"
            ) from error
        logger.info("%s written to %s", counted(len(self.messages), "message"), name)
