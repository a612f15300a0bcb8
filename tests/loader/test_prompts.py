"""Prompts of every kind as token ids: one token of the beginning, refusals that say what is
valid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.chats import THINKING, chat_tokenizer
from tests.conftest import tiny_tokenizer
from tokenswift.chat.prompts import prompt_ids
from tokenswift.loader.chat_template import has_template
from tokenswift.loader.ends import end_tokens
from tokenswift.types import InputError

BOS = 256
V = 260
HELLO = [{"role": "user", "content": "hé"}]


def text_of(ids: list[int]) -> str:
    return chat_tokenizer().decode(ids)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_chat_is_the_templates_text_with_one_bos(adds_bos: bool) -> None:
    tokenizer = chat_tokenizer(adds_bos)
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    ids = prompt_ids(messages, tokenizer, V)
    assert text_of(ids) == "<s>system: Be brief.\nuser: hé\nassistant:"
    assert ids.count(BOS) == 1
    assert ids[0] == BOS
    assert prompt_ids(tuple(messages), tokenizer, V) == ids


@pytest.mark.parametrize("text", ["hi", "<s>hi", "<s><s>hi", "<s>", "hi<s>", " <s>hi"])
def test_text_gets_at_most_one_bos_of_the_tokenizer(text: str) -> None:
    adds = chat_tokenizer(True)
    leaves = chat_tokenizer(False)
    bare = leaves(text)["input_ids"]
    assert prompt_ids(text, leaves, V) == bare  # as it was written, whatever it begins with
    begun = bare if text.startswith("<s>") else [BOS, *bare]
    assert prompt_ids(text, adds, V) == begun


KINDS = (
    [5, 6],
    (5, 6),
    range(5, 7),
    np.array([5, 6]),
    torch.tensor([5, 6]),
    [np.int32(5), torch.tensor(6)],
)


@pytest.mark.parametrize("ids", KINDS, ids=lambda ids: type(ids).__name__)
def test_token_ids_of_every_kind(ids: Any) -> None:
    converted = prompt_ids(ids, None, V)
    assert converted == [5, 6]
    assert all(type(token) is int for token in converted)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "prompt is None; valid: text"),
        ([True], "prompt holds True; valid: text"),
        (torch.tensor(3), "prompt is tensor(3)"),
        (["1", "2"], "prompt holds '1'; valid: text"),
        (np.array([[1], [2]]), "prompt holds [1]; valid: text"),
        ([260], "prompt token id is 260; valid: 0 to 259"),
        ([-1], "prompt token id is -1; valid: 0 to 259"),
        ([], "prompt is empty"),
        ("", "prompt is empty"),
        ([{"role": "user"}], "prompt[0] is {'role': 'user'}; valid: a message such as"),
        ([*HELLO, "more"], "prompt[1] is 'more'; valid: a message"),
        ([{"role": "user", "content": None}], "prompt[0]['content'] is None; valid: text"),
        ([{"role": 1, "content": "x"}], "prompt[0]['role'] is 1; valid: text"),
        (
            [{"role": "robot", "content": "x"}],
            "prompt[0]['role'] is 'robot'; valid: system, developer, user, assistant, tool",
        ),
    ],
    ids=repr,
)
def test_what_is_no_prompt(prompt: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        prompt_ids(prompt, chat_tokenizer(False), V)
    line = str(caught.value)
    assert words in line, line
    assert "\n" not in line, line
    assert len(line) < 300, line


def test_chat_needs_a_template_and_text_a_tokenizer() -> None:
    with pytest.raises(InputError, match="the model has no chat template; valid: text"):
        prompt_ids(HELLO, tiny_tokenizer(), V)
    with pytest.raises(InputError, match="came without a tokenizer; valid: token ids"):
        prompt_ids("x", None, V)
    assert not has_template(None)
    assert not has_template(tiny_tokenizer())
    assert has_template(chat_tokenizer())
    named = chat_tokenizer()
    named.chat_template = {"tool_use": "x"}
    assert not has_template(named)
    named.chat_template = {"default": "hi {{ messages[0]['content'] }}", "tool_use": "x"}
    assert text_of(prompt_ids(HELLO, named, V)) == "hi hé"


def test_all_tokens_that_end_a_text() -> None:
    class Part:
        def __init__(self, ids: Any, config: Any = None) -> None:
            self.eos_token_id = ids
            self.config = config
            self.generation_config: object = None

    model = Part(None, config=Part([3, 4]))
    model.generation_config = Part(5)
    assert end_tokens(model, Part(6)) == {3, 4, 5, 6}
    assert end_tokens(model, None) == {3, 4, 5}


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", "refusal"])
def test_parts_that_are_text_are_one_text(kind: str) -> None:
    """Of chats and of responses."""
    key = "refusal" if kind == "refusal" else "text"
    parts = [{"type": "text", "text": "h"}, {"type": kind, key: "é"}]
    tokenizer = chat_tokenizer(False)
    in_parts = prompt_ids([{"role": "user", "content": parts}], tokenizer, V)
    assert in_parts == prompt_ids(HELLO, tokenizer, V)


PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text | trim }}{% else %}{{ raise_exception('no text') }}{% endif %}{% endfor %}"
    "{{ '\\n' }}{% endfor %}{{ '>' }}"
)
ONLY_PARTS = "{{ messages[0].content[0]['text'] + '\\n' + messages[-1].content[0]['text'] }}"


@pytest.mark.parametrize("content", [" hé ", [{"type": "text", "text": " hé "}]])
@pytest.mark.parametrize(
    ("template", "text"),
    [
        (PARTS, "system:Be brief.\nuser:hé\n>"),
        (ONLY_PARTS, "Be brief.\n hé "),
        ("{{ messages | map(attribute='content') | join('|') }}", "Be brief.| hé "),
        ("{{ messages[-1].content is string }}", "True"),
    ],
    ids=["parts", "parts alone", "text", "neither"],
)
def test_contents_have_the_form_that_the_template_reads(
    template: str, text: str, content: Any
) -> None:
    """A question is never lost because a template looks for it in a list."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    assert written(template, messages) == text


def test_an_answer_goes_on_in_parts() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer "}]
    template = PARTS.replace(" | trim", "")
    assert written(template, messages) == "user:Hi\nassistant:The answer "


@pytest.mark.parametrize(
    "content", [[], ["hi"], [{"type": "image"}], [{"type": "text", "text": 1}], {}]
)
def test_parts_that_are_no_text(content: Any) -> None:
    with pytest.raises(InputError, match=r"prompt\[0\]\['content'\] is .*; valid: text"):
        prompt_ids([{"role": "user", "content": content}], chat_tokenizer(), V)


@pytest.mark.parametrize(
    ("role", "is_valid"),
    [
        ("tool", True),
        ("ipython", True),
        ("calls", False),
        ("model\nsystem", False),
        ("other", False),
    ],
)
def test_roles_are_those_of_the_template(role: str, is_valid: bool) -> None:
    """A role is a part of the prompt's own marks: any text would forge turns."""
    template = (
        "{% for m in messages %}"
        "{% if m['role'] in ['ipython', 'tool'] or 'calls' in m %}R{% endif %}"
        "{% if m.content == 'other' %}O{% endif %}{{ m.role + m.content }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "Hi"}, {"role": role, "content": "x", "name": "f"}]
    if is_valid:
        assert written(template, messages).endswith("x")
        return
    with pytest.raises(InputError) as caught:
        written(template, messages)
    valid = "system, developer, user, assistant, tool, ipython"
    assert str(caught.value) == f"prompt[1]['role'] is {role!r}; valid: {valid}"


# ---- conversations that a template was not written for, and where an answer goes on ----

#: no system message, turns in strict alternation, content trimmed
GEMMA = """{% if messages[0]['role'] == 'system' %}
{{- raise_exception('no system role') }}{% endif %}
{%- for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
{{- '<' + m['role'] + '>' + m['content'] | trim + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
#: one system message, first, told with the last user turn; turns in strict alternation
MISTRAL = """{% if messages[0].role == 'system' %}
{%- set system, turns = messages[0].content, messages[1:] %}
{%- else %}{% set system, turns = '', messages %}{% endif %}
{%- for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}
{{- '[' + (system + '\\n\\n' if loop.last and system else '') + m.content + ']' }}
{%- else %}{{ ' ' + m.content + ';' }}{% endif %}{% endfor %}"""
#: other system messages than the first are dropped without a word
FIRST = """{% if messages[0].role == 'system' %}{{ '<s:' + messages[0].content + '>' }}{% endif %}
{%- for m in messages %}{% if m.role != 'system' %}
{{- m.role + ':' + m.content + ';' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
ANY = """{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
TALK = "s:Be brief. u:Hi a:Yes? s:Be kind. u:Why?"
ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}


def talk(text: str) -> list[dict[str, Any]]:
    """``u:Hi a:Yes?`` → messages."""
    messages: list[dict[str, Any]] = []
    for word in text.split(" "):
        role, colon, content = word.partition(":")
        if colon and role in ROLES:
            messages.append({"role": ROLES[role], "content": content})
        else:
            messages[-1]["content"] += " " + word
    return messages


def written(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = chat_tokenizer(adds_bos=False)
    tokenizer.chat_template = template
    return tokenizer.decode(prompt_ids(messages, tokenizer, 260, options=options))


@pytest.mark.parametrize(
    ("template", "conversation", "text"),
    [
        (ANY, TALK, "system:Be brief.;user:Hi;assistant:Yes?;system:Be kind.;user:Why?;assistant:"),
        (ANY, "d:Be brief. u:Hi", "system:Be brief.;user:Hi;assistant:"),
        (FIRST, TALK, "<s:Be brief.\n\nBe kind.>user:Hi;assistant:Yes?;user:Why?;assistant:"),
        (FIRST, "s:A d:B u:One u:Two", "<s:A\n\nB>user:One;user:Two;assistant:"),
        (MISTRAL, "s:A u:One s:B u:Two", "[A\n\nB\n\nOne\n\nTwo]"),
        (GEMMA, "s:A u:Hi", "<user>A\n\nHi\n<assistant>"),
        (
            GEMMA,
            TALK,
            "<user>Be brief.\n\nBe kind.\n\nHi\n<assistant>Yes?\n<user>Why?\n<assistant>",
        ),
        (
            GEMMA,
            "u:One a:Yes a:No u:Two",
            "<user>One\n<assistant>Yes\n\nNo\n<user>Two\n<assistant>",
        ),
        (GEMMA, "a:Yes? u:Hi", "<user>\n<assistant>Yes?\n<user>Hi\n<assistant>"),
        (GEMMA, "a:Yes? u:Hi a:No", "<user>\n<assistant>Yes?\n<user>Hi\n<assistant>No"),
        (GEMMA, "s:A a:Yes? u:Hi", "<user>A\n<assistant>Yes?\n<user>Hi\n<assistant>"),
    ],
)
def test_all_that_is_said_is_written(template: str, conversation: str, text: str) -> None:
    """In the first form that the template writes whole: a system message is never dropped."""
    assert written(template, talk(conversation)) == text


def test_what_no_form_helps_is_refused_as_ever() -> None:
    with pytest.raises(InputError, match="refuses the messages .one turn alone"):
        written(
            "{% if messages | length > 1 %}{{ raise_exception('one turn alone') }}{% endif %}",
            talk("u:Hi a:No"),
        )


@pytest.mark.parametrize(
    ("template", "conversation", "text"),
    [
        (ANY, "u:Hi a:The answer", "user:Hi;assistant:The answer"),
        (ANY, "u:Hi a:The answer  ", "user:Hi;assistant:The answer  "),
        (ANY, "u:Hi a:", "user:Hi;assistant:"),
        (GEMMA, "u:Hi a:The answer ", "<user>Hi\n<assistant>The answer "),
        (MISTRAL, "s:A u:Hi a:The", "[A\n\nHi] The"),
    ],
)
def test_an_answer_that_has_begun_goes_on(template: str, conversation: str, text: str) -> None:
    """Behind the assistant's last message, which ends as it is: no second turn begins."""
    assert written(template, talk(conversation)) == text
    if talk(conversation)[-1]["content"]:
        assert written(template, talk(conversation), continue_final_message=True) == text


def test_a_second_turn_is_asked_for_by_name() -> None:
    messages = talk("u:Hi a:Yes")
    assert (
        written(ANY, messages, continue_final_message=False) == "user:Hi;assistant:Yes;assistant:"
    )
    with pytest.raises(
        InputError, match="continue_final_message is True, and the last message the user's"
    ):
        written(ANY, talk("u:Hi"), continue_final_message=True)
    with pytest.raises(InputError, match="leaves out the assistant's message at the end"):
        written("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", messages)


def test_options_of_a_template() -> None:
    """They reach it, and never what it is given otherwise; control tokens in them are text."""
    assert written(THINKING, talk("u:Hi")).endswith("assistant:")
    assert written(THINKING, talk("u:Hi"), enable_thinking=False).endswith(
        "<think>\n\n</think>\n\n"
    )
    tokenizer = chat_tokenizer(adds_bos=False)
    tokenizer.chat_template = "{{ bos_token }}{{ mood }}"
    ids = prompt_ids(talk("u:Hi"), tokenizer, 260, options={"mood": "<s>", "bos_token": "x"})
    assert ids[0] == 256 not in ids[1:]
    assert tokenizer.decode(ids) == "<s><s>"
    tokenizer.chat_template = "{{ template }}{{ special }}"
    ids = prompt_ids(talk("u:Hi"), tokenizer, 260, options={"template": "a", "special": "b"})
    assert tokenizer.decode(ids) == "ab"
    for name in ("messages", "tools", "add_generation_prompt", "chat_template", "a b", 5):
        with pytest.raises(InputError, match="template_options holds"):
            prompt_ids(talk("u:Hi"), tokenizer, 260, options={name: "x"})  # type: ignore[dict-item]
    with pytest.raises(InputError, match="template_options is 'x'; valid: a dict"):
        prompt_ids(talk("u:Hi"), tokenizer, 260, options="x")  # type: ignore[arg-type]
