"""``tokenswift report``: one HTML page about a run."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from tokenswift.cli import options
from tokenswift.cli.declare import add_options
from tokenswift.cli.output import check_apart, check_writable, files_of_run, write_text
from tokenswift.cli.runs import summaries
from tokenswift.files import is_address
from tokenswift.types import InputError
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "report",
        help="write a page about a run",
        description="Write one HTML page about a run that was kept with generate --run-dir: settings, speed "
        "and acceptance against length, cost by phase, and the text, each token marked by its source, "
        "repeats highlighted. For a folder (or an address) with the runs of many prompts: figures of each "
        "and of all. The page needs no network and no scripts.",
    )
    add_options(parser, options.RunDir)
    parser.add_argument(
        "--output", metavar="FILE", help="write the page to this file; default: report.html in the folder"
    )
    add_options(parser, options.Quiet)


def run(args: argparse.Namespace) -> int:
    """Read the journals and write the page; the model is not needed."""
    from tokenswift.runs import folder as folders
    from tokenswift.runs.listing import find
    from tokenswift.runs.report.page import page, page_of_all

    folder = Path(args.run_dir).expanduser()
    remote = is_address(args.run_dir)
    if remote and args.output is None:
        raise InputError(f"--output is not given, and {args.run_dir} is an address; valid: a file here")
    several = remote or (folder.is_dir() and not folders.has_run(folder) and bool(find(folder)))
    contents, state = (None, None) if several else folders.load(folder)
    path = check_writable("--output", str(folder / "report.html") if args.output is None else args.output)
    check_apart({"--output": path}, {} if several else files_of_run(args.run_dir))
    if contents is None or state is None:
        rows = summaries(args.run_dir)
        html = page_of_all(rows, args.run_dir if remote else folder.resolve().name)
        told = counted(len(rows), "run")
    else:
        if contents.damaged:
            what = "the journal is damaged at byte %d; the page shows what is before it"
            logger.warning(what, contents.good)
        html = page(state, folder.resolve().name, folders.is_locked(folder))
        told = counted(len(state.tokens), "token")
    if path is not None:
        write_text(path, html.encode("utf-8", errors="replace").decode("utf-8"))
    logger.info("%s, %s", path, told)
    return 0
