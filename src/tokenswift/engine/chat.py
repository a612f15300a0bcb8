"""Chats that may call tools: what ``LLM.chat`` and a server make of messages, and of what was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenswift.chat.calls import Calls, Reply, ToolCall, call_id, calls_of, conversation
from tokenswift.chat.tools import Tools, thought_of
from tokenswift.config import SamplingParams
from tokenswift.engine.journal import asked_of
from tokenswift.engine.request import Request
from tokenswift.grammar import Grammar
from tokenswift.loader.prompts import Prompt, is_chat
from tokenswift.memory import default_length
from tokenswift.types import Generation, InputError


def encoded(
    llm: Any, prompt: Prompt, tools: Tools | None = None, name: str = "messages", options: Any = None
) -> list[int]:
    """Token ids of a prompt; of messages with what they call, and the tools that they may call.

    Args:
        llm: the ``LLM``.
        name: of the argument, for messages.
        options: of the chat template (`loader.prompts.prompt_ids`).
    Raises:
        InputError: naming what is wrong.
    """
    if not is_chat(prompt):
        return llm.encode(prompt)
    found: Any = prompt
    messages, forms = conversation(found, tools, llm.source.codec, name)
    return llm.encode(messages, forms, options)


def bound(sampling: SamplingParams, calls: Calls | None) -> SamplingParams:
    """A sampling under which every call of an answer is valid, and the model may think before what it is held
    to.

    Raises:
        InputError: calls do not go with its grammar.
    """
    if calls is None:
        return sampling
    given = sampling.grammar
    if calls.tools is not None:
        if given is not None and given.kind != "json_schema":
            raise InputError(
                f"a grammar ({given.kind}) is given beside tools; valid: one of the two", "tools"
            )
        given = Grammar.lark(calls.grammar(None if given is None else given.text))
    return replace(sampling, grammar=None if given is None else replace(given, thought=calls.thought))


def request_of_ids(
    llm: Any, prompt: Prompt, ids: list[int], max_new_tokens: int | None = None, *how: Any, **options: Any
) -> Request:
    """The request of a prompt that has these ids: as long, and sampled, as is usual for the prompt."""
    if max_new_tokens is None:
        max_new_tokens = default_length(llm.target, is_chat(prompt), len(ids))
    return Request.of(ids, lambda _: llm.default_sampling(prompt), max_new_tokens, *how, **options)


def chat_request(
    llm: Any, messages: Sequence[Mapping[str, Any]], tools: Tools | None, *how: Any, **options: Any
) -> tuple[Request, Calls | None]:
    """What a chat asks for, and how its calls are read.

    Args:
        llm: the ``LLM``.
        messages: the conversation.
        tools: that may be called.
        how, options: further arguments of `Request.of`, from the most new tokens on.
    Raises:
        InputError: naming what is wrong.
    """
    if not is_chat(messages):
        raise InputError("messages is not a list of messages; valid: [{'role': 'user', 'content': 'Hello'}]")
    template = options.get("template_options")
    ids = encoded(llm, messages, tools, options=template)
    calls = calls_of(tools, llm.source.codec, thought_of(llm.source.codec, ids))
    made = request_of_ids(llm, messages, ids, *how, **options)
    asked = asked_of(messages, tools, template)
    return replace(made, sampling=bound(made.sampling, calls), asked=asked), calls


def reply_of(generation: Generation, request: Request, calls: Calls | None) -> Reply:
    """What was written, its thought and its calls apart."""
    if calls is None:
        return Reply(generation.text, (), generation)
    said = calls.read(generation.text)
    key = f"{request.prompt} {generation.token_ids}"  # the same run has the same ids, another turn others
    made = (ToolCall(call_id(key, i), *call) for i, call in enumerate(said.calls))
    return Reply(said.text, tuple(made), generation, said.thought)
