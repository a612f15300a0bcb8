"""``tokenswift chat``: a conversation with a model, its commands, and conversations as files.

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
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenswift.checks import LARGEST, check_integer, meant, shown
from tokenswift.cli import options
from tokenswift.cli.declare import KINDS, RARE, add_options, command, option, reader, texts_of
from tokenswift.cli.generate import Text
from tokenswift.cli.output import TextSink, summary
from tokenswift.cli.terminal import Interrupted, Signals, Stages, table
from tokenswift.config import ANSWERS, SamplingParams, sampling_over
from tokenswift.types import InputError, RunError
from tokenswift.words import counted

if TYPE_CHECKING:
    from tokenswift.engine.prefix_cache import Prefixes

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
#: what some other programs, and this one before, call them
ALSO = {"/reset": "/clear", "/regen": "/retry", "/quit": "/exit", "/bye": "/exit", "/?": "/help"}
KEYS = (
    "Enter sends; Ctrl-J (or Alt-Enter) begins a new line. Ctrl-C stops an answer and keeps what was "
    "written. Arrow up brings back earlier messages."
)
#: what options of other commands are here
TEXTS = {
    "max_new_tokens": "tokens of an answer at most, at least 1; default: until the model ends it",
    "seed": "0 or more: the same seed and messages, the same answers; default: a new one each time",
}
#: type of a setting → how its text is read, and its placeholder
READERS = {
    **KINDS,
    "bool": (reader({"on": True, "off": False}.__getitem__, "on, off"), "on"),
    "Length": (reader(lambda text: None if text == "none" else int(text), "an integer, or none"), "N"),
}
#: setting → its type, and what it is
SETTINGS = {one.name: str(one.type) for one in fields(SamplingParams) if one.name != "grammar"}
SETTINGS["max_new_tokens"] = "Length"
WHAT = {**texts_of(SamplingParams), "max_new_tokens": "tokens of an answer at most, at least 1, or none"}
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
    parser = command(subparsers, "chat", run, "talk with a model")
    group = parser.add_argument_group("conversation")
    add_options(group, options.System)
    add_options(group, Text, only=("max_new_tokens",), texts=TEXTS)
    add_options(group, History)
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
    sampling = options.sampling_from(args)
    options.check_model_options(args)
    call = {"strategy": args.strategy, "strategy_options": options.strategy_options_from(args)}
    call["template_options"] = dict(args.template_option) or None
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        chat = _begin(args, sampling, call)
        all(chat.take(line) for line in _piped())  # up to the first that ends the chat
        return 0
    with Signals():
        ask, chat = editor(args.history), _begin(args, sampling, call)
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


def _begin(args: argparse.Namespace, sampling: SamplingParams, call: dict[str, Any]) -> Chat:
    """The chat, once its model is loaded."""
    llm = options.load_model(args)
    options.check_template(llm, "chat")
    call["sampling"] = options.settled_sampling(args, sampling, llm, answered=True)
    if args.seed is None:  # a chat need not begin like the one before
        call["sampling"] = replace(call["sampling"], seed=secrets.randbits(31))
    logger.info("/help lists the commands")
    if args.verbose:
        settings = options.sampling_words(call["sampling"])
        logger.info("%s; --seed %d repeats the answers", settings, call["sampling"].seed)

    from tokenswift.engine.prefix_cache import Prefixes

    telling = (args.quiet, args.raw_output, args.verbose)
    return Chat(llm, args.max_new_tokens, args.system, *telling, Prefixes.beside(llm.target), **call)


# ---- where messages come from ------------------------------------------------------------------------------


def editor(history: str | None) -> Callable[[], str]:
    """What reads a message from the terminal.

    Args:
        history: the file that keeps typed lines, None for the usual one, "none" for none.
    """
    import termios

    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    for names in (("c-j",), ("escape", "enter")):
        keys.add(*names)(lambda event: event.current_buffer.insert_text("\n"))
    session: PromptSession[str] = PromptSession(
        history=_history(history),
        key_bindings=keys,
        prompt_continuation="  ",
        include_default_pygments_style=False,
    )

    def ask() -> str:
        termios.tcflush(sys.stdin, termios.TCIFLUSH)  # what was typed into an answer
        return session.prompt("\n> ").encode("utf-8", "replace").decode("utf-8")

    return ask


def _history(name: str | None) -> Any:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from tokenswift.loader.find import cache_dir

    if name == "none":
        return InMemoryHistory()
    path = cache_dir() / "chat-history" if name is None else Path(name).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))  # nobody else reads it
        return FileHistory(str(path))
    except OSError as error:
        logger.warning("the input history is not saved: %s (%s)", path, error.strerror or error)
        return InMemoryHistory()


def _piped() -> Iterator[str]:
    """The messages of standard input: its lines."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"line {number} of standard input is not UTF-8; valid: UTF-8 text") from error


