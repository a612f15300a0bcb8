"""Bodies of requests: the fields of OpenAI's interface that mean something here, and our own.

Unknown fields are left out, which the log and a header say; they are refused only where the answer would
mean something else (`WITHOUT`). Types are checked here, ranges where the command line's are, by
`config.SamplingParams` and `engine.request`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, FailFast, Field

from tokenswift.chat.tools import Tools, tools_of
from tokenswift.checks import meant, shown
from tokenswift.config import MOST_BIASES, MOST_TEXTS, SamplingParams
from tokenswift.engine.request import Request
from tokenswift.grammar import Grammar
from tokenswift.loader.prompts import Prompt, is_chat
from tokenswift.serve.settings import Settings
from tokenswift.types import InputError
from tokenswift.words import counted

LIST = 4096  # messages of a conversation
ITEMS = 32  # of an object of settings
CHARACTERS = 32  # of a prompt for each token that it may have: no language has so many
TOKENS = 1024  # new tokens of a continued text at most, where no number is given
#: fields that are not served, and without which an answer would mean something else
WITHOUT = ("functions", "function_call", "conversation", "prompt", "suffix", "audio", "documents")
WITHOUT += ("chat_template", "truncate_prompt_tokens", "allowed_token_ids", "use_beam_search")
WITHOUT += ("include_stop_str_in_output", "echo", "prompt_logprobs", "grammar", "json_schema")
WITHOUT += ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
WITHOUT += ("previous_response_id", "instructions", "input", "messages")
#: keys of ``tokenswift`` besides settings of the sampling
OWN = ("strategy", "ignore_eos", "on_loop", "logprobs_mode", "details")
SAMPLING = [one.name for one in fields(SamplingParams) if one.name not in ("grammar", "greedy")]
#: types of a message's parts → the key of their text
PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
CALL, RESULT, SKIPPED = "function_call", "function_call_output", "reasoning"
#: kinds of vLLM's ``structured_outputs`` → what is made of their values
MADE: dict[str, Callable[[Any], Grammar | None]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.written,
    "json_object": lambda value: Grammar.json_object(),
}


class Quick(FailFast):
    """Of a list, the first entry that is wrong is the only one looked at; may stand in a union."""

    __hash__ = object.__hash__  # type: ignore[assignment]


Ids = Annotated[list[int], Quick()]
Several = Annotated[list[Any] | None, Field(max_length=MOST_TEXTS)]
Object = Annotated[dict[str, Any] | None, Field(max_length=ITEMS)]
Turns = Annotated[list[dict[str, Any]], Quick(), Field(min_length=1, max_length=LIST)]


# ---- messages -------------------------------------------------------------------------------------


def plain_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message of OpenAI's interface as `LLM.chat` takes it.

    Args:
        where: its name, such as ``messages[0]``.
    Raises:
        InputError: it holds something else than text.
    """
    kept = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content")
    made = {name: message[name] for name in kept if message.get(name) is not None}
    made["content"] = plain_text(message.get("content"), f"{where}.content")
    if made.get("role") == "developer":
        made["role"] = "system"
    if made.get("role") == "assistant":
        made["content"] = made["content"] or message.get("refusal") or ""
        thought = message.get("reasoning_content") or message.get("reasoning")  # the same, of other servers
        made |= {"reasoning_content": thought} if thought else {}
    return made


def plain_text(content: Any, where: str) -> Any:
    """The text of a content, or of its parts.

    Raises:
        InputError: a part is no text.
    """
    if not isinstance(content, list):
        return content
    found: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(PARTS[kind]) if kind in PARTS else None
        if not isinstance(text, str):
            given = shown(part if kind is None else kind)
            raise InputError(f"{where} holds a part of type {given}; valid: text", where.partition("[")[0])
        found.append(text)
    return "".join(found)


