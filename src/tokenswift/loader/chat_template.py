"""A model's chat template: which one, what it can write, and the text that it makes of messages.

Templates refuse, or leave out without a word, what they were not written for; what a template does
is seen by trials with marks (`abilities`, `fitting`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TypeAlias

from tokenswift.checks import shown
from tokenswift.loader.abilities import Abilities, LimitReached, Turns
from tokenswift.sandbox import templates
from tokenswift.tokenizer import Tokenizer
from tokenswift.types import InputError, RunError

Messages: TypeAlias = Sequence[Mapping[str, object]]
Tools: TypeAlias = Sequence[Mapping[str, object]] | None
Options: TypeAlias = Mapping[str, object] | None

#: variables of a template that are no options
RESERVED = (
    "messages",
    "conversation",
    "tools",
    "documents",
    "add_generation_prompt",
    "chat_template",
    "tokenize",
)
#: stands behind an assistant's message that is continued; no template writes it, or changes it
END = "31415926535897932384626"
#: stands for an assistant's message
PROBE = "31415926"
SECONDS = 2  # processor time of a template
MEMORY = 2**28  # bytes of its address space
#: names under which reasoning is passed, the most common one first
REASONING = ("reasoning_content", "thinking", "reasoning")


def template_of(tokenizer: object, tools: bool = False) -> object:
    """The chat template of a tokenizer, of several the one for chats (with tools); None without.
    It is a text, unless somebody has set it to something else."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        return (template.get("tool_use") if tools else None) or template.get("default")
    return template


def has_template(tokenizer: object) -> bool:
    """Whether a tokenizer has a chat template."""
    return bool(template_of(tokenizer))


def check_template_options(options: Options) -> dict[str, object]:
    """The options of a chat template.

    Raises:
        InputError: they are no variables of a template.
    """
    if not isinstance(options, Mapping | None):
        valid = "a dict of the template's variables, such as {'enable_thinking': False}"
        raise InputError(
            f"template_options is {shown(options)}; valid: {valid}", "template_options"
        )
    for name in options or ():
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
            valid = f"names of the template's variables, but for {', '.join(RESERVED)}"
            raise InputError(
                f"template_options holds {shown(name)}; valid: {valid}", "template_options"
            )
    return dict(options or {})


def template_text(tokenizer: object, tools: bool = False) -> str:
    """The chat template of a tokenizer.

    Args:
        tools: whether it is to write tools or calls.
    Raises:
        InputError: it is no text.
    """
    template = template_of(tokenizer, tools)
    if not isinstance(template, str):
        raise InputError(f"the model's chat template is {shown(template)}; valid: text")
    return template


def abilities_of(template: str, tokenizer: Tokenizer) -> Abilities:
    """What a template can write with the special tokens of a tokenizer."""
    return _abilities(template, json.dumps(tokenizer.special_tokens_map, default=str))


@lru_cache(8)
def _abilities(template: str, special: str) -> Abilities:
    special_tokens = json.loads(special)

    def render(turns: Turns, variables: Mapping[str, object]) -> str:
        return rendered(template, turns, special_tokens, variables)

    return Abilities(render)


def prepare() -> None:
    """Start what renders templates now, while the model is loaded; what is wrong the first chat
    says."""
    with suppress(RunError), templates.lock:
        templates.ensure_process()


def rendered(
    template: str,
    messages: Messages,
    special: Mapping[str, object],
    variables: Mapping[str, object] | None = None,
) -> str:
    """The text of chat messages, as transformers' ``apply_chat_template`` has it.

    Args:
        template: of the model.
        messages: each with a role, a content and whatever else JSON can hold.
        special: the tokenizer's special tokens by name.
        variables: of the template, besides: ``tools``; ``add_generation_prompt``: end where the
            answer begins (default).
    Raises:
        InputError: the template meets a limit, refuses the messages, or is none.
        RunError: no process can be started.
    """
    scope = {
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        **(variables or {}),
        **special,
        "messages": [_in_common_form(message) for message in messages],
    }
    try:
        answer = templates.ask("render", SECONDS, MEMORY, template, scope)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"messages are not JSON ({error}); valid: texts, numbers, lists"
        ) from error
    if "error" in answer:
        reason = " ".join(answer["error"].split())
        raise InputError(f"the model's chat template refuses the messages ({reason[:160]})")
    if "limit" in answer:
        valid = f"up to {SECONDS} seconds of processor time and {MEMORY // 10**6} MB of memory"
        raise LimitReached(f"the model's chat template {answer['limit']}; valid: {valid}")
    return answer.get("text", "")


def _in_common_form(message: Mapping[str, object]) -> dict[str, object]:
    """A message as transformers hands it to templates: no empty fields, reasoning under the most
    common names."""
    fields = {name: value for name, value in message.items() if value is not None}
    if message.get("tool_calls") and "content" in message:
        fields["content"] = message["content"]  # None tells some templates that calls alone follow
    thought = next((fields[name] for name in REASONING if name in fields), None)
    if thought is None:
        return fields
    return {"thinking": thought, **fields, REASONING[0]: thought}