# ---- the conversation --------------------------------------------------------------------------------------


def dashed(name: str) -> str:
    """A field as it is typed: ``top-p``."""
    return name.replace("_", "-")


def said(value: Any) -> str:
    """A setting as it is typed."""
    if isinstance(value, tuple):
        pairs = [f"{one[0]}={said(one[1])}" if isinstance(one, tuple) else repr(one) for one in value]
        return ",".join(pairs) or "none"
    return {"None": "none", "True": "on", "False": "off"}.get(str(value), str(value).removesuffix(".0"))


class Chat:
    """A conversation.

    Args:
        llm: an ``LLM`` with a chat template.
        most: tokens of an answer at most; None: as `memory.default_length` has it.
        system: the system message, None for the template's own.
        quiet: show no progress.
        raw: let control characters of the answers reach a terminal.
        verbose: tokens a pass behind each answer too.
        prefixes: keeps what was read of the conversation, so that an answer needs to read only what is new.
        sampling: of answers.
        call: strategy of a request.

    Attributes:
        turns: messages and their answers, oldest first.
        system: the system message of this conversation.
        sampling, most: of the next answer.
    """

    def __init__(
        self,
        llm: Any,
        most: int | None,
        system: str | None = None,
        quiet: bool = False,
        raw: bool = False,
        verbose: bool = False,
        prefixes: Prefixes | None = None,
        sampling: SamplingParams | None = None,
        **call: Any,
    ) -> None:
        self._llm, self._quiet, self._raw, self._call = llm, quiet, raw, call
        self._verbose, self._prefixes = verbose, prefixes
        self.sampling, self.most = sampling or SamplingParams(), most
        self.system = self._usual = system
        self._saved: set[Path] = set()
        self.turns: list[tuple[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as chat messages."""
        turns = [
            {"role": role, "content": content}
            for turn in self.turns
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]
        return [*options.system_messages(self.system), *turns]

    def take(self, line: str) -> bool:
        """Do what a line says, a command or a message; False when the chat is to end.

        Raises:
            InputError, RunError: a command or an answer failed; the conversation is as it was before.
            Interrupted: a signal other than Ctrl-C ended the answer.
        """
        text = line.strip()
        found = re.fullmatch(r"(/(?:[a-z]+|\?))(?:\s+(.*))?", text, re.DOTALL)
        if found is None:
            if text:
                self.answer(text)
            return True
        command, rest = ALSO.get(found[1], found[1]), found[2] or ""
        names = [name.partition(" ")[0] for name in COMMANDS]
        if command == "/exit":
            return False
        if command not in names:
            valid = f"{', '.join(COMMANDS)}{meant(command, names)}"
            raise InputError(f"{command} is not a command; valid: {valid}")
        if command in COMMANDS and rest:
            raise InputError(f"{command} is followed by {shown(rest)}; valid: {command} alone")
        if command == "/save" and not rest:
            raise InputError("/save has no file; valid: /save FILE")
        getattr(self, f"do_{command[1:]}")(*([] if command in COMMANDS else [rest]))
        return True

    def answer(self, text: str) -> None:
        """Answer a message; what Ctrl-C left of the answer is kept."""
        from tokenswift.engine.request import Request

        ids = self._encoded([*self.messages, {"role": "user", "content": text}])
        most, cut = self._room(len(ids)), "cut off by the model's positions"
        if most == self.most:
            cut = "cut off by max-new-tokens, see /set"
        sink, answer, stages = TextSink(None, raw=self._raw), "", Stages(self._quiet)
        how = {"sampling": self.sampling, "on_loop": "stop", "on_progress": stages}
        request = Request(ids, most, **how, **self._call)
        with Signals(leave=_leave) as signals:
            try:
                with self._llm.start(request, self._prefixes) as steps:
                    for step in steps:
                        answer += step.text
                        sink.write(step.text)
                        signals.check()
                    ended = summary(steps.result, self._verbose, cut)
            except KeyboardInterrupt:
                if signals.number not in (0, signal.SIGINT):
                    raise
                ended = "stopped"
            finally:
                stages.end()
                sink.close()
        if answer:
            self.turns = [*self.turns, (text, answer)]
        logger.info("(%s)", ended)

    def _encoded(self, messages: list[dict[str, str]]) -> list[int]:
        return self._llm.encode(messages, template_options=self._call.get("template_options"))

    def _room(self, tokens: int) -> int:
        """How long an answer may become behind ``tokens`` tokens."""
        from tokenswift.memory import default_length

        limit, most = self._llm.target.rotary.limit, self.most
        if limit is not None and tokens >= limit:
            raise InputError(
                f"the conversation has {counted(tokens, 'token')}, the model {limit:,} positions; valid: a "
                "shorter message, /undo, /clear, or --rope-scaling yarn"
            )
        if most is None:
            return default_length(self._llm.target, True, tokens)
        return most if limit is None else min(most, limit - tokens)

    # ---- commands

    def do_help(self) -> None:
        """Show the commands."""
        logger.info("%s\n%s", table(COMMANDS.items()), KEYS)

    def do_retry(self) -> None:
        """Answer the last message again, with the next seed."""
        if not self.turns:
            raise InputError("/retry has no answer to replace; valid: after an answer")
        before, self.turns = self.turns, self.turns[:-1]
        seed = self.sampling.seed
        self.sampling = replace(self.sampling, seed=seed + 1 if seed < LARGEST else 0)
        if self.sampling.greedy:
            usual = ANSWERS.temperature
            logger.warning("greedy decoding has one answer; /set temperature %s has more", usual)
        else:
            logger.info("another answer, with seed %d", self.sampling.seed)
        try:
            self.answer(before[-1][0])
        finally:
            if len(self.turns) < len(before):  # there is no other answer
                self.turns = before

    def do_undo(self) -> None:
        """Take the last turn back."""
        if not self.turns:
            raise InputError("/undo has no answer to take back; valid: after an answer")
        self.turns, gone = self.turns[:-1], self.turns[-1]
        left = counted(2 * len(self.turns), "message")
        logger.info("taken back: %s and its answer; %s left", shown(gone[0]), left)

    def do_clear(self) -> None:
        """Begin a new conversation with the same instructions and settings."""
        self.turns, self.system = [], self._usual
        logger.info("a new conversation")

    def do_system(self, text: str) -> None:
        """Set the system message of what follows, or show it.

        Raises:
            InputError: the model's chat template takes none.
        """
        if not text:
            logger.info("%s", self.system or "no system prompt but the chat template's own")
            return
        system = None if text == '""' else text
        self._encoded([*options.system_messages(system), {"role": "user", "content": "?"}])
        self.system = self._usual = system
        done = "the system prompt is set" if system is not None else "no system prompt any longer"
        more = "; the conversation continues (/clear begins a new one)" if self.turns else ""
        logger.info("%s%s", done, more)

    def do_set(self, words: str) -> None:
        """Change a setting of the answers that follow, or show all.

        Raises:
            InputError: naming the setting, its value and what is valid.
        """
        if not words:
            values = {name: getattr(self.sampling, name, self.most) for name in SETTINGS}
            rows = [(dashed(name), said(value), WHAT[name]) for name, value in values.items()]
            logger.info("%s", table(rows))
            return
        given, _, text = words.replace("=", " ", 1).partition(" ")
        name = given.removeprefix("--").replace("-", "_")
        if name not in SETTINGS:
            names = [dashed(name) for name in SETTINGS]
            raise InputError(f"/set {given} is not a setting; valid: {', '.join(names)}{meant(given, names)}")
        read, metavar = READERS[SETTINGS[name]]
        if not text.strip():
            raise InputError(f"/set {given} has no value; valid: /set {given} {metavar}")
        try:
            value = read(text.strip())
            if name != "max_new_tokens":
                self.sampling = sampling_over(self.sampling, {name: value})
            else:
                self.most = None if value is None else check_integer(name, value, 1)
        except (InputError, argparse.ArgumentTypeError) as error:
            raise InputError(f"/set {dashed(name)} {str(error).removeprefix(name).strip()}") from None
        logger.info("%s is %s", dashed(name), said(value))

    def do_save(self, name: str) -> None:
        """Write the conversation to a file, which is replaced only if this chat has made it.

        Raises:
            InputError: there is something else of that name, or it cannot be written.
        """
        path, messages = Path(name).expanduser(), self.messages
        if path.exists() and path.resolve() not in self._saved:
            raise InputError(f"/save {name}: it exists already; valid: a new file")
        if path.suffix == ".json":
            text = json.dumps(messages, ensure_ascii=False, indent=1) + "\n"
        else:
            text = "\n\n".join(f"{m['role']}:\n{m['content']}" for m in messages) + "\n"
        try:
            path.write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"/save {name} cannot be written ({reason}); valid: a writable file") from error
        self._saved.add(path.resolve())
        logger.info("%s written to %s", counted(len(messages), "message"), path)


def _leave(code: int) -> None:
    """A second signal during an answer: one more Ctrl-C says nothing new."""
    if code != 128 + signal.SIGINT:
        os._exit(code)
