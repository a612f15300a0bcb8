"""Options of commands from dataclasses: a field is an option, and its class's docstring says what it is.

::

    @dataclass(frozen=True)
    class Length:
        \"\"\"How much is written.

        Attributes:
            max_new_tokens: tokens to write at most, at least 1
        \"\"\"

        max_new_tokens: int = option(200, least=1)

``add_options(parser, Length)`` makes ``--max-new-tokens N``, with the default in its help, and refuses 0.
Light: no torch in here.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any, NoReturn

from tokenswift.checks import check_integer, meant
from tokenswift.types import InputError

RARE = "rare"  # the level of an option that --help-all alone shows


def option(default: Any = MISSING, metavar: str | None = None, **more: Any) -> Any:
    """A field that is an option.

    Args:
        default: None stands for what the text says; without one it has to be given.
        metavar: placeholder of its value, by its type where it is not given.
        more: ``names``, before the usual one, the first of them in help and messages; ``least`` of a number,
            and ``valid``, that in words; ``level``; ``place``, for an argument without a name; anything else
            is argparse's.
    """
    return field(default=default, metadata={"metavar": metavar, **more})


def reader(read: Callable[[str], Any], valid: str) -> Callable[[str], Any]:
    """An argparse type: what ``read`` makes of a text; one that it refuses is told with what is valid."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"is {text!r}; valid: {valid}") from None

    return parse


def _widths(text: str) -> tuple[int, ...]:
    made = tuple(int(width) for width in text.split(","))
    if min(made) < 1:
        raise ValueError
    return made


def _texts(text: str) -> list[str]:
    return [] if text == "none" else [text]


def _biases(text: str) -> list[tuple[int, float]]:
    pairs = [part.split("=") for part in text.split(",")] if text != "none" else []
    return [(int(token), float(bias)) for token, bias in pairs]


#: short names of options, the same in every command
SHORT = {"model": "-m", "max_new_tokens": "-n", "seed": "-s", "temperature": "-t"}
BIASES = "token ids with a bias each, such as 198=-5,11=2, or none"
#: type of a field → how its value is read, and its placeholder
KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (reader(int, "an integer"), "N"),
    "float": (reader(float, "a number"), "X"),  # its range is checked later, NaN included
    "Path": (Path, "FILE"),
    "tuple[int, ...]": (reader(_widths, "integers of at least 1, such as 1,3,3,3"), "N,N,…"),
    "Texts": (_texts, "TEXT"),
    "Biases": (reader(_biases, BIASES), "ID=X,…"),
}
ADDED = ("Texts", "Biases")  # several of these options add up


