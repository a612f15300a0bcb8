"""Bodies of requests: the fields of OpenAI's interface that mean something here, and our own.

A field that asks for nothing is taken in silence. One that cannot be served is left out, which the log and
a header say; it is refused only where the answer would mean something else (`WITHOUT`). Ranges are checked
where the command line's are, by `config.SamplingParams` and `engine.request`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tokenswift.chat.calls import calls_of
from tokenswift.chat.families import effort_options, thought_of
from tokenswift.chat.tools import Tools, tools_of
from tokenswift.checks import shown
from tokenswift.config import MOST_BIASES, MOST_TEXTS, SamplingParams, sampling_over, tree_nodes
from tokenswift.engine.chat import bound, encoded
from tokenswift.engine.journal import asked_of
from tokenswift.engine.request import MOST_LOGPROBS, Request
from tokenswift.loader.prompts import Prompt, is_chat
from tokenswift.memory import default_length
from tokenswift.serve.errors import CLOSED, in_words_of
from tokenswift.serve.forms import MADE, Formed
from tokenswift.serve.settings import Settings
from tokenswift.spec.drafters.lookup import LENGTH
from tokenswift.types import InputError
from tokenswift.words import counted

LIST = 4096  # entries of a list: messages, parts of one, prompts, numbers of a strategy's option
ITEMS = 32  # of an object of settings
#: fields that are lists or objects → how many entries they may have
MOST = dict.fromkeys(("messages", "input", "content"), LIST) | {"stop": 16, "metadata": 16}
MOST |= dict.fromkeys(("tokenswift", "strategy_options", "chat_template_kwargs", "text"), ITEMS)
MOST |= dict.fromkeys(("stream_options", "structured_outputs", "tool_choice", "response_format"), ITEMS)
MOST |= dict.fromkeys(("bad_words", "stop_token_ids", "dry_breakers"), MOST_TEXTS)
MOST |= {"logit_bias": MOST_BIASES}
CHARACTERS = 32  # of a prompt for each token that it may have: no language has so many
NODES = 256  # of a fixed tree: a larger one makes every other client wait
PASSES = 64  # of a draft model in a step, for the same reason


def check_body(body: Any) -> None:
    """See that lists and objects are as short as they may be, and lists of prompts of one kind.

    Raises:
        InputError: naming the field.
    """
    if not isinstance(body, Mapping):
        return  # whoever reads it says so
    for name in MOST:
        _check_size(name, body.get(name), 2 if name in ("messages", "input", "tokenswift") else 0)
    _check_prompts(body.get("prompt"))


def _check_size(name: str, value: Any, levels: int) -> None:
    if not isinstance(value, list | Mapping):
        return
    most = MOST.get(name.rpartition(".")[2], LIST)
    if len(value) > most:
        field = name.partition(".")[0].partition("[")[0]
        raise InputError(f"{name} has {len(value):,} entries; valid: up to {most:,}", field)
    if not levels:
        return
    named = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, one in named:
        inner = f"[{key}]" if isinstance(key, int) else f".{shown(key)[1:-1]}"
        _check_size(name + inner, one, levels - 1)


def _check_prompts(prompt: Any) -> None:
    """A list of texts, of token ids, or of lists of these: of others every entry would be an error."""
    if not isinstance(prompt, list) or not prompt:
        return
    kind = type(prompt[0])
    if kind is not int and len(prompt) > LIST:
        raise InputError(f"prompt has {len(prompt):,} entries; valid: up to {LIST:,}", "prompt")
    alike = kind in (str, int, list) and all(type(one) is kind for one in prompt)
    if alike and kind is list:
        alike = all(type(token) is int for one in prompt for token in one)
    if not alike:
        raise InputError(
            f"prompt is {shown(prompt[:8])}; valid: text, a list of texts, token ids, or a list of these",
            "prompt",
        )


def check_prompt(prompt: Any, most: int | None, field: str, tools: Tools | None = None) -> None:
    """See that a prompt can have as few tokens as it may, before it is encoded.

    Args:
        prompt: text, token ids or messages.
        most: tokens; None: any number.
        field: of the request.
        tools: that it describes.
    Raises:
        InputError: it cannot.
    """
    if most is None:
        return
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        check_tokens(len(prompt), most, field)
        return
    size = len(prompt) if isinstance(prompt, str) else _length(prompt)
    size += 0 if tools is None else len(json.dumps(tools.forms, ensure_ascii=False))
    if size > CHARACTERS * most:
        room = f"{CHARACTERS * most:,}, for {most:,} tokens"
        raise InputError(f"the prompt is {size:,} characters; valid: up to {room}", field)


def check_tokens(size: int, most: int, field: str) -> None:
    """See that a prompt has as few tokens as it may."""
    if size > most:
        raise InputError(f"the prompt is {size:,} tokens; valid: up to {most:,}", field)


def check_ids(ids: Collection[int], size: int) -> None:
    """See that a text can be stopped by these ids.

    Args:
        size: of the vocabulary.
    Raises:
        InputError: one of them is none of a token.
    """
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        valid = f"0 to {size - 1}, the model's vocabulary"
        raise InputError(f"stop_token_ids holds {wrong}; valid: {valid}", "stop_token_ids")


def _length(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(message["content"]) + len(str(message.get("tool_calls") or "")) for message in messages)


def check_nodes(nodes: int) -> None:
    """See that a tree is as small as it has to be beside other clients' texts.

    Raises:
        InputError: it is not.
    """
    if nodes > NODES:
        raise InputError(
            f"tokenswift.strategy_options asks for a tree of {nodes:,} nodes; valid here: up to {NODES}",
            "tokenswift",
        )


def check_passes(passes: int) -> None:
    """See that a step has as few passes of a draft model as it has to beside other clients' texts.

    Raises:
        InputError: it has more.
    """
    if passes > PASSES:
        raise InputError(
            f"tokenswift.strategy_options.gamma times inner_gamma is {passes:,}; valid here: up to {PASSES}",
            "tokenswift",
        )


CALL, RESULT, SKIPPED = "function_call", "function_call_output", "reasoning"
ITEM_TYPES = (None, "message", CALL, RESULT, SKIPPED)


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


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"] | None = None
    content: str | list[Piece] | None = None
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
    output: str | list[Piece] | None = None


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
            raise InputError(
                f"{where} holds a part of type {shown(piece.type)}; valid: text", where.partition("[")[0]
            )
    return "".join(piece.said or "" for piece in content)


def plain_messages(messages: Sequence[Message], name: str) -> list[dict[str, Any]]:
    """Messages as `chat` takes them.

    Raises:
        InputError: naming what is wrong.
    """
    return [message.plain(f"{name}[{i}]") for i, message in enumerate(messages)]


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


class Own(BaseModel):
    """The key ``tokenswift`` of a request: what OpenAI's interface has no word for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    strategy: str = Field(default="auto", description="how to draft; never changes the text")
    strategy_options: dict[str, Any] = Field(default_factory=dict, description="options of the strategy")
    ignore_eos: bool = Field(default=False, description="go on after an end-of-text token")
    on_loop: str = Field(default="report", description="report, or stop where the text repeats itself")
    eta_cutoff: float | None = None
    penalty_window: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_range: int | None = None
    dry_breakers: list[str] | None = None
    logprobs_mode: str = Field(
        default="processed_logprobs", description="raw_logprobs: those of new tokens are the model's own"
    )
    details: bool = Field(
        default=False, description="with each piece of text: who drafted it, and the steps' times"
    )


