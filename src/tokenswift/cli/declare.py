"""Options of commands and how they are read: a field of a dataclass is an option, and its class's
docstring says what it is.

::

    @dataclass(frozen=True)
    class Length:
        \"\"\"How much is written.

        Attributes:
            max_new_tokens: tokens to write at most, at least 1
        \"\"\"

        max_new_tokens: int = option(200, least=1)

``add_options(parser, Length)`` makes ``--max-new-tokens N``, with the default in its help, and
refuses 0. Light: no torch in here.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tokenswift.checks import meant
from tokenswift.types import InputError

#: short names of options, the same in every command
SHORT = {"model": "-m", "max_new_tokens": "-n", "seed": "-s", "temperature": "-t", "verbose": "-v"}
#: the options that ``--help`` shows; ``--help-all`` shows all
USUAL = frozenset(
    "prompt prompt_file raw system max_new_tokens model heads dtype device strategy temperature "
    "top_k top_p "
    "min_p repetition_penalty seed json output run_dir quiet prompts out at_once contexts "
    "repeats seeds "
    "no_measure folder text kind num_heads data work "
    "tokens epochs steps lr batch host port api_key_file served_model_name max_concurrent queue "
    "max_tokens "
    "max_prompt".split()
)


def option(default: Any = MISSING, metavar: str | None = None, **more: Any) -> Any:
    """A field that is an option.

    Args:
        default: None stands for what the text says; without one it has to be given.
        metavar: placeholder of its value, by its type where it is not given.
        more: ``names``, in place of the usual one; ``least`` of a number, and ``valid``, that in
            words; ``place``, for an argument without a name; anything else is argparse's.
    """
    return field(
        default=default, metadata=more if metavar is None else {"metavar": metavar, **more}
    )


def reader(read: Callable[[str], Any], valid: str) -> Callable[[str], Any]:
    """An argparse type: what ``read`` makes of a text; one that it refuses is told with what is
    valid."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, KeyError):
            given = text if re.fullmatch("-?[0-9]+", text) else repr(text)
            raise argparse.ArgumentTypeError(f"is {given}; valid: {valid}") from None

    return parse


def integer(least: int, valid: str | None = None) -> Callable[[str], int]:
    """An argparse type: an integer of at least ``least``."""

    def read(text: str) -> int:
        if int(text) < least:
            raise ValueError
        return int(text)

    return reader(read, valid or f"an integer of at least {least}")


def _widths(text: str) -> tuple[int, ...] | None:
    return None if text == "auto" else tuple(int(width) for width in text.split(","))


def _biases(text: str) -> list[tuple[int, float]]:
    pairs = [part.split("=") for part in text.split(",")] if text != "none" else []
    return [(int(token), float(bias)) for token, bias in pairs]


BIASES = "token ids with a bias each, such as 198=-5,11=2, or none"
#: type of a field → how its value is read, and its placeholder
KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (reader(int, "an integer"), "N"),
    "float": (reader(float, "a number"), "X"),  # its range is checked later, NaN included
    "Path": (Path, "FILE"),
    "tuple[int, ...]": (
        reader(_widths, "auto, or integers of at least 1, such as 1,3,3,3"),
        "N,N,…",
    ),
    "Texts": (lambda text: [] if text == "none" else [text], "TEXT"),
    "Biases": (reader(_biases, BIASES), "ID=X,…"),
}
ADDED = ("Texts", "Biases")  # several of these options add up


