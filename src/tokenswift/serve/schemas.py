"""Bodies of requests, and how one is refused.

A body has the fields of OpenAI's interface that mean something here, and our own. Unknown fields
are left out, which the log says; they are refused only where the answer would mean something else
(`WITHOUT`). Types are checked here, ranges where the command line's are, by `config.SamplingParams`
and `engine.request`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field
from starlette.exceptions import HTTPException

from tokenswift.chat import Tools, tools_of
from tokenswift.config import MOST_BIASES, MOST_TEXTS, SamplingParams
from tokenswift.engine.request import Request
from tokenswift.grammar import Grammar
from tokenswift.loader.prompts import Prompt, is_chat
from tokenswift.serve.settings import Settings
from tokenswift.types import LARGEST, InputError, check_choice, shown

LIST = 4096  # messages of a conversation
ITEMS = 32  # of an object of settings
CHARACTERS = 32  # of a prompt for each token that it may have: no language has so many
TOKENS = 1024  # new tokens of a continued text at most, where no number is given
#: fields that are not served, and without which an answer would mean something else
WITHOUT = frozenset(
    "functions function_call conversation prompt suffix audio documents chat_template "
    "truncate_prompt_tokens "
    "allowed_token_ids use_beam_search echo include_stop_str_in_output logprobs top_logprobs "
    "prompt_logprobs "
    "grammar json_schema guided_json guided_regex guided_choice guided_grammar structured_outputs "
    "previous_response_id instructions input messages".split()
)
#: keys of ``tokenswift`` besides settings of the sampling
OWN = ("strategy", "ignore_eos", "on_loop")
SAMPLING = [one.name for one in fields(SamplingParams) if one.name != "greedy"]
#: types of a message's parts → the key of their text
PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
CALL, RESULT, SKIPPED = "function_call", "function_call_output", "reasoning"
_UNION = re.compile(r"str|\w+\[.*\]")  # what pydantic calls the members of a union


class Quick(FailFast):
    """Of a list, the first entry that is wrong is the only one looked at; may stand in a union."""

    __hash__ = object.__hash__  # type: ignore[assignment]


Several = Annotated[list[Any] | None, Field(max_length=MOST_TEXTS)]
Object = Annotated[dict[str, Any] | None, Field(max_length=ITEMS)]
Turns = Annotated[list[dict[str, Any]], Quick(), Field(min_length=1, max_length=LIST)]


# ---- errors --------------------------------------------------------------------------------------


class Refused(HTTPException):
    """A request that is not served.

    Args:
        status: of HTTP.
        message: in one line.
        param: the field that is wrong.
        code: OpenAI's word for it.
        headers: of the reply.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        **headers: str,
    ) -> None:
        super().__init__(status, message, headers)
        kind = "invalid_request_error" if status < 500 else "server_error"
        text = message.encode(errors="backslashreplace").decode()  # names may hold lone surrogates
        #: as OpenAI's clients read it
        self.body = {"error": {"message": text, "type": kind, "param": param, "code": code}}


def wrong_fields(errors: Sequence[Any]) -> Refused:
    """What pydantic found first."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return Refused(400, f"the body is not JSON ({first['ctx']['error']}); valid: a JSON object")
    place = [str(part) for part in first["loc"][1:] if not _UNION.fullmatch(str(part))]
    given = "missing" if first["type"] == "missing" else shown(first["input"])
    valid = first["msg"].removeprefix("Input should be ")
    return Refused(
        400, f"{'.'.join(place) or 'the body'} is {given}; valid: {valid}", next(iter(place), None)
    )


# ---- messages ------------------------------------------------------------------------------------


def plain_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message of OpenAI's interface as `LLM.chat` takes it.

    Args:
        where: its name, such as ``messages[0]``.
    Raises:
        InputError: it holds something else than text.
    """
    kept = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content")
    made = {name: message[name] for name in kept if message.get(name) is not None}
    if made.get("role") == "tool" and message.get("name") is not None:
        made["name"] = message["name"]  # where its call is not in the conversation
    made["content"] = plain_text(message.get("content"), f"{where}.content")
    if made.get("role") == "developer":
        made["role"] = "system"
    if made.get("role") == "assistant":
        made["content"] = made["content"] or message.get("refusal") or ""
        thought = message.get("reasoning_content") or message.get(
            "reasoning"
        )  # the same, of other servers
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
        text = part.get(PARTS.get(kind)) if isinstance(kind, str) else None
        if not isinstance(text, str):
            given = shown(part if kind is None else kind)
            raise InputError(
                f"{where} holds a part of type {given}; valid: text", where.partition("[")[0]
            )
        found.append(text)
    return "".join(found)


def plain_items(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items of a response's input as messages: calls in a row, and a text of the assistant's before
    them, are one message.

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
            raise InputError(
                f"{where}.type is {shown(kind)}; valid: message, {CALL}, {RESULT}", "input"
            )
    return made


# ---- bodies --------------------------------------------------------------------------------------


class Body(BaseModel):
    """What all bodies have in common.

    Attributes:
        kind: of the answer, "chat", "completion" or "response".
        begins: what its id begins with.
        asked: the field that holds the prompt.
        lengths: the fields that say how many new tokens there may be, the best known one last.
    """

    kind: ClassVar[str]
    begins: ClassVar[str]
    asked: ClassVar[str]
    lengths: ClassVar[tuple[str, ...]] = ("max_tokens",)
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
    tokenswift: Object = Field(
        default=None, description="settings of this server alone, see its docs"
    )

    @property
    def own(self) -> dict[str, Any]:
        """Our own settings."""
        return self.tokenswift or {}

    def given(self, name: str) -> Any:
        """The value of a field that not all bodies have; None where this one has none of the name,
        whatever a client has sent."""
        return getattr(self, name) if name in type(self).model_fields else None

    def whole_prompt(self, has_template: bool, before: Sequence[Mapping[str, Any]]) -> Prompt:
        """What is to be answered or gone on from.

        Args:
            has_template: whether the model answers chats.
            before: messages of earlier responses.
        Raises:
            InputError: naming what is wrong.
        """
        raise NotImplementedError

    def tools_asked(self) -> Tools | None:
        """The tools that may be called, without those that OpenAI's servers run; None: none.

        Raises:
            InputError: naming what is wrong with them.
        """
        own = (None, "function")  # others are run by a host
        tools = self.given("tools") or ()
        functions = [
            tool for tool in tools if not isinstance(tool, Mapping) or tool.get("type") in own
        ]
        return tools_of(functions, self.given("tool_choice"), self.given("parallel_tool_calls"))

    def length(self) -> tuple[str, int | None]:
        """The field that says how many tokens there may be, and its value."""
        given = ((name, getattr(self, name)) for name in self.lengths)
        return next((one for one in given if one[1] is not None), (self.lengths[-1], None))

    @property
    def is_bound(self) -> bool:
        """Whether there may be a grammar, of tools or of the text, so that one is to be
        compiled."""
        return "grammar" in self.own or any(map(self.given, ("response_format", "text", "tools")))

    def left_out(self) -> list[str]:
        """The fields that nobody knows, and that ask for something.

        Raises:
            InputError: without one the answer would mean something else.
        """
        found = [name for name, value in (self.model_extra or {}).items() if value]
        for name in found:
            if name in WITHOUT:
                raise InputError(f"{name} is not supported; valid: leave it out", name)
        known = [*OWN, *(name for name in SAMPLING if name not in Body.model_fields)]
        for name in self.own:
            check_choice("tokenswift", name, tuple(known))
        return found

    def template_options(self) -> dict[str, Any]:
        """What the chat template is given besides messages and tools; it takes what it knows."""
        effort = self.given("reasoning_effort") or (self.given("reasoning") or {}).get("effort")
        made = {
            "reasoning_effort": effort,
            "continue_final_message": self.given("continue_final_message"),
        }
        made |= {"enable_thinking": False} if effort == "none" else {}
        made |= self.given("chat_template_kwargs") or {}
        return {name: value for name, value in made.items() if value is not None}

    def request(
        self, llm: Any, settings: Settings, seed: int, before: Sequence[Mapping[str, Any]] = ()
    ) -> Request:
        """The generation that the body asks for.

        Args:
            llm: the ``LLM``.
            seed: where the body names none.
            before: messages of earlier responses.
        Raises:
            InputError: naming the field, its value and what is valid.
        """
        if self.given("n") not in (None, 1):
            raise InputError(f"n is {self.given('n')}; valid: 1, in a request for each text", "n")
        prompt, how = self.whole_prompt(llm.has_chat_template, before), self._arguments(seed)
        limit, tools = llm.target.rotary.limit or LARGEST, self.tools_asked()
        most = min(settings.max_prompt or LARGEST, limit - 1)
        size = len(str(prompt)) + len(str(tools.forms if tools else ""))
        if size > CHARACTERS * most:  # it is not encoded
            room = f"{CHARACTERS * most:,}, for {most:,} tokens"
            raise InputError(f"the prompt is {size:,} characters; valid: up to {room}", self.asked)
        if is_chat(prompt):
            how |= {"name": self.asked, "template_options": self.template_options() or None}
            request, _ = llm.chat_request(prompt, tools, **how)
        else:
            request = llm.request(prompt, llm.encode(prompt), TOKENS, **how)
        size = len(request.prompt)
        if size > most:
            raise InputError(f"the prompt is {size:,} tokens; valid: up to {most:,}", self.asked)
        rest = min(settings.max_tokens, limit - size)
        field, wanted = self.length()
        if wanted is not None and not 1 <= wanted <= rest:
            raise InputError(f"{field} is {wanted}; valid: an integer from 1 to {rest:,}", field)
        return replace(
            request, max_new_tokens=min(request.max_new_tokens, rest) if wanted is None else wanted
        )

    def _arguments(self, seed: int) -> dict[str, Any]:
        """Arguments of a generation, but for its prompt and length."""
        given = {
            name: self.own.get(name, self.given(name))
            for name in (*SAMPLING, "strategy", "on_loop")
        }
        given["seed"] = seed if given["seed"] in (None, -1) else given["seed"]
        if self.top_k == -1:
            given["top_k"] = 0  # as vLLM has it: all tokens
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        given["stop"] = [*filter(None, stop), *([token] for token in self.stop_token_ids or ())]
        given["ignore_eos"] = self.own.get("ignore_eos") or bool(self.ignore_eos)
        form = Grammar.of_format((self.given("text") or {}).get("format"), "text.format")
        given["response_format"] = form or self.response_format
        return {name: value for name, value in given.items() if value is not None}


class Calling(BaseModel):
    """Fields of a body whose answer may call tools."""

    chat_template_kwargs: Object = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class Chat(Body, Calling):
    """The body of ``/v1/chat/completions``."""

    kind: ClassVar[str] = "chat"
    begins: ClassVar[str] = "chatcmpl-"
    asked: ClassVar[str] = "messages"
    lengths: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens")

    messages: Turns
    n: int | None = None
    stream_options: Object = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None

    def whole_prompt(self, has_template: bool, before: Sequence[Mapping[str, Any]]) -> Prompt:
        return [plain_message(message, f"messages[{i}]") for i, message in enumerate(self.messages)]


def _only(prompt: Any) -> Any:
    """The prompt of a list of one, which some clients always send."""
    alone = isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list)
    return prompt[0] if alone else prompt


class Completion(Body):
    """The body of ``/v1/completions``."""

    kind: ClassVar[str] = "completion"
    begins: ClassVar[str] = "cmpl-"
    asked: ClassVar[str] = "prompt"

    prompt: Annotated[str | Annotated[list[int], Quick()], BeforeValidator(_only)]
    n: int | None = None
    stream_options: Object = None
    max_tokens: int | None = None

    def whole_prompt(self, has_template: bool, before: Sequence[Mapping[str, Any]]) -> Prompt:
        return self.prompt


class Responses(Body, Calling):
    """The body of ``/v1/responses``."""

    kind: ClassVar[str] = "response"
    begins: ClassVar[str] = "resp_"
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

    def whole_prompt(self, has_template: bool, before: Sequence[Mapping[str, Any]]) -> Prompt:
        told = (
            [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        )
        if isinstance(self.input, str) and not (told or before or self.tools or has_template):
            return self.input  # as the command line has it: gone on from
        return [*told, *before, *self.conversation()]

    def conversation(self) -> list[dict[str, Any]]:
        """The input as messages.

        Raises:
            InputError: naming what is wrong.
        """
        given = self.input
        return (
            [{"role": "user", "content": given}] if isinstance(given, str) else plain_items(given)
        )
