"""``tokenswift generate``: one text, streamed, or with ``--prompts`` many at once."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tokenswift.cli import options
from tokenswift.cli.call import (
    Text,
    add_call_options,
    call_from,
    request_for_model,
    settings_from,
)
from tokenswift.cli.declare import Subparsers, add_options, command
from tokenswift.cli.many import Several, write_all
from tokenswift.cli.results import STDOUT, check_record, check_writable
from tokenswift.cli.runs import Listed, Longer, list_runs, resume
from tokenswift.cli.write import write
from tokenswift.config.fields import Option
from tokenswift.types import InputError

if TYPE_CHECKING:
    from tokenswift.runs.records import RunState

logger = logging.getLogger("tokenswift")


@dataclass(frozen=True)
class Results(options.Shown, options.Record):
    """What a run leaves behind.

    Attributes:
        output: write the text to this file too, as it comes
        run_dir: keep a journal here, for resume after a crash; resume DIR finishes the run; with a
            run in it already, that run is resumed
    """

    output: Annotated[str | None, Option("FILE", shown=True)] = None
    run_dir: Annotated[str | None, Option("DIR", shown=True)] = None


def add_parser(subparsers: Subparsers) -> None:
    """Register the subcommands."""
    parser = command(subparsers, "generate", run, "write a text", "[PROMPT]")
    add_call_options(parser)
    add_options(parser.add_argument_group("results"), Results)
    add_options(parser.add_argument_group("many prompts"), Several)
    parser = command(
        subparsers, "resume", resume, "finish an interrupted run, or lengthen one", "DIR"
    )
    add_options(parser, Longer)
    add_options(parser, Text, ("on_loop",), on_loop=None)
    add_options(parser, options.Record)
    add_options(parser, options.Shown, ("verbose",))
    add_options(command(subparsers, "runs", list_runs, "list runs, or print one", "[DIR]"), Listed)


def run(args: argparse.Namespace) -> int:
    """Write a text. A chat model answers the prompt; with --continue, or without a chat template,
    it continues it. The text streams to standard output; progress and summary go to standard
    error."""
    if args.prompts is not None or args.out is not None:
        return write_all(args, settings_from(args))
    prompt, settings = call_from(args)
    if args.output == str(STDOUT):
        raise InputError("--output is -; valid: a file (the text is on standard output anyway)")
    file = args.output and check_writable("--output", args.output)
    check_record(args.json)
    if args.run_dir is not None:
        args.run_dir = check_writable("--run-dir", args.run_dir, "folder")
    earlier = earlier_run(args.run_dir)
    if args.acceptance == "published":
        logger.warning(
            "the published acceptance rule is not lossless: the text differs from plain decoding"
        )
    if not args.raw and args.prompt_ids is None:
        from tokenswift.loader.chat_template import prepare

        prepare()  # what renders chat templates starts while the model is loaded
    llm = options.load_model(args)
    request = request_for_model(args, llm, prompt, settings, earlier)
    write(args, llm, replace(request, run_dir=args.run_dir), earlier, file)
    return 0


def earlier_run(folder: Path | None) -> RunState | None:
    """The run that is in a folder; None where there is none.

    Raises:
        InputError: no run can begin there, or the one that is there cannot be read.
    """
    from tokenswift.runs import folder as folders

    if folder is None:
        return None
    if folders.has_run(folder):
        return folders.load_whole(folder)
    folders.check_new(folder)
    return None
