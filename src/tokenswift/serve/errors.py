"""What is wrong with a request, in the words of the command line and the form of OpenAI's errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenswift.checks import shown
from tokenswift.sampling.choice import RefusedRow
from tokenswift.sampling.masks import LEFT, NoMask
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


def fault_of(error: BaseException, bad_words: Sequence[str] | None) -> BaseException | None:
    """What ended a text, where its request is to blame: another try would end as well. None: it is not."""
    if isinstance(error, RefusedRow) and bad_words and error.args[1] != "NaN":
        return InputError("bad_words leave no token that may be written; valid: fewer", "bad_words")
    return error if isinstance(error, NoMask) and error.args[1] != LEFT else None


def wrong_fields(errors: Sequence[Any]) -> InputError:
    """What pydantic found, about the first field that is wrong."""
    first = errors[0]
    if isinstance(own := first.get("ctx", {}).get("error"), InputError):
        return own
    if first["type"] == "json_invalid":
        return InputError(f"the body is not JSON ({first['ctx']['error']}); valid: a JSON object")
    field = next(iter(_place(first)), None)
    if field is None and first["type"] == "missing":
        return InputError("the body is missing; valid: a JSON object")
    if field is None:
        given = "of another type" if isinstance(first["input"], bytes) else shown(first["input"])
        return InputError(f"the body is {given}; valid: a JSON object, as application/json")
    found = [error for error in errors if _place(error)[:1] == [field]]
    place = max(map(_place, found), key=len)  # of a value of several kinds, the one that fits the furthest
    found = [error for error in found if _place(error) == place]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
    if found[0]["type"] == "too_many":
        size, most = len(found[0]["input"]), found[0]["ctx"]["most"]
        return InputError(f"{name} has {size:,} entries; valid: up to {most:,}", str(field))
    if found[0]["type"] == "missing":
        return InputError(f"{name} is missing; valid: a value for it", str(field))
    if found[0]["type"] == "extra_forbidden":
        return InputError(f"{name} is not a setting of this server", str(field))
    words = dict.fromkeys(
        _WANTED.get(error["type"]) or re.sub("^(Input|String) should (be |have )", "", error["msg"])
        for error in found
    )
    return InputError(f"{name} is {shown(found[0]['input'])}; valid: {', or '.join(words)}", str(field))


def _place(error: Any) -> list[str | int]:
    """Where in a body, query or header an error is, without the kinds of values that pydantic tried there."""
    return [part for part in error["loc"][1:] if not _KIND.fullmatch(str(part))]


_KIND = re.compile(r"str|(list|dict)\[.*\]")
#: pydantic's name of an error → what would be right
_WANTED = {
    "string_type": "text",
    "list_type": "a list",
    "too_short": "at least one",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
#: options of strategies that name files or models: for whoever starts the server, not for its clients
CLOSED = ("explain", "draft_model")
#: advice for whoever starts a server, in errors that its clients see
NOT_HERE = (", a dtype of two bytes", ", or more with rope_scaling yarn", " or a Grammar")
NOT_HERE += tuple(f", {name}" for name in CLOSED)


def in_words_of(error: InputError, names: Mapping[str, str]) -> InputError:
    """An error of the engine, with the names of fields that a client can set.

    Args:
        names: arguments of the engine → fields of a body.
    """
    text, field = str(error), error.field
    for advice in NOT_HERE:
        text = text.replace(advice, "")
    first = text.partition(" ")[0].partition("[")[0]
    if first in names:
        text, field = names[first] + text.removeprefix(first), field or first
    text = text.replace("max_new_tokens", names["max_new_tokens"])
    field = names.get(field or "", field)
    return InputError(text, field and field.partition(".")[0])
