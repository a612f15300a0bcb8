"""Bodies of requests: the fields of OpenAI's interface that mean something here, and our own.

A field that asks for nothing is taken in silence. One that cannot be served is left out, which the log and
a header say; it is refused only where the answer would mean something else (`WITHOUT`). Lengths are bounded
here, before entries are looked at; ranges where the command line's are, by `config.SamplingParams` and
`engine.request`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field
from pydantic_core import PydanticCustomError

from tokenswift.chat.calls import calls_of
from tokenswift.chat.families import effort_options, thought_of
from tokenswift.chat.tools import Tools, tools_of
from tokenswift.checks import shown
from tokenswift.config import (
    MOST_BIASES,
    MOST_TEXTS,
    OPTIONS,
    SamplingParams,
    build_options,
    sampling_over,
    tree_nodes,
)  # fmt: skip
from tokenswift.engine.chat import bound, encoded
from tokenswift.engine.journal import asked_of
from tokenswift.engine.request import MOST_LOGPROBS, Request
from tokenswift.grammar import Grammar
from tokenswift.loader.prompts import Prompt, is_chat
from tokenswift.memory import default_length
from tokenswift.serve.errors import CLOSED, in_words_of
from tokenswift.serve.settings import Settings
from tokenswift.spec.drafters.lookup import LENGTH
from tokenswift.types import InputError
from tokenswift.words import counted

LIST = 4096  # messages, and parts of one
ITEMS = 32  # of an object of settings
CHARACTERS = 32  # of a prompt for each token that it may have: no language has so many
NODES = 256  # of a fixed tree: a larger one makes every other client wait
PASSES = 64  # of a draft model in a step, for the same reason
TOKENS = 1024  # new tokens of a continued text at most, where no number is given
#: fields that are not served, and without which an answer would mean something else
WITHOUT = ("functions", "function_call", "conversation", "prompt", "suffix", "audio", "modalities")
WITHOUT += ("documents", "chat_template", "truncate_prompt_tokens")
WITHOUT += ("allowed_token_ids", "use_beam_search", "include_stop_str_in_output", "echo")
WITHOUT += ("grammar", "json_schema", "previous_response_id", "instructions", "input", "messages")
#: values that ask for nothing, beside null, false, 0, "", [] and {}
NOTHING: dict[str, tuple[Any, ...]] = {"modalities": (["text"],), "function_call": ("none", "auto")}
NOTHING |= dict.fromkeys(("best_of", "length_penalty", "typical_p", "tfs_z"), (1,))
#: fields that no text depends on
NO_MATTER = {"user", "metadata", "store", "service_tier", "safety_identifier", "prediction", "truncation"}
NO_MATTER |= {"prompt_cache_key", "prompt_cache_retention", "cache_prompt", "client_metadata", "request_id"}
NO_MATTER |= {"chat_id", "session_id", "skip_special_tokens", "spaces_between_special_tokens"}
NO_MATTER |= {"add_generation_prompt", "include_reasoning", "stream_options"}


class Quick(FailFast):
    """Of a list, the first entry that is wrong is the only one looked at; may stand in a union."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def _upto(most: int) -> BeforeValidator:
    """A validator of how many entries there are, which goes before one of what they are: in millions of
    entries each would be an error."""

    def check(value: Any) -> Any:
        if isinstance(value, list | Mapping) and len(value) > most:
            raise PydanticCustomError("too_many", "up to {most}", {"most": most})
        return value

    return BeforeValidator(check)


def _whole(value: Any) -> Any:
    """An integer that is written as a float is one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _texts(stop: Any) -> Any:
    """Stop texts without empty ones, which end nothing."""
    texts = [stop] if isinstance(stop, str) else stop
    return [text for text in texts if text != ""] or None if isinstance(texts, list) else stop


Whole = Annotated[int, BeforeValidator(_whole)]
Seed = Annotated[Whole | None, BeforeValidator(lambda value: None if value == -1 else value)]
Likely = Annotated[Whole | None, Field(ge=0, le=MOST_LOGPROBS)]
Stop = Annotated[str, Field(max_length=256)]
Stops = Annotated[list[Stop] | None, BeforeValidator(_texts), _upto(16)]
Texts = Annotated[list[str] | None, _upto(MOST_TEXTS)]
Object = Annotated[dict[str, Any] | None, _upto(ITEMS)]
Labels = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]
Ids = Annotated[list[int], Quick()]

CALL, RESULT, SKIPPED = "function_call", "function_call_output", "reasoning"
ITEM_TYPES = (None, "message", CALL, RESULT, SKIPPED)


# ---- messages -------------------------------------------------------------------------------------


class Piece(BaseModel):
    """A part of a message."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def said(self) -> str | None:
        """Its text; None: it holds something else."""
        if self.type == "refusal":
            return self.refusal
        return self.text if self.type in ("text", "input_text", "output_text") else None


