"""A conversation with a model: its commands, and its answers."""

from __future__ import annotations

import logging
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenswift.checks import meant, shown
from tokenswift.cli import conversation, options, prompting
from tokenswift.cli.keys import QUOTES, Typed, unquoted
from tokenswift.cli.output import TextSink
from tokenswift.cli.progress import Stages
from tokenswift.cli.settings import Settings, dashed, said
from tokenswift.cli.signals import Signals
from tokenswift.cli.tables import folded, table
from tokenswift.config import ANSWERS, SamplingParams
from tokenswift.types import Generation, InputError
from tokenswift.words import counted

if TYPE_CHECKING:
    from tokenswift.engine.prefixes import Prefixes

COMMANDS = {
    "/system TEXT": 'set the system prompt; alone it shows it, and /system "" removes it',
    "/set NAME VALUE": "change the sampling or the length of answers; alone it shows the settings",
    "/retry": "write another answer to the last message, with the next seed",
    "/undo": "remove the last message and its answer",
    "/clear": "begin a new conversation; system prompt and settings stay",
    "/load FILE": "load a conversation that /save wrote to a .json file, and continue it",
    "/save FILE": "save the conversation: as JSON for a name that ends in .json, else as text",
    "/help": "show this list",
    "/exit": "end the chat, as Ctrl-D does",
}
#: what some other programs, and this one before, call them
ALSO = {"/reset": "/clear", "/regen": "/retry", "/quit": "/exit", "/bye": "/exit", "/?": "/help"}
KEYS = (
    f"Enter sends; Ctrl-J (or Alt-Enter) begins a new line, and so does Enter in a message that begins with "
    f"{QUOTES}, up to the {QUOTES} that end it. Ctrl-C stops an answer and keeps what was written. Arrow "
    f"up brings back earlier messages."
)
logger = logging.getLogger("tokenswift")


