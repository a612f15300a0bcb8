"""``tokenswift chat``: a conversation with a model, and its commands.

In a terminal lines are edited with prompt_toolkit. Elsewhere each line of standard input is a message, and
nothing but the answers goes to standard output.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenswift.checks import LARGEST, meant, shown
from tokenswift.cli import options
from tokenswift.cli.declare import Parser, add_options, command, dashed
from tokenswift.cli.generate import Text
from tokenswift.cli.output import TextSink, summary
from tokenswift.cli.terminal import Interrupted, Signals, Stages, table
from tokenswift.config import ANSWERS, SamplingParams, sampling_over
from tokenswift.types import InputError, RunError
from tokenswift.words import counted

COMMANDS = {
    "/system TEXT": 'set the system prompt; alone it shows it, and /system "" removes it',
    "/set NAME VALUE": "change the sampling or the length of answers; alone it shows the settings",
    "/retry": "write another answer to the last message, with the next seed",
    "/undo": "remove the last message and its answer",
    "/clear": "begin a new conversation; system prompt and settings stay",
    "/save FILE": "save the conversation: as JSON for a name that ends in .json, else as text",
    "/help": "show this list",
    "/exit": "end the chat, as Ctrl-D does",
}
KEYS = (
    "Enter sends; Ctrl-J (or Alt-Enter) begins a new line. Ctrl-C stops an answer and keeps what was "
    "written. Arrow up brings back earlier messages."
)
#: what options of other commands are here
TEXTS = {
    "max_new_tokens": "tokens of an answer at most, at least 1; default: until the model ends it",
    "seed": "0 or more: the same seed and messages, the same answers; default: a new one each time",
}
ASKING = [{"role": "user", "content": "?"}]
logger = logging.getLogger("tokenswift")


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = command(subparsers, "chat", run, "talk with a model")
    group = parser.add_argument_group("conversation")
    add_options(group, options.System)
    add_options(group, Text, only=("max_new_tokens",), texts=TEXTS)
    options.add_model_options(parser)
    options.add_strategy_options(parser)
    title = "sampling (defaults where the model names no settings of its own)"
    options.add_sampling_options(parser, title, TEXTS, ANSWERS)
    add_options(parser.add_argument_group("verbosity"), options.Shown)


def run(args: argparse.Namespace) -> int:
    """Talk with a model through its chat template; /help lists the commands of the chat. Answers stream to
    standard output. In a terminal, lines can be edited and earlier ones brought back; Ctrl-C stops an answer
    and keeps what there is of it, Ctrl-D ends the chat. Without a terminal, each line of standard input is a
    message."""
    options.sampling_from(args)
    options.check_model_options(args)
    call = {"strategy": args.strategy, "strategy_options": options.strategy_options_from(args)}
    call["template_options"] = dict(args.template_option) or None
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        chat = _begin(args, call)
        all(chat.take(line) for line in _piped())  # up to the first that ends the chat
        return 0
    with Signals():
        ask, chat = editor(), _begin(args, call)
    while True:
        try:
            with Signals():  # a signal raises, so that the terminal is given back as it was
                line = ask()
            if not chat.take(line):
                return 0
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, Interrupted) and interrupt.number != signal.SIGINT:
                raise
            logger.info("Ctrl-D or /exit ends the chat")
        except EOFError:
            return 0
        except (InputError, RunError) as error:  # the conversation is as it was before
            logger.error("error: %s", args.parser.in_words(str(error)))


def _begin(args: argparse.Namespace, call: dict[str, Any]) -> Chat:
    """The chat, once its model is loaded."""
    llm = options.load_model(args)
    options.check_template(llm, "chat")
    sampling = options.sampling_from(args, llm.default_sampling(ASKING))
    if args.seed is None:  # a chat need not begin like the one before
        sampling = replace(sampling, seed=secrets.randbits(31))
    logger.info("/help lists the commands")
    if args.verbose:
        words = options.sampling_words(sampling)
        logger.info("%s; --seed %d repeats the answers", words, sampling.seed)
    return Chat(llm, sampling, args, **call)


# ---- where messages come from ------------------------------------------------------------------------------


def editor() -> Callable[[], str]:
    """What reads a message from the terminal; typed lines are kept in the cache folder for the next chat."""
    import termios

    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    from tokenswift.loader.find import cache_dir

    path, keys = cache_dir() / "chat-history", KeyBindings()
    for names in (("c-j",), ("escape", "enter")):
        keys.add(*names)(lambda event: event.current_buffer.insert_text("\n"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))  # nobody else reads it
        history: Any = FileHistory(str(path))
    except OSError as error:
        logger.warning("the input history is not saved: %s (%s)", path, error.strerror or error)
        history = InMemoryHistory()
    session: PromptSession[str] = PromptSession(history=history, key_bindings=keys, prompt_continuation="  ")

    def ask() -> str:
        termios.tcflush(sys.stdin, termios.TCIFLUSH)  # what was typed into an answer
        return session.prompt("\n> ").encode("utf-8", "replace").decode("utf-8")

    return ask


def _piped() -> Iterator[str]:
    """The messages of standard input: its lines."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"line {number} of standard input is not UTF-8; valid: UTF-8 text") from error


