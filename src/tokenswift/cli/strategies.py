"""``tokenswift strategies``: what there is to choose from."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from tokenswift.cli.options import shown_default
from tokenswift.cli.output import STDOUT, add_json_option, check_record, write_json
from tokenswift.cli.tables import table
from tokenswift.config import OPTIONS
from tokenswift.spec.methods.about import ABOUT
from tokenswift.types import InputError


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "strategies",
        help="list the strategies, what each needs, and its options",
        description="The ways to draft. All of them write the text that plain decoding writes.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="one strategy only")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    if args.name is not None and args.name not in ABOUT:
        raise InputError(f"strategy is {args.name!r}; valid: {', '.join(ABOUT)}")
    target = check_record(args.json)
    found = []
    for name, entry in ABOUT.items():
        if args.name in (None, name):
            options = [
                {
                    "name": option.name,
                    "default": option.default,
                    "help": option.metadata["help"],
                    "shown": shown_default(option),
                }
                for option in fields(OPTIONS[name])
            ]
            about = {"name": name, "summary": entry.summary, "needs": entry.needs, "paper": entry.paper}
            found.append({**about, "options": options})
    shown = "\n\n".join(_text(record) for record in found)
    if target is not None:
        for record in found:
            for option in record["options"]:
                del option["shown"]
        write_json(target, {"strategies": found})
    if target != STDOUT:
        print(shown, flush=True)
    return 0


def _text(record: dict[str, Any]) -> str:
    about = [("needs", record["needs"])]
    if record["paper"] != "none":
        about.append(("paper", record["paper"]))
    lines = [record["name"], table([(record["summary"],)], indent=2), table(about, indent=2)]
    options = [(f"--{o['name'].replace('_', '-')}", o["help"], o["shown"]) for o in record["options"]]
    if options:
        lines.append(table(options, ("option", "what it is", "default"), indent=2))
    return "\n".join(lines)