class StreamOptions(BaseModel):
    """Of a stream."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI's padding: there is none
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, the tokens so far in every chunk


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


def _whole(value: Any) -> Any:
    """An integer that is written as a float is one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _unless(nothing: Any) -> BeforeValidator:
    """A validator to which one value means that none is given."""
    return BeforeValidator(lambda value: None if value == nothing else value)


def _texts(stop: Any) -> Any:
    """Stop texts without empty ones, which end nothing."""
    texts = [stop] if isinstance(stop, str) else stop
    return [text for text in texts if text != ""] or None if isinstance(texts, list) else stop


def _is_hosted(tool: Any) -> bool:
    """Whether a tool is no function but one that OpenAI's servers run, or a form of theirs."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return isinstance(kind, str) and kind != "function"


Whole = Annotated[int, BeforeValidator(_whole)]
Stop = Annotated[str, Field(max_length=256)]
Name = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]
Likely = Annotated[Whole | None, Field(ge=0, le=MOST_LOGPROBS)]


class Body(Formed):
    """What all bodies have in common.

    Attributes:
        asked: the field that holds the prompt.
        is_chat: whether messages are answered.
    """

    asked: ClassVar[str]
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
    logit_bias: dict[str, float] | None = None
    min_tokens: Whole | None = None
    bad_words: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[Whole | None, _unless(-1)] = None
    stop: Annotated[list[Stop] | None, BeforeValidator(_texts)] = None
    tokenswift: Own | None = None

    @model_validator(mode="before")
    @classmethod
    def _short(cls, body: Any) -> Any:
        """Refuse what is too long before every entry of it is looked at."""
        check_body(body)
        return body

    @property
    def own(self) -> Own:
        """Our own settings."""
        return self.tokenswift or Own()

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
        return None

    def length(self) -> tuple[str, int | None]:
        """The field that says how many tokens there may be, and its value."""
        raise NotImplementedError

    @property
    def choices(self) -> int:
        """Texts for each prompt."""
        return 1

    @property
    def likely(self) -> int | None:
        """How many of the likeliest tokens are told with each token's log-probability; None: neither is."""
        return None

    @property
    def prompt_likely(self) -> int | None:
        """The same for each token of the prompt."""
        return getattr(self, "prompt_logprobs", None)

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    def check_served(self) -> None:
        """Refuse what would change the answer and cannot be served."""
        if self.stream and getattr(self, "prompt_logprobs", None) is not None:
            raise InputError(
                "prompt_logprobs cannot be streamed; valid: stream false, or echo with logprobs",
                "prompt_logprobs",
            )
        for name in self._unserved():
            if name in WITHOUT:
                raise InputError(f"{name} is not supported; valid: leave it out", name)
        for name in CLOSED:
            if name in self.own.strategy_options:
                raise InputError(
                    f"tokenswift.strategy_options.{name} is not an option of a server", "tokenswift"
                )

    def template_options(self, tokenizer: Any) -> dict[str, Any]:
        """What the chat template is given besides messages and tools, as far as it reads it."""
        asked = getattr(self, "reasoning", None) or {}
        made = effort_options(getattr(self, "reasoning_effort", None) or asked.get("effort"), tokenizer)
        made |= getattr(self, "chat_template_kwargs", None) or {}
        goes_on = getattr(self, "continue_final_message", None)
        return made if goes_on is None else {**made, "continue_final_message": goes_on}

    def left_out(self) -> list[str]:
        """What was asked for and is not served, and without which the answer means the same."""
        found = self._unserved()
        for i, tool in enumerate(getattr(self, "tools", None) or ()):
            found += [f"tools[{i}] ({tool['type']})"] if _is_hosted(tool) else []
        options = getattr(self, "stream_options", None)
        found += [f"stream_options.{name}" for name in (options and options.model_extra) or ()]
        found += [f"text.{name}" for name in self.text or () if name != "format"]
        return [
            *found,
            *(f"structured_outputs.{name}" for name in self.structured_outputs or () if name not in MADE),
        ]

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
        field, wanted = self.length()
        most, own, limit = settings.max_tokens, self.own, llm.target.rotary.limit
        least = 0 if self.echoes else 1
        if wanted not in (None, -1) and not least <= wanted <= most:
            more = ", or 0 with echo" if least and self.asked == "prompt" else ""
            raise InputError(f"{field} is {wanted}; valid: an integer from {least} to {most:,}{more}", field)
        tools = self.tools_asked()
        check_ids(self.stop_token_ids or (), llm.target.vocab_size)
        prompts = self.prompts(llm.has_chat_template, before)
        if not 1 <= self.choices * len(prompts) <= settings.max_choices:
            given = f"n is {self.choices}, for {counted(len(prompts), 'prompt')}"
            name = "n" if self.choices != 1 else self.asked
            raise InputError(f"{given}; valid: 1 to {settings.max_choices} in all", name)
        longest = min((size for size in (settings.max_prompt, limit and limit - 1) if size), default=None)
        for prompt in prompts:
            check_prompt(prompt, longest, self.asked, tools)
        made: list[Request] = []
        template = self.template_options(llm.source.codec)
        for prompt in prompts:
            sampling = replace(self._sampling(llm.default_sampling(prompt), seed), grammar=self.grammar())
            ids = encoded(llm, prompt, tools, self.asked, template)
            thought = thought_of(llm.source.codec, ids) if self.is_chat else ""
            sampling = bound(sampling, calls_of(tools, llm.source.codec, thought))
            if sampling.grammar is not None:
                try:
                    llm.resources.grammars.masks(sampling.grammar, 0)  # compiled here, or refused
                except InputError as error:
                    raise self.in_own_field(error) from error
            if longest is not None:
                check_tokens(len(ids), longest, self.asked)
            left = most if limit is None else limit - len(ids)
            if (wanted or 0) > left:
                after = f"after a prompt of {counted(len(ids), 'token')}"
                raise InputError(f"{field} is {wanted}, {after}; valid: up to {left:,}", field)
            rest = min(left, most)
            usual = default_length(llm.target, True, len(ids)) if is_chat(prompt) else TOKENS
            new = min(usual, rest) if wanted is None else rest if wanted == -1 else wanted
            if (self.min_tokens or 0) > new:
                given = f"min_tokens is {self.min_tokens}, {field} {new:,}"
                raise InputError(f"{given}; valid: up to {new:,}, or a larger {field}", "min_tokens")
            made += [
                Request(
                    ids,
                    new,
                    own.strategy,
                    {k: tuple(v) if isinstance(v, list) else v for k, v in own.strategy_options.items()},
                    replace(sampling, seed=sampling.seed + index),
                    ignore_eos=own.ignore_eos or bool(self.ignore_eos),
                    stop=(*(self.stop or ()), *((token,) for token in self.stop_token_ids or ())),
                    on_loop=own.on_loop,
                    logprobs=self.likely,
                    logprobs_mode=own.logprobs_mode,
                    prompt_logprobs=self.prompt_likely,
                    asked=asked_of(prompt, tools, template),
                )
                for index in range(self.choices)
            ]
        if made and made[0].strategy in ("tokenswift", "medusa"):
            options = made[0].options
            check_nodes(tree_nodes(options.tree) + LENGTH * (getattr(options, "ngrams", None) or 0))
        if made and made[0].strategy == "triforce":
            check_passes(made[0].options.gamma * made[0].options.inner_gamma)
        return made

    def in_own_words(self, error: InputError) -> InputError:
        """An error of the engine, with the names of fields that a client can set."""
        own = [name for name in Own.model_fields if getattr(self, name, None) is None]
        return in_words_of(error, self.length()[0], self.asked, own)

    def _sampling(self, usual: SamplingParams, seed: int) -> SamplingParams:
        names = [one.name for one in fields(SamplingParams) if one.name != "grammar"]
        given = {name: getattr(self.own, name, None) for name in names} | {"seed": seed}
        for name in names:
            if getattr(self, name, None) is not None:
                given[name] = getattr(self, name)
        if self.top_k == -1:
            given["top_k"] = 0  # as vLLM has it: all tokens
        if self.top_p == 0:  # the likeliest token alone
            given |= {"top_p": None, "temperature": 0}
        return sampling_over(usual, {name: value for name, value in given.items() if value is not None})


