"""Bodies of requests: chats, completions and responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import BaseModel, BeforeValidator, Field

from tokenswift.chat.messages import plain_message
from tokenswift.chat.prompts import Prompt
from tokenswift.checks import counted
from tokenswift.engine.arguments import CallArguments
from tokenswift.engine.infill import Infill
from tokenswift.serve.base import Body
from tokenswift.serve.fields import MOST_MESSAGES, ClientMessages, Object, Quick
from tokenswift.serve.items import PlacedMessage, foreign_items, plain_items
from tokenswift.types import InputError


class Calling(BaseModel):
    """Fields of a body whose answer may call tools."""

    chat_template_kwargs: Object = None
    tools: list[object] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None


MOST_TEXTS = 128  # of one request: texts of each prompt × prompts
MOST_TOP = 20  # likeliest tokens that are told of, as `engine.request` has it


def check_texts(n: int | None, prompts: int = 1) -> int:
    """The number of texts of each prompt.

    Args:
        n: as the client has it.
        prompts: of the request.
    Raises:
        InputError: there are too many, or none.
    """
    count = 1 if n is None else n
    if not 1 <= count <= MOST_TEXTS:
        raise InputError(f"n is {count}; valid: an integer from 1 to {MOST_TEXTS}", "n")
    if count * prompts > MOST_TEXTS:
        text = f"n is {count}, with {prompts} prompts: {count * prompts:,} texts"
        raise InputError(f"{text}; valid: up to {MOST_TEXTS} in one request", "n")
    return count


class Chat(Body, Calling):
    """The body of ``/v1/chat/completions``."""

    kind: ClassVar[str] = "chat"
    id_prefix: ClassVar[str] = "chatcmpl-"
    prompt_field: ClassVar[str] = "messages"
    length_fields: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens")

    messages: ClientMessages
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream_options: Object = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None

    def full_prompt(self, has_template: bool, before: Sequence[Mapping[str, object]]) -> Prompt:
        return [
            plain_message(message, place)
            for message, place in zip(self.messages, self.places(before), strict=True)
        ]

    def places(self, before: Sequence[Mapping[str, object]]) -> list[str]:
        return [f"messages[{i}]" for i in range(len(self.messages))]

    def each_text(self) -> Sequence[Body]:
        return [self.with_sample(number) for number in range(check_texts(self.n))]

    def with_logprobs(self) -> CallArguments:
        top = self.top_logprobs or 0
        if not 0 <= top <= MOST_TOP:
            text = f"top_logprobs is {top}"
            raise InputError(f"{text}; valid: an integer from 0 to {MOST_TOP}", "top_logprobs")
        if self.logprobs:
            return {"logprobs": top}
        if top:
            text = f"top_logprobs is {top} without logprobs"
            raise InputError(f"{text}; valid: together with logprobs true", "top_logprobs")
        return {}


def _only_prompt(prompt: object) -> object:
    """The prompt of a list of one, which some clients always send."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        return prompt[0]
    return prompt


TextOrIds = str | Annotated[list[int], Quick()]
Prompts = Annotated[list[TextOrIds], Quick(), Field(min_length=1, max_length=MOST_TEXTS)]


class Completion(Body):
    """The body of ``/v1/completions``."""

    kind: ClassVar[str] = "completion"
    id_prefix: ClassVar[str] = "cmpl-"
    prompt_field: ClassVar[str] = "prompt"

    prompt: Annotated[TextOrIds | Prompts, BeforeValidator(_only_prompt)]
    n: int | None = None
    logprobs: bool | int | None = None
    echo: bool | None = None
    suffix: str | None = None
    stream_options: Object = None
    max_tokens: int | None = None

    def full_prompt(self, has_template: bool, before: Sequence[Mapping[str, object]]) -> Prompt:
        first, *others = self.prompts
        if others:
            raise TypeError("several prompts are no prompt; valid: one of `each_text`")
        return first

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, of which there may be several."""
        several: list[str | list[int]] = []
        ids: list[int] = []
        for one in [self.prompt] if isinstance(self.prompt, str) else self.prompt:
            if isinstance(one, int):
                ids.append(one)
            else:
                several.append(one)
        return several or [ids]

    def gap(self) -> Infill | None:
        if not self.suffix:
            return None
        if self.echo:
            raise InputError("echo is true together with suffix; valid: one of the two", "echo")
        prompt = self.full_prompt(False, ())
        if not isinstance(prompt, str):
            raise InputError(
                "suffix is given together with token ids; valid: a prompt of text", "suffix"
            )
        return Infill(prompt, self.suffix)

    def each_text(self) -> Sequence[Body]:
        prompts = self.prompts
        count = check_texts(self.n, len(prompts))
        return [
            self.with_sample(number, prompt=prompt) for prompt in prompts for number in range(count)
        ]

    @property
    def writes_nothing(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    def with_logprobs(self) -> CallArguments:
        if self.logprobs is None or self.logprobs is False:
            return {}
        arguments: CallArguments = {"logprobs": int(self.logprobs)}
        if self.echo:
            arguments["prompt_logprobs"] = int(self.logprobs)
        return arguments


class Responses(Body, Calling):
    """The body of ``/v1/responses``."""

    kind: ClassVar[str] = "response"
    id_prefix: ClassVar[str] = "resp_"
    prompt_field: ClassVar[str] = "input"
    length_fields: ClassVar[tuple[str, ...]] = ("max_output_tokens",)

    input: str | ClientMessages
    instructions: str | None = None
    reasoning: Object = None
    text: Object = None
    max_output_tokens: int | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: Object = None
    previous_response_id: str | None = None

    def full_prompt(self, has_template: bool, before: Sequence[Mapping[str, object]]) -> Prompt:
        instructions = self._instructions()
        is_bare = not (instructions or before or self.tools)
        if isinstance(self.input, str) and is_bare and not has_template:
            return self.input  # as the command line has it: gone on from
        conversation = [*instructions, *before, *self.conversation()]
        if len(conversation) > MOST_MESSAGES:
            text = f"the conversation has {counted(len(conversation), 'message')}"
            raise InputError(f"{text}; valid: up to {MOST_MESSAGES:,}", "previous_response_id")
        return conversation

    def _instructions(self) -> list[dict[str, object]]:
        """The system message before all others, if there is one."""
        if self.instructions is None:
            return []
        return [{"role": "system", "content": self.instructions}]

    def places(self, before: Sequence[Mapping[str, object]]) -> list[str]:
        places = [] if self.instructions is None else ["instructions"]
        places += [""] * len(before)
        places += [turn.place for turn in self._turns()]
        return places

    def conversation(self) -> list[dict[str, object]]:
        """The input as messages.

        Raises:
            InputError: naming what is wrong.
        """
        return [turn.message for turn in self._turns()]

    def _turns(self) -> list[PlacedMessage]:
        if isinstance(self.input, str):
            return [PlacedMessage("input", {"role": "user", "content": self.input})]
        return plain_items(self.input)

    def ignored_fields(self) -> list[str]:
        items = [] if isinstance(self.input, str) else foreign_items(self.input)
        return [*super().ignored_fields(), *items]
