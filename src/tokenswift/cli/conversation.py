"""The conversation of ``tokenswift chat``, and its commands."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from tokenswift.chat import Calls, message_of
from tokenswift.chat.harmony import HarmonyParser
from tokenswift.chat.messages import checked
from tokenswift.chat.saved import read_messages, write_messages
from tokenswift.checks import counted, meant
from tokenswift.cli.prompts import system_messages
from tokenswift.cli.results import TextSink, summary
from tokenswift.cli.settings import Settings
from tokenswift.cli.signals import Interrupted
from tokenswift.cli.terminal import table
from tokenswift.cli.write import stream
from tokenswift.config.sampling import SamplingParams
from tokenswift.loader.abilities import Turns
from tokenswift.loader.chat_template import template_of
from tokenswift.types import Generation, InputError

if TYPE_CHECKING:
    from tokenswift.engine.llm import LLM

KEYS = """
Enter sends; Ctrl-J (or Alt-Enter) begins a new line; Ctrl-C stops an answer and
keeps what has been written."""
LENGTH_COMMAND = "/set max-new-tokens"
MOST_SHOWN = 60  # characters of a question in a line
logger = logging.getLogger("tokenswift")


class Method(TypedDict):
    """The arguments of a chat's requests that stay the same."""

    strategy: str
    strategy_options: Mapping[str, object]
    template_options: Mapping[str, object] | None


class ChannelSink(TextSink):
    """Writes the thought and the text of an answer that has channels, without their marks."""

    def __init__(self) -> None:
        super().__init__(None)
        self._parser = HarmonyParser()
        self._kind = ""

    def shown(self, text: str) -> str:
        """See :meth:`TextSink.shown`."""
        pieces: list[str] = []
        for delta in self._parser.push(text):
            if delta.kind != self._kind:
                pieces.append("\n\n" if self._kind else "")
                pieces.append("(thinking) " if delta.kind == "thought" else "")
                self._kind = delta.kind
            pieces.append(delta.text)
        return "".join(pieces)


