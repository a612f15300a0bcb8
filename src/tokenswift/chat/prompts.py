"""Prompts: text, token ids, or chat messages, as token ids.

Text gets the tokenizer's special tokens. A chat template writes its own, so what it wrote is
encoded without more: nothing begins with two tokens of the beginning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TypeAlias, TypeGuard

from tokenswift.chat.messages import checked
from tokenswift.checks import check_text, integer_of, shown
from tokenswift.loader.abilities import Abilities, Turns
from tokenswift.loader.apart import controls_of, encoded, set_apart
from tokenswift.loader.call_forms import family_of
from tokenswift.loader.chat_template import (
    END,
    Messages,
    Options,
    Tools,
    abilities_of,
    check_template_options,
    has_template,
    template_of,
    template_text,
)
from tokenswift.loader.errors import refused_as
from tokenswift.loader.fitting import Fitted, fitted
from tokenswift.tokenizer import Tokenizer
from tokenswift.types import InputError

logger = logging.getLogger("tokenswift")

Prompt: TypeAlias = str | Sequence[int] | Messages
EMPTY_ANSWER = {"role": "assistant", "content": ""}
VALID = (
    "text, a list of token ids, or a list of messages such as {'role': 'user', 'content': 'Hello'}"
)


def prompt_ids(
    prompt: object,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    name: str = "prompt",
    tools: Tools = None,
    options: Options = None,
) -> list[int]:
    """Token ids of a prompt of any kind.

    Args:
        prompt: text; token ids (a list, a tuple, a range, or an array or tensor of one dimension);
            or chat messages, which end where the model's answer begins, or goes on behind an
            assistant's message.
        tokenizer: of the model, or None.
        vocab_size: V; ids are below it.
        name: of the argument, for messages.
        tools: that a chat's template is given, in the form of OpenAI's interface.
        options: variables of the template, and ``continue_final_message``: whether the answer goes
            on behind an assistant's message at the end (default), or is a turn of its own.
    Raises:
        InputError: naming what is wrong with it and what is valid.
    """
    if isinstance(prompt, str):
        ids = text_ids(prompt, tokenizer, name)
    elif is_chat(prompt):
        ids = chat_ids(prompt, tokenizer, name, tools, options)
    else:
        ids = _checked_ids(prompt, vocab_size, name)
    if not ids:
        raise InputError(f"{name} is empty; valid: at least one token")
    token = max(ids)
    if token >= vocab_size:  # a tokenizer may have added tokens that the model has no row for
        name_of_token = tokenizer.convert_ids_to_tokens(token) if tokenizer is not None else token
        written = shown(str(name_of_token))
        raise InputError(
            f"{name} holds {written}, whose token id is {token}; valid: tokens of the model, 0 to "
            f"{vocab_size - 1}"
        )
    return ids


def several_ids(
    prompts: object, tokenizer: Tokenizer | None, vocab_size: int, options: Options = None
) -> list[list[int]]:
    """Token ids of each of several prompts; ``options`` as for `prompt_ids`.

    Raises:
        InputError: not several prompts, or naming which of them is wrong.
    """
    if not isinstance(prompts, list | tuple) or is_chat(prompts):
        raise InputError(f"prompts is {shown(prompts)}; valid: a list of prompts")
    named = ((f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts))
    return [
        prompt_ids(prompt, tokenizer, vocab_size, name, None, options) for name, prompt in named
    ]


def text_ids(text: str, tokenizer: Tokenizer | None, name: str = "prompt") -> list[int]:
    """Token ids of a text with the tokenizer's special tokens; where the text itself begins with
    the token of the beginning (``<s>``, say), it gets no second one."""
    if tokenizer is None:
        raise InputError(
            f"{name} is text, but the model came without a tokenizer; valid: token ids"
        )
    ids = _encoded(check_text(name, text), tokenizer, name)
    begin = getattr(tokenizer, "bos_token", None)
    if begin and text.startswith(begin):
        bare = _encoded(text, tokenizer, name, add_special_tokens=False)
        begin_id = getattr(tokenizer, "bos_token_id", None)
        if ids[: len(bare) + 1] == [begin_id, *bare]:
            return ids[1:]
    return ids


def _encoded(
    text: str, tokenizer: Tokenizer, name: str, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a text; what a model's tokenizer trips over is bad input."""
    with refused_as(f"the model's tokenizer refuses {name}"):
        return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def is_chat(prompt: object) -> TypeGuard[Messages]:
    """Whether a prompt is meant as chat messages."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def ids_of(prompt: Prompt) -> list[int]:
    """The token ids of a prompt that has been encoded.

    Raises:
        TypeError: it is text, or messages.
    """
    ids = [token for token in prompt if isinstance(token, int)]
    if len(ids) != len(prompt):
        raise TypeError("the prompt is not encoded; valid: token ids")
    return ids


def chat_ids(
    messages: Sequence[object],
    tokenizer: Tokenizer | None,
    name: str = "prompt",
    tools: Tools = None,
    options: Options = None,
) -> list[int]:
    """Token ids of chat messages by the tokenizer's template; the arguments are those of
    `prompt_ids`.

    Raises:
        InputError: there is no template, a message is none, or the template refuses them.
    """
    template = template_of(tokenizer, tools=True)
    turns = checked(messages, name, template if isinstance(template, str) else "")
    if tokenizer is None or not has_template(tokenizer):
        raise InputError(
            f"{name} is a list of messages, but the model has no chat template; valid: text"
        )
    text_name = "the text that the model's chat template makes"
    text, sign = _written(turns, tokenizer, tools, check_template_options(options))
    encode = partial(_encoded, tokenizer=tokenizer, name=text_name, add_special_tokens=False)
    return encoded(check_text(text_name, text), tokenizer, encode, sign)


def _written(
    turns: Turns, tokenizer: Tokenizer, tools: Tools, options: dict[str, object]
) -> tuple[str, str]:
    """The text of chat messages by the tokenizer's template, up to where the answer begins; and the
    sign of :func:`set_apart`."""
    continues = options.pop("continue_final_message", None)
    if continues is not False and len(turns) > 1 and turns[-1] == EMPTY_ANSWER:
        turns.pop()  # the answer that the caller wants
    has_calls = any(turn["role"] == "tool" or turn.get("tool_calls") for turn in turns)
    template = template_text(tokenizer, has_calls or tools is not None)
    abilities = abilities_of(template, tokenizer)
    signed, sign = set_apart({"messages": turns, "tools": tools, "options": options}, tokenizer)
    fit = fitted(
        signed["messages"],
        tools=signed["tools"],
        variables=signed["options"],
        abilities=abilities,
        family=family_of(template, controls_of(tokenizer)),
    )
    for warning in fit.warnings:
        _warn(warning, template)
    last = fit.turns[-1]
    has_answer = last["role"] == "assistant" and not last.get("tool_calls")
    if continues and not has_answer:
        text = f"continue_final_message is {shown(continues)}"
        raise InputError(
            f"{text}, and the last message the {last['role']}'s; valid: with an assistant message "
            "at the end",
            "continue_final_message",
        )
    if not has_answer or continues is False:
        return abilities.render(fit.turns, fit.variables), sign
    return _text_of_continued(fit, abilities), sign


def _text_of_continued(fit: Fitted, abilities: Abilities) -> str:
    """The text of a conversation up to the end of its last message, the assistant's."""
    last = fit.turns[-1]
    turns = [*fit.turns[:-1], {**last, "content": last["content"] + END}]
    variables = {**fit.variables, "add_generation_prompt": False}
    text, mark, _ = abilities.render(turns, variables).rpartition(END)
    if not mark:
        raise InputError("the model's chat template leaves out the assistant's message at the end")
    return text


@lru_cache(64)
def _warn(warning: str, template: str) -> None:
    """Say what is wrong with a template, once."""
    logger.warning("%s", warning)


def _checked_ids(prompt: object, vocab_size: int, name: str) -> list[int]:
    """Token ids as Python's own integers."""
    tolist = getattr(prompt, "tolist", None)  # numpy's arrays and torch's tensors
    values = tolist() if callable(tolist) else prompt
    if not isinstance(values, list | tuple | range):
        raise InputError(f"{name} is {shown(prompt)}; valid: {VALID}")
    ids: list[int] = []
    for value in values:
        token = integer_of(value)
        if token is None:
            raise InputError(f"{name} holds {shown(value)}; valid: {VALID}")
        if not 0 <= token < vocab_size:
            raise InputError(f"{name} token id is {token}; valid: 0 to {vocab_size - 1}")
        ids.append(token)
    return ids
