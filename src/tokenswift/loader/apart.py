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
from functools import lru_cache, partial
from typing import Any

from tokenswift.loader import control_tokens
from tokenswift.tokenizer import Tokenizer, backend_of
from tokenswift.types import InputError

PRIVATE = [
    chr(at) for at in range(0xE000, 0xF900)
]  # of the characters that Unicode leaves to everybody


def _secret() -> str:
    return "".join(secrets.choice(PRIVATE) for _ in range(6))


SECRET = _secret()  # stands before names of control tokens


def set_apart(given: Any, tokenizer: Tokenizer) -> tuple[Any, str]:
    """What a template is given, as JSON has it, with a sign before each control token, and that
    sign.

    Raises:
        InputError: there are too many levels.
    """
    sign, marks = _secret(), controls_of(tokenizer)
    whole, longest = re.compile(f"(?={_any_of(marks)})"), max(map(len, marks), default=0)
    parts = {mark[:size] for mark in marks for size in range(1, len(mark))}

    def signed(text: str) -> str:
        """A control token that the end of the text may begin is signed, too."""
        at = {i for i in range(max(0, len(text) - longest), len(text)) if text[i:] in parts}
        at |= {found.start() for found in whole.finditer(text)}
        return "".join(sign * (i in at) + letter for i, letter in enumerate(text)) if at else text

    try:
        return (_mapped(given, signed) if marks else given), sign
    except RecursionError as error:
        raise InputError("messages are nested too deeply; valid: texts, numbers, lists") from error


def encoded(
    text: str, tokenizer: Tokenizer, encode: Callable[..., list[int]], sign: str
) -> list[int]:
    """Token ids of what a template made of what :func:`set_apart` returned.

    Args:
        encode: encodes a text as the tokenizer does.
    Raises:
        InputError: a control token is to be text, and the tokenizer cannot write it so.
    """
    escaped = r"(\\{1,8})" + r"\1".join(f"u{ord(letter):04x}" for letter in sign)
    text = re.sub(
        escaped, sign, text
    )  # where a template writes JSON in ASCII, or JSON of such JSON
    controls = controls_of(tokenizer)
    if backend_of(tokenizer) is not None:
        apart = partial(_apart, tokenizer, sign)
        encode = control_tokens.without_forgeries(
            encode, controls, control_tokens.unknown_id(tokenizer, controls), apart
        )
    if sign not in text:
        return encode(text)
    marks, plain = _any_of(controls), text.replace(sign, "")
    own = re.compile(f"(?<!{sign})(?:{marks})")
    if own.findall(text) == re.findall(marks, plain):  # they only seemed to begin
        return encode(plain)
    return _apart(tokenizer, sign, text)


def _apart(tokenizer: Tokenizer, sign: str, text: str) -> list[int]:
    """Token ids of a text in which the names of control tokens alone are such, and those behind a
    sign text."""
    backend = backend_of(tokenizer)
    if backend is not None:
        made, named = _renamed(backend)
        controls = controls_of(tokenizer)
        own = re.compile(f"(?<!{sign})(?:{_any_of(controls)})")
        text = own.sub(lambda found: SECRET + found[0], text).replace(sign, "")
        ids: list[int] = made.encode(text, add_special_tokens=False).ids
        if set(ids).isdisjoint(
            {*named.values()} - {control_tokens.unknown_id(tokenizer, controls)}
        ):
            return [named.get(token, token) for token in ids]
    raise InputError(
        "a message holds a control token, which the model's tokenizer cannot write as text; "
        "valid: a "
        "message without it"
    )


@lru_cache(2)
def _renamed(backend: Any) -> tuple[Any, dict[Any, int]]:
    """A tokenizer to which control tokens are text, but for those with `SECRET` before their names;
    and the ids of these, with those that they stand for."""
    from tokenizers import AddedToken, Tokenizer

    made = Tokenizer.from_str(backend.to_str())
    made.encode_special_tokens = True
    known = {
        at: token for at, token in backend.get_added_tokens_decoder().items() if _is_control(token)
    }
    made.add_special_tokens([token.content for token in known.values()])  # which some are not yet
    for token in known.values():
        how = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word")}
        made.add_tokens([AddedToken(SECRET + token.content, normalized=False, **how)])
    return made, {made.token_to_id(SECRET + token.content): at for at, token in known.items()}


def controls_of(tokenizer: object) -> dict[str, int]:
    """The control tokens of a tokenizer, with their ids."""
    backend = backend_of(tokenizer)
    plain = getattr(tokenizer, "added_tokens_decoder", {})
    added = plain if backend is None else backend.get_added_tokens_decoder()
    return {token.content: at for at, token in added.items() if _is_control(token)}


def _is_control(token: Any) -> bool:
    """Whether a token beside a model is one; some files call ``<|im_start|>`` a word of the
    users'."""
    called = token.special or re.fullmatch(r"<[|｜].*[|｜]>", token.content)
    return bool(called) and not token.content.isspace()


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of any of some texts, the longest first."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(inner, change) for key, inner in value.items()}
    return [_mapped(inner, change) for inner in value] if isinstance(value, list | tuple) else value
