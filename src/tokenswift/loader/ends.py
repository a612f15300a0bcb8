"""Tokens that end a text, by a model's files and by its chat template; rows without a token."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from tokenswift.loader.abilities import Turns
from tokenswift.loader.apart import controls_of
from tokenswift.loader.chat_template import PROBE, abilities_of, has_template, template_text
from tokenswift.loader.harmony import CALL, END, RETURN, speaks_harmony
from tokenswift.tokenizer import Tokenizer, backend_of
from tokenswift.types import InputError, RunError


def unnamed_rows(tokenizer: object, rows: int) -> list[int]:
    """Rows of an embedding that no token of a tokenizer names, in order."""
    backend = backend_of(tokenizer)
    if backend is not None:  # a whole vocabulary takes longer
        return [row for row in range(rows) if backend.id_to_token(row) is None]
    vocabulary = getattr(tokenizer, "get_vocab", dict)()
    return sorted(set(range(rows)).difference(vocabulary.values())) if vocabulary else []


def turn_ends(tokenizer: Tokenizer | None) -> set[int]:
    """The control token that the chat template puts behind an assistant's message, whatever the
    files say."""
    if tokenizer is None or not has_template(tokenizer):
        return set()
    messages: Turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": PROBE},
    ]
    try:
        abilities = abilities_of(template_text(tokenizer), tokenizer)
        text = abilities.render(messages, {"add_generation_prompt": False})
    except (InputError, RunError):  # a chat says what is wrong with it
        return set()
    behind = text.partition(PROBE)[2].lstrip()
    controls = controls_of(tokenizer)
    names = [name for name in controls if behind.startswith(name)]
    return {controls[max(names, key=len)]} if names else set()


def without_message_ends(ends: Set[int], tokenizer: object) -> set[int]:
    """The ids that end a text; of Harmony's marks those that end an answer."""
    backend = backend_of(tokenizer)
    added = {} if backend is None else backend.get_added_tokens_decoder()
    ids = {token.content: number for number, token in added.items()}
    if not speaks_harmony(ids):
        return set(ends)
    of_answers = {ids[name] for name in (CALL, RETURN) if name in ids}
    return {end for end in ends | of_answers if end != ids.get(END)}


def end_tokens(model: Any, tokenizer: object) -> set[int]:
    """End-of-text ids: those of a model's generation config, of its config and of the tokenizer."""
    return end_ids(getattr(model, "generation_config", None), model.config, tokenizer)


def end_ids(*sources: object) -> set[int]:
    """The ids that end a text, of whatever names ``eos_token_id``."""
    ends: set[int] = set()
    for source in sources:
        stated = getattr(source, "eos_token_id", None)
        ids = stated if isinstance(stated, list | tuple) else [stated]
        ends.update(end for end in ids if type(end) is int)
    return ends
