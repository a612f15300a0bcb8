"""``tokenswift chat``: a conversation with a model.

In a terminal lines are edited with prompt_toolkit. Elsewhere each line of standard input is a message, and
nothing but the answers goes to standard output.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenswift.cli import conversation, options, prompting
from tokenswift.cli.declare import add_options, check_options, option
from tokenswift.cli.errors import option_names, with_option_name
from tokenswift.cli.generate import Length
from tokenswift.cli.keys import Editor, Typed
from tokenswift.cli.output import TextSink, check_writable
from tokenswift.cli.progress import Stages
from tokenswift.cli.signals import Interrupted, Signals
from tokenswift.cli.tables import table
from tokenswift.models.rope import parse_rope_scaling
from tokenswift.types import Generation, InputError, RunError

if TYPE_CHECKING:
    from tokenswift.engine.prefixes import Prefixes

COMMANDS = {
    "/reset": "forget the conversation and begin a new one",
    "/load FILE": "go on with a conversation that /save has written to a name that ends in .json",
    "/save FILE": "write the conversation there: messages as JSON for a name that ends in .json, else text",
    "/help": "show this list",
    "/exit": "end the chat, as Ctrl-D does",
}
KEYS = (
    "Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer, arrow up brings back earlier messages"
)
#: what options of other commands are here
TEXTS = {
    "system": "instructions that stand before the conversation; default: the template's own",
    "max_new_tokens": "tokens of an answer at most, at least 1",
}
logger = logging.getLogger("tokenswift")


@dataclass(frozen=True)
class History:
    """What is kept of the keyboard.

    Attributes:
        history: where lines typed in a terminal are kept for the next chat, or none; default: chat-history
            in the cache folder
    """

    history: str | None = option(None, "FILE")


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model through its chat template. Answers stream to standard output. In a "
        "terminal lines can be edited and earlier ones brought back; Ctrl-C stops an answer and keeps what "
        "was said of it, Ctrl-D ends the chat. Without a terminal each line of standard input is a message.",
        epilog=f"In the chat: {'; '.join(f'{name}: {text}' for name, text in COMMANDS.items())}. Exit codes: "
        "0 done, 1 the run failed, 2 bad input, 129, 143 hung up, terminated.",
    )
    add_options(parser, prompting.System, texts=TEXTS)
    add_options(parser, Length, texts=TEXTS, max_new_tokens=1024)
    add_options(parser, History)
    options.add_model_options(parser)
    options.add_strategy_options(parser)
    options.add_sampling_options(parser)
    add_options(parser.add_argument_group("results"), options.Shown)
    parser.set_defaults(options=option_names(parser))


def run(args: argparse.Namespace) -> int:
    """Load the model, then answer until the input ends; cheap checks come first."""
    check_options(args, Length)
    sampling = options.sampling_from(args)
    parse_rope_scaling(args.rope_scaling)
    options.check_model_options(args)
    call = {"strategy": args.strategy, "strategy_options": options.strategy_options_from(args)}
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if args.history not in (None, "none"):
        check_writable("--history", args.history)

    llm = options.load_model(args, args.rope_scaling)
    prompting.check_template(llm, "chat")
    sampling = options.model_sampling(args, sampling, llm)
    call["sampling"] = prompting.answer_sampling(args, sampling)
    logger.info("%s, %s on %s, %s; /help lists the commands", llm.name, llm.dtype, llm.device, args.strategy)

    from tokenswift.engine.prefixes import Prefixes

    shown = (args.quiet, args.raw_output, args.verbose)
    chat = Chat(llm, args.max_new_tokens, args.system, *shown, Prefixes.beside(llm.target), **call)
    if not terminal:
        for line in _piped():
            if not chat.take(line):
                break
        return 0
    with _ends_by_signal():
        editor = Editor(args.history)
        chat.typed = Typed(editor)
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


class Chat:
    """A conversation.

    Args:
        llm: an ``LLM`` with a chat template.
        most: tokens of an answer at most.
        system: the system message, None for the template's own.
        quiet: show no progress.
        raw: let control characters of the answers reach a terminal.
        verbose: tokens a pass behind each answer too.
        prefixes: keeps what was read of the conversation, so that an answer needs to read only what is new.
        call: strategy and sampling of a request.

    Attributes:
        messages: what was said, oldest first.
        typed: takes what is typed during an answer.
    """

    def __init__(
        self,
        llm: Any,
        most: int,
        system: str | None = None,
        quiet: bool = False,
        raw: bool = False,
        verbose: bool = False,
        prefixes: Prefixes | None = None,
        **call: Any,
    ) -> None:
        self._llm, self._most, self._quiet, self._raw, self._call = llm, most, quiet, raw, call
        self._verbose = verbose
        self._prefixes = prefixes
        self.typed = Typed()
        self._begin = prompting.system_messages(system)
        self._saved: set[Path] = set()
        self.messages = list(self._begin)

    def take(self, line: str) -> bool:
        """Do what a line says, a command or a message; False when the chat is to end.

        Raises:
            InputError, RunError: a command or an answer failed; the conversation is as it was before.
            Interrupted: a signal other than Ctrl-C ended the answer.
        """
        text = line.strip()
        command = re.fullmatch(r"(/[a-z]+)(?:\s+(.*))?", text)
        if not text:
            return True
        if command is None:
            self.answer(text)
        elif command[1] in ("/exit", "/quit"):
            return False
        elif command[1] == "/reset":
            self.messages = list(self._begin)
            logger.info("a new conversation")
        elif command[1] == "/save":
            self.save(command[2] or "")
        elif command[1] == "/load":
            self.load(command[2] or "")
        elif command[1] == "/help":
            logger.info("%s\n%s", table(COMMANDS.items()), KEYS)
        else:
            raise InputError(f"{command[1]} is no command; valid: {', '.join(COMMANDS)}")
        return True

    def answer(self, text: str) -> None:
        """Answer a message; what Ctrl-C left of the answer is kept."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._llm.encode(messages)
        sink, said = TextSink(None, raw=self._raw), ""
        stages = Stages(self._quiet)
        from tokenswift.engine.request import Request

        request = Request(ids, self._room(len(ids)), **self._call, on_loop="stop", on_progress=stages)
        with Signals(leave=_leave) as signals, self.typed.silent():
            try:
                with self._llm.start(request, self._prefixes) as steps:
                    for step in steps:
                        said += step.text
                        sink.write(step.text)
                        self.typed.listen()
                        signals.check()
                    ended = figures(steps.result, self._most, self._verbose)
            except KeyboardInterrupt:
                if signals.number not in (0, signal.SIGINT):
                    raise
                ended = "stopped"
            finally:
                stages.end()
                sink.close()
        if said:
            self.messages = [*messages, {"role": "assistant", "content": said}]
        logger.info("(%s)", ended)

    def _room(self, tokens: int) -> int:
        """How long an answer may become behind ``tokens`` tokens."""
        limit = self._llm.target.rotary.limit
        if limit is not None and tokens >= limit:
            raise InputError(
                f"the conversation has {tokens} tokens, the model {limit} positions; valid: a shorter "
                "message, /reset, or --rope-scaling yarn"
            )
        return self._most if limit is None else min(self._most, limit - tokens)

    def save(self, name: str) -> None:
        """Write the conversation to a file, which is replaced only if this chat has made it.

        Raises:
            InputError: there is something else of that name, or it cannot be written.
        """
        if not name:
            raise InputError("/save has no file; valid: /save FILE")
        path = Path(name).expanduser()
        if path.exists() and path.resolve() not in self._saved:
            raise InputError(f"/save {name}: it is there already; valid: a new file")
        try:
            path.write_text(conversation.text_of(self.messages, path), encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"/save {name} cannot be written ({reason}); valid: a writable file") from error
        self._saved.add(path.resolve())
        logger.info("%d messages written to %s", len(self.messages), path)

    def load(self, name: str) -> None:
        """Take up a conversation of a file in place of this one.

        Raises:
            InputError: there is no conversation in it, or it is too long for the model; this one stays.
        """
        if not name:
            raise InputError("/load has no file; valid: /load FILE")
        messages = conversation.read(name)
        if messages and messages[-1]["role"] == "assistant":
            self._room(len(self._llm.encode(messages)))
        self.messages = messages
        logger.info("%d messages read from %s", len(messages), name)


def figures(result: Generation, most: int, verbose: bool = False) -> str:
    """An answer in figures, and why it ended where that is not its own end."""
    m = result.metrics
    text = f"{len(result.token_ids)} tokens, {m.tokens_per_second:.0f} tokens/s"
    if verbose:
        text += f", {m.mean_acceptance_length:.2f} tokens a pass"
    if result.finish_reason == "length":
        reached = "--max-new-tokens" if len(result.token_ids) == most else "the model's positions"
        return f"{text}; cut off by {reached}"
    return text + ("; stopped, it began to repeat itself" if result.finish_reason == "loop" else "")


def _leave(code: int) -> None:
    """A second signal during an answer: one more Ctrl-C says nothing new."""
    if code != 128 + signal.SIGINT:
        os._exit(code)


def _piped() -> Iterator[str]:
    """The lines of standard input."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"line {number} of standard input is not UTF-8; valid: UTF-8 text") from error


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