def plain_items(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items of a response's input as messages: calls in a row, and a text of the assistant's before them, are
    one message.

    Raises:
        InputError: naming what is wrong.
    """
    made: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        where, kind = f"input[{i}]", item.get("type")
        if kind == CALL:
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not (made and made[-1].get("role") == "assistant"):
                made.append({"role": "assistant", "content": ""})
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            made[-1]["tool_calls"] = [*made[-1].get("tool_calls", ()), call]
        elif kind == RESULT:
            text = plain_text(item.get("output"), f"{where}.output")
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind in (None, "message"):
            made.append(plain_message(item, where))
        elif kind != SKIPPED:
            raise InputError(f"{where}.type is {shown(kind)}; valid: message, {CALL}, {RESULT}", "input")
    return made


# ---- bodies ---------------------------------------------------------------------------------------


def _is_hosted(tool: Any) -> bool:
    """Whether a tool is no function but one that OpenAI's servers run, or a form of theirs."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return isinstance(kind, str) and kind != "function"


class Body(BaseModel):
    """What all bodies have in common.

    Attributes:
        asked: the field that holds the prompt.
        lengths: the fields that say how many new tokens there may be, the best known one last.
        is_chat: whether messages are answered.
    """

    asked: ClassVar[str]
    lengths: ClassVar[tuple[str, ...]] = ("max_tokens",)
    is_chat: ClassVar[bool] = True
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, Any] | None, Field(max_length=MOST_BIASES)] = None
    min_tokens: int | None = None
    bad_words: Several = None
    stop: str | Several = None
    stop_token_ids: Annotated[list[int] | None, Quick(), Field(max_length=MOST_TEXTS)] = None
    ignore_eos: bool | None = None
    seed: int | None = None
    response_format: Any = None
    structured_outputs: Object = None
    tokenswift: Object = Field(default=None, description="settings of this server alone, see its docs")

    @property
    def own(self) -> dict[str, Any]:
        """Our own settings."""
        return self.tokenswift or {}

    def given(self, name: str) -> Any:
        """The value of a field that not all bodies have; None where this one has none of the name, whatever a
        client has sent."""
        return getattr(self, name) if name in type(self).model_fields else None

    def prompts(self, has_template: bool, before: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        """What is to be answered or gone on from, one for each text.

        Args:
            has_template: whether the model answers chats.
            before: messages of earlier responses.
        Raises:
            InputError: naming what is wrong.
        """
        raise NotImplementedError

    def tools_asked(self) -> Tools | None:
        """The tools that may be called; None: none.

        Raises:
            InputError: naming what is wrong with them.
        """
        functions = [tool for tool in self.given("tools") or () if not _is_hosted(tool)]
        return tools_of(functions, self.given("tool_choice"), self.given("parallel_tool_calls"))

    def length(self) -> tuple[str, int | None]:
        """The field that says how many tokens there may be, and its value."""
        given = ((name, getattr(self, name)) for name in self.lengths)
        return next((one for one in given if one[1] is not None), (self.lengths[-1], None))

    @property
    def choices(self) -> int:
        """Texts for each prompt."""
        number = self.given("n")
        return 1 if number is None else number

    @property
    def likely(self) -> int | None:
        """How many of the likeliest tokens are told with each token's log-probability; None: neither is."""
        asked, top = self.given("logprobs"), self.given("top_logprobs")
        if asked is None or isinstance(asked, bool):  # of a chat
            return top or 0 if asked or top else None
        return asked

    @property
    def is_bound(self) -> bool:
        """Whether there may be a grammar, of tools or of the text, so that one is to be compiled."""
        return any(map(self.given, ("response_format", "structured_outputs", "text", "tools")))

    def grammar(self) -> tuple[Grammar | None, str]:
        """The grammar that is asked for (None: any text), and the field that asks for it.

        Raises:
            InputError: naming the field; several are given, or one cannot be read.
        """
        outputs, found = self.structured_outputs or {}, list[tuple[Grammar, str]]()
        if outputs and not outputs.keys() & MADE.keys():
            given = f"structured_outputs holds {shown(next(iter(outputs)))}"
            raise InputError(f"{given}; valid: {', '.join(MADE)}", "structured_outputs")
        asked = [("structured_outputs", MADE[kind], value) for kind, value in outputs.items() if kind in MADE]
        asked.append(("response_format", Grammar.of_format, self.response_format))
        of_text = partial(Grammar.of_format, name="text.format")
        asked.append(("text", of_text, (self.given("text") or {}).get("format")))
        for field, make, value in asked:
            try:
                made = None if value in (None, False) else make(value)
            except InputError as error:
                raise InputError(str(error), field) from error
            found += [] if made is None else [(made, field)]
        if len(found) > 1:
            names = " and ".join(field for _, field in found)
            raise InputError(f"grammars are given by {names}; valid: one of them", found[1][1])
        return found[0] if found else (None, "tools")

    def check_served(self) -> None:
        """Refuse what would change the answer and cannot be served."""
        for name in self._unknown():
            if name in WITHOUT:
                raise InputError(f"{name} is not supported; valid: leave it out", name)
        known = [*OWN, *(name for name in SAMPLING if name not in Body.model_fields)]
        for name in self.own:
            if name not in known:
                given = f"tokenswift.{name[:80]} is not a setting of this server"
                raise InputError(f"{given}; valid: {', '.join(known)}{meant(name, known)}", "tokenswift")

    def template_options(self) -> dict[str, Any]:
        """What the chat template is given besides messages and tools; it takes what it knows."""
        effort = self.given("reasoning_effort") or (self.given("reasoning") or {}).get("effort")
        made = {"reasoning_effort": effort, "continue_final_message": self.given("continue_final_message")}
        made |= {"enable_thinking": False} if effort == "none" else {}
        made |= self.given("chat_template_kwargs") or {}
        return {name: value for name, value in made.items() if value is not None}

    def left_out(self) -> list[str]:
        """What was asked for and is not served, and without which the answer means the same."""
        found = self._unknown()
        for i, tool in enumerate(self.given("tools") or ()):
            found += [f"tools[{i}] ({tool['type']})"] if _is_hosted(tool) else []
        return found + [f"text.{name}" for name in self.given("text") or () if name != "format"]

    def _unknown(self) -> list[str]:
        """The fields that nobody knows and that ask for something."""
        return [name for name, value in (self.model_extra or {}).items() if value]

    def requests(
        self, llm: Any, settings: Settings, seed: int, before: Sequence[Mapping[str, Any]] = ()
    ) -> list[Request]:
        """The generations that the body asks for.

        Args:
            llm: the ``LLM``.
            seed: of the first of ``n`` texts, where the body names none.
            before: messages of earlier responses.
        Raises:
            InputError: naming the field, its value and what is valid.
        """
        prompts, (grammar, field) = self.prompts(llm.has_chat_template, before), self.grammar()
        if not 1 <= self.choices * len(prompts) <= settings.max_choices:
            given = f"n is {self.choices}, for {counted(len(prompts), 'prompt')}"
            name = "n" if self.choices != 1 else self.asked
            raise InputError(f"{given}; valid: 1 to {settings.max_choices} in all", name)
        made: list[Request] = []
        for prompt in prompts:
            request = self._request(
                llm, settings, prompt, {**self._arguments(seed), "response_format": grammar}
            )
            sampling = request.sampling
            if sampling.grammar is not None:
                try:
                    llm.resources.grammars.masks(sampling.grammar, 0)  # compiled, or refused
                except InputError as error:
                    raise InputError(str(error), field) from error
            seeds = range(sampling.seed, sampling.seed + self.choices)
            made += [replace(request, sampling=replace(sampling, seed=each)) for each in seeds]
        return made

    def _request(self, llm: Any, settings: Settings, prompt: Prompt, how: dict[str, Any]) -> Request:
        """The request of a prompt; one that is far too long is refused before it is encoded."""
        limit, tools = llm.target.rotary.limit, self.tools_asked()
        most = min((size for size in (settings.max_prompt, limit and limit - 1) if size), default=None)
        size = len(str(prompt)) + (0 if tools is None else len(str(tools.forms)))
        if most is not None and size > CHARACTERS * most:
            room = f"{CHARACTERS * most:,}, for {most:,} tokens"
            raise InputError(f"the prompt is {size:,} characters; valid: up to {room}", self.asked)
        if is_chat(prompt):
            how |= {"name": self.asked, "template_options": self.template_options() or None}
            request, _ = llm.chat_request(prompt, tools, **how)
        else:
            request = replace(llm.request(prompt, llm.encode(prompt), **how), max_new_tokens=TOKENS)
        size = len(request.prompt)
        if most is not None and size > most:
            raise InputError(f"the prompt is {size:,} tokens; valid: up to {most:,}", self.asked)
        rest = settings.max_tokens if limit is None else min(settings.max_tokens, limit - size)
        field, wanted = self.length()
        if wanted not in (None, -1) and not 1 <= wanted <= rest:
            raise InputError(f"{field} is {wanted}; valid: an integer from 1 to {rest:,}", field)
        new = min(request.max_new_tokens, rest) if wanted is None else rest if wanted == -1 else wanted
        return replace(request, max_new_tokens=new)

    def _arguments(self, seed: int) -> dict[str, Any]:
        """Arguments of a generation, but for its prompt and length."""
        given = {name: self.own.get(name, self.given(name)) for name in SAMPLING}
        given["seed"] = seed if given["seed"] in (None, -1) else given["seed"]
        if self.top_k == -1:
            given["top_k"] = 0  # as vLLM has it: all tokens
        if self.top_p == 0:  # the likeliest token alone
            given |= {"top_p": None, "temperature": 0}
        given |= {name: self.own.get(name) for name in ("strategy", "on_loop", "logprobs_mode")}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        given["stop"] = [*filter(None, stop), *([token] for token in self.stop_token_ids or ())]
        given["ignore_eos"] = self.own.get("ignore_eos") or bool(self.ignore_eos)
        given["logprobs"] = self.likely
        return {name: value for name, value in given.items() if value is not None}

    def in_own_words(self, error: InputError) -> InputError:
        """An error of the engine, with the names of fields that a client can set."""
        names = {"prompt": self.asked, "template_options": "chat_template_kwargs"}
        names |= {name: f"tokenswift.{name}" for name in self.own} | {"max_new_tokens": self.length()[0]}
        text, first = str(error), re.match(r"\w*", str(error))[0]  # type: ignore[index]
        text = names.get(first, first) + text.removeprefix(first)
        field = names.get(error.field or first, error.field or self.asked)
        return InputError(text.replace("max_new_tokens", names["max_new_tokens"]), field.partition(".")[0])


class Calling(BaseModel):
    """Fields of a body whose answer may call tools."""

    chat_template_kwargs: Object = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class Chat(Body, Calling):
    """The body of ``/v1/chat/completions``."""

    asked: ClassVar[str] = "messages"
    lengths: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens")

    messages: Turns
    n: int | None = None
    stream_options: Object = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def prompts(self, has_template: bool, before: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        return [[plain_message(message, f"messages[{i}]") for i, message in enumerate(self.messages)]]


class Completion(Body):
    """The body of ``/v1/completions``."""

    asked: ClassVar[str] = "prompt"
    is_chat: ClassVar[bool] = False

    prompt: str | Ids | Annotated[list[str], Quick()] | Annotated[list[Ids], Quick()]
    n: int | None = None
    stream_options: Object = None
    max_tokens: int | None = None
    logprobs: int | None = None

    def prompts(self, has_template: bool, before: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        prompt: Any = self.prompt
        several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
        return prompt if several else [prompt]


class Responses(Body, Calling):
    """The body of ``/v1/responses``."""

    asked: ClassVar[str] = "input"
    lengths: ClassVar[tuple[str, ...]] = ("max_output_tokens",)

    input: str | Turns
    instructions: str | None = None
    reasoning: Object = None
    text: Object = None
    max_output_tokens: int | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: Object = None
    previous_response_id: str | None = None

    def prompts(self, has_template: bool, before: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        told = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str) and not (told or before or self.tools or has_template):
            return [self.input]  # as the command line has it: gone on from
        return [[*told, *before, *self.conversation()]]

    def conversation(self) -> list[dict[str, Any]]:
        """The input as messages.

        Raises:
            InputError: naming what is wrong.
        """
        given = self.input
        return [{"role": "user", "content": given}] if isinstance(given, str) else plain_items(given)


#: kind of an answer → its body, and how its ids begin
KINDS: dict[str, tuple[type[Body], str]] = {
    "chat": (Chat, "chatcmpl-"),
    "completion": (Completion, "cmpl-"),
    "response": (Responses, "resp_"),
}
