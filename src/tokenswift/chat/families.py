"""Which family a model writes calls like: by its chat template and its vocabulary."""

from __future__ import annotations

from typing import Any

from tokenswift.chat.family import Family
from tokenswift.chat.hermes import HERMES
from tokenswift.chat.llama3 import LLAMA3
from tokenswift.chat.plain import PLAIN


def template_of(tokenizer: Any) -> str:
    """The template that a tokenizer has for chats with tools; "" where it has none."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        found = found.get("tool_use") or found.get("default")
    return found if isinstance(found, str) else ""


def knows_tools(tokenizer: Any) -> bool:
    """Whether a chat template does anything with tools."""
    return "tools" in template_of(tokenizer)


def effort_options(effort: str | None, tokenizer: Any) -> dict[str, Any]:
    """How much a model is to think, in the variables that its chat template knows."""
    template = template_of(tokenizer)
    found: dict[str, Any] = {}
    if effort is not None and "reasoning_effort" in template:
        found["reasoning_effort"] = effort
    if effort == "none" and "enable_thinking" in template:
        found["enable_thinking"] = False
    return found


def family_of(tokenizer: Any) -> Family:
    """The family whose form of calls a model's template speaks of; a plain one where it speaks of none."""
    template = template_of(tokenizer)
    if "tools" in template and HERMES.opening.strip() in template:
        return HERMES
    if "tools" in template and ("ipython" in template or LLAMA3.begins in template):
        return LLAMA3
    return PLAIN