@dataclass(frozen=True)
class Turn:
    """A message and its answer.

    Attributes:
        how: settings and system message of the answer; None: it was read from a file.
    """

    question: str
    answer: str
    how: tuple[Settings, str | None] | None = None


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
        turns: what was said, oldest first.
        system: the system message of this conversation.
        settings: of the next answer.
        typed: takes what is typed during an answer.
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
        self._verbose = verbose
        self._prefixes = prefixes
        self.typed = Typed()
        self.settings = Settings(sampling or SamplingParams(), most)
        self.system = self._usual = system
        self._begun = (self.settings, system)
        self._saved: set[Path] = set()
        self.turns: list[Turn] = []
        self._unanswered: str | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as chat messages."""
        turns = [
            {"role": role, "content": content}
            for turn in self.turns
            for role, content in (("user", turn.question), ("assistant", turn.answer))
        ]
        return [*prompting.system_messages(self.system), *turns]

    def take(self, line: str) -> bool:
        """Do what a line says, a command or a message; False when the chat is to end.

        Raises:
            InputError, RunError: a command or an answer failed; the conversation is as it was before.
            Interrupted: a signal other than Ctrl-C ended the answer.
        """
        text = line.strip()
        found = re.fullmatch(r"(/(?:[a-z]+|\?))(?:\s+(.*))?", text, re.DOTALL)
        if found is None:
            if text := unquoted(text):
                self.answer(text)
            return True
        command, rest = ALSO.get(found[1], found[1]), found[2] or ""
        does = {
            "/system": self.instruct,
            "/set": self.set,
            "/retry": self.retry,
            "/undo": self.undo,
            "/clear": self.clear,
            "/load": self.load,
            "/save": self.save,
            "/help": _help,
        }
        if command == "/exit":
            return False
        if command not in does:
            names = [name.partition(" ")[0] for name in COMMANDS]
            raise InputError(
                f"{command} is not a command; valid: {', '.join(COMMANDS)}{meant(command, names)}"
            )
        if command != "/system" and "\n" in rest:
            raise InputError(f"{command} is followed by several lines; valid: one, or /system with several")
        does[command](rest)
        return True

    def answer(self, text: str) -> None:
        """Answer a message; what Ctrl-C left of the answer is kept."""
        ids = self._encoded([*self.messages, {"role": "user", "content": text}])
        how = (self.settings, self.system)
        most, sampling = self._room(len(ids)), self.settings.sampling
        sink, answer = TextSink(None, raw=self._raw, wrap=True), ""
        stages = Stages(self._quiet)
        from tokenswift.engine.request import Request

        request = Request(ids, most, sampling=sampling, **self._call, on_loop="stop", on_progress=stages)
        self._unanswered = text
        with Signals(leave=_leave) as signals, self.typed.silent():
            try:
                with self._llm.start(request, self._prefixes) as steps:
                    for step in steps:
                        answer += step.text
                        sink.write(step.text)
                        self.typed.listen()
                        signals.check()
                    ended = figures(steps.result, self.settings.max_new_tokens, self._verbose)
            except KeyboardInterrupt:
                if signals.number not in (0, signal.SIGINT):
                    raise
                ended = "stopped"
            finally:
                stages.end()
                sink.close()
        if answer:
            self.turns.append(Turn(text, answer, how))
            self._unanswered = None
        logger.info("(%s)", ended)

    def _encoded(self, messages: list[dict[str, str]]) -> list[int]:
        return self._llm.encode(messages, template_options=self._call.get("template_options"))

    def retry(self, rest: str = "") -> None:
        """Answer the last message again, with the next seed."""
        _alone("/retry", rest)
        if self._unanswered is None and not self.turns:
            raise InputError("/retry has no message to answer again; valid: after a message")
        before, replaced = self.turns, self._unanswered is None
        question = self._unanswered or self.turns[-1].question
        if replaced:
            self.turns = self.turns[:-1]
        kept = len(self.turns)
        self.settings = self.settings.next_seed()
        if self.settings.sampling.greedy:
            logger.warning(
                "greedy decoding has one answer; /set temperature %s has more", ANSWERS.temperature
            )
        else:
            logger.info("another answer, with seed %d", self.settings.sampling.seed)
        try:
            self.answer(question)
        finally:
            if replaced and len(self.turns) == kept:  # there is no other answer
                self.turns, self._unanswered = before, None

    def undo(self, rest: str = "") -> None:
        """Take the last turn back."""
        _alone("/undo", rest)
        if not self.turns:
            raise InputError("/undo has no answer to take back; valid: after an answer")
        self.turns, gone, self._unanswered = self.turns[:-1], self.turns[-1], None
        left = counted(2 * len(self.turns), "message")
        logger.info("taken back: %s and its answer; %s left", shown(gone.question), left)

    def clear(self, rest: str = "") -> None:
        """Begin a new conversation with the same instructions and settings."""
        _alone("/clear", rest)
        self.turns, self.system, self._unanswered = [], self._usual, None
        logger.info("a new conversation")

    def instruct(self, text: str) -> None:
        """Set the system message of what follows, or show it.

        Raises:
            InputError: the model's chat template takes none.
        """
        if not text:
            logger.info("%s", self.system or "no system prompt but the chat template's own")
            return
        system = (unquoted(text) if text != '""' else "") or None
        self._encoded([*prompting.system_messages(system), {"role": "user", "content": "?"}])
        self.system = self._usual = system
        done = "the system prompt is set" if system is not None else "no system prompt any longer"
        logger.info(
            "%s%s", done, "; the conversation continues (/clear begins a new one)" if self.turns else ""
        )

    def set(self, words: str) -> None:
        """Change a setting of the answers that follow, or show all.

        Raises:
            InputError: naming the setting, its value and what is valid.
        """
        if not words:
            logger.info("%s", table(self.settings.rows()))
            return
        name, self.settings = self.settings.changed(words)
        value = self.settings.values()[name]
        logger.info("%s is %s", dashed(name), said(value))
        options.warn_idle(self.settings.sampling, {name: value}, "")

    def _room(self, tokens: int) -> int:
        """How long an answer may become behind ``tokens`` tokens."""
        limit = self._llm.target.rotary.limit
        if limit is not None and tokens >= limit:
            raise InputError(
                f"the conversation has {counted(tokens, 'token')}, the model {limit:,} positions; valid: a "
                "shorter message, /undo, /clear, or --rope-scaling yarn"
            )
        most = self.settings.max_new_tokens
        if most is None:
            from tokenswift.memory import default_length

            return default_length(self._llm.target, True, tokens)
        return most if limit is None else min(most, limit - tokens)

    def save(self, name: str) -> None:
        """Write the conversation to a file, which is replaced only if this chat has made it.

        Raises:
            InputError: there is something else of that name, or it cannot be written.
        """
        if not name:
            raise InputError("/save has no file; valid: /save FILE")
        path = Path(name).expanduser()
        if path.exists() and path.resolve() not in self._saved:
            raise InputError(f"/save {name}: it exists already; valid: a new file")
        try:
            path.write_text(conversation.text_of(self.messages, path), encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"/save {name} cannot be written ({reason}); valid: a writable file") from error
        self._saved.add(path.resolve())
        again = all(turn.how == self._begun for turn in self.turns)
        seed = f" (--seed {self._begun[0].sampling.seed} repeats them)" if again and self.turns else ""
        logger.info("%s written to %s%s", counted(len(self.messages), "message"), path, seed)

    def load(self, name: str) -> None:
        """Take up a conversation of a file in place of this one.

        Raises:
            InputError: there is no conversation in it, or it is too long for the model; this one stays.
        """
        if not name:
            raise InputError("/load has no file; valid: /load FILE")
        messages = conversation.read(name)
        if messages and messages[-1]["role"] == "assistant":
            self._room(len(self._encoded(messages)))
        first = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        texts = [message["content"] for message in messages if message["role"] != "system"]
        self.system, self._unanswered = first, None
        self.turns = [Turn(*pair) for pair in zip(texts[::2], texts[1::2], strict=True)]
        logger.info("%s read from %s", counted(len(messages), "message"), name)


def _help(rest: str) -> None:
    _alone("/help", rest)
    logger.info("%s\n%s", table(COMMANDS.items()), "\n".join(folded(KEYS)))


def _alone(command: str, rest: str) -> None:
    if rest:
        raise InputError(f"{command} is followed by {shown(rest)}; valid: {command} alone")


def figures(result: Generation, most: int | None, verbose: bool = False) -> str:
    """An answer in figures, and why it ended where that is not its own end."""
    m = result.metrics
    text = f"{counted(len(result.token_ids), 'token')}, {m.tokens_per_second:.0f} tokens/s"
    if verbose:
        text += f", {m.mean_acceptance_length:.2f} tokens a pass"
    if result.finish_reason == "length":
        reached = "max-new-tokens, see /set" if len(result.token_ids) == most else "the model's positions"
        return f"{text}; cut off by {reached}"
    return text + ("; stopped, it began to repeat itself" if result.finish_reason == "loop" else "")


def _leave(code: int) -> None:
    """A second signal during an answer: one more Ctrl-C says nothing new."""
    if code != 128 + signal.SIGINT:
        os._exit(code)
