"""Options of commands and how they are read: a field of a dataclass is an option, and its class's
docstring says what it is.

::

    @dataclass(frozen=True)
    class Length:
        \"\"\"How much is written.

        Attributes:
            max_new_tokens: tokens to write at most
        \"\"\"

        max_new_tokens: Annotated[int, AtLeast(1), Option(short="-n")] = 200

``add_options(parser, Length)`` makes ``--max-new-tokens N``, with the default in its help, and
refuses 0. Rules and :class:`~tokenswift.config.fields.Option` are in `config.fields`. Light: no
torch in here.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from tokenswift.checks import meant
from tokenswift.config.fields import FieldType, Option, Rule, field_types
from tokenswift.types import InputError

#: what options are added to: a parser, or a group of its options
OptionGroup: TypeAlias = "argparse.ArgumentParser | argparse._ArgumentGroup"
#: what the commands' parsers are added to
Subparsers: TypeAlias = "argparse._SubParsersAction[Parser]"


def reader(read: Callable[[str], object], valid: str) -> Callable[[str], object]:
    """An argparse type: what ``read`` makes of a text; one that it refuses is named with what is
    valid."""

    def parse(text: str) -> object:
        try:
            return read(text)
        except (ValueError, KeyError):
            shown_text = text if re.fullmatch("-?[0-9]+", text) else repr(text)
            raise argparse.ArgumentTypeError(f"is {shown_text}; valid: {valid}") from None

    return parse


def value_reader(field_type: FieldType) -> Callable[[str], object]:
    """The argparse type of a field."""
    option = field_type.option
    if option.read is not None:
        return reader(option.read, option.valid)
    if int in field_type.kinds:
        return reader(partial(parse_integer, field_type.rule), field_type.rule.valid)
    if float in field_type.kinds:
        return reader(float, "a number")  # its range is checked later, NaN included
    return Path if Path in field_type.kinds else str


def parse_integer(rule: Rule, text: str) -> int:
    """The integer that a text is.

    Raises:
        ValueError: it is none, or one that the rule does not allow.
    """
    number = int(text)
    if not rule.allows(number):
        raise ValueError
    return number


def placeholder(field_type: FieldType) -> str:
    """What stands for the value of an option in the help."""
    if field_type.option.metavar is not None:
        return field_type.option.metavar
    for kind, letter in ((int, "N"), (float, "X"), (Path, "FILE")):
        if kind in field_type.kinds:
            return letter
    return "NAME"


def help_texts(options_class: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say of their attributes, as one line each."""
    texts: dict[str, str] = {}
    for part in reversed(options_class.__mro__):
        entries = inspect.cleandoc(part.__doc__ or "").partition("\nAttributes:\n")[2]
        for names, text in re.findall(r"^    ([\w, ]+): (.*(?:\n {5,}.*)*)", entries, re.MULTILINE):
            line = " ".join(text.replace("`", "").split()).removesuffix(".")
            texts |= dict.fromkeys(names.split(", "), line)
    return texts


def add_options(
    group: OptionGroup,
    options_class: type,
    only: Collection[str] = (),
    unset: bool = False,
    **defaults: object,
) -> None:
    """Give a parser, or a group of one, an option for each field.

    Args:
        only: these fields alone; () for all.
        unset: an option that is not given is None, also where its field has a default.
        defaults: over those of the fields.
    """
    texts = help_texts(options_class)
    types = field_types(options_class)
    for field in fields(options_class):
        if only and field.name not in only:
            continue
        text = re.sub(
            r"(?<=\(see )\w+", lambda name: f"--{dashed(name[0])}", texts.get(field.name, "")
        )
        default = defaults.get(field.name, field.default)
        add_option(group, field.name, types[field.name], text, default, unset)


