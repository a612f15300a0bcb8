"""Prompts of every kind as token ids: one token of the beginning, refusals that say what is valid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.chats import chat_tokenizer
from tests.conftest import tiny_tokenizer
from tokenswift.loader.prompts import end_tokens, has_template, prompt_ids
from tokenswift.types import InputError

BOS, V = 256, 260
HELLO = [{"role": "user", "content": "hé"}]


def text_of(ids: list[int]) -> str:
    return chat_tokenizer().decode(ids)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_chat_is_the_templates_text_with_one_bos(adds_bos: bool) -> None:
    tokenizer = chat_tokenizer(adds_bos)
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    ids = prompt_ids(messages, tokenizer, V)
    assert text_of(ids) == "<s>system: Be brief.\nuser: hé\nassistant:"
    assert ids.count(BOS) == 1 and ids[0] == BOS
    assert prompt_ids(tuple(messages), tokenizer, V) == ids


@pytest.mark.parametrize("text", ["hi", "<s>hi", "<s><s>hi", "<s>", "hi<s>", " <s>hi"])
def test_text_gets_at_most_one_bos_of_the_tokenizer(text: str) -> None:
    adds, leaves = chat_tokenizer(True), chat_tokenizer(False)
    bare = leaves(text)["input_ids"]
    assert prompt_ids(text, leaves, V) == bare  # as it was written, whatever it begins with
    begun = bare if text.startswith("<s>") else [BOS, *bare]
    assert prompt_ids(text, adds, V) == begun


@pytest.mark.parametrize(
    "ids",
    [
        [5, 6],
        (5, 6),
        range(5, 7),
        np.array([5, 6]),
        torch.tensor([5, 6]),
        [np.int32(5), np.uint8(6)],
        [torch.tensor(5), 6],
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_token_ids_of_every_kind(ids: Any) -> None:
    found = prompt_ids(ids, None, V)
    assert found == [5, 6] and all(type(token) is int for token in found)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (b"x", "prompt is b'x'; valid: text"),
        (None, "prompt is None; valid: text"),
        ({"input_ids": [1]}, "prompt is {'input_ids': [1]}; valid: text"),
        ([1.0], "prompt holds 1.0; valid: text"),
        ([True], "prompt holds True; valid: text"),
        (np.array([1.5]), "prompt holds 1.5"),
        (torch.tensor(3), "prompt is tensor(3)"),
        (["1", "2"], "prompt is ['1', '2']; valid: text"),
        ([[1, 2]], "prompt is [[1, 2]]; valid: text"),
        (np.array([[1], [2]]), "prompt is array([[1], [2]]); valid: text"),
        ([260], "prompt token id is 260; valid: 0 to 259"),
        ([-1], "prompt token id is -1; valid: 0 to 259"),
        ([10**30], "prompt token id is 10000"),
        ([], "prompt is empty"),
        ("", "prompt is empty"),
        ([{"role": "user"}], "prompt[0] is {'role': 'user'}; valid: a message such as"),
        ([*HELLO, "more"], "prompt[1] is 'more'; valid: a message"),
        ([{"role": "user", "content": None}], "prompt[0]['content'] is None; valid: text"),
        ([{"role": 1, "content": "x"}], "prompt[0]['role'] is 1; valid: text"),
        ([{"role": "robot", "content": "x"}], "template refuses the messages (no such role: robot)"),
    ],
    ids=repr,
)
def test_what_is_no_prompt(prompt: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        prompt_ids(prompt, chat_tokenizer(False), V)
    line = str(caught.value)
    assert words in line and "\n" not in line and len(line) < 300, line
    several = isinstance(prompt, list | np.ndarray) and len(prompt) and not isinstance(prompt[0], dict)
    nested = several and isinstance(prompt[0], str | list | np.ndarray)
    assert ("generate_many takes several" in line) == nested


def test_chat_needs_a_template_and_text_a_tokenizer() -> None:
    with pytest.raises(InputError, match="the model has no chat template; valid: text"):
        prompt_ids(HELLO, tiny_tokenizer(), V)
    with pytest.raises(InputError, match="came without a tokenizer; valid: token ids"):
        prompt_ids("x", None, V)
    assert not has_template(None) and not has_template(tiny_tokenizer()) and has_template(chat_tokenizer())
    named = chat_tokenizer()
    named.chat_template = {"tool_use": "x"}
    assert not has_template(named)
    named.chat_template = {"default": "hi {{ messages[0]['content'] }}", "tool_use": "x"}
    assert text_of(prompt_ids(HELLO, named, V)) == "hi hé"


def test_all_tokens_that_end_a_text() -> None:
    class Part:
        def __init__(self, ids: Any, config: Any = None) -> None:
            self.eos_token_id, self.config = ids, config
            self.generation_config: Any = None

    model = Part(None, config=Part([3, 4]))
    model.generation_config = Part(5)
    assert end_tokens(model, Part(6)) == {3, 4, 5, 6} and end_tokens(model, None) == {3, 4, 5}


def test_parts_that_are_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "é"}]
    tokenizer = chat_tokenizer(False)
    assert prompt_ids([{"role": "user", "content": parts}], tokenizer, V) == prompt_ids(HELLO, tokenizer, V)


@pytest.mark.parametrize("content", [[], ["hi"], [{"type": "image"}], [{"type": "text", "text": 1}], {}])
def test_parts_that_are_no_text(content: Any) -> None:
    with pytest.raises(InputError, match=r"prompt\[0\]\['content'\] is .*; valid: text"):
        prompt_ids([{"role": "user", "content": content}], chat_tokenizer(), V)