Content = Annotated[str | Annotated[list[Piece], Quick()] | None, _upto(LIST)]


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"] | None = None
    content: Content = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, of other servers
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None

    def plain(self, where: str) -> dict[str, Any]:
        """The message as `chat` takes it.

        Args:
            where: its name, such as ``messages[0]``.
        Raises:
            InputError: it has no role, or holds something else than text, or nothing (what only an
                assistant may say).
        """
        if self.role is None:
            valid = "system, developer, user, assistant, tool"
            raise InputError(f"{where}.role is missing; valid: {valid}", where.partition("[")[0])
        nothing = (self.refusal or "") if self.role == "assistant" else None
        content = nothing if self.content is None else self.content
        text = plain_text(content, f"{where}.content", self.tool_calls)
        made: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            made["tool_calls"] = self.tool_calls
        if self.role == "assistant" and (thought := self.reasoning_content or self.reasoning):
            made["reasoning_content"] = thought
        if self.role == "tool":
            made["tool_call_id"] = self.tool_call_id
        return made


class Item(Message):
    """One item of a response's input: a message, a call, or what came of it."""

    type: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content = None


def plain_text(content: str | list[Piece] | None, where: str, calls: Any = None) -> str:
    """The text of a content.

    Args:
        where: its name.
        calls: with them there may be none.
    Raises:
        InputError: it holds something else than text, or nothing.
    """
    if content is None and not calls:
        raise InputError(f"{where} is missing; valid: text", where.partition("[")[0])
    if not isinstance(content, list):
        return content or ""
    for piece in content:
        if piece.said is None:
            given = f"{where} holds a part of type {shown(piece.type)}"
            raise InputError(f"{given}; valid: text", where.partition("[")[0])
    return "".join(piece.said or "" for piece in content)


def plain_items(items: Sequence[Item], name: str = "input") -> list[dict[str, Any]]:
    """Items as messages: calls in a row, and a text of the assistant's before them, are one message.

    Raises:
        InputError: naming what is wrong.
    """
    made: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        where = f"{name}[{i}]"
        if item.type not in ITEM_TYPES:
            valid = f"message, {CALL}, {RESULT}"
            raise InputError(f"{where}.type is {shown(item.type)}; valid: {valid}", name)
        if item.type == CALL:
            function = {"name": item.name, "arguments": item.arguments}
            if not (made and made[-1]["role"] == "assistant"):
                made.append({"role": "assistant", "content": ""})
            call = {"id": item.call_id, "type": "function", "function": function}
            made[-1]["tool_calls"] = [*made[-1].get("tool_calls", ()), call]
        elif item.type == RESULT:
            text = plain_text(item.output, f"{where}.output")
            made.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        elif item.type != SKIPPED:
            made.append(item.plain(where))
    return made


# ---- what a text has to be like -------------------------------------------------------------------


class Structure(BaseModel):
    """vLLM's ``structured_outputs``."""

    model_config = ConfigDict(extra="allow", strict=True)

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Quick()] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def _of_format(name: str) -> Callable[[Any], Grammar | None]:
    def made(value: Any) -> Grammar | None:
        known = value if isinstance(value, Mapping) else {}
        if known.get("type") in ("text", "json_object") and sum(v is not None for v in known.values()) > 1:
            given = f"{name} of type {known['type']} holds more than its type"
            raise InputError(f"{given}; valid: the type alone, or type json_schema")
        return Grammar.of_format(value, name)

    return made


#: kinds of structured outputs → what is made of their values
MADE: dict[str, Callable[[Any], Grammar | None]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.written,
    "json_object": lambda value: Grammar.json_object() if value else None,
}


