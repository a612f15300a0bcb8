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
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tokenswift.checks import counted
from tokenswift.cli import options
from tokenswift.cli.call import Text
from tokenswift.cli.declare import Subparsers, add_options, command
from tokenswift.cli.prompts import System, asking, check_template
from tokenswift.cli.results import TextSink, summary
from tokenswift.cli.signals import Interrupted, Signals
from tokenswift.cli.terminal import table
from tokenswift.cli.write import stream
from tokenswift.config.sampling import ANSWERS, SamplingParams
from tokenswift.files import line_of
from tokenswift.loader.chat_template import check_template_options
from tokenswift.types import InputError, RunError

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
    call = {"strategy": args.strategy, "strategy_options": options.strategy_options_from(args)}
    call["template_options"] = check_template_options(args.template_options)
    live = sys.stdin.isatty() and sys.stdout.isatty()
    with Signals():
        ask, llm = editor() if live else piped, options.load_model(args)
        check_template(llm, "chat")
        sampling = options.sampling_from(args, llm.default_sampling(asking(None, "?")))
        if args.seed is None:  # a chat need not begin like the one before
            sampling = replace(sampling, seed=secrets.randbits(31))
    seed = f"; --seed {sampling.seed} repeats the answers" if args.verbose else ""
    logger.info("/help lists the commands%s", seed)
    chat = Chat(llm, sampling, args, **call)
    while True:
        try:
            with Signals():  # a signal raises, so that the terminal is given back as it was
                line = ask()
            chat.take(line)
        except EOFError:
            return 0
        except KeyboardInterrupt as interrupt:
            if not live or getattr(interrupt, "number", signal.SIGINT) != signal.SIGINT:
                raise
            logger.info("Ctrl-D or /exit ends the chat")
        except (InputError, RunError) as error:  # the conversation is as it was before
            if not live:
                raise
            logger.error("error: %s", args.parser.in_words(str(error)))


# ---- where messages come from --------------------------------------------------------------------


def editor() -> Callable[[], str]:
    """What reads a message from the terminal."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    for names in (("c-j",), ("escape", "enter")):
        keys.add(*names)(lambda event: event.current_buffer.insert_text("\n"))
    session: PromptSession[str] = PromptSession(key_bindings=keys, prompt_continuation="  ")
    return lambda: session.prompt("\n> ").encode("utf-8", "replace").decode("utf-8")


def piped() -> str:
    """A message of standard input: its next line."""
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
        llm: an ``LLM`` with a chat template.
        sampling: of answers.
        args: options of the command: system, max_new_tokens, quiet, verbose.
        call: strategy of a request.

    Attributes:
        messages: the conversation, oldest first.
    """

    def __init__(
        self, llm: Any, sampling: SamplingParams, args: argparse.Namespace, **call: Any
    ) -> None:
        from tokenswift.engine.prefix_cache import PrefixCache

        self._llm, self._args, self._call = llm, args, call
        self.prefixes = PrefixCache.for_model(llm.target)  # an answer has to read only what is new
        self._sampling, self.messages = sampling, asking(args.system, "")[:-1]

    def take(self, line: str) -> None:
        """Do what a line says, a command or a message.

        Raises:
            InputError, RunError: a command or an answer failed; the conversation is as it was
                before.
            Interrupted: a signal other than Ctrl-C ended the answer.
            EOFError: the chat is to end.
        """
        text = line.strip()
        found = re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", text, re.DOTALL)
        if found is None and text:
            self.answer(text)
        elif found is not None:
            done = getattr(self, f"do_{found[1]}", None)
            if done is None:
                raise InputError(
                    f"/{found[1]} is not a command; valid: {', '.join(self.commands())}"
                )
            done(found[2] or "")

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

        asked = [*self.messages, {"role": "user", "content": text}]
        most, limit = self._args.max_new_tokens, self._llm.target.rotary.limit
        if limit is not None and most is not None:  # the last answer may be shorter
            read = len(self._llm.encode(asked, template_options=self._call["template_options"]))
            most = max(1, min(most, limit - read))
        request = Request(asked, most, sampling=self._sampling, on_loop="stop", **self._call)
        sink = TextSink(None)
        try:
            result = stream(self._llm, request, sink, self._args.quiet, known=self.prefixes)
            ended = summary(result, self._args.verbose)
        except Interrupted as error:
            if error.number != signal.SIGINT:
                raise
            ended = "stopped"
        if sink.text:
            self.messages = [*asked, {"role": "assistant", "content": sink.text}]
        logger.info("(%s)", ended)

    # ---- commands

    def do_clear(self, _: str) -> None:
        """begin a new conversation; the system prompt stays"""
        self.messages = asking(self._args.system, "")[:-1]
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
            why = line_of(error)
            raise InputError(
                f"/save {name} cannot be written ({why}); valid: a new file"
            ) from error
        logger.info("%s written to %s", counted(len(self.messages), "message"), name)
