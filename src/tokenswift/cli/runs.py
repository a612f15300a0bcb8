"""``tokenswift runs``: the runs below a folder, with state and figures."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenswift.cli.output import STDOUT, add_json_option, check_record, write_text
from tokenswift.cli.tables import table
from tokenswift.files import is_address
from tokenswift.types import InputError

COLUMNS = ("run", "state", "tokens", "of", "tokens/s", "a pass", "model", "strategy", "last written")


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "runs",
        help="list runs",
        description="List the runs that were kept with generate --run-dir, with state and figures.",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        default=".",
        metavar="DIR",
        help="a run's folder, one that has such folders in it, or an address that generate --ray wrote to; "
        "default: the current folder",
    )
    add_json_option(parser, "write one JSON record per run to this file, a line each")


def run(args: argparse.Namespace) -> int:
    """Read the journals; nothing is loaded, nothing is locked."""
    record = check_record(args.json)
    rows = summaries(args.folder)
    if record is not None:
        write_text(record, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    if record != STDOUT:
        print(shown(rows) if rows else f"no runs in {args.folder}", flush=True)
    return 0


def summaries(name: str) -> list[dict[str, Any]]:
    """The figures of the runs in a folder, or at an address.

    Raises:
        InputError: there is no such folder.
    """
    from tokenswift.runs.listing import find, summary_of

    with fetched(name) as folder:
        if not folder.is_dir():
            raise InputError(f"folder is {name!r}: no such folder; valid: one with runs in it")
        rows = [summary_of(path) for path in find(folder)]
        if is_address(name):  # its copies have no locks
            rows = [{**row, "run": f"{name.rstrip('/')}/{Path(row['run']).name}"} for row in rows]
        return rows


@contextmanager
def fetched(name: str) -> Iterator[Path]:
    """A folder, or the journals of the runs at an address in a folder of this moment."""
    if not is_address(name):
        yield Path(name).expanduser()
        return
    from tokenswift.runs.remote import fetch

    with tempfile.TemporaryDirectory() as folder:
        fetch(name, Path(folder))
        yield Path(folder)


def shown(rows: list[dict[str, Any]]) -> str:
    """The runs as a table; of what cannot be read only name and state."""
    from tokenswift.runs.listing import cells

    lines = [tuple(text for column, text in cells(row).items() if column in COLUMNS) for row in rows]
    return table(lines, COLUMNS, right=range(2, 6))
