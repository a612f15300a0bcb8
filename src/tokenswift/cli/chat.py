"""``tokenswift chat``: a conversation with a model.

In a terminal lines are edited with prompt_toolkit. Elsewhere each line of standard input is a message, and
nothing but the answers goes to standard output.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenswift.cli import options, prompting
from tokenswift.cli.output import TextSink, check_writable
from tokenswift.cli.progress import Stages
from tokenswift.cli.signals import Interrupted, Signals
from tokenswift.config import check_integer
from tokenswift.models.rope import parse_rope_scaling
from tokenswift.types import Generation, InputError, RunError, Step

COMMANDS = {
    "/reset": "forget the conversation and begin a new one",
    "/save FILE": "write the conversation there: messages as JSON for a name that ends in .json, else text",
    "/help": "show this list",
    "/exit": "end the chat, as Ctrl-D does",
}
KEYS = (
    "Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer, arrow up brings back earlier messages"
)
PROMPT, MORE = "\n> ", "  "
logger = logging.getLogger("tokenswift")


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
    prompting.add_system_option(parser)
    parser.add_argument(
        "--max-new-tokens",
        type=options.integer,
        default=1024,
        metavar="N",
        help="tokens of an answer at most, at least 1; default: %(default)s",
    )
    parser.add_argument(
        "--rope-scaling",
        default="none",
        metavar="R",
        help="for conversations beyond the model's positions: yarn, yarn:4 or none (see generate); default: "
        "%(default)s",
    )
    parser.add_argument(
        "--history",
        metavar="FILE",
        help="where lines typed in a terminal are kept for the next chat, or none; default: chat-history in "
        "the cache folder",
    )
    options.add_model_options(parser)
    options.add_strategy_options(parser)
    options.add_sampling_options(parser, "sampling (the same for every strategy)")
    parser.add_argument_group("results").add_argument(
        "--quiet", action="store_true", help="nothing on standard error except errors"
    )


def run(args: argparse.Namespace) -> int:
    """Load the model, then answer until the input ends; cheap checks come first."""
    check_integer("max_new_tokens", args.max_new_tokens, 1)
    sampling = options.sampling_from(args)
    parse_rope_scaling(args.rope_scaling)
    options.check_model_options(args)
    call = {"strategy": args.strategy, "strategy_options": options.strategy_options_from(args)}
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if args.history not in (None, "none"):
        check_writable("--history", args.history)

    llm = options.load_model(args, args.rope_scaling)
    prompting.check_template(llm, "chat")
    sampling = options.model_sampling(args, sampling, llm.generation_config, llm.name)
    call["sampling"] = prompting.answer_sampling(args, sampling)
    logger.info("%s, %s on %s, %s; /help lists the commands", llm.name, llm.dtype, llm.device, args.strategy)
    chat = Chat(llm, args.max_new_tokens, args.system, args.quiet, **call)
    if not terminal:
        for line in _piped():
            if not chat.take(line):
                break
        return 0
    with _ends_by_signal():
        ask = _editor(args.history)
        while True:
            try:
                if not chat.take(ask()):
                    return 0
            except KeyboardInterrupt as interrupt:
                if isinstance(interrupt, Interrupted):
                    raise
                logger.info("Ctrl-D or /exit ends the chat")
            except EOFError:
                return 0
            except (InputError, RunError) as error:  # the conversation is as it was before
                logger.error("error: %s", error)


class Chat:
    """A conversation.

    Args:
        llm: an ``LLM`` with a chat template.
        most: tokens of an answer at most.
        system: the system message, None for the template's own.
        quiet: show no progress.
        call: arguments of ``LLM.generate``.

    Attributes:
        messages: what was said, oldest first.
    """

    def __init__(self, llm: Any, most: int, system: str | None = None, quiet: bool = False, **call: Any):
        self._llm, self._most, self._quiet, self._call = llm, most, quiet, call
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
        elif command[1] == "/help":
            width = max(map(len, COMMANDS))
            logger.info("%s", "\n".join([*(f"{k.ljust(width)}  {v}" for k, v in COMMANDS.items()), KEYS]))
        else:
            raise InputError(f"{command[1]} is no command; valid: {', '.join(COMMANDS)}")
        return True

    def answer(self, text: str) -> None:
        """Answer a message; what Ctrl-C left of the answer is kept."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._llm.encode(messages)
        sink, said = TextSink(None), ""
        stages = Stages(self._quiet)

        with Signals(leave=_leave) as signals, _silent_keys():

            def on_step(step: Step) -> None:
                nonlocal said
                said += step.text
                sink.write(step.text)
                signals.check()

            try:
                result = self._llm.generate(
                    ids,
                    self._room(len(ids)),
                    **self._call,
                    on_loop="stop",
                    on_step=on_step,
                    on_progress=stages,
                )
                ended = figures(result, self._most)
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
        if path.suffix == ".json":
            text = json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n"
        else:
            text = "\n\n".join(f"{m['role']}:\n{m['content']}" for m in self.messages) + "\n"
        try:
            path.write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"/save {name} cannot be written ({reason}); valid: a writable file") from error
        self._saved.add(path.resolve())
        logger.info("%d messages written to %s", len(self.messages), path)


def figures(result: Generation, most: int) -> str:
    """An answer in figures, and why it ended where that is not its own end."""
    m = result.metrics
    text = (
        f"{len(result.token_ids)} tokens, {m.tokens_per_second:.0f} tokens/s, "
        f"{m.mean_acceptance_length:.2f} tokens a pass"
    )
    if result.finish_reason == "length":
        reached = "--max-new-tokens" if len(result.token_ids) == most else "the model's positions"
        return f"{text}; cut off by {reached}"
    return text + ("; stopped, it began to repeat itself" if result.finish_reason == "loop" else "")


def _leave(code: int) -> None:
    """A second signal during an answer: one more Ctrl-C says nothing new."""
    if code != 128 + signal.SIGINT:
        os._exit(code)


@contextmanager
def _silent_keys() -> Iterator[None]:
    """Keys typed during an answer are not shown in the middle of it; the next line gets them."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    try:
        termios.tcsetattr(handle, termios.TCSANOW, silent)
        yield
    finally:
        termios.tcsetattr(handle, termios.TCSANOW, before)


def _piped() -> Iterator[str]:
    """The lines of standard input."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"line {number} of standard input is not UTF-8; valid: UTF-8 text") from error


def _editor(history: str | None) -> Callable[[], str]:
    """A function that reads a message from the terminal."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    from tokenswift.models.load import cache_dir

    kept: History = InMemoryHistory()
    if history != "none":
        path = cache_dir() / "chat-history" if history is None else Path(history).expanduser()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))  # nobody else reads it
            kept = FileHistory(str(path))
        except OSError as error:
            logger.warning("lines are not kept: %s (%s)", path, error.strerror or error)
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=kept, key_bindings=keys, prompt_continuation=MORE, include_default_pygments_style=False
    )
    return lambda: session.prompt(PROMPT).encode("utf-8", "replace").decode("utf-8")


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
