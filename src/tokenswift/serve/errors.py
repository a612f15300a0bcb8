"""What is wrong with a request, in the words of the command line and the form of OpenAI's errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tokenswift.checks import shown
from tokenswift.sampling.choice import RefusedRow
from tokenswift.sampling.masks import LEFT, NoMask
from tokenswift.types import InputError

#: status of HTTP → OpenAI's word for the kind of an error
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
KINDS[429] = "rate_limit_error"
_UNION = re.compile(r"str|\w+\[.*\]")  # what pydantic calls the members of a union
_WORDS = re.compile("^[A-Z][a-z]+ should (be |have )(a valid )?|(, unable| after validation).*")  # of no use


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
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    text = message.encode(errors="backslashreplace").decode()  # names may hold lone surrogates
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


def fault_of(error: BaseException, bad_words: Sequence[str] | None) -> BaseException | None:
    """What ended a text, where its request is to blame: another try would end as well. None: it is not."""
    if isinstance(error, RefusedRow) and bad_words and error.args[1] != "NaN":
        return InputError("bad_words leave no token that may be written; valid: fewer", "bad_words")
    return error if isinstance(error, NoMask) and error.args[1] != LEFT else None


def wrong_fields(errors: Sequence[Any]) -> InputError:
    """What pydantic found, about the first field that is wrong."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return InputError(f"the body is not JSON ({first['ctx']['error']}); valid: a JSON object")
    field = next(iter(_place(first)), None)
    if field is None:
        return InputError(f"the body is {shown(first['input'])}; valid: a JSON object, as application/json")
    found = [error for error in errors if _place(error)[:1] == [field]]
    place = max(map(_place, found), key=len)  # of a value of several kinds, the one that fits the furthest
    found = [error for error in found if _place(error) == place]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
    if found[0]["type"] == "missing":
        return InputError(f"{name} is missing; valid: a value for it", str(field))
    words = dict.fromkeys(_WORDS.sub("", error["msg"]) for error in found)
    return InputError(f"{name} is {shown(found[0]['input'])}; valid: {', or '.join(words)}", str(field))


def _place(error: Any) -> list[str | int]:
    """Where in a body, query or header an error is, without the kinds of values that pydantic tried there."""
    return [part for part in error["loc"][1:] if not _UNION.fullmatch(str(part))]
