"""From the bytes of a request to its checked body.

What a body holds is a stranger's. Objects that are handed on as they are (tools, schemas, options
of templates, labels) are measured before anything is made of them: `check_object` looks at no more
of a value than it may have. All of this takes processor time, so large bodies are read in a thread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from tokenswift.checks import shown
from tokenswift.grammar import MOST_CHARACTERS, MOST_DEPTH, MOST_ITEMS
from tokenswift.serve.refusals import Refused, wrong_fields
from tokenswift.types import InputError

#: bytes of a body that are read on the event loop, in about a millisecond; more take a thread
SMALL_BODY = 1 << 16
#: fields of a body whose values are handed on as they are
MEASURED = (
    "tools",
    "tool_choice",
    "response_format",
    "text",
    "tokenswift",
    "chat_template_kwargs",
    "metadata",
    "reasoning",
    "stream_options",
)
MOST_TOOLS = 128
#: of the tools that OpenAI's servers run, which are left out, a client may list as many again
MOST_LISTED_TOOLS = 2 * MOST_TOOLS
#: of objects and lists in each other: those of a schema, and of what it stands in
MOST_LEVELS = MOST_DEPTH + 8
JSON_TYPES = ("application/json", "+json")

BodyT = TypeVar("BodyT", bound=BaseModel)


async def read_body(kind: type[BodyT], raw: bytes, content_type: str) -> BodyT:
    """The body of a request.

    Args:
        kind: of the body.
        raw: what was sent.
        content_type: as the header has it, "" where there is none.
    Raises:
        Refused: it is no JSON, or a field is wrong.
        InputError: a field is larger than it may be.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type and not media_type.endswith(JSON_TYPES):
        valid = "content-type: application/json"
        raise Refused(415, f"the content-type is {content_type[:80]!r}; valid: {valid}")
    if len(raw) <= SMALL_BODY:
        return parse_body(kind, raw)
    return await asyncio.to_thread(parse_body, kind, raw)


def parse_body(kind: type[BodyT], raw: bytes) -> BodyT:
    """The body of a request; see `read_body`."""
    try:
        value = json.loads(raw)
    except RecursionError:
        raise Refused(400, "the body is nested too deeply; valid: few levels") from None
    except ValueError as error:  # of JSON, of UTF-8, and numbers of thousands of digits
        reason = " ".join(str(error).split())[:80]
        raise Refused(400, f"the body is not JSON ({reason}); valid: a JSON object") from None
    if not isinstance(value, dict):
        raise Refused(400, f"the body is {shown(value)}; valid: a JSON object")
    for name in MEASURED:
        if value.get(name):
            check_object(name, value[name])
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise wrong_fields(error.errors(include_url=False, include_context=False)) from None


def check_object(name: str, value: object) -> None:
    """Check that a value is no larger than a grammar may be, which is looked at level by level and
    no further than that.

    Raises:
        InputError: it has too many tools, levels, values or characters.
    """
    if name == "tools" and isinstance(value, list) and len(value) > MOST_LISTED_TOOLS:
        valid = f"up to {MOST_TOOLS} functions"
        raise InputError(f"tools holds {len(value):,} tools; valid: {valid}", "tools")
    level: Sequence[object] = [value]
    values = 1
    characters = 0
    depth = 0
    while level:
        inner: list[object] = []
        for one in level:
            if isinstance(one, str):
                characters += len(one)
            elif isinstance(one, Mapping):
                characters += sum(map(len, one))
                inner.extend(one.values())
            elif isinstance(one, list):
                inner.extend(one)
        values += len(inner)
        depth += 1
        if values > MOST_ITEMS or characters > MOST_CHARACTERS or depth > MOST_LEVELS:
            valid = (
                f"up to {MOST_CHARACTERS:,} characters, {MOST_ITEMS:,} values, "
                f"{MOST_LEVELS} levels of objects and lists"
            )
            raise InputError(f"{name} is too large; valid: {valid}", name)
        level = inner
