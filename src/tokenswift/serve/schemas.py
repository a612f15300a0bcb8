"""Bodies of requests: chats, completions and responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import BaseModel, BeforeValidator

from tokenswift.chat.messages import plain_message
from tokenswift.chat.prompts import Prompt
from tokenswift.checks import counted
from tokenswift.serve.base import MOST_MESSAGES, Body, ClientMessages, Object, Quick
from tokenswift.serve.items import PlacedMessage, foreign_items, plain_items
from tokenswift.types import InputError


class Calling(BaseModel):
    """Fields of a body whose answer may call tools."""

    chat_template_kwargs: Object = None
    tools: list[object] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None


class Chat(Body, Calling):
    """The body of ``/v1/chat/completions``."""

    kind: ClassVar[str] = "chat"
    id_prefix: ClassVar[str] = "chatcmpl-"
    prompt_field: ClassVar[str] = "messages"
    length_fields: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens")

    messages: ClientMessages
    n: int | None = None
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


def _only_prompt(prompt: object) -> object:
    """The prompt of a list of one, which some clients always send."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        return prompt[0]
    return prompt


class Completion(Body):
    """The body of ``/v1/completions``."""

    kind: ClassVar[str] = "completion"
    id_prefix: ClassVar[str] = "cmpl-"
    prompt_field: ClassVar[str] = "prompt"

    prompt: Annotated[str | Annotated[list[int], Quick()], BeforeValidator(_only_prompt)]
    n: int | None = None
    stream_options: Object = None
    max_tokens: int | None = None

    def full_prompt(self, has_template: bool, before: Sequence[Mapping[str, object]]) -> Prompt:
        return self.prompt


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
