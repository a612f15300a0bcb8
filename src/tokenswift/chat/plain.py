"""Models of which nothing is known: an answer that is ``{"name": …, "arguments": {…}}``, a call a line.

Where the chat template knows no tools, the conversation says it all in text: what there is to call, how, and
what came of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenswift.chat.family import Family
from tokenswift.chat.tools import Tools

PLAIN = Family("plain")
TOLD = """You can call functions. As JSON, they are:
{tools}
To call one, answer with nothing but {{"name": NAME, "arguments": {{…}}}}{more}."""


def in_words(messages: Sequence[Mapping[str, Any]], tools: Tools | None) -> list[dict[str, Any]]:
    """A conversation without calls and tools: they are told in its text.

    Args:
        messages: as `messages.for_template` has them.
        tools: what can be called.
    """
    made = [_message(message) for message in messages]
    if tools is None:
        return made
    listed = "\n".join(json.dumps(form["function"], ensure_ascii=False) for form in tools.forms)
    told = TOLD.format(tools=listed, more=", a line for each call" if tools.parallel else "")
    if made and made[0].get("role") == "system":
        made[0] = {**made[0], "content": f"{made[0]['content']}\n\n{told}"}
    else:
        made.insert(0, {"role": "system", "content": told})
    return made


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if message.get("role") == "tool":
        name = message.get("name")
        return {"role": "user", "content": f"{name or 'It'} returned: {content}"}
    if calls := message.get("tool_calls"):
        said = PLAIN.written([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
        return {**message, "tool_calls": None, "content": f"{content}\n{said}" if content else said}
    return dict(message)
