"""Checks of single values: errors name the field, the value and what is valid."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from numbers import Real

from tokenswift.types import InputError

#: the greatest integer that a field takes: what a tensor's size and index can be
LARGEST = 2**63 - 1
_SHOWN = 80  # characters of a bad value in a message


def shown(value: object) -> str:
    """``repr`` of a bad value, cut to one short piece of a line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no integer of more than 4,300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def check_integer(
    name: str, value: object, least: int, valid: str = "", most: int = LARGEST
) -> int:
    """The integer, numpy's and torch's as Python's own.

    Raises:
        InputError: unless ``value`` is an integer from ``least`` to ``most``.
    """
    number = integer_of(value)
    if number is None or not least <= number <= most:
        bounds = f"of at least {least}" if most == LARGEST else f"from {least} to {most:,}"
        valid = valid or f"an integer {bounds}"
        raise InputError(f"{name} is {shown(value)}; valid: {valid}", name)
    return number


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise :class:`InputError` unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise InputError(
            f"{name} is {shown(value)}; valid: {', '.join(choices)}{meant(value, choices)}", name
        )


def meant(value: object, words: Iterable[str]) -> str:
    """What the refusal of a value ends with: the word that was probably meant, if any."""
    if not isinstance(value, str):
        return ""
    by_name = {word.lstrip("-"): word for word in words}
    wrong = value.lower().lstrip("-")
    names = [name for name in by_name if len(wrong) > 2 and name.startswith(wrong)]
    # "torch_dtype" holds the word "dtype"
    names += [name for name in by_name if f"_{name}_" in f"_{wrong}_" and name != wrong]
    names += get_close_matches(wrong, by_name, n=1)
    if not names or by_name[names[0]] == value:
        return ""
    return f"; did you mean {by_name[names[0]]}?"


def check_tokens(tokens: Collection[int], count: int) -> None:
    """Raise :class:`InputError` unless all token ids are below ``count`` and none is negative."""
    if tokens and (min(tokens) < 0 or max(tokens) >= count):
        wrong = next(token for token in tokens if not 0 <= token < count)
        raise InputError(f"token id is {wrong}; valid: 0 to {count - 1}, the model's vocabulary")


def check_flag(name: str, value: object) -> bool:
    """The truth value, numpy's as Python's own; :class:`InputError` for anything else."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise InputError(f"{name} is {shown(value)}; valid: True, False", name)
    return bool(value)


def check_callback(name: str, value: object) -> None:
    """Refuse what cannot be called; None passes."""
    if value is not None and not callable(value):
        raise InputError(f"{name} is {shown(value)}; valid: None, or a function", name)


def integer_of(value: object) -> int | None:
    """An integer of Python, numpy or torch as Python's own; None for anything else, truth values
    too."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def finite(value: object) -> float:
    """The value as a float for range checks; NaN (which fails every check) when it is no such
    number."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer beyond every float
        return math.nan


def check_text(name: str, text: str) -> str:
    """The text.

    Raises:
        InputError: it holds a lone surrogate, half a character that no UTF-8 has.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        character = f"character {error.start}, {ascii(text[error.start])}"
        line = f"{name} holds a lone surrogate ({character}); valid: whole characters"
        raise InputError(line, name) from error
    return text


def depth_and_size(value: object, most: int) -> tuple[int, int]:
    """How deep objects and lists of a JSON value lie in each other (counted to one more than
    ``most``), and how many values it has down to there."""
    level = [value] if isinstance(value, dict | list) else []
    depth = 0
    count = 1
    while level and depth <= most:
        next_level: list[dict[object, object] | list[object]] = []
        for container in level:
            values = container.values() if isinstance(container, dict) else container
            count += len(values)
            next_level += [inner for inner in values if isinstance(inner, dict | list)]
        level = next_level
        depth += 1
    return depth, count


def keep_field(options: object, name: str, value: object) -> None:
    """Set a field of a frozen dataclass while it is made."""
    object.__setattr__(options, name, value)


def counted(number: int, word: str, several: str | None = None) -> str:
    """A count in words: ``1 token``, ``2,000 tokens``.

    Args:
        word: of one.
        several: of any other number; default: with an s.
    """
    return f"{number:,} {word if number == 1 else several or word + 's'}"
