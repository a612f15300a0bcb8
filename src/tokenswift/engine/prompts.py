"""From prompts to requests: token ids, and the defaults of sampling and length for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from tokenswift.chat import Calls, Tools, thought_of
from tokenswift.chat.prompts import Prompt, is_chat, prompt_ids, several_ids
from tokenswift.config.sampling import CONTINUED, SamplingParams
from tokenswift.config.strategies import Strategy
from tokenswift.engine.arguments import GenerationArguments
from tokenswift.engine.detokenize import begins_turn
from tokenswift.engine.request import Request
from tokenswift.engine.run_journal import conversation_digest
from tokenswift.memory import default_length
from tokenswift.speculation.resources import Resources
from tokenswift.types import InputError


def encode(
    resources: Resources,
    prompt: Prompt,
    template_options: Mapping[str, object] | None = None,
    tools: Sequence[Mapping[str, object]] | None = None,
    name: str = "prompt",
) -> list[int]:
    """Token ids of a prompt; the arguments are those of `chat.prompts.prompt_ids`.

    Raises:
        InputError: naming what is wrong with the prompt.
    """
    tokenizer = resources.source.tokenizer
    rows = resources.target.vocab_size
    return prompt_ids(prompt, tokenizer, rows, name, tools, template_options)


def encode_all(
    resources: Resources,
    prompts: Sequence[Prompt],
    template_options: Mapping[str, object] | None = None,
) -> list[list[int]]:
    """Token ids of each of several prompts.

    Raises:
        InputError: not several prompts, or naming which of them is wrong.
    """
    tokenizer = resources.source.tokenizer
    return several_ids(prompts, tokenizer, resources.target.vocab_size, template_options)


def default_sampling(resources: Resources, prompt: Prompt) -> SamplingParams:
    """The sampling of a prompt for which none is given (see ``LLM.default_sampling``)."""
    return resources.source.answers if is_chat(prompt) else CONTINUED


def request_for(
    resources: Resources,
    prompt: Prompt,
    ids: list[int],
    max_new_tokens: int | None = None,
    strategy: Strategy | str = "auto",
    strategy_options: Mapping[str, object] | None = None,
    sampling: SamplingParams | None = None,
    **options: Unpack[GenerationArguments],
) -> Request:
    """The request for a prompt that has been encoded.

    Args:
        prompt: the prompt, from which the defaults of sampling and length follow.
        ids: its token ids.

    The others are those of ``LLM.generate``.

    Raises:
        InputError: naming the argument, its value and what is valid.
    """
    if max_new_tokens is None:
        max_new_tokens = default_length(resources.target, is_chat(prompt), len(ids))
    request = Request.of(
        ids,
        lambda _: default_sampling(resources, prompt),
        max_new_tokens,
        strategy,
        strategy_options,
        sampling,
        **options,
    )
    return replace(request, new_turn=begins_turn(prompt, request.template_options))


def chat_request(
    resources: Resources,
    messages: Sequence[Mapping[str, object]],
    tools: Tools | None,
    max_new_tokens: int | None = None,
    strategy: Strategy | str = "auto",
    strategy_options: Mapping[str, object] | None = None,
    sampling: SamplingParams | None = None,
    *,
    name: str = "messages",
    **options: Unpack[GenerationArguments],
) -> tuple[Request, Calls]:
    """The request of a chat, and the parser of its answer.

    Args:
        messages: the conversation.
        tools: the tools that may be called.
        name: of the messages, in errors.

    The others are those of ``LLM.generate``.

    Raises:
        InputError: naming what is wrong.
    """
    if not is_chat(messages):
        valid = "[{'role': 'user', 'content': 'Hello'}]"
        raise InputError(f"messages is not a list of messages; valid: {valid}")
    tokenizer = resources.source.tokenizer
    template_options = options.get("template_options")
    forms = None if tools is None else tools.forms
    ids = encode(resources, messages, template_options, forms, name)
    calls = Calls.of(tools, tokenizer, thought_of(tokenizer, ids))
    request = request_for(
        resources,
        messages,
        ids,
        max_new_tokens,
        strategy,
        strategy_options,
        sampling,
        **options,
    )
    request = replace(
        request,
        sampling=calls.bound(request.sampling),
        conversation_digest=conversation_digest(messages, tools, template_options),
    )
    return request, calls
