"""A model's chat template: which one, what it can write, and the text that it makes of messages.

Templates refuse, or leave out without a word, what they were not written for; what a template does
is seen by trials with marks (`abilities`, `fitting`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeAlias

from tokenswift.checks import shown
from tokenswift.loader.abilities import Abilities, LimitReached, Turns
from tokenswift.sandbox import templates
from tokenswift.tokenizer import Tokenizer
from tokenswift.types import InputError, RunError

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Tools: TypeAlias = Sequence[Mapping[str, Any]] | None
Options: TypeAlias = Mapping[str, Any] | None

#: what a template is given by others than its options
TAKEN = ("messages", "conversation", "tools", "documents", "add_generation_prompt", "chat_template")
TAKEN += ("tokenize",)
#: stands behind an assistant's message that is continued; and for one: no template writes it, or
#: changes it
END, PROBE = "31415926535897932384626", "31415926"
SECONDS, MEMORY = 2, 2**28  # processor time of a template, and bytes of address space
#: names under which reasoning is passed, the usual one first
REASONING = ("reasoning_content", "thinking", "reasoning")


def template_of(tokenizer: object, tools: bool = False) -> Any:
    """The chat template of a tokenizer, of several the one for chats (with tools); None without."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        return (found.get("tool_use") if tools else None) or found.get("default")
    return found


def has_template(tokenizer: object) -> bool:
    """Whether a tokenizer has a chat template."""
    return bool(template_of(tokenizer))


def check_template_options(options: Options) -> dict[str, Any]:
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
        if not isinstance(name, str) or not name.isidentifier() or name in TAKEN:
            valid = f"names of the template's variables, but for {', '.join(TAKEN)}"
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
    named = json.loads(special)

    def render(turns: Turns, variables: Mapping[str, Any]) -> str:
        return rendered(template, turns, named, **variables)

    return Abilities(render)


def prepare() -> None:
    """Start what renders templates now, beside what else takes time; what is wrong the first chat
    says."""
    with suppress(RunError), templates.lock:
        templates.ensure_process()


def rendered(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, Any],
    /,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> str:
    """The text of chat messages, as transformers' ``apply_chat_template`` has it.

    Args:
        template: of the model.
        messages: each with a role, a content and whatever else JSON can hold.
        special: the tokenizer's special tokens by name.
        tools: as JSON has them.
        options: variables of the template; ``add_generation_prompt``: end where the answer begins
            (default).
    Raises:
        InputError: the template meets a limit, refuses the messages, or is none.
        RunError: no process can be started.
    """
    usual = {"documents": None, "add_generation_prompt": True}
    turns = [_usual(message) for message in messages]
    given = {**usual, **options, **special, "messages": turns, "tools": tools}
    try:
        answer = templates.ask("render", SECONDS, MEMORY, template, given)
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


def _usual(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as transformers hands it to templates: no empty fields, reasoning under the usual
    names."""
    made = {key: value for key, value in message.items() if value is not None}
    if message.get("tool_calls") and "content" in message:
        made["content"] = message["content"]  # None tells some templates that calls alone are said
    thought = next((made[key] for key in REASONING if key in made), None)
    return made if thought is None else {"thinking": thought, **made, REASONING[0]: thought}