class Chat(Body):
    """The body of ``/v1/chat/completions``."""

    asked: ClassVar[str] = "messages"

    messages: list[Message] = Field(min_length=1)
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    n: Whole | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Likely = None
    prompt_logprobs: Likely = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def likely(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def tools_asked(self) -> Tools | None:
        functions = [tool for tool in self.tools or () if not _is_hosted(tool)]
        return tools_of(functions, self.tool_choice, self.parallel_tool_calls)

    def check_served(self) -> None:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            given = f"max_tokens is {self.max_tokens}, max_completion_tokens {self.max_completion_tokens}"
            raise InputError(f"{given}; valid: one of them, or both alike", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise InputError(
                f"top_logprobs is {self.top_logprobs} without logprobs; valid: with logprobs true",
                "top_logprobs",
            )
        super().check_served()

    def prompts(self, has_template: bool, before: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        return [plain_messages(self.messages, self.asked)]

    def length(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n


class Completion(Body):
    """The body of ``/v1/completions``."""

    asked: ClassVar[str] = "prompt"
    is_chat: ClassVar[bool] = False

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Whole | None = None
    n: Whole | None = None
    stream_options: StreamOptions | None = None
    logprobs: Likely = None
    prompt_logprobs: Likely = None
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

    def length(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n


class Responses(Body):
    """The body of ``/v1/responses``."""

    asked: ClassVar[str] = "input"

    input: str | list[Item]
    instructions: str | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_output_tokens: Whole | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: dict[Name, Value] | None = None
    previous_response_id: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def tools_asked(self) -> Tools | None:
        functions = [tool for tool in self.tools or () if not _is_hosted(tool)]
        return tools_of(functions, self.tool_choice, self.parallel_tool_calls)

    def prompts(self, has_template: bool, before: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        told = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str) and not (told or before or self.tools or has_template):
            return [self.input]  # as the command line has it: gone on from
        found = [*told, *before, *self.messages()]
        if len(found) > LIST:
            given = f"the conversation has {len(found):,} messages"
            raise InputError(f"{given}; valid: up to {LIST:,}", "previous_response_id")
        return [found]

    def messages(self) -> list[dict[str, Any]]:
        """The input as messages.

        Raises:
            InputError: naming what is wrong.
        """
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not self.input:
            raise InputError("input is []; valid: text, or at least one message", "input")
        return plain_items(self.input)

    def length(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_output_tokens


#: kind of an answer → its body, and how its ids begin
KINDS: dict[str, tuple[type[Body], str]] = {
    "chat": (Chat, "chatcmpl-"),
    "completion": (Completion, "cmpl-"),
    "response": (Responses, "resp_"),
}