def texts_of(kind: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say of their attributes, as one line each."""
    found: dict[str, str] = {}
    for part in reversed(kind.__mro__):
        entries = inspect.cleandoc(part.__doc__ or "").partition("\nAttributes:\n")[2]
        for names, text in re.findall(r"^    ([\w, ]+): (.*(?:\n {5,}.*)*)", entries, re.MULTILINE):
            found |= dict.fromkeys(
                names.split(", "), " ".join(text.replace("`", "").split()).removesuffix(".")
            )
    return found


def add_options(
    to: Any,
    kind: type,
    only: Collection[str] = (),
    unset: bool = False,
    **defaults: Any,
) -> None:
    """Give a parser, or a group of one, an option for each field.

    Args:
        only: these fields alone; () for all.
        unset: what is not given is None, also where there is a default.
        defaults: over those of the fields.
    """
    said = texts_of(kind)
    for one in fields(kind):
        if not only or one.name in only:
            text = re.sub(
                r"(?<=\(see )\w+", lambda found: f"--{dashed(found[0])}", said.get(one.name, "")
            )
            add_option(to, one, text, defaults.get(one.name, one.default), unset)


def add_option(to: Any, one: Field[Any], text: str, default: Any, unset: bool = False) -> None:
    """One option; its default is added to its text where that says none."""
    how: dict[str, Any] = dict(one.metadata)
    names, place, least, valid = (
        how.pop(name, None) for name in ("names", "place", "least", "valid")
    )
    type_name = str(one.type).partition(" | ")[0]
    if type_name == "bool":
        how["action"] = "store_true"
    else:
        read, usual = KINDS.get(type_name, (str, "NAME"))
        read = read if least is None else integer(least, valid)
        added = {"action": "extend"} if type_name in ADDED else {}
        how = {"type": read, "metavar": usual, **added, **how}
        if default not in (MISSING, None, (), []) and "default" not in text:
            text += f"; default: {shown(default)}"
    called = [SHORT.get(one.name), *(names or [f"--{dashed(one.name)}"])]
    if not place:
        how |= {"dest": one.name, "required": default is MISSING}
    how["default"] = None if unset or default is MISSING else [] if default == () else default
    text = text.replace("%", "%%")
    brief = "; ".join([text.partition("; ")[0], *re.findall(r"; (default: \S+)$", text)])
    made = to.add_argument(*([one.name] if place else filter(None, called)), **how)
    made.help, made.text = brief if one.name in USUAL else argparse.SUPPRESS, text


def dashed(name: str) -> str:
    """A field as an option is called."""
    return name.replace("_", "-")


def shown(default: Any) -> str:
    """A default as it is typed."""
    return ",".join(map(str, default)) if isinstance(default, tuple | list) else str(default)


class HelpAll(argparse.Action):
    """--help-all: the help with rare options too, and with all of each text, not only its first
    clause."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        for action in parser._actions:
            action.help = getattr(action, "text", action.help)
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ordinary :class:`InputError`\\ s (no usage dump, no
    exit)."""

    def __init__(self, **kwargs: Any) -> None:
        wrapped = {"formatter_class": partial(argparse.HelpFormatter, max_help_position=30)}
        super().__init__(**{"allow_abbrev": False, "add_help": False, **wrapped, **kwargs})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; refuses what it does not know with the option that is probably meant."""
        made, rest = self.parse_known_args(args, namespace)
        if rest:
            given = next((word for word in rest if word.startswith("-")), rest[0]).partition("=")[0]
            known = getattr(made, "parser", self)._option_string_actions
            valid = "the options of --help-all, and quotes around a text of several words"
            raise InputError(f"unknown argument {given}; valid: {valid}{meant(given, known)}")
        return made

    def error(self, message: str) -> NoReturn:
        """Raise :class:`InputError` with argparse's message, an option by its long name."""
        found = re.match(r"argument (?:-\w/)?([^:/]+)[^:]*: (.*)", message, re.DOTALL)
        if found:
            message = f"{found[1]}{' ' if found[2].startswith('is ') else ': '}{found[2]}"
        raise InputError(message)

    def in_words(self, message: str) -> str:
        """The message with fields written as the options that set them: the one that it begins
        with, and names with an underscore anywhere."""
        options = {one.dest: one.option_strings[-1] for one in self._actions if one.option_strings}
        names = r"^(?!out of )'?\w+'?(?=[ :])|(?<![\w./-])\w+_\w+(?![\w./-])"  # not --out of memory
        return re.sub(names, lambda found: options.get(found[0].strip("'"), found[0]), message)


def command(
    subparsers: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    words: str,
    places: str = "",
) -> Parser:
    """The parser of a subcommand.

    Args:
        run: what it does; its docstring is the description.
        words: beside its name in the list of commands.
        places: its arguments without a name, for the line of usage.
    """
    text = " ".join(inspect.cleandoc(run.__doc__ or "").split())
    usage = f"tokenswift {name} [options] {places}".strip()
    parser = subparsers.add_parser(name, help=words, description=text, usage=usage)
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("-h", "--help", action="help", help="show the usual options, and exit")
    parser.add_argument("--help-all", action=HelpAll, nargs=0, help="show all options, and exit")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser
