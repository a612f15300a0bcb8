"""What an answer of a chat holds, and what it is bound to."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tokenswift.chat.answer_grammar import answer_grammar
from tokenswift.chat.argument_parsers import PARSERS
from tokenswift.chat.harmony import HarmonyParser, harmony_grammar
from tokenswift.chat.parser import Delta, Parser
from tokenswift.chat.tools import Tools
from tokenswift.config.sampling import SamplingParams
from tokenswift.grammar import CLOSE, OPEN, Grammar
from tokenswift.loader import chat_template
from tokenswift.loader.abilities import SHORT
from tokenswift.loader.apart import controls_of
from tokenswift.loader.call_forms import HARMONY, PLAIN, Family, family_of
from tokenswift.tokenizer import Tokenizer, backend_of
from tokenswift.types import Generation, InputError

MARK_TOKENS = 16  # at a prompt's end, among which the mark of a thought is


def template_of(tokenizer: object) -> str:
    """The template that a tokenizer has for chats with tools; "" where it has none."""
    template = chat_template.template_of(tokenizer, tools=True)
    return template if isinstance(template, str) else ""


def thought_of(tokenizer: Tokenizer | None, prompt: Sequence[int]) -> str:
    """Where the thought of an answer begins: "may" (the answer may begin with one), "begun" (the
    prompt has), "" (there is none).

    Args:
        tokenizer: of the model; None: it has none.
        prompt: token ids of a chat.
    """
    if tokenizer is None or CLOSE not in template_of(tokenizer):
        return ""
    end = tokenizer.decode(list(prompt[-MARK_TOKENS:]), skip_special_tokens=False).rstrip()
    if end.endswith(OPEN):
        return "begun"
    return "" if end.endswith(CLOSE) else "may"


def special_ids(tokenizer: object) -> dict[str, int]:
    """The special tokens of a tokenizer, with their ids."""
    backend = backend_of(tokenizer)
    added = {} if backend is None else backend.get_added_tokens_decoder()
    return {token.content: key for key, token in added.items() if token.special}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        id: the call's, by which its result names it.
        name: the tool's.
        arguments: a JSON object, as text; cut where the answer was, by its length.
    """

    id: str
    name: str
    arguments: str

    @property
    def form(self) -> dict[str, object]:
        """The call as messages hold it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def call_id(answer: str, index: int) -> str:
    """The id of a call: the same one each time the answer is read. Nine letters and digits, which
    all chat templates take."""
    digest = hashlib.sha256(f"{answer}\0{index}".encode()).digest()
    return base64.b32encode(digest).decode()[:SHORT].lower()


def gathered(deltas: Iterable[Delta], answer: str) -> tuple[str, tuple[ToolCall, ...], str]:
    """The pieces of an answer, put together: its text beside calls, the calls, of which the last
    may be cut, and the thought before.

    Args:
        answer: what tells ids of its calls from those of other answers.
    """
    spoken = {"text": "", "thought": ""}
    calls: list[ToolCall] = []
    for kind, text, index in deltas:
        if kind in spoken:
            spoken[kind] += text
        elif kind == "call":
            calls.append(ToolCall(call_id(answer, index), text, ""))
        elif kind == "arguments":
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + text)
    return spoken["text"], tuple(calls), spoken["thought"]


def message_of(text: str, calls: Sequence[ToolCall], thought: str) -> dict[str, object]:
    """An answer as a message of its conversation."""
    message: dict[str, object] = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [call.form for call in calls]
    return message


@dataclass(frozen=True, slots=True)
class Calls:
    """What an answer may hold beside text: calls of tools, in a family's form, and a thought
    before.

    Attributes:
        tools: what may be called; None: nothing.
        family: the form.
        special: the vocabulary's special tokens, with their ids.
        thought: where it begins, as `thought_of` has it.
    """

    tools: Tools | None = None
    family: Family = PLAIN
    special: Mapping[str, int] = field(default_factory=dict)
    thought: str = ""

    @classmethod
    def of(cls, tools: Tools | None, tokenizer: Tokenizer | None, thought: str = "") -> Calls:
        """In the form of a model."""
        family = family_of(template_of(tokenizer), controls_of(tokenizer))
        return cls(tools, family, special_ids(tokenizer), thought)

    @property
    def has_channels(self) -> bool:
        """Whether an answer's thought and text stand between marks of their own (Harmony)."""
        return self.family is HARMONY

    def parser(self) -> Parser | HarmonyParser:
        """A parser of one answer."""
        if self.family is HARMONY:
            names = [] if self.tools is None else [*self.tools.known]
            return HarmonyParser(names, self.tools is None or self.tools.parallel)
        if self.tools is None:
            return Parser(None, thought=self.thought)
        kind = PARSERS.get(self.family.arguments)
        if kind is not None:
            return kind(self.family, self.tools.schemas, self.tools.parallel, self.thought)
        return Parser(self.family, [*self.tools.known], self.tools.parallel, self.thought)

    def read(self, text: str, answer: str) -> tuple[str, tuple[ToolCall, ...], str]:
        """What a finished answer holds; see `gathered`."""
        parser = self.parser()
        return gathered([*parser.push(text), *parser.finish()], answer)

    def bound(self, sampling: SamplingParams) -> SamplingParams:
        """A sampling under which every call of an answer is valid, and the model may think before
        what it is held to.

        Raises:
            InputError: calls do not go with its grammar.
        """
        grammar = sampling.grammar
        if self.tools is not None:
            if grammar is not None and grammar.kind != "json_schema":
                text = f"a grammar ({grammar.kind}) and tools are given; valid: one of the two"
                raise InputError(text, "tools")
        if self.family is HARMONY:
            grammar = harmony_grammar(self.tools, self.special, grammar)
            return replace(sampling, grammar=grammar)
        if self.tools is not None:
            schema = None if grammar is None else grammar.text
            text = answer_grammar(self.family, self.tools, self.special, schema)
            grammar = Grammar.lark(text)
        if grammar is not None:
            grammar = replace(grammar, thought=self.thought)
        return replace(sampling, grammar=grammar)


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of ``LLM.chat``.

    Attributes:
        text: what the answer says besides its calls.
        tool_calls: its calls, in the order in which they were written.
        generation: the tokens, as they were written, with their figures.
        reasoning: what the model thought before, between ``<think>`` and ``</think>``, or in its
            own channel (gpt-oss).
    """

    text: str
    tool_calls: tuple[ToolCall, ...]
    generation: Generation = field(repr=False)
    reasoning: str = ""

    @property
    def finish_reason(self) -> str:
        """Why it ended: "tool_calls" where it calls and was not cut, else the generation's."""
        reason = self.generation.finish_reason
        return "tool_calls" if self.tool_calls and reason != "length" else reason

    @property
    def message(self) -> dict[str, object]:
        """The answer as a message of the conversation, for the next call of ``LLM.chat``; a result
        follows it as ``{"role": "tool", "tool_call_id": call.id, "content": …}``."""
        return message_of(self.text, self.tool_calls, self.reasoning)
