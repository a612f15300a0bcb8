"""``tokenswift text``: the whole text of a run."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from tokenswift.cli import options
from tokenswift.cli.declare import add_options
from tokenswift.cli.output import STDOUT, TextSink, check_apart, check_writable, files_of_run, write_text
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "text",
        help="print the whole text of a run",
        description="Print the whole text of a run that generate --run-dir kept, or the text so far of an "
        "unfinished one, from its journal. No model is needed.",
        epilog="Exit codes: 0 done, 1 the text could not be written, 2 bad input.",
    )
    add_options(parser, options.RunDir)
    parser.add_argument(
        "--output", metavar="FILE", help="write the text to this file; default, and -: standard output"
    )
    add_options(parser, options.Quiet)


def run(args: argparse.Namespace) -> int:
    """Read the journal and write the text; nothing is loaded, nothing is locked."""
    from tokenswift.runs import folder as folders

    contents, state = folders.load(Path(args.run_dir).expanduser())
    to_file = args.output not in (None, str(STDOUT))
    path = check_writable("--output", args.output) if to_file else None
    check_apart({"--output": path}, files_of_run(args.run_dir))
    if contents.damaged:
        logger.warning("the journal is damaged at byte %d; the text is what is before it", contents.good)
    text = (state.text + state.tail).encode("utf-8", errors="replace").decode("utf-8")
    if path is not None:
        write_text(path, text)
        logger.info("%s, %s", path, counted(len(state.tokens), "token"))
        return 0
    sink = TextSink(None)
    sink.write(text)
    if sys.stdout.isatty():
        sink.close()  # ends the last line
    return 0
