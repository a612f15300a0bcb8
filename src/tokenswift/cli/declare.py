"""Options of commands from dataclasses: a field is an option, and its class's docstring says what it is.

::

    @dataclass(frozen=True)
    class Length:
        \"\"\"How much is written.

        Attributes:
            max_new_tokens: tokens to write at most, at least 1
        \"\"\"

        max_new_tokens: int = option(200, earlier="--tokens", least=1)

``add_options(parser, Length)`` makes ``--max-new-tokens N``, with the default in its help;
``check_options(args, Length)`` refuses 0. Light: no torch in here.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any

from tokenswift.config import check_integer


def option(default: Any = MISSING, metavar: str | None = None, **more: Any) -> Any:
    """A field that is an option.

    Args:
        default: None stands for what the text says; without one it has to be given.
        metavar: placeholder of its value, by its type where it is not given.
        more: ``names`` beside the usual one; ``earlier``, a name that is understood but not shown; ``least``
            of a number, and ``valid``, that in words; ``hidden``, for one that no help shows; ``place``, for
            an argument without a name; anything else is argparse's.
    """
    return field(default=default, metadata={"metavar": metavar, **more})


def integer(text: str) -> int:
    """An argparse type: an integer."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; valid: an integer") from None


def number(text: str) -> float:
    """An argparse type: a number (its range is checked later, NaN included)."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; valid: a number") from None


def widths(text: str) -> tuple[int, ...] | None:
    """An argparse type: "auto" (None), or integers with commas."""
    if text == "auto":
        return None
    try:
        made = tuple(int(width) for width in text.split(","))
    except ValueError:
        made = (0,)
    if min(made) < 1:
        raise argparse.ArgumentTypeError(
            f"is {text!r}; valid: auto, or integers of at least 1, such as 1,3,3,3"
        )
    return made


#: short names of options, the same in every command
SHORT = {"model": "-m", "max_new_tokens": "-n", "seed": "-s", "temperature": "-t"}
#: type of a field → how its value is read, and its placeholder
KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (integer, "N"),
    "float": (number, "X"),
    "Path": (Path, "FILE"),
    "tuple[int, ...]": (widths, "W,W,…"),
    "str": (str, "NAME"),
    "Any": (str, "NAME"),
}


def texts_of(kind: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say of their attributes, as one line each."""
    found: dict[str, str] = {}
    for part in kind.__mro__:
        entries = inspect.cleandoc(part.__doc__ or "").partition("\nAttributes:\n")[2]
        for names, text in re.findall(r"^    ([\w, ]+): (.*(?:\n {5,}.*)*)", entries, re.MULTILINE):
            line = " ".join(text.replace("`", "").split()).removesuffix(".")
            found = {**{name: line for name in names.split(", ")}, **found}
    return found


def add_options(
    to: Any,
    kind: type,
    only: Collection[str] = (),
    unset: bool = False,
    texts: Mapping[str, str] | None = None,
    **defaults: Any,
) -> None:
    """Give a parser, or a group of one, an option for each field.

    Args:
        only: these fields alone; () for all.
        unset: what is not given is None, also where there is a default.
        texts: over those of the docstring.
        defaults: over those of the fields.
    """
    said = {**texts_of(kind), **(texts or {})}
    for one in fields(kind):
        if not only or one.name in only:
            default = defaults.get(one.name, one.default)
            add_option(to, one, said.get(one.name, ""), None if default is MISSING else default, unset)


def add_option(to: Any, one: Field[Any], text: str, default: Any = None, unset: bool = False) -> None:
    """One option.

    Args:
        text: what it is; the default is added where it says none.
        unset: as :func:`add_options` has it.
    """
    more = dict(one.metadata)
    names = [*more.pop("names", ()), f"--{one.name.replace('_', '-')}"]
    metavar, place, earlier = (more.pop(key, None) for key in ("metavar", "place", "earlier"))
    hidden = more.pop("hidden", False)
    for key in ("least", "valid", "help"):
        more.pop(key, None)
    type_name = str(one.type).removesuffix(" | None")
    if type_name == "bool":
        how: dict[str, Any] = {"action": "store_true"}
    else:
        kind, usual = KINDS.get(type_name, KINDS["str"])
        how = {"type": kind, "metavar": metavar or usual}
        if default not in (None, [], ()) and "default" not in text:
            text += f"; default: {default}"
    default = [] if default == () else default
    how |= {"default": None if unset else default, **more}
    text = argparse.SUPPRESS if hidden else text.replace("%", "%%")
    if place:
        to.add_argument(one.name, **how, help=text)
        return
    names = [SHORT[one.name], *names] if one.name in SHORT else names
    to.add_argument(*names, dest=one.name, **how, required=one.default is MISSING, help=text)
    if earlier:
        to.add_argument(earlier, dest=one.name, **how, help=argparse.SUPPRESS)


def check_options(args: argparse.Namespace, kind: type) -> None:
    """Check the numbers that have a least one.

    Raises:
        InputError: naming the option.
    """
    for one in fields(kind):
        if "least" in one.metadata and getattr(args, one.name) is not None:
            check_integer(one.name, getattr(args, one.name), one.metadata["least"], one.metadata.get("valid"))
