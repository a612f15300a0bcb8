"""What is wrong with a request, in the words of the command line and the form of OpenAI's errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from tokenswift.checks import shown
from tokenswift.config import OPTIONS
from tokenswift.types import InputError


class Refused(Exception):
    """A request that is not served.

    Attributes:
        status: of HTTP.
        body: OpenAI's ``{"error": {"message", "type", "param", "code"}}``.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, status, param, code)


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    kinds |= {429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def wrong_fields(errors: Sequence[Any]) -> InputError:
    """What pydantic found, about the first field that is wrong."""
    first = errors[0]
    if isinstance(own := first.get("ctx", {}).get("error"), InputError):
        return own
    where = [part for part in first["loc"] if part not in ("body", "query", "path", "header")]
    if first["type"] == "json_invalid":
        return InputError(f"the body is no JSON ({first['ctx']['error']}); valid: a JSON object")
    name = str(where[0]) if where else ""
    if first["type"] == "missing":
        return InputError(f"{name or 'the body'} is missing; valid: a value for it", name or None)
    if not name:
        return InputError(f"the body is {shown(first['input'])}; valid: a JSON object, as application/json")
    if first["type"] == "extra_forbidden":
        return InputError(f"{'.'.join(map(str, where))} is no setting of this server", name)
    own = [error for error in errors if tuple(error["loc"][:2]) == tuple(first["loc"][:2])]
    words = dict.fromkeys(error["msg"].removeprefix("Input should be ") for error in own)
    inside = [str(part) for part in where[1:] if name == "tokenswift"]
    return InputError(
        f"{'.'.join([name, *inside[:1]])} is {shown(first['input'])}; valid: {', or '.join(words)}", name
    )


#: advice for whoever starts a server, in errors that its clients see
_NOT_HERE = re.compile(r", a dtype of two bytes|, or more with rope_scaling yarn")
_OPTION = re.compile(r"'(.*?)' (is no option of strategy )", re.DOTALL)
#: options of strategies that name files or models: for whoever starts the server, not for its clients
CLOSED = ("explain", "draft_model")
_STRATEGIES = {one.name for kind in OPTIONS.values() for one in fields(kind)}


def in_words_of(error: InputError, length: str, asked: str, own: Sequence[str]) -> InputError:
    """An error of the engine, with the names of fields that a client can set.

    Args:
        length, asked: the request's fields of new tokens and of the prompt.
        own: fields below ``tokenswift``.
    """
    text, field = _NOT_HERE.sub("", str(error)), error.field
    text = re.sub(r"\bmax_new_tokens\b", length, text)
    text = _OPTION.sub(lambda found: f"tokenswift.strategy_options.{found[1]} {found[2]}", text)
    if text.startswith("tokenswift.strategy_options"):
        for closed in CLOSED:
            text = text.replace(f", {closed}", "")
        return InputError(text, "tokenswift")
    first = text.split(maxsplit=1)[0] if text else ""
    field = field or ("stop" if first == "stop" else None)
    name = {"max_new_tokens": length, "prompt": asked}.get(field or "", field)
    if first.partition("[")[0] == "prompt":
        text, name = asked + text.removeprefix("prompt"), asked
    for known, where in ((own, "tokenswift"), (_STRATEGIES, "tokenswift.strategy_options")):
        if first in known:
            text, name = f"{where}.{text}", "tokenswift"
            break
    return InputError(text, name)
