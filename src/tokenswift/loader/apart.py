"""Control tokens come from the template alone: what messages and tools say is encoded as text.

A sign that nobody can guess is put before each control token's text in what a client wrote, before
the template runs (:func:`set_apart`). Where such signs come out, the text is encoded by a copy of
the tokenizer that knows control tokens by other names alone (:func:`encoded`); a chat without them
is encoded as any text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from tokenswift.loader import control_tokens
from tokenswift.tokenizer import Tokenizer, backend_of
from tokenswift.types import InputError

if TYPE_CHECKING:
    import tokenizers

#: characters that Unicode leaves to everybody
PRIVATE = [chr(code) for code in range(0xE000, 0xF900)]
#: what encodes a text as the tokenizer does
Encode = Callable[[str], list[int]]
JsonValue = TypeVar("JsonValue")


def _secret() -> str:
    return "".join(secrets.choice(PRIVATE) for _ in range(6))


SECRET = _secret()  # stands before names of control tokens


def set_apart(value: JsonValue, tokenizer: Tokenizer) -> tuple[JsonValue, str]:
    """What a template is given, as JSON has it, with a sign before each control token, and that
    sign.

    Raises:
        InputError: there are too many levels.
    """
    sign = _secret()
    names = controls_of(tokenizer)
    if not names:
        return value, sign
    begins_name = re.compile(f"(?={_any_of(names)})")
    longest = max(map(len, names))
    beginnings = {name[:size] for name in names for size in range(1, len(name))}

    def signed(text: str) -> str:
        """A control token that the end of the text may begin is signed, too."""
        last = range(max(0, len(text) - longest), len(text))
        starts = {start for start in last if text[start:] in beginnings}
        starts |= {match.start() for match in begins_name.finditer(text)}
        if not starts:
            return text
        return "".join(sign * (i in starts) + letter for i, letter in enumerate(text))

    try:
        return _mapped(value, signed), sign
    except RecursionError as error:
        raise InputError("messages are nested too deeply; valid: texts, numbers, lists") from error


def encoded(text: str, tokenizer: Tokenizer, encode: Encode, sign: str) -> list[int]:
    """Token ids of what a template made of what :func:`set_apart` returned.

    Args:
        encode: encodes a text as the tokenizer does.
    Raises:
        InputError: a control token is to be text, and the tokenizer cannot write it so.
    """
    # where a template writes JSON in ASCII, or JSON of such JSON
    escaped = r"(\\{1,8})" + r"\1".join(f"u{ord(letter):04x}" for letter in sign)
    text = re.sub(escaped, sign, text)
    controls = controls_of(tokenizer)
    if backend_of(tokenizer) is not None:
        apart = partial(_apart, tokenizer, sign)
        unknown = control_tokens.unknown_id(tokenizer, controls)
        encode = control_tokens.without_forgeries(encode, controls, unknown, apart)
    if sign not in text:
        return encode(text)
    plain = text.replace(sign, "")
    names = _any_of(controls)
    unsigned = re.compile(f"(?<!{sign})(?:{names})")
    if unsigned.findall(text) == re.findall(names, plain):  # they only seemed to begin
        return encode(plain)
    return _apart(tokenizer, sign, text)


def _apart(tokenizer: Tokenizer, sign: str, text: str) -> list[int]:
    """Token ids of a text in which the names of control tokens alone are such, and those behind a
    sign text."""
    backend = backend_of(tokenizer)
    if backend is not None:
        renamed = _renamed(backend)
        controls = controls_of(tokenizer)
        unsigned = re.compile(f"(?<!{sign})(?:{_any_of(controls)})")
        text = unsigned.sub(lambda match: SECRET + match[0], text).replace(sign, "")
        ids = renamed.backend.encode(text, add_special_tokens=False).ids
        unknown = control_tokens.unknown_id(tokenizer, controls)
        if set(ids).isdisjoint({*renamed.controls.values()} - {unknown}):
            return [renamed.controls.get(token, token) for token in ids]
    raise InputError(
        "a message holds a control token, which the model's tokenizer cannot write as text; "
        "valid: a message without it"
    )


@dataclass(frozen=True, slots=True)
class _Renamed:
    """A tokenizer to which control tokens are text, but for those with `SECRET` before their names.

    Attributes:
        backend: the tokenizer.
        controls: the ids of these, with those that they stand for.
    """

    backend: tokenizers.Tokenizer
    controls: dict[int, int]


@lru_cache(2)
def _renamed(backend: tokenizers.Tokenizer) -> _Renamed:
    from tokenizers import AddedToken, Tokenizer

    renamed = Tokenizer.from_str(backend.to_str())
    renamed.encode_special_tokens = True
    controls = {
        number: token
        for number, token in backend.get_added_tokens_decoder().items()
        if _is_control(token)
    }
    renamed.add_special_tokens([token.content for token in controls.values()])  # some are not yet
    for token in controls.values():
        secret = AddedToken(
            SECRET + token.content,
            normalized=False,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            single_word=token.single_word,
        )
        renamed.add_tokens([secret])
    ids: dict[int, int] = {}
    for number, token in controls.items():
        secret_id = renamed.token_to_id(SECRET + token.content)
        if secret_id is not None:
            ids[secret_id] = number
    return _Renamed(renamed, ids)


def controls_of(tokenizer: object) -> dict[str, int]:
    """The control tokens of a tokenizer, with their ids."""
    backend = backend_of(tokenizer)
    added: Mapping[int, tokenizers.AddedToken] = getattr(tokenizer, "added_tokens_decoder", {})
    if backend is not None:
        added = backend.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if _is_control(token)}


def _is_control(token: tokenizers.AddedToken) -> bool:
    """Whether a token beside a model is one; some files call ``<|im_start|>`` a word of the
    users'."""
    is_named_so = re.fullmatch(r"<[|｜].*[|｜]>", token.content) is not None
    return (token.special or is_named_so) and not token.content.isspace()


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of any of some texts, the longest first."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(inner, change) for inner in value]
    return value
