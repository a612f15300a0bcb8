"""Bodies of requests: chats, completions and responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator

from tokenswift.chat.messages import plain_message
from tokenswift.chat.prompts import Prompt
from tokenswift.checks import counted
from tokenswift.serve.base import LIST, Body, Object, Quick, Turns
from tokenswift.serve.items import PlacedMessage, foreign_items, plain_items
from tokenswift.types import InputError


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
        return [
            plain_message(message, place)
            for message, place in zip(self.messages, self.places(before), strict=True)
        ]

    def places(self, before: Sequence[Mapping[str, Any]]) -> list[str]:
        return [f"messages[{i}]" for i in range(len(self.messages))]


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
        told: list[dict[str, Any]] = []
        if self.instructions is not None:
            told.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str) and not (told or before or self.tools or has_template):
            return self.input  # as the command line has it: gone on from
        conversation = [*told, *before, *self.conversation()]
        if len(conversation) > LIST:
            text = f"the conversation has {counted(len(conversation), 'message')}"
            raise InputError(f"{text}; valid: up to {LIST:,}", "previous_response_id")
        return conversation

    def places(self, before: Sequence[Mapping[str, Any]]) -> list[str]:
        told = [] if self.instructions is None else ["instructions"]
        return [*told, *("" for _ in before), *(turn.place for turn in self._turns())]

    def conversation(self) -> list[dict[str, Any]]:
        """The input as messages.

        Raises:
            InputError: naming what is wrong.
        """
        return [turn.message for turn in self._turns()]

    def _turns(self) -> list[PlacedMessage]:
        if isinstance(self.input, str):
            return [PlacedMessage("input", {"role": "user", "content": self.input})]
        return plain_items(self.input)

    def left_out(self) -> list[str]:
        items = [] if isinstance(self.input, str) else foreign_items(self.input)
        return [*super().left_out(), *items]
