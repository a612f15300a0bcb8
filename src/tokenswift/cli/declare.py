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

from tokenswift.checks import check_integer, meant
from tokenswift.types import InputError

#: who is told of an option: --help-all alone; --method-option alone, as one of its keys; nobody
RARE, KEY, HIDDEN = "rare", "key", "hidden"


def option(default: Any = MISSING, metavar: str | None = None, **more: Any) -> Any:
    """A field that is an option.

    Args:
        default: None stands for what the text says; without one it has to be given.
        metavar: placeholder of its value, by its type where it is not given.
        more: ``names`` beside the usual one; ``shown``, a name in place of it; ``earlier``, a name that is
            understood but not shown; ``least`` of a number, and ``valid``, that in words; ``level``: RARE,
            KEY or HIDDEN; ``place``, for an argument without a name; anything else is argparse's.
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


def widths(text: str) -> tuple[int, ...]:
    """An argparse type: integers with commas."""
    try:
        made = tuple(int(width) for width in text.split(","))
    except ValueError:
        made = (0,)
    if min(made) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; valid: integers of at least 1, such as 1,3,3,3")
    return made


def texts(text: str) -> tuple[str, ...]:
    """An argparse type: a text, of which there may be several; "none" is none."""
    return () if text == "none" else (text,)


def biases(text: str) -> tuple[tuple[int, float], ...]:
    """An argparse type: token ids with a bias each, which is checked later."""
    try:
        pairs = [part.split("=") for part in text.split(",")] if text != "none" else []
        return tuple((int(token), float(bias)) for token, bias in pairs)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"is {text!r}; valid: token ids with a bias each, such as 198=-5,11=2, or none"
        ) from None


#: short names of options, the same in every command
SHORT = {"model": "-m", "max_new_tokens": "-n", "seed": "-s", "temperature": "-t"}
#: type of a field → how its value is read, and its placeholder
KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (integer, "N"),
    "float": (number, "X"),
    "Path": (Path, "FILE"),
    "tuple[int, ...]": (widths, "W,W,…"),
    "str": (str, "NAME"),
    "Texts": (texts, "TEXT"),
    "Biases": (biases, "ID=X,…"),
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
    rare: Collection[str] = (),
    **defaults: Any,
) -> None:
    """Give a parser, or a group of one, an option for each field.

    Args:
        only: these fields alone; () for all.
        unset: what is not given is None, also where there is a default.
        texts: over those of the docstring.
        rare: fields that --help-all alone shows, besides those that say so themselves.
        defaults: over those of the fields.
    """
    said = {**texts_of(kind), **(texts or {})}
    for one in fields(kind):
        if not only or one.name in only:
            default = defaults.get(one.name, one.default)
            default = None if default is MISSING else default
            level = RARE if one.name in rare else None
            add_option(to, one, said.get(one.name, ""), default, unset, level)


def add_option(
    to: Any, one: Field[Any], text: str, default: Any = None, unset: bool = False, level: str | None = None
) -> None:
    """One option.

    Args:
        text: what it is; the default is added where it says none.
        unset: as :func:`add_options` has it.
        level: over the field's own.
    """
    more = dict(one.metadata)
    usual = f"--{one.name.replace('_', '-')}"
    names = [*more.pop("names", ()), more.pop("shown", None) or usual]
    metavar, place, earlier = (more.pop(key, None) for key in ("metavar", "place", "earlier"))
    level = more.pop("level", None) or level
    for key in ("least", "valid", "help"):
        more.pop(key, None)
    type_name = str(one.type).removesuffix(" | None")
    if type_name == "bool":
        how: dict[str, Any] = {"action": "store_true"}
    else:
        kind, usual_metavar = KINDS.get(type_name, KINDS["str"])
        how = {"type": kind, "metavar": metavar or usual_metavar}
        if kind in (texts, biases):  # several of them add up
            how["action"] = "extend"
        if default not in (None, [], ()) and "default" not in text:
            text += f"; default: {default}"
    default = [] if default == () else default
    how |= {"default": None if unset else default, **more}
    text = text.replace("%", "%%")
    if place:
        to.add_argument(one.name, **how, help=text)
        return
    names = [SHORT[one.name], *names] if one.name in SHORT else names
    shown = argparse.SUPPRESS if level else text
    made = to.add_argument(*names, dest=one.name, **how, required=one.default is MISSING, help=shown)
    made.level, made.text = level, text
    for name in (earlier, usual):
        if name is not None and name not in names:
            to.add_argument(name, dest=one.name, **how, help=argparse.SUPPRESS)


def level_of(action: argparse.Action) -> str | None:
    """RARE, KEY or HIDDEN; None for an option that every help shows."""
    return getattr(action, "level", None)


def keys_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Key → option, of what --method-option sets."""
    return {action.dest: action for action in parser._actions if level_of(action) == KEY}


class MethodOption(argparse.Action):
    """--method-option KEY=VALUE: the option of that name. ``help`` is answered once all is read."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, *args: Any) -> None:
        given, equals, text = str(values).partition("=")
        if given == "help" and not equals:
            namespace.method_help = keys_of(parser)
            for action in parser._actions:
                action.required = False
            return
        keys, key = keys_of(parser), given.replace("-", "_")
        if key not in keys:
            valid = f"{', '.join(keys)}, or help{meant(key, list(keys))}"
            raise InputError(f"--method-option {given} is not a key; valid: {valid}")
        action = keys[key]
        if not equals:
            raise InputError(f"--method-option {given} has no value; valid: {key}={action.metavar}")
        try:
            value = action.type(text) if callable(action.type) else text
        except argparse.ArgumentTypeError as error:
            raise InputError(f"--method-option {key} {error}") from None
        setattr(namespace, key, value)


class HelpAll(argparse.Action):
    """--help-all: the help, with rare options too."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        for action in parser._actions:
            if level_of(action) == RARE:
                action.help = action.text  # type: ignore[attr-defined]
        parser.print_help()
        parser.exit()


def complete(parser: argparse.ArgumentParser) -> None:
    """Add what goes with the options of a command: --method-option for its keys (beside --strategy, where it
    has that one), --help-all for rare ones, and --debug. A group of nothing else comes last."""
    keys = keys_of(parser)
    if keys:
        beside = next((a for a in parser._actions if a.dest == "strategy"), next(iter(keys.values())))
        beside.container.add_argument(  # type: ignore[attr-defined]
            "--method-option",
            action=MethodOption,
            metavar="KEY=VALUE",
            help="an option of the method or of its kernels; may be given several times; help lists them",
        )
    debug = parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    if any(level_of(action) == RARE for action in parser._actions):
        debug.level, debug.text, debug.help = RARE, debug.help, argparse.SUPPRESS  # type: ignore[attr-defined]
        parser.add_argument(
            "--help-all", action=HelpAll, nargs=0, help="show all options, the rare ones included, and exit"
        )
    shown = [a for a in parser._optionals._group_actions if a.help != argparse.SUPPRESS]
    if all(action.dest in ("help", "help_all", "debug") for action in shown):
        parser._action_groups.remove(parser._optionals)
        parser._action_groups.append(parser._optionals)


def check_options(args: argparse.Namespace, kind: type) -> None:
    """Check the numbers that have a least one.

    Raises:
        InputError: naming the option.
    """
    for one in fields(kind):
        if "least" in one.metadata and getattr(args, one.name) is not None:
            check_integer(one.name, getattr(args, one.name), one.metadata["least"], one.metadata.get("valid"))
