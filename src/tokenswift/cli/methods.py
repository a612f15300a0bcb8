"""``tokenswift methods``: the ways to draft, and the options of each, which --method-option sets."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from tokenswift.cli.declare import KEY, texts_of
from tokenswift.cli.options import Model, shown_default
from tokenswift.cli.output import STDOUT, add_json_option, check_record, write_json
from tokenswift.cli.tables import table
from tokenswift.method_options import OPTIONS
from tokenswift.spec.methods.about import ABOUT
from tokenswift.types import InputError

#: of the model's options those that --method-option sets, whatever the method
KERNELS = [one for one in fields(Model) if one.metadata.get("level") == KEY]


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "methods",
        help="list the drafting methods (--strategy) and their options (--method-option)",
        description="List the drafting methods, what each needs, and its options. All of them write the text "
        "that plain decoding writes, except with acceptance=published.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="this method alone")
    add_json_option(parser, "write the list to this file as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    names = [args.name] if args.name is not None else list(ABOUT)
    check_method(names[0])
    target = check_record(args.json)
    if target is not None:
        write_json(target, {"strategies": [_record(name) for name in names]})
    if target != STDOUT:
        print("\n\n".join([*map(_text, names), _kernels()]), flush=True)
    return 0


def print_keys(args: argparse.Namespace) -> int:
    """Print what ``--method-option help`` asks for: the keys that a command takes, of its method."""
    name = getattr(args, "strategy", "auto")
    names = list(OPTIONS) if name == "all" else [name]
    check_method(names[0])
    shown = [
        *(f"{name}\n{found}" for name in names if (found := _options(name, args.method_help))),
        *([_kernels()] if KERNELS[0].name in args.method_help else []),
    ]
    print("\n\n".join(shown), flush=True)
    return 0


def check_method(name: str) -> None:
    """Refuse the name of no method.

    Raises:
        InputError: naming it.
    """
    if name not in OPTIONS:
        raise InputError(f"strategy is {name!r}; valid: {', '.join(OPTIONS)}")


def _record(name: str) -> dict[str, Any]:
    about = ABOUT[name]
    options = [
        {"name": one.name, "default": one.default, "help": one.metadata["help"]}
        for one in fields(OPTIONS[name])
    ]
    return {
        "name": name,
        "summary": about.summary,
        "needs": about.needs,
        "paper": about.paper,
        "options": options,
    }


def _text(name: str) -> str:
    """A method: what it is, what it needs, its options."""
    about = ABOUT[name]
    said = [("needs", about.needs), *([("paper", about.paper)] if about.paper != "none" else [])]
    lines = [name, table([(about.summary,)], indent=2), table(said, indent=2)]
    options = _options(name, [one.name for one in fields(OPTIONS[name])])
    return "\n".join([*lines, options] if options else lines)


def _options(name: str, keys: Collection[str]) -> str:
    """A table of a method's options that are among ``keys``; "" for none."""
    return _table(
        (one.name, one.metadata["metavar"], one.metadata["help"], shown_default(one))
        for one in fields(OPTIONS[name])
        if one.name in keys
    )


def _kernels() -> str:
    said = texts_of(Model)
    rows = ((one.name, one.metadata["metavar"], said[one.name], str(one.default)) for one in KERNELS)
    return f"kernels of every method\n{_table(rows)}"


def _table(rows: Any) -> str:
    cells = [(f"{key}={metavar}", text, default) for key, metavar, text, default in rows]
    return table(cells, ("--method-option", "what it is", "default"), indent=2) if cells else ""