class Formed(BaseModel):
    """The fields of a body that say what the text has to be like: OpenAI's ``response_format`` and
    ``text.format``, and vLLM's ``structured_outputs`` and ``guided_*``."""

    response_format: Annotated[Any, _upto(ITEMS)] = None
    text: Object = None
    structured_outputs: Annotated[Structure | None, _upto(ITEMS)] = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Quick()] | None = None
    guided_grammar: str | None = None

    @property
    def is_bound(self) -> bool:
        """Whether there may be a grammar, of tools or of the text, so that one is to be compiled."""
        names = (*Formed.model_fields, "tools")
        return any(getattr(self, name, None) is not None for name in names)

    def grammar(self) -> tuple[Grammar | None, str]:
        """The grammar that is asked for (None: any text), and the field that asks for it.

        Raises:
            InputError: naming the field; several are given, or one cannot be read.
        """
        outputs, found = self.structured_outputs, dict[str, Grammar]()
        asked = [(f"guided_{kind}", MADE[kind], getattr(self, f"guided_{kind}")) for kind in list(MADE)[:4]]
        for kind, value in outputs.model_dump(by_alias=True).items() if outputs else ():
            if kind in MADE:
                asked.append((f"structured_outputs.{kind}", MADE[kind], value))
        asked.append(("response_format", _of_format("response_format"), self.response_format))
        asked.append(("text.format", _of_format("text.format"), (self.text or {}).get("format")))
        for name, make, value in asked:
            try:
                made = None if value is None else make(value)
            except InputError as error:
                said = "" if name in str(error) else f"{name}: "
                raise InputError(f"{said}{error}", name.partition(".")[0]) from error
            found |= {} if made is None else {name: made}
        if len(found) > 1:
            raise InputError(f"{' and '.join(found)} are given; valid: one of them", list(found)[1])
        return next(((made, name.partition(".")[0]) for name, made in found.items()), (None, "tools"))


# ---- bodies ---------------------------------------------------------------------------------------


class Own(BaseModel):
    """The key ``tokenswift`` of a request: what OpenAI's interface has no word for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    strategy: str = Field(default="auto", description="how to draft; never changes the text")
    strategy_options: Annotated[dict[str, Any], _upto(ITEMS)] = Field(
        default_factory=dict, description="options of the strategy"
    )
    ignore_eos: bool = Field(default=False, description="go on after an end-of-text token")
    on_loop: str = Field(default="report", description="report, or stop where the text repeats itself")
    eta_cutoff: float | None = None
    penalty_window: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_range: int | None = None
    dry_breakers: Texts = None
    logprobs_mode: str = Field(
        default="processed_logprobs", description="raw_logprobs: those of new tokens are the model's own"
    )
    details: bool = Field(
        default=False, description="with each piece of text: who drafted it, and the steps' times"
    )

    def options(self) -> Any:
        """The options of the strategy, with as few nodes and passes a step as there have to be beside other
        clients' texts.

        Raises:
            InputError: naming what is wrong.
        """
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in self.strategy_options.items()}
        if self.strategy not in OPTIONS:
            return given  # `Request` says so
        try:
            made: Any = build_options(OPTIONS[self.strategy], self.strategy, given)
        except InputError as error:
            text = str(error)
            text = text.replace("'", "", 2) if text.startswith("'") else text  # of a name that is unknown
            raise InputError(f"tokenswift.strategy_options.{text}", "tokenswift") from error
        if self.strategy in ("tokenswift", "medusa"):
            nodes = tree_nodes(made.tree) + LENGTH * (getattr(made, "ngrams", None) or 0)
            if nodes > NODES:
                given = f"tokenswift.strategy_options asks for a tree of {nodes:,} nodes"
                raise InputError(f"{given}; valid here: up to {NODES}", "tokenswift")
        if self.strategy == "triforce" and (passes := made.gamma * made.inner_gamma) > PASSES:
            given = f"tokenswift.strategy_options.gamma times inner_gamma is {passes:,}"
            raise InputError(f"{given}; valid here: up to {PASSES}", "tokenswift")
        return made


class StreamOptions(BaseModel):
    """Of a stream."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI's padding: there is none
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, the tokens so far in every chunk


