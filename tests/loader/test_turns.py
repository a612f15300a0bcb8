"""Conversations that a template was not written for are written whole; and where an answer goes on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chats import THINKING, chat_tokenizer
from tokenswift.loader.prompts import prompt_ids
from tokenswift.types import InputError

#: no system message, turns in strict alternation, content trimmed
GEMMA = """{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
{{- '<' + m['role'] + '>' + m['content'] | trim + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
#: one system message, first, told with the last user turn; turns in strict alternation
MISTRAL = """{% if messages[0].role == 'system' %}{% set system, turns = messages[0].content, messages[1:] %}
{%- else %}{% set system, turns = '', messages %}{% endif %}
{%- for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}{{ '[' + (system + '\\n\\n' if loop.last and system else '') + m.content + ']' }}
{%- else %}{{ ' ' + m.content + ';' }}{% endif %}{% endfor %}"""
#: other system messages than the first are dropped without a word
FIRST = """{% if messages[0].role == 'system' %}{{ '<s:' + messages[0].content + '>' }}{% endif %}
{%- for m in messages %}{% if m.role != 'system' %}{{ m.role + ':' + m.content + ';' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
ANY = """{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
TALK = "s:Be brief. u:Hi a:Yes? s:Be kind. u:Why?"
ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}


def talk(text: str) -> list[dict[str, Any]]:
    """``u:Hi a:Yes?`` → messages."""
    found: list[dict[str, Any]] = []
    for word in text.split(" "):
        role, colon, said = word.partition(":")
        if colon and role in ROLES:
            found.append({"role": ROLES[role], "content": said})
        else:
            found[-1]["content"] += " " + word
    return found


def written(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = chat_tokenizer(adds_bos=False)
    tokenizer.chat_template = template
    return tokenizer.decode(prompt_ids(messages, tokenizer, 260, options=options))


@pytest.mark.parametrize(
    ("template", "said", "text"),
    [
        (ANY, TALK, "system:Be brief.;user:Hi;assistant:Yes?;system:Be kind.;user:Why?;assistant:"),
        (ANY, "d:Be brief. u:Hi", "system:Be brief.;user:Hi;assistant:"),
        (ANY, "u:One u:Two", "user:One;user:Two;assistant:"),
        (FIRST, TALK, "<s:Be brief.\n\nBe kind.>user:Hi;assistant:Yes?;user:Why?;assistant:"),
        (FIRST, "s:A d:B u:One u:Two", "<s:A\n\nB>user:One;user:Two;assistant:"),
        (MISTRAL, "s:A u:One s:B u:Two", "[A\n\nB\n\nOne\n\nTwo]"),
        (GEMMA, "s:A u:Hi", "<user>A\n\nHi\n<assistant>"),
        (GEMMA, TALK, "<user>Be brief.\n\nBe kind.\n\nHi\n<assistant>Yes?\n<user>Why?\n<assistant>"),
        (GEMMA, "u:One a:Yes a:No u:Two", "<user>One\n<assistant>Yes\n\nNo\n<user>Two\n<assistant>"),
        (GEMMA, "s:A", "<user>A\n<assistant>"),
    ],
)  # fmt: skip
def test_all_that_is_said_is_written(template: str, said: str, text: str) -> None:
    """In the first form that the template writes whole: a system message is never dropped."""
    assert written(template, talk(said)) == text


def test_what_no_form_helps_is_refused_as_ever() -> None:
    with pytest.raises(InputError, match="refuses the messages .Conversation roles must alternate"):
        written(GEMMA, talk("a:Yes? u:Hi a:No"))


@pytest.mark.parametrize(
    ("template", "said", "text"),
    [
        (ANY, "u:Hi a:The answer", "user:Hi;assistant:The answer"),
        (ANY, "u:Hi a:The answer  ", "user:Hi;assistant:The answer  "),
        (ANY, "u:Hi a:", "user:Hi;assistant:"),
        (GEMMA, "u:Hi a:The answer ", "<user>Hi\n<assistant>The answer "),
        (MISTRAL, "s:A u:Hi a:The", "[A\n\nHi] The"),
    ],
)
def test_an_answer_that_has_begun_goes_on(template: str, said: str, text: str) -> None:
    """Behind the assistant's last message, which ends as it is: no second turn begins."""
    assert written(template, talk(said)) == text
    if talk(said)[-1]["content"]:
        assert written(template, talk(said), continue_final_message=True) == text


def test_a_second_turn_is_asked_for_by_name() -> None:
    said = talk("u:Hi a:Yes")
    assert written(ANY, said, continue_final_message=False) == "user:Hi;assistant:Yes;assistant:"
    with pytest.raises(InputError, match="continue_final_message is True, and the last message the user's"):
        written(ANY, talk("u:Hi"), continue_final_message=True)
    with pytest.raises(InputError, match="leaves out the assistant's message at the end"):
        written("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", said)


def test_options_of_a_template() -> None:
    """They reach it, and never what it is given otherwise; control tokens in them are text."""
    assert written(THINKING, talk("u:Hi")).endswith("assistant:")
    assert written(THINKING, talk("u:Hi"), enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    tokenizer = chat_tokenizer(adds_bos=False)
    tokenizer.chat_template = "{{ bos_token }}{{ mood }}"
    ids = prompt_ids(talk("u:Hi"), tokenizer, 260, options={"mood": "<s>", "bos_token": "x"})
    assert ids[0] == 256 not in ids[1:] and tokenizer.decode(ids) == "<s><s>"
    tokenizer.chat_template = "{{ template }}{{ special }}"
    ids = prompt_ids(talk("u:Hi"), tokenizer, 260, options={"template": "a", "special": "b"})
    assert tokenizer.decode(ids) == "ab"
    for name in ("messages", "tools", "add_generation_prompt", "chat_template", "a b", 5):
        with pytest.raises(InputError, match="template_options holds"):
            prompt_ids(talk("u:Hi"), tokenizer, 260, options={name: "x"})  # type: ignore[dict-item]
    with pytest.raises(InputError, match="template_options is 'x'; valid: a dict"):
        prompt_ids(talk("u:Hi"), tokenizer, 260, options="x")  # type: ignore[arg-type]
