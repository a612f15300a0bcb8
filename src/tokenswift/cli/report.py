"""``tokenswift report``: one HTML page about a run."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from tokenswift.cli import options
from tokenswift.cli.declare import add_options
from tokenswift.cli.output import check_apart, check_writable, files_of_run, write_text

logger = logging.getLogger("tokenswift")


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "report",
        help="a page about a run",
        description="Write one HTML page about a run that was kept with generate --run-dir: settings, speed "
        "and acceptance against length, cost by phase, and the text, each token marked by its source, "
        "repeats highlighted. The page needs no network and no scripts.",
    )
    add_options(parser, options.RunDir)
    parser.add_argument("--output", metavar="FILE", help="the page; default: report.html in the folder")
    add_options(parser, options.Quiet)


def run(args: argparse.Namespace) -> int:
    """Read the journal and write the page; the model is not needed."""
    from tokenswift.report.page import page
    from tokenswift.runs import folder as folders

    folder = Path(args.run_dir).expanduser()
    contents, state = folders.load(folder)
    path = check_writable("--output", str(folder / "report.html") if args.output is None else args.output)
    check_apart({"--output": path}, files_of_run(args.run_dir))
    if contents.damaged:
        logger.warning("the journal is damaged at byte %d; the page shows what is before it", contents.good)
    html = page(state, folder.resolve().name, folders.is_locked(folder))
    if path is not None:
        write_text(path, html.encode("utf-8", errors="replace").decode("utf-8"))
    logger.info("%s, %d tokens", path, len(state.tokens))
    return 0