def add_option(
    group: OptionGroup,
    name: str,
    field_type: FieldType,
    text: str,
    default: object,
    unset: bool = False,
) -> None:
    """One option; its default is added to its text where that says none.

    Args:
        name: the field's.
        text: the help.
        default: of the field; ``MISSING`` where the option has to be given.
        unset: without the option the value is None, whatever the default.
    """
    option = field_type.option
    is_flag = bool in field_type.kinds
    how: dict[str, Any] = {"default": default}
    if unset or default is MISSING:
        how["default"] = None
    elif default == ():
        how["default"] = []
    if is_flag:
        how["action"] = "store_true"
    else:
        how["type"] = value_reader(field_type)
        how["metavar"] = placeholder(field_type)
        if default not in (MISSING, None, (), []) and "default" not in text:
            text += f"; default: {shown(default)}"
    if option.adds_up or option.repeatable:
        how["action"] = "extend" if option.adds_up else "append"
    if option.bare is not None or (option.positional and default is not MISSING):
        how["nargs"] = "?"
        how["const"] = option.bare
    if option.positional:
        action = group.add_argument(name, **how)
    else:
        required = default is MISSING
        action = group.add_argument(
            *option_names(name, option), dest=name, required=required, **how
        )
    text = text.replace("%", "%%")
    default_note = re.findall(r"; (default: \S+)$", text)
    brief = "; ".join([text.partition("; ")[0], *default_note])
    action.help = brief if option.shown else argparse.SUPPRESS
    vars(action)["full_help"] = text


def option_names(name: str, option: Option) -> tuple[str, ...]:
    """The names of an option, the short one first."""
    names = option.names or (f"--{dashed(name)}",)
    return names if option.short is None else (option.short, *names)


def dashed(name: str) -> str:
    """A field as an option is called."""
    return name.replace("_", "-")


def shown(default: object) -> str:
    """A default as it is typed."""
    return ",".join(map(str, default)) if isinstance(default, tuple | list) else str(default)


class HelpAll(argparse.Action):
    """--help-all: the help with rare options too, and with all of each text, not only its first
    clause."""

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> None:
        for action in parser._actions:
            action.help = vars(action).get("full_help", action.help)
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ordinary :class:`InputError`\\ s (no usage dump, no
    exit)."""

    def __init__(self, **kwargs: Any) -> None:
        wrapped = {"formatter_class": partial(argparse.HelpFormatter, max_help_position=30)}
        super().__init__(**{"allow_abbrev": False, "add_help": False, **wrapped, **kwargs})

    def parse_args(  # type: ignore[override]  # argparse's takes namespaces of other classes, too
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """As argparse's; refuses what it does not know with the option that is probably meant."""
        options, unknown = self.parse_known_args(args, namespace or argparse.Namespace())
        if unknown:
            dashed_words = [word for word in unknown if word.startswith("-")]
            name = (dashed_words or unknown)[0].partition("=")[0]
            known = getattr(options, "parser", self)._option_string_actions
            valid = "the options of --help-all, and quotes around a text of several words"
            raise InputError(f"unknown argument {name}; valid: {valid}{meant(name, known)}")
        return options

    def error(self, message: str) -> NoReturn:
        """Raise :class:`InputError` with argparse's message, an option by its long name."""
        missing = message.partition("arguments are required: ")[2]
        if missing:
            raise InputError(f"{missing} is missing; valid: {self.usage}")
        parts = re.match(r"argument (?:-\w/)?([^:/]+)[^:]*: (.*)", message, re.DOTALL)
        if parts:
            name, reason = parts.groups()
            message = f"{name} {reason}" if reason.startswith("is ") else f"{name}: {reason}"
        raise InputError(message)

    def in_words(self, message: str) -> str:
        """The message with fields written as the options that set them: the one that it begins
        with, and names with an underscore anywhere."""
        options = {
            action.dest: action.option_strings[-1]
            for action in self._actions
            if action.option_strings
        }
        names = r"^(?!out of )'?\w+'?(?=[ :])|(?<![\w./-])\w+_\w+(?![\w./-])"  # not --out of memory
        return re.sub(names, lambda name: options.get(name[0].strip("'"), name[0]), message)


def command(
    subparsers: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    positionals: str = "",
) -> Parser:
    """The parser of a subcommand.

    Args:
        run: what it does; its docstring is the description.
        summary: stands next to its name in the list of commands.
        positionals: its arguments without a name, for the line of usage.
    """
    text = " ".join(inspect.cleandoc(run.__doc__ or "").split())
    usage = f"tokenswift {name} [options] {positionals}".strip()
    parser = subparsers.add_parser(name, help=summary, description=text, usage=usage)
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("-h", "--help", action="help", help="show the usual options, and exit")
    parser.add_argument("--help-all", action=HelpAll, nargs=0, help="show all options, and exit")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser
