"""How a request is refused: errors in the form that OpenAI's clients read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypedDict

from starlette.exceptions import HTTPException

from tokenswift.checks import shown
from tokenswift.sampling.masks import LEFT, NoMask
from tokenswift.sampling.sampler import RefusedRow
from tokenswift.types import InputError

GONE = 499  # the client closed the connection: nobody reads this
_UNION = re.compile(r"str|\w+\[.*\]")  # what pydantic calls the members of a union


class ErrorFields(TypedDict):
    """An error, as OpenAI's clients know it."""

    message: str
    type: str
    param: str | None
    code: str | None


class Refused(HTTPException):
    """A request that is not served.

    Args:
        status: of HTTP.
        message: in one line.
        param: the field that is wrong.
        code: OpenAI's word for it.
        headers: of the reply.

    Attributes:
        body: of the reply.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        **headers: str,
    ) -> None:
        super().__init__(status, message, headers)
        kind = "invalid_request_error" if status < 500 else "server_error"
        text = message.encode(errors="backslashreplace").decode()  # names may hold lone surrogates
        error = ErrorFields(message=text, type=kind, param=param, code=code)
        self.body: dict[str, ErrorFields] = {"error": error}


def wrong_fields(errors: Sequence[Mapping[str, object]]) -> Refused:
    """What pydantic found first, in a body or a query."""
    first = errors[0]
    location = first["loc"]
    parts = location if isinstance(location, tuple) else ()
    names = [part for part in parts if isinstance(part, int) or not _UNION.fullmatch(str(part))]
    place = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)[1:]
    value = shown(first["input"])
    valid = str(first["msg"]).removeprefix("Input should be ")
    if first["type"] == "missing":
        value = "missing"
        valid = "a request that has it"
    text = f"{place or 'the body'} is {value}; valid: {valid}"
    return Refused(400, text, str(names[0]) if names else None)


def log_text(text: str, most: int = 200) -> str:
    """A stranger's text for one line of the log: no control characters, and nothing but ASCII."""
    return ascii(text[:most])[1:-1]


def fault_of(error: BaseException, bad_words: Sequence[object] | None) -> BaseException | None:
    """What ended a text, where its request is to blame: another try would end as well. None: it is
    not."""
    if isinstance(error, RefusedRow) and bad_words and error.fault != "NaN":
        return InputError("bad_words leave no token that may be written; valid: fewer", "bad_words")
    return error if isinstance(error, NoMask) and error.reason != LEFT else None
