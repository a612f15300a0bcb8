"""How much a request may hold, looked at before anything is made of it: what is longer costs no work."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tokenswift.chat.tools import Tools
from tokenswift.checks import shown
from tokenswift.config import MOST_BIASES, MOST_TEXTS
from tokenswift.types import InputError

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