# ---- the conversation --------------------------------------------------------------------------------------


def settings() -> Parser:
    """The parser of a setting: options of the command that hold for each answer."""
    parser = Parser(prog="/set")
    add_options(parser, SamplingParams, options.SAMPLING, unset=True)
    add_options(parser, Text, only=("max_new_tokens",))
    return parser


class Chat:
    """A conversation.

    Args:
        llm: an ``LLM`` with a chat template.
        sampling: of answers.
        args: options of the command: system, max_new_tokens, quiet, verbose.
        call: strategy of a request.

    Attributes:
        turns: messages and their answers, oldest first.
        system: the system message; None for the template's own.
        sampling, most: of the next answer.
    """

    def __init__(self, llm: Any, sampling: SamplingParams, args: argparse.Namespace, **call: Any) -> None:
        from tokenswift.engine.prefix_cache import Prefixes

        self._llm, self._args, self._call = llm, args, call
        self.prefixes = Prefixes.beside(llm.target)  # an answer has to read only what is new
        self.sampling, self.most, self.system = sampling, args.max_new_tokens, args.system
        self._saved: set[Path] = set()
        self.turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as chat messages."""
        return [*options.system_messages(self.system), *self.turns]

    def take(self, line: str) -> bool:
        """Do what a line says, a command or a message; False when the chat is to end.

        Raises:
            InputError, RunError: a command or an answer failed; the conversation is as it was before.
            Interrupted: a signal other than Ctrl-C ended the answer.
        """
        text = line.strip()
        found = re.fullmatch(r"(/[a-z]+)(?:\s+(.*))?", text, re.DOTALL)
        if found is None:
            if text:
                self.answer(text)
            return True
        name, rest = found[1], found[2] or ""
        names = {one.partition(" ")[0]: one for one in COMMANDS}
        if name not in names:
            raise InputError(f"{name} is not a command; valid: {', '.join(COMMANDS)}{meant(name, names)}")
        if bool(rest) and names[name] == name or not rest and name == "/save":
            raise InputError(f"{shown(text)} does not fit; valid: {names[name]}")
        if name != "/exit":
            getattr(self, f"do_{name[1:]}")(rest)
        return name != "/exit"

    def answer(self, text: str) -> None:
        """Answer a message; what Ctrl-C left of the answer is kept."""
        from tokenswift.engine.request import Request

        question = {"role": "user", "content": text}
        ids = self._encoded([*self.messages, question])
        most, cut = self._room(len(ids)), "cut off by max-new-tokens, see /set"
        if most != self.most or most is None:
            cut = "cut off by the model's positions"
        sink, answer, stages = TextSink(None), "", Stages(self._args.quiet)
        how = {"sampling": self.sampling, "on_loop": "stop", "on_progress": stages}
        request = Request(ids, most, **how, **self._call)
        with Signals(leave=_leave) as signals:
            try:
                with self._llm.start(request, self.prefixes) as steps:
                    for step in steps:
                        answer += step.text
                        sink.write(step.text)
                        signals.check()
                    ended = summary(steps.result, self._args.verbose, cut)
            except KeyboardInterrupt:
                if signals.number not in (0, signal.SIGINT):
                    raise
                ended = "stopped"
            finally:
                stages.end()
                sink.close()
        if answer:
            self.turns = [*self.turns, question, {"role": "assistant", "content": answer}]
        logger.info("(%s)", ended)

    def _encoded(self, messages: list[dict[str, str]]) -> list[int]:
        return self._llm.encode(messages, template_options=self._call.get("template_options"))

    def _room(self, tokens: int) -> int | None:
        """How long an answer may become behind ``tokens`` tokens; None: as long as the model has it."""
        limit, most = self._llm.target.rotary.limit, self.most
        if limit is not None and tokens >= limit:
            raise InputError(
                f"the conversation has {counted(tokens, 'token')}, the model {limit:,} positions; valid: a "
                "shorter message, /undo, /clear, or --rope-scaling yarn"
            )
        return most if limit is None or most is None else min(most, limit - tokens)

    # ---- commands

    def do_help(self, _: str) -> None:
        """Show the commands."""
        logger.info("%s\n%s", table(COMMANDS.items()), KEYS)

    def do_retry(self, _: str) -> None:
        """Answer the last message again, with the next seed."""
        before, seed = self.turns, self.sampling.seed
        self.do_undo("")
        self.sampling = replace(self.sampling, seed=(seed + 1) % LARGEST)
        logger.info("another answer, with seed %d", self.sampling.seed)
        try:
            self.answer(before[-2]["content"])
        finally:
            if len(self.turns) < len(before):  # there is no other answer
                self.turns = before

    def do_undo(self, _: str) -> None:
        """Take the last turn back."""
        if not self.turns:
            raise InputError("there is no answer yet; valid: /retry and /undo after an answer")
        self.turns, gone = self.turns[:-2], self.turns[-2]["content"]
        logger.info("taken back: %s and its answer", shown(gone))

    def do_clear(self, _: str) -> None:
        """Begin a new conversation with the same instructions and settings."""
        self.turns = []
        logger.info("a new conversation")

    def do_system(self, text: str) -> None:
        """Set the system message of what follows, or show it.

        Raises:
            InputError: the model's chat template takes none.
        """
        if text:
            system = None if text == '""' else text
            self._encoded([*options.system_messages(system), *ASKING])
            self.system = system
        logger.info("%s", self.system or "no system prompt but the chat template's own")

    def do_set(self, words: str) -> None:
        """Change a setting of the answers that follow, or show all.

        Raises:
            InputError: naming the setting, its value and what is valid.
        """
        if not words:
            values = {name: getattr(self.sampling, name) for name in options.SAMPLING}
            values["max_new_tokens"] = self.most
            logger.info("%s", table([(dashed(name), str(value)) for name, value in values.items()]))
            return
        name, _, value = words.replace("=", " ", 1).partition(" ")
        name = f"--{dashed(name.removeprefix('--'))}"
        args = settings().parse_args([f"{name}={value.strip()}"] if value else [name])
        given = {key: one for key, one in vars(args).items() if one not in (None, False)}
        self.most = given.pop("max_new_tokens", self.most)
        self.sampling = sampling_over(self.sampling, given)
        logger.info(
            "%s", " ".join(f"{dashed(key)} {one}" for key, one in vars(args).items() if one is not None)
        )

    def do_save(self, name: str) -> None:
        """Write the conversation to a file, which is replaced only if this chat has made it.

        Raises:
            InputError: there is something else of that name, or it cannot be written.
        """
        path, messages = Path(name).expanduser(), self.messages
        if path.exists() and path.resolve() not in self._saved:
            raise InputError(f"/save {name}: it exists already; valid: a new file")
        text = "\n\n".join(f"{m['role']}:\n{m['content']}" for m in messages)
        if path.suffix == ".json":
            text = json.dumps(messages, ensure_ascii=False, indent=1)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"/save {name} cannot be written ({reason}); valid: a writable file") from error
        self._saved.add(path.resolve())
        logger.info("%s written to %s", counted(len(messages), "message"), path)


def _leave(code: int) -> None:
    """A second signal during an answer: one more Ctrl-C says nothing new."""
    if code != 128 + signal.SIGINT:
        os._exit(code)