class Chat:
    """A conversation. ``/NAME`` calls the method ``do_NAME``, whose docstring /help shows: what
    follows the name, if anything does, and what the command does.

    Args:
        llm: a model with a chat template.
        sampling: how answers' tokens are chosen.
        args: options of the command: system, max_new_tokens, quiet, verbose.
        method: other arguments of requests.

    Attributes:
        messages: the conversation, oldest first.
        system: the system prompt; None: the template's own.
        settings: what /set changes.
        file: where this conversation was read or written last; /save may write there again.
        prefixes: earlier parts of the conversation, so that an answer's prefill is of new text
            alone.
    """

    def __init__(
        self,
        llm: LLM,
        sampling: SamplingParams,
        args: argparse.Namespace,
        method: Method,
    ) -> None:
        from tokenswift.engine.prefix_cache import PrefixCache

        self._llm = llm
        self._args = args
        self._method = method
        self.settings = Settings(sampling, args.max_new_tokens)
        self.prefixes = PrefixCache.for_model(llm.target)
        self.system: str | None = args.system
        self.messages: Turns = system_turns(self.system)
        self.file: Path | None = None

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
            self.answer([*self.messages, {"role": "user", "content": text}])

    def _do(self, name: str, argument: str) -> None:
        """Do a command."""
        method = getattr(self, f"do_{name}", None)
        if method is None:
            names = self.commands()
            valid = f"{', '.join(names)}{meant(f'/{name}', names)}"
            raise InputError(f"/{name} is not a command; valid: {valid}")
        method(argument)

    def commands(self) -> dict[str, str]:
        """What each command does."""
        return {
            f"/{name[3:]}": str(getattr(self, name).__doc__)
            for name in dir(self)
            if name[:3] == "do_"
        }

    def resume(self, messages: Sequence[object], path: Path, name: str) -> None:
        """Go on with the conversation of a file. The command's own system prompt, if there is one,
        takes the place of the file's.

        Args:
            messages: as the file has them.
            name: what read it, for errors.
        Raises:
            InputError: a message that the model's template does not take.
        """
        template = template_of(self._llm.tokenizer)
        try:
            turns = checked(messages, "messages", template if isinstance(template, str) else "")
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        self.messages = turns
        self.file = path
        if self._args.system is not None:
            self._set_system(self._args.system)
        else:
            self.system = str(turns[0]["content"]) if self._has_system() else None
        logger.info("%s read from %s", counted(len(turns), "message"), path)

    def _has_system(self) -> bool:
        return bool(self.messages) and self.messages[0]["role"] == "system"

    def _set_system(self, system: str | None) -> None:
        rest = self.messages[1:] if self._has_system() else self.messages
        self.system = system
        self.messages = [*system_turns(system), *rest]

    # ---- answers

    def answer(self, messages: Turns) -> None:
        """Answer a conversation that ends with a question; what Ctrl-C left of the answer is
        kept."""
        from tokenswift.engine.request import Request

        request = Request(
            messages,
            self._answer_length(messages),
            sampling=self.settings.sampling,
            on_loop="copies",
            **self._method,
        )
        calls = Calls.of(None, self._llm.tokenizer)
        sink = ChannelSink() if calls.has_channels else TextSink(None)
        answer = ""
        try:
            result = stream(self._llm, request, sink, self._args.quiet, prefixes=self.prefixes)
            note = summary(result, self._args.verbose, LENGTH_COMMAND)
            answer = self._without_loop(result)
            if len(answer) < len(result.text):
                note += "; the conversation keeps one copy"
        except Interrupted as error:
            if error.number != signal.SIGINT:
                raise
            note = "stopped"
            answer = sink.text
        if answer:
            message: dict[str, object] = {"role": "assistant", "content": answer}
            if calls.has_channels:
                message = message_of(*calls.read(answer, ""))
            self.messages = [*messages, message]
        logger.info("(%s)", note)

    def _without_loop(self, result: Generation) -> str:
        """The text of an answer, up to the end of the first copy where it repeats itself: a model
        that reads a loop writes one."""
        loop = result.metrics.loop
        if result.finish_reason != "loop" or loop is None:
            return result.text
        from tokenswift.engine.detokenize import TextStream

        text = TextStream(self._llm.tokenizer)
        pieces = [text.push(token) for token in result.token_ids[: loop.start + loop.size]]
        return os.path.commonprefix(["".join([*pieces, text.finish()]), result.text])

    def _answer_length(self, messages: Turns) -> int | None:
        """New tokens of an answer, at most: fewer than the setting says where the model's positions
        end; None where the setting says nothing."""
        max_new_tokens = self.settings.max_new_tokens
        limit = self._llm.target.rotary.limit
        if limit is None or max_new_tokens is None:
            return max_new_tokens
        options = self._method["template_options"]
        prompt_length = len(self._llm.encode(messages, template_options=options))
        return max(1, min(max_new_tokens, limit - prompt_length))

    def _last_question(self, command: str) -> int:
        """The place of the newest message of the user.

        Raises:
            InputError: there is none.
        """
        for place in reversed(range(len(self.messages))):
            if self.messages[place]["role"] == "user":
                return place
        raise InputError(f"{command} needs a question, and there is none yet; valid: ask one")

    # ---- commands

    def do_clear(self, _: str) -> None:
        """begin a new conversation with the same system prompt"""
        self.messages = system_turns(self.system)
        self.file = None
        logger.info("a new conversation")

    def do_exit(self, _: str) -> None:
        """end the chat, as Ctrl-D does"""
        raise EOFError

    def do_help(self, _: str) -> None:
        """show this list"""
        rows = [usage(name, does) for name, does in self.commands().items()]
        logger.info(f"{table(('command', 'what it does'), rows)}\n{KEYS}")

    def do_load(self, name: str) -> None:
        """FILE: continue the conversation in a file"""
        path = Path(name).expanduser()
        self.resume(read_messages(path, f"/load {name}"), path, f"/load {name}")

    def do_retry(self, _: str) -> None:
        """answer the last question again, with another seed"""
        question = self._last_question("/retry")
        if self.settings.sampling.greedy:
            logger.info("greedy decoding gives the same answer; /set temperature .7 changes that")
        else:
            seed = self.settings.next_seed()
            if self._args.verbose:
                logger.info("seed %s", seed)
        self.answer(self.messages[: question + 1])

    def do_save(self, name: str) -> None:
        """FILE: write the conversation to a new file; alone, to the same"""
        path = Path(name).expanduser() if name else self.file
        if path is None:
            raise InputError("/save cannot be written (no file is named yet); valid: a new file")
        write_messages(path, self.messages, f"/save {path}", is_new=bool(name))
        self.file = path
        logger.info("%s written to %s", counted(len(self.messages), "message"), path)

    def do_set(self, text: str) -> None:
        """temperature .3: change a setting; alone, list all"""
        if text:
            logger.info("%s", self.settings.change(text))
        else:
            logger.info(table(("setting", "value"), self.settings.rows()))

    def do_system(self, text: str) -> None:
        """TEXT: set the system prompt, or none; alone, show it"""
        if text:
            self._set_system(None if text == "none" else text)
        logger.info("system prompt: %s", "the model's own" if self.system is None else self.system)

    def do_undo(self, _: str) -> None:
        """take back the last question and its answer"""
        question = self._last_question("/undo")
        text = str(self.messages[question]["content"])
        self.messages = self.messages[:question]
        logger.info("taken back: %s", text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…")


def usage(name: str, does: str) -> tuple[str, str]:
    """A command with what follows its name, and what it does."""
    argument, _, words = does.rpartition(": ")
    return f"{name} {argument}".rstrip(), words


def system_turns(system: str | None) -> Turns:
    """The messages that stand before a conversation."""
    return [dict(message) for message in system_messages(system)]
