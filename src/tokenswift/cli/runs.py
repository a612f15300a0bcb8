"""``tokenswift runs, resume, text, report``: what to do with runs that ``generate --run-dir`` kept."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenswift.cli import options, output
from tokenswift.cli.declare import add_options, command, option
from tokenswift.cli.generate import Text, write
from tokenswift.cli.terminal import Stages, say, table
from tokenswift.config import LoadConfig
from tokenswift.words import counted

if TYPE_CHECKING:
    from tokenswift.runs.state import RunState

logger = logging.getLogger("tokenswift")
#: here the default is what the run had
LOOP = "when the text repeats itself: report (continue and say so) or stop; default: as before"


@dataclass(frozen=True, kw_only=True)
class RunDir:
    """Which run.

    Attributes:
        run_dir: the run's folder
    """

    run_dir: str = option(metavar="DIR", place=True)


@dataclass(frozen=True)
class Longer(RunDir):
    """How a run goes on.

    Attributes:
        max_new_tokens: tokens of the whole run at most, counted from its prompt; default: as before
        drop_damaged: use the good part of a damaged journal, and keep the rest in a file beside it
    """

    max_new_tokens: int | None = option(None, least=1)
    drop_damaged: bool = option(False)


@dataclass(frozen=True)
class Where:
    """Where runs are.

    Attributes:
        folder: a run's folder, or one that has such folders in it; default: the current folder
    """

    folder: str = option(".", "DIR", place=True, nargs="?")


@dataclass(frozen=True, kw_only=True)
class Written(RunDir, options.Quiet):
    """What is written.

    Attributes:
        output: write it to this file
    """

    output: str | None = option(None, "FILE")


def add_parser(subparsers: Any) -> None:
    """Register the subcommands."""
    parser = command(subparsers, "resume", resume, "finish a run that was interrupted, or make one longer")
    add_options(parser, Longer)
    add_options(parser, Text, ("on_loop",), unset=True, texts={"on_loop": LOOP})
    add_options(parser, LoadConfig, ("threads",))
    add_options(parser, options.Record)
    add_options(parser, options.Shown, ("verbose",))
    parser = command(subparsers, "runs", list_runs, "list runs")
    add_options(parser, Where)
    add_options(parser, options.Record, texts={"json": "write one JSON record per run to this file"})
    add_options(command(subparsers, "text", text, "print the whole text of a run"), Written)
    add_options(command(subparsers, "report", report, "write a page about a run"), Written)


def resume(args: argparse.Namespace) -> int:
    """Finish a run that generate --run-dir kept, with the tokens of the uninterrupted run. The continuation
    streams to standard output; the whole text is in the folder. --max-new-tokens makes a finished run longer.
    """
    from tokenswift.runs import folder as folders

    LoadConfig(threads=args.threads)
    record = output.check_record(args.json)
    folder = Path(args.run_dir).expanduser()
    state = folders.load(folder)[1] if args.drop_damaged else folders.load_whole(folder)
    longer = args.max_new_tokens is not None and args.max_new_tokens > len(state.tokens)
    if state.end is not None and record is None and not (longer and state.end.reason == "length"):
        how = (
            f"{counted(len(state.tokens), 'token')}, {output.ENDINGS.get(state.end.reason, state.end.reason)}"
        )
        more = "; --max-new-tokens makes it longer" if state.end.reason == "length" else ""
        logger.info("%s is finished (%s): tokenswift text %s prints it%s", folder, how, folder, more)
        return 0

    logger.info("loading %s", state.header.model.model if state.header.model else state.header.name)
    with Stages(args.quiet, "loading") as stages:
        import torch

        from tokenswift.engine.journal import reload, request_of

        request = request_of(state, folder, args.max_new_tokens, args.on_loop, args.drop_damaged)
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        llm = reload(state, stages)
    logger.info("%s, %s on %s, from token %d", llm.name, llm.dtype, llm.device, len(state.tokens))
    write(args, llm, request, None, record, state)
    return 0


# ---- what needs no model -----------------------------------------------------------------------------------


def list_runs(args: argparse.Namespace) -> int:
    """List the runs that were kept with generate --run-dir, with state and figures."""
    from tokenswift.runs.report import COLUMNS, cells, summaries

    record = output.check_record(args.json)
    rows = summaries(Path(args.folder).expanduser())
    if record is not None:
        output.write_json(record, *rows)
    if record != output.STDOUT:
        lines = [[cells(row).get(column, "") for column in COLUMNS] for row in rows]
        say((table(lines, COLUMNS, right=range(2, 8)) if rows else f"no runs in {args.folder}") + "\n")
    return 0


def text(args: argparse.Namespace) -> int:
    """Print the whole text of a run that generate --run-dir kept, or the text so far of an unfinished one,
    from its journal. No model is needed."""
    path = output.STDOUT
    if args.output not in (None, str(output.STDOUT)):
        path = output.check_writable("--output", args.output) or path
    state = _state(Path(args.run_dir).expanduser())
    end = "\n" if path == output.STDOUT and sys.stdout.isatty() else ""
    output.write_text(path, _utf8(state.text + state.tail) + end)
    if path != output.STDOUT:
        logger.info("%s, %s", path, counted(len(state.tokens), "token"))
    return 0


def report(args: argparse.Namespace) -> int:
    """Write one HTML page about a run that was kept with generate --run-dir, by default report.html in its
    folder: figures, settings, and the text, each token marked by its source. For a folder with the runs of
    many prompts: figures of each. The page needs no network and no scripts."""
    from tokenswift.runs.report import page, summaries

    folder = Path(args.run_dir).expanduser()
    path = folder / "report.html" if args.output is None else Path(args.output).expanduser()
    rows = summaries(folder)
    alone = [row["run"] for row in rows] in ([], [str(folder)])
    state = _state(folder) if alone else None
    output.check_writable("--output", path)
    html = page(rows, folder.resolve().name, state)
    output.write_text(path, _utf8(html))
    logger.info("%s, %s", path, counted(len(rows), "run"))
    return 0


def _state(folder: Path) -> RunState:
    """A run as its journal has it, up to where that is damaged."""
    from tokenswift.runs import folder as folders

    contents, state = folders.load(folder)
    if contents.damaged:
        logger.warning("the journal is damaged at byte %d; what is before it is taken", contents.good)
    return state


def _utf8(text: str) -> str:
    return text.encode("utf-8", errors="replace").decode("utf-8")