def _is_hosted(tool: Any) -> bool:
    """Whether a tool is no function but one that OpenAI's servers run, or a form of theirs."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return isinstance(kind, str) and kind != "function"


class Body(Formed):
    """What all bodies have in common.

    Attributes:
        asked: the field that holds the prompt.
        lengths: the fields that say how many new tokens there may be, the best known one last.
        is_chat: whether messages are answered.
    """

    asked: ClassVar[str]
    lengths: ClassVar[tuple[str, ...]] = ("max_tokens",)
    is_chat: ClassVar[bool] = True
    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: Whole | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, _upto(MOST_BIASES)] = None
    min_tokens: Whole | None = None
    bad_words: Texts = None
    stop_token_ids: Annotated[list[int] | None, _upto(MOST_TEXTS)] = None
    ignore_eos: bool | None = None
    seed: Seed = None
    stop: Stops = None
    tokenswift: Annotated[Own | None, _upto(ITEMS)] = None

    @property
    def own(self) -> Own:
        """Our own settings."""
        return self.tokenswift or Own()

    def given(self, name: str) -> Any:
        """The value of a field that not all bodies have; None where this one has none of the name, whatever a
        client has sent."""
        return getattr(self, name) if name in type(self).model_fields else None

    def prompts(self, has_template: bool, before: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        """What is to be answered or gone on from, one for each text.

        Args:
            has_template: whether the model answers chats.
            before: messages of earlier responses.
        """
        raise NotImplementedError

    def tools_asked(self) -> Tools | None:
        """The tools that may be called; None: none.

        Raises:
            InputError: naming what is wrong with them.
        """
        functions = [tool for tool in self.given("tools") or () if not _is_hosted(tool)]
        choice = self.given("tool_choice")
        return tools_of(functions, choice, self.given("parallel_tool_calls"))

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
        return None

    @property
    def prompt_likely(self) -> int | None:
        """The same for each token of the prompt."""
        return self.given("prompt_logprobs")

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    def check_served(self) -> None:
        """Refuse what would change the answer and cannot be served."""
        if self.stream and self.given("prompt_logprobs") is not None:
            valid = "stream false, or echo with logprobs"
            raise InputError(f"prompt_logprobs cannot be streamed; valid: {valid}", "prompt_logprobs")
        for name in self._unserved():
            if name in WITHOUT:
                raise InputError(f"{name} is not supported; valid: leave it out", name)
        if self.structured_outputs and (self.structured_outputs.model_extra or {}).get("structural_tag"):
            given = "structured_outputs.structural_tag is not served"
            raise InputError(f"{given}; valid: {', '.join(MADE)}", "structured_outputs")
        for name in CLOSED:
            if name in self.own.strategy_options:
                given = f"tokenswift.strategy_options.{name} is not an option of a server"
                raise InputError(given, "tokenswift")

    def template_options(self, tokenizer: Any) -> dict[str, Any]:
        """What the chat template is given besides messages and tools, as far as it reads it."""
        asked = self.given("reasoning") or {}
        made = effort_options(self.given("reasoning_effort") or asked.get("effort"), tokenizer)
        made |= self.given("chat_template_kwargs") or {}
        goes_on = self.given("continue_final_message")
        return made if goes_on is None else {**made, "continue_final_message": goes_on}

    def left_out(self) -> list[str]:
        """What was asked for and is not served, and without which the answer means the same."""
        found = self._unserved()
        for i, tool in enumerate(self.given("tools") or ()):
            found += [f"tools[{i}] ({tool['type']})"] if _is_hosted(tool) else []
        for name in ("stream_options", "structured_outputs"):
            inner = self.given(name)
            found += [f"{name}.{key}" for key in (inner and inner.model_extra) or ()]
        return found + [f"text.{name}" for name in self.text or () if name != "format"]

    def _unserved(self) -> list[str]:
        """The fields that nobody knows and that ask for something."""
        extra = self.model_extra or {}
        return [
            name for name, value in extra.items()
            if value and name not in NO_MATTER and value not in NOTHING.get(name, ())
        ]  # fmt: skip

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
        tools, codec, limit, own = self.tools_asked(), llm.source.codec, llm.target.rotary.limit, self.own
        self._check(llm, settings)
        prompts = self.prompts(llm.has_chat_template, before)
        if not 1 <= self.choices * len(prompts) <= settings.max_choices:
            given = f"n is {self.choices}, for {counted(len(prompts), 'prompt')}"
            name = "n" if self.choices != 1 else self.asked
            raise InputError(f"{given}; valid: 1 to {settings.max_choices} in all", name)
        longest = min((size for size in (settings.max_prompt, limit and limit - 1) if size), default=None)
        for prompt in prompts:
            self._check_size(prompt, longest, tools)
        template, options = self.template_options(codec), own.options()
        made: list[Request] = []
        for prompt in prompts:
            ids = encoded(llm, prompt, tools, self.asked, template)
            if longest is not None and len(ids) > longest:
                raise InputError(f"the prompt is {len(ids):,} tokens; valid: up to {longest:,}", self.asked)
            sampling = self._sampling(llm, prompt, ids, tools, seed)
            request = Request(
                ids,
                self._new_tokens(llm, settings.max_tokens, len(ids), is_chat(prompt)),
                own.strategy,
                options,
                sampling,
                ignore_eos=own.ignore_eos or bool(self.ignore_eos),
                stop=(*(self.stop or ()), *((token,) for token in self.stop_token_ids or ())),
                on_loop=own.on_loop,
                logprobs=self.likely,
                logprobs_mode=own.logprobs_mode,
                prompt_logprobs=self.prompt_likely,
                asked=asked_of(prompt, tools, template),
            )
            for index in range(self.choices):
                made.append(replace(request, sampling=replace(sampling, seed=sampling.seed + index)))
        return made

    def _check(self, llm: Any, settings: Settings) -> None:
        """See that numbers are within the server's limits and the model's."""
        field, wanted = self.length()
        least = 0 if self.echoes else 1
        if wanted not in (None, -1) and not least <= wanted <= settings.max_tokens:
            more = ", or 0 with echo" if least and self.asked == "prompt" else ""
            valid = f"an integer from {least} to {settings.max_tokens:,}{more}"
            raise InputError(f"{field} is {wanted}; valid: {valid}", field)
        size = llm.target.vocab_size
        for token in self.stop_token_ids or ():
            if not 0 <= token < size:
                valid = f"0 to {size - 1}, the model's vocabulary"
                raise InputError(f"stop_token_ids holds {token}; valid: {valid}", "stop_token_ids")

    def _check_size(self, prompt: Any, most: int | None, tools: Tools | None) -> None:
        """See that a prompt can have as few tokens as it may, before it is encoded."""
        if most is None:
            return
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            if len(prompt) > most:
                raise InputError(f"the prompt is {len(prompt):,} tokens; valid: up to {most:,}", self.asked)
            return
        messages = [] if isinstance(prompt, str) else prompt
        size = sum(len(one["content"]) + len(str(one.get("tool_calls") or "")) for one in messages)
        size += len(prompt) if isinstance(prompt, str) else 0
        size += 0 if tools is None else len(json.dumps(tools.forms, ensure_ascii=False))
        if size > CHARACTERS * most:
            room = f"{CHARACTERS * most:,}, for {most:,} tokens"
            raise InputError(f"the prompt is {size:,} characters; valid: up to {room}", self.asked)

    def _new_tokens(self, llm: Any, most: int, size: int, answers: bool) -> int:
        """How many tokens may follow a prompt of so many, which is answered or gone on from."""
        field, wanted = self.length()
        limit = llm.target.rotary.limit
        left = most if limit is None else limit - size
        if (wanted or 0) > left:
            after = f"after a prompt of {counted(size, 'token')}"
            raise InputError(f"{field} is {wanted}, {after}; valid: up to {left:,}", field)
        usual = default_length(llm.target, True, size) if answers else TOKENS
        rest = min(left, most)
        new = min(usual, rest) if wanted is None else rest if wanted == -1 else wanted
        if (self.min_tokens or 0) > new:
            given = f"min_tokens is {self.min_tokens}, {field} {new:,}"
            raise InputError(f"{given}; valid: up to {new:,}, or a larger {field}", "min_tokens")
        return new

    def _sampling(
        self, llm: Any, prompt: Prompt, ids: list[int], tools: Tools | None, seed: int
    ) -> SamplingParams:
        """The sampling of a prompt; its grammar is compiled, or refused."""
        names = [one.name for one in fields(SamplingParams) if one.name != "grammar"]
        given = {name: getattr(self.own, name, None) for name in names} | {"seed": seed}
        given |= {name: value for name in names if (value := self.given(name)) is not None}
        if self.top_k == -1:
            given["top_k"] = 0  # as vLLM has it: all tokens
        if self.top_p == 0:  # the likeliest token alone
            given |= {"top_p": None, "temperature": 0}
        given = {name: value for name, value in given.items() if value is not None}
        grammar, field = self.grammar()
        made = replace(sampling_over(llm.default_sampling(prompt), given), grammar=grammar)
        thought = thought_of(llm.source.codec, ids) if self.is_chat else ""
        made = bound(made, calls_of(tools, llm.source.codec, thought))
        if made.grammar is not None:
            try:
                llm.resources.grammars.masks(made.grammar, 0)
            except InputError as error:
                raise InputError(str(error), field) from error
        return made

    def in_own_words(self, error: InputError) -> InputError:
        """An error of the engine, with the names of fields that a client can set."""
        own = [name for name in Own.model_fields if self.given(name) is None]
        names = {name: f"tokenswift.{name}" for name in own}
        names |= {"max_new_tokens": self.length()[0], "prompt": self.asked, "stop": "stop"}
        return in_words_of(error, {**names, "template_options": "chat_template_kwargs"})


class Several(BaseModel):
    """Fields of a body that may ask for several texts."""

    n: Whole | None = None
    stream_options: Annotated[StreamOptions | None, _upto(ITEMS)] = None
    prompt_logprobs: Likely = None


class Calling(BaseModel):
    """Fields of a body whose answer may call tools."""

    chat_template_kwargs: Object = None
    tools: list[Any] | None = None
    tool_choice: Annotated[str | dict[str, Any] | None, _upto(ITEMS)] = None
    parallel_tool_calls: bool | None = None


class Chat(Body, Several, Calling):
    """The body of ``/v1/chat/completions``."""

    asked: ClassVar[str] = "messages"
    lengths: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens")

    messages: Annotated[list[Message], Quick(), Field(min_length=1), _upto(LIST)]
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Likely = None

    @property
    def likely(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_served(self) -> None:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            given = f"max_tokens is {self.max_tokens}, max_completion_tokens {self.max_completion_tokens}"
            raise InputError(f"{given}; valid: one of them, or both alike", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            given = f"top_logprobs is {self.top_logprobs} without logprobs"
            raise InputError(f"{given}; valid: with logprobs true", "top_logprobs")
        super().check_served()

    def prompts(self, has_template: bool, before: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        return [[message.plain(f"messages[{i}]") for i, message in enumerate(self.messages)]]


class Completion(Body, Several):
    """The body of ``/v1/completions``."""

    asked: ClassVar[str] = "prompt"
    is_chat: ClassVar[bool] = False

    prompt: str | Ids | Annotated[list[str], Quick()] | Annotated[list[Ids], Quick()]
    max_tokens: Whole | None = None
    logprobs: Likely = None
    echo: bool | None = None

    @property
    def likely(self) -> int | None:
        return self.logprobs

    @property
    def prompt_likely(self) -> int | None:
        asked = [self.prompt_logprobs, self.logprobs if self.echoes else None]
        asked += [0 if self.max_tokens == 0 else None]  # what is told of a prompt has to be computed
        return max((number for number in asked if number is not None), default=None)

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    def prompts(self, has_template: bool, before: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        prompt: Any = self.prompt
        several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
        return prompt if several else [prompt]


class Responses(Body, Calling):
    """The body of ``/v1/responses``."""

    asked: ClassVar[str] = "input"
    lengths: ClassVar[tuple[str, ...]] = ("max_output_tokens",)

    input: Annotated[str | Annotated[list[Item], Quick()], _upto(LIST)]
    instructions: str | None = None
    reasoning: Object = None
    max_output_tokens: Whole | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: Annotated[Labels | None, _upto(16)] = None
    previous_response_id: str | None = None

    def prompts(self, has_template: bool, before: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        told = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str) and not (told or before or self.tools or has_template):
            return [self.input]  # as the command line has it: gone on from
        found = [*told, *before, *self.conversation()]
        if len(found) > LIST:
            given = f"the conversation has {len(found):,} messages"
            raise InputError(f"{given}; valid: up to {LIST:,}", "previous_response_id")
        return [found]

    def conversation(self) -> list[dict[str, Any]]:
        """The input as messages.

        Raises:
            InputError: naming what is wrong.
        """
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not self.input:
            raise InputError("input is []; valid: text, or at least one message", "input")
        return plain_items(self.input)


#: kind of an answer → its body, and how its ids begin
KINDS: dict[str, tuple[type[Body], str]] = {
    "chat": (Chat, "chatcmpl-"),
    "completion": (Completion, "cmpl-"),
    "response": (Responses, "resp_"),
}
