"""``tokenswift chat``: a conversation with a model.

In a terminal lines are edited with prompt_toolkit. Elsewhere each line of standard input is a message, and
nothing but the answers goes to standard output.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tokenswift.cli import options, prompting
from tokenswift.cli.declare import RARE, add_options, check_options, option
from tokenswift.cli.errors import option_names, with_option_name
from tokenswift.cli.generate import Length
from tokenswift.cli.keys import Editor, Typed, is_open
from tokenswift.cli.output import check_writable
from tokenswift.cli.signals import Interrupted
from tokenswift.cli.talk import COMMANDS, Chat
from tokenswift.config import ANSWERS, SamplingParams
from tokenswift.loader.rope import parse_rope_scaling
from tokenswift.types import InputError, RunError

#: what options of other commands are here
TEXTS = {
    "system": "system prompt; default: the template's own",
    "max_new_tokens": "tokens of an answer at most, at least 1; default: until the model ends it",
    "sampling": "settings that are not given: default (the model's generation_config.json or GGUF file, else "
    "the defaults above) or model (the model's; what it does not name is off); default: default",
    "seed": "0 or more: the same seed and messages, the same answers; default: a new one each time",
}
logger = logging.getLogger("tokenswift")


@dataclass(frozen=True)
class History:
    """What is kept of the keyboard.

    Attributes:
        history: where lines typed in a terminal are kept for the next chat, or none; default: chat-history
            in the cache folder
    """

    history: str | None = option(None, "FILE", level=RARE)


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model through its chat template. Answers stream to standard output. In a "
        "terminal, lines can be edited and earlier ones brought back; Ctrl-C stops an answer and keeps what "
        "there is of it, Ctrl-D ends the chat. Without a terminal, each line of standard input is a message.",
        epilog=f"Commands in the chat: {', '.join(COMMANDS)}; /help explains them. Exit codes: 0 done, "
        "1 failed, 2 bad input, 129, 143 hung up, terminated.",
    )
    group = parser.add_argument_group("conversation")
    add_options(group, prompting.System, texts=TEXTS)
    add_options(group, Length, texts=TEXTS)
    add_options(group, History)
    options.add_model_options(parser)
    options.add_strategy_options(parser)
    title = "sampling (defaults where the model names no settings of its own)"
    options.add_sampling_options(parser, title, TEXTS, ANSWERS)
    add_options(parser.add_argument_group("verbosity"), options.Shown)
    parser.set_defaults(options=option_names(parser))


def run(args: argparse.Namespace) -> int:
    """Load the model, then answer until the input ends; cheap checks come first."""
    check_options(args, Length)
    sampling = options.sampling_from(args)
    parse_rope_scaling(args.rope_scaling)
    options.check_model_options(args)
    call = {"strategy": args.strategy, "strategy_options": options.strategy_options_from(args)}
    call["template_options"] = dict(args.template_option) or None
    if args.history not in (None, "none"):
        check_writable("--history", args.history)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        chat = _begin(args, sampling, call)
        for line in _piped():
            if not chat.take(line):
                break
        return 0
    editor = Editor(args.history)
    typed = Typed(editor)
    with _ends_by_signal(), typed.plain_enter():
        with typed.silent():
            chat = _begin(args, sampling, call)
        chat.typed = typed
        while True:
            try:
                if not chat.take(editor()):
                    return 0
            except KeyboardInterrupt as interrupt:
                if isinstance(interrupt, Interrupted):
                    raise
                logger.info("Ctrl-D or /exit ends the chat")
            except EOFError:
                return 0
            except (InputError, RunError) as error:  # the conversation is as it was before
                logger.error("error: %s", with_option_name(str(error), args.options))


def _begin(args: argparse.Namespace, sampling: SamplingParams, call: dict[str, Any]) -> Chat:
    """The chat, once its model is loaded."""
    llm = options.load_model(args, args.rope_scaling)
    prompting.check_template(llm, "chat")
    sampling = options.model_sampling(args, sampling, llm)
    call["sampling"] = prompting.answer_sampling(args, sampling, llm)
    if args.seed is None:  # a chat need not begin like the one before
        call["sampling"] = replace(call["sampling"], seed=secrets.randbits(31))
    logger.info("%s, %s on %s, %s; /help lists the commands", llm.name, llm.dtype, llm.device, args.strategy)
    if args.verbose:
        settings = options.sampling_words(call["sampling"])
        logger.info("%s; --seed %d repeats the answers", settings, call["sampling"].seed)

    from tokenswift.engine.prefixes import Prefixes

    telling = (args.quiet, args.raw_output, args.verbose)
    return Chat(llm, args.max_new_tokens, args.system, *telling, Prefixes.beside(llm.target), **call)


def _piped() -> Iterator[str]:
    """The messages of standard input: its lines, those between three quotes together."""
    held = ""
    for line in _lines():
        held += line
        if not is_open(held):
            yield held
            held = ""
    if held:
        yield held


def _lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"line {number} of standard input is not UTF-8; valid: UTF-8 text") from error
        yield text.replace("\r\n", "\n")


@contextmanager
def _ends_by_signal() -> Iterator[None]:
    """SIGTERM and SIGHUP raise :class:`Interrupted`, so that the terminal is given back as it was."""

    def end(number: int, frame: object) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
