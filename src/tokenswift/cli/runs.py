"""``tokenswift resume`` and ``runs``: what to do with runs that ``--run-dir`` kept."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tokenswift.checks import counted
from tokenswift.cli import options
from tokenswift.cli.places import Input, check_written_apart
from tokenswift.cli.progress import Stages
from tokenswift.cli.results import STDOUT, check_record, ending, write_json, write_text
from tokenswift.cli.terminal import on_one_line, say, table
from tokenswift.cli.write import write
from tokenswift.config.fields import SHOWN, AtLeast, Option
from tokenswift.types import InputError

if TYPE_CHECKING:
    from tokenswift.runs.records import RunState

logger = logging.getLogger("tokenswift")


@dataclass(frozen=True)
class Longer:
    """How a run goes on.

    Attributes:
        run_dir: the run's folder
        max_new_tokens: tokens of the whole run at most, counted from its prompt; default: as before
        min_tokens: tokens of the whole run before the model may end it; a text that it ended before
            continues in place of its end mark; default: as before
    """

    run_dir: Annotated[str, Option("DIR", shown=True, positional=True)]
    max_new_tokens: Annotated[int | None, AtLeast(1), Option(shown=True, short="-n")] = None
    min_tokens: Annotated[int | None, AtLeast(0), SHOWN] = None


@dataclass(frozen=True)
class Listed(options.Record):
    """What is shown of runs.

    Attributes:
        folder: a run's folder, or one that has such folders in it; default: the current folder
        text: write the whole text of the run, or the text so far, to this file; with - or no FILE,
            to standard output
        verbose: all figures, in a wide table
    """

    folder: Annotated[str, Option("DIR", shown=True, positional=True)] = "."
    text: Annotated[str | None, Option("FILE", shown=True, bare="-")] = None
    verbose: Annotated[bool, Option(shown=True, short="-v")] = False


def resume(args: argparse.Namespace) -> int:
    """Finish a run that generate --run-dir kept, with the tokens of an uninterrupted run. What is
    new streams to standard output; the whole text is in the folder. --max-new-tokens makes a
    finished run longer; --min-tokens continues one that the model ended.
    """
    from tokenswift.runs import folder as folders

    check_record(args.json)
    folder = Path(args.run_dir).expanduser()
    state = folders.load_whole(folder)
    if is_finished(state, args.max_new_tokens, args.on_loop, args.min_tokens):
        if args.json is None and folders.has_text(folder, state.text + state.tail):
            logger.info("%s", finished_line(folder, state))
            return 0
    names = models_of(state)
    check_written_apart(args, [Input("the run's model", Path(name)) for name in names])
    logger.info("loading %s", ", ".join(names) or state.header.name)
    with Stages(args.quiet, "loading") as stages:
        from tokenswift.engine.resume import reload, request_of

        request = request_of(state, folder, args.max_new_tokens, args.on_loop, args.min_tokens)
        llm = reload(state, stages)
    logger.info("%s, %s on %s, from token %d", llm.name, llm.dtype, llm.device, len(state.tokens))
    write(args, llm, request, state)
    return 0


def is_finished(
    state: RunState,
    max_new_tokens: int | None,
    on_loop: str | None,
    min_tokens: int | None = None,
) -> bool:
    """Whether nothing is left to write of a run.

    Args:
        max_new_tokens, on_loop, min_tokens: of `resume`; None: as before.
    Raises:
        InputError: the run has more tokens than it is to have.
    """
    token_count = len(state.tokens)
    limit = state.session.max_new_tokens if max_new_tokens is None else max_new_tokens
    if limit < token_count:
        line = f"max_new_tokens is {limit}; the run has {counted(token_count, 'token')} already"
        raise InputError(f"{line}; valid: at least as many", "max_new_tokens")
    if state.end is None:
        return False
    goes_on = state.end.reason == "eos" and token_count <= (min_tokens or 0)
    ended_for_good = state.end.reason in ("eos", "stop") and not goes_on
    stays_at_loop = state.end.reason == "loop" and on_loop != "report"
    return ended_for_good or stays_at_loop or (limit == token_count and not goes_on)


def finished_line(folder: Path, state: RunState) -> str:
    """A line about a finished run: its tokens, why it ended, and how to see its text."""
    reason = "" if state.end is None else f", {ending(state.end.reason)}"
    tokens = counted(len(state.tokens), "token")
    line = f"{folder} is finished ({tokens}{reason}); tokenswift runs {folder} --text prints it"
    if state.end is not None and state.end.reason == "eos":
        line += f", tokenswift resume {folder} --min-tokens N continues it"
    return line


def models_of(state: RunState) -> list[str]:
    """The names of the model of a run and of what drafts for it, as far as its journal has them."""
    model = state.header.model
    if model is None:
        return []
    names = (model.model, model.heads, model.eagle, state.session.options.get("draft_model"))
    return [str(name) for name in names if name not in (None, "auto", "none")]


def list_runs(args: argparse.Namespace) -> int:
    """List the runs that were kept with generate --run-dir, with state and figures; or print the
    text of one (--text). No model is needed."""
    from tokenswift.runs import folder as folders
    from tokenswift.runs.lists import cells, summaries

    folder = Path(args.folder).expanduser()
    record_path = check_record(args.json)
    text_path = check_record(args.text, "--text")
    if text_path is not None:
        contents, state = folders.load(folder)
        if contents.damaged:
            logger.warning(
                "the journal is damaged at byte %d; what is before it is taken", contents.good
            )
        end = "\n" if text_path == STDOUT and sys.stdout.isatty() else ""
        write_text(text_path, state.text + state.tail + end)
        return 0
    rows = summaries(folder)
    text = f"no runs in {on_one_line(args.folder)}"
    if rows:
        shown = [cells(row, few=not args.verbose) for row in rows]
        numbers = range(2, 9) if args.verbose else range(2, 4)
        text = table(tuple(shown[0]), [tuple(line.values()) for line in shown], right=numbers)
    if record_path is not None:
        write_json(record_path, *rows)
    if record_path != STDOUT:
        say(text + "\n")
    return 0