def texts_of(kind: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say of their attributes, as one line each."""
    found: dict[str, str] = {}
    for part in kind.__mro__:
        entries = inspect.cleandoc(part.__doc__ or "").partition("\nAttributes:\n")[2]
        for names, text in re.findall(r"^    ([\w, ]+): (.*(?:\n {5,}.*)*)", entries, re.MULTILINE):
            line = " ".join(text.replace("`", "").split()).removesuffix(".")
            found = {**{name: line for name in names.split(", ")}, **found}
    return found


def command(subparsers: Any, name: str, run: Callable[[argparse.Namespace], int], words: str) -> Parser:
    """The parser of a subcommand.

    Args:
        run: what it does; its docstring is the description.
        words: beside its name in the list of commands.
    """
    text = " ".join(inspect.cleandoc(run.__doc__ or "").split())
    parser = subparsers.add_parser(name, help=words, description=text)
    parser.set_defaults(run=run)
    return parser


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
            text = re.sub(r"(?<=\(see )\w+", lambda m: f"--{m[0].replace('_', '-')}", said.get(one.name, ""))
            add_option(to, one, text, default, unset, one.name in rare)


def add_option(to: Any, one: Field[Any], text: str, default: Any, unset: bool, rare: bool = False) -> None:
    """One option; its default is added to its text where that says none."""
    more = {key: value for key, value in one.metadata.items() if key not in ("least", "valid", "help")}
    names, metavar, place, level = (more.pop(key, None) for key in ("names", "metavar", "place", "level"))
    usual = f"--{one.name.replace('_', '-')}"
    names = [SHORT.get(one.name), *(names or ()), usual]
    type_name = str(one.type).partition(" | ")[0]
    if type_name == "bool":
        how: dict[str, Any] = {"action": "store_true"}
    else:
        kind, usual_metavar = KINDS.get(type_name, (str, "NAME"))
        how = {"type": kind, "metavar": metavar or usual_metavar}
        if type_name in ADDED:
            how["action"] = "extend"
        if default not in (MISSING, None, (), []) and "default" not in text:
            text += f"; default: {shown(default)}"
    how |= {"default": None if unset or default is MISSING else [] if default == () else default, **more}
    text = text.replace("%", "%%")
    hidden = argparse.SUPPRESS if rare or level else text
    if place:
        made = to.add_argument(one.name, **how, help=hidden)
    else:
        needed = default is MISSING
        made = to.add_argument(*filter(None, names), dest=one.name, **how, required=needed, help=hidden)
    made.text, made.valid = text, (one.metadata.get("least"), one.metadata.get("valid"))


def shown(default: Any) -> str:
    """A default as it is typed."""
    return ",".join(map(str, default)) if isinstance(default, tuple | list) else str(default)


def long_name(action: argparse.Action) -> str:
    """The name of an option that help and messages use: ``--seed`` of ``-s`` and ``--seed``."""
    names = action.option_strings or [str(action.metavar or action.dest)]
    return next((name for name in names if name.startswith("--")), names[0])


class Format(argparse.HelpFormatter):
    """Options by their short and their first long name, with the placeholder once: ``-s, --seed N``."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, max_help_position=30, **kwargs)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        short = [name for name in action.option_strings if not name.startswith("--")]
        value = "" if action.nargs == 0 else f" {self._format_args(action, str(action.metavar))}"
        return ", ".join([*short, long_name(action)]) + value


class HelpAll(argparse.Action):
    """--help-all: the help, with rare options too."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        for action in parser._actions:
            action.help = getattr(action, "text", action.help)
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ordinary :class:`InputError`\\ s (no usage dump, no exit)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "add_help": False, "formatter_class": Format, **kwargs})

    def complete(self) -> None:
        """Add what every command has, and the line of its usage."""
        group = self.add_argument_group("help")
        group.add_argument("-h", "--help", action="help", help="show the usual options, and exit")
        group.add_argument("--help-all", action=HelpAll, nargs=0, help="show all options, and exit")
        group.add_argument("--debug", action="store_true", help="show the traceback of an error")
        words = [self.prog, "[options]"]
        for action in self._actions:
            if action.option_strings:
                words += [f"{long_name(action)} {action.metavar}"] if action.required else []
            else:
                words.append(f"[{action.metavar}]" if action.nargs in ("?", "*") else str(action.metavar))
        self.usage = " ".join(words)
        self.set_defaults(parser=self)

    @property
    def commands(self) -> dict[str, Parser]:
        """The parsers of the subcommands; none of a command without any."""
        return next((a.choices for a in self._actions if isinstance(a, argparse._SubParsersAction)), {})

    def print_help(self, file: Any = None) -> None:
        """Print the help text; argparse's own would pass over what cannot be written."""
        print(self.format_help(), end="", file=file or sys.stdout, flush=True)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; refuses unknown options, with the one that is probably meant, and numbers below the
        least that they may be."""
        made, rest = self.parse_known_args(args, namespace)
        unknown = next((word.partition("=")[0] for word in rest if word.startswith("-")), None)
        if unknown is not None:
            command = getattr(made, "parser", self)
            raise InputError(f"unknown option {unknown}{meant(unknown, command._option_string_actions)}")
        for action in getattr(made, "parser", self)._actions:
            least, valid = getattr(action, "valid", (None, None))
            if least is not None and getattr(made, action.dest) is not None:
                check_integer(long_name(action), getattr(made, action.dest), least, valid)
        if rest:
            raise InputError(f"unexpected argument {rest[0]!r}; valid: quotes around a text of several words")
        return made

    def error(self, message: str) -> NoReturn:
        """Raise :class:`InputError` with argparse's message, an option by its long name."""
        found = re.match(r"argument (?:-\w/)?([^:/]+)[^:]*: (.*)", message, re.DOTALL)
        if found:
            message = f"{found[1]}{' ' if found[2].startswith('is ') else ': '}{found[2]}"
        raise InputError(message)

    def in_words(self, message: str) -> str:
        """The message with fields written as the options that set them: the one that it begins with, and
        names with an underscore anywhere, but those in a list of a method's options."""
        options = {
            name: long_name(action)
            for action in self._actions
            if action.option_strings
            for name in (action.dest, *(word.lstrip("-").replace("-", "_") for word in action.option_strings))
        }
        begin = re.match(r"(?!out of )'?(\w+)'?(?=[ :])", message)  # not --out of memory
        if begin and begin[1] in options:
            message = options[begin[1]] + message[begin.end() :]
        if " is not an option of " in message:
            return message
        return re.sub(r"(?<![\w./-])\w+_\w+(?![\w./-])", lambda m: options.get(m[0], m[0]), message)
