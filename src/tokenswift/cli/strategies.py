"""``tokenswift strategies``: what there is to choose from."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import Any

from tokenswift.cli.options import shown_default


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "strategies",
        help="list the strategies, what each needs, and its options",
        description="The ways to draft. All of them write the text that plain decoding writes.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="one strategy only")
    parser.add_argument("--json", action="store_true", help="one JSON record instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    from tokenswift.strategies.table import STRATEGIES
    from tokenswift.types import InputError

    if args.name is not None and args.name not in STRATEGIES:
        raise InputError(f"strategy is {args.name!r}; valid: {', '.join(STRATEGIES)}")
    found = []
    for name, entry in STRATEGIES.items():
        if args.name in (None, name):
            options = [
                {
                    "name": option.name,
                    "default": option.default,
                    "help": option.metadata["help"],
                    "shown": shown_default(option),
                }
                for option in fields(entry.options)
            ]
            about = {"name": name, "summary": entry.summary, "needs": entry.needs, "paper": entry.paper}
            found.append({**about, "options": options})
    if args.json:
        for record in found:
            for option in record["options"]:
                del option["shown"]
        print(json.dumps({"strategies": found}, ensure_ascii=False))
        return 0
    print("\n\n".join(_text(record) for record in found))
    return 0


def _text(record: dict[str, Any]) -> str:
    lines = [record["name"], f"  {record['summary']}", f"  needs: {record['needs']}"]
    if record["paper"] != "none":
        lines.append(f"  paper: {record['paper']}")
    for option in record["options"]:
        name = option["name"].replace("_", "-")
        lines.append(f"  --{name}: {option['help']}; default: {option['shown']}")
    return "\n".join(lines)
