"""``tokenswift runs`` and ``resume``: what to do with runs that ``generate --run-dir`` kept."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenswift.cli import options, output
from tokenswift.cli.declare import add_options, command, option
from tokenswift.cli.generate import Text, write
from tokenswift.cli.terminal import Stages, say, table

logger = logging.getLogger("tokenswift")


@dataclass(frozen=True)
class Longer:
    """How a run goes on.

    Attributes:
        run_dir: the run's folder
        max_new_tokens: tokens of the whole run at most, counted from its prompt; default: as before
    """

    run_dir: str = option(metavar="DIR", place=True)
    max_new_tokens: int | None = option(None, least=1)


@dataclass(frozen=True)
class Listed(options.Record):
    """What is shown of runs.

    Attributes:
        folder: a run's folder, or one that has such folders in it; default: the current folder
        text: write the whole text of the run, or the text so far, to this file; with - or no FILE, to
            standard output
    """

    folder: str = option(".", "DIR", place=True, nargs="?")
    text: str | None = option(None, "FILE", nargs="?", const="-")


def add_parser(subparsers: Any) -> None:
    """Register the subcommands."""
    parser = command(subparsers, "resume", resume, "finish an interrupted run, or lengthen one", "DIR")
    add_options(parser, Longer)
    add_options(parser, Text, ("on_loop",), on_loop=None)
    add_options(parser, options.Record)
    add_options(parser, options.Shown, ("verbose",))
    add_options(command(subparsers, "runs", list_runs, "list runs, or print one", "[DIR]"), Listed)


def resume(args: argparse.Namespace) -> int:
    """Finish a run that generate --run-dir kept, with the tokens of the uninterrupted run. The continuation
    streams to standard output; the whole text is in the folder. --max-new-tokens makes a finished run longer.
    """
    from tokenswift.runs import folder as folders

    output.check_record(args.json)
    folder = Path(args.run_dir).expanduser()
    state = folders.load_whole(folder)
    logger.info("loading %s", state.header.model.model if state.header.model else state.header.name)
    with Stages(args.quiet, "loading") as stages:
        from tokenswift.engine.llm import reload, request_of

        request = request_of(state, folder, args.max_new_tokens, args.on_loop)
        llm = reload(state, stages)
    logger.info("%s, %s on %s, from token %d", llm.name, llm.dtype, llm.device, len(state.tokens))
    write(args, llm, request, state)
    return 0


# ---- what needs no model -----------------------------------------------------------------------------------


def list_runs(args: argparse.Namespace) -> int:
    """List the runs that were kept with generate --run-dir, with state and figures; or print the text of one
    (--text). No model is needed."""
    from tokenswift.runs import folder as folders
    from tokenswift.runs.folder import COLUMNS, cells, summaries

    folder = Path(args.folder).expanduser()
    record, text = output.check_record(args.json), output.check_record(args.text, "--text")
    if text is not None:
        contents, state = folders.load(folder)
        if contents.damaged:
            logger.warning("the journal is damaged at byte %d; what is before it is taken", contents.good)
        end = "\n" if text == output.STDOUT and sys.stdout.isatty() else ""
        output.write_text(text, state.text + state.tail + end)
        return 0
    rows = summaries(folder)
    if record is not None:
        output.write_json(record, *rows)
    if record != output.STDOUT:
        lines = [[cells(row).get(column, "") for column in COLUMNS] for row in rows]
        say((table(tuple(COLUMNS), lines, right=range(2, 8)) if rows else f"no runs in {args.folder}") + "\n")
    return 0
