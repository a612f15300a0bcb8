"""``tokenswift resume``: go on with a run, or make a finished one longer."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenswift.cli import options
from tokenswift.cli.declare import add_options, check_options, option
from tokenswift.cli.generate import Loops, stream
from tokenswift.cli.output import (
    STDOUT,
    TextSink,
    add_json_option,
    check_record,
    files_of_run,
    write_json,
)
from tokenswift.cli.progress import ENDINGS, Progress, Stages
from tokenswift.config import LoadConfig
from tokenswift.engine.records import record_of
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")


#: here the default is what the run had
PLACED = "spread the layers: auto, or a JSON file with a device for each module; default: as before"
LOOP = "when the text repeats itself: report (continue and say so) or stop; default: as before"


@dataclass(frozen=True)
class Longer:
    """How a run goes on.

    Attributes:
        max_new_tokens: tokens of the whole run at most, counted from its prompt; default: as before
        drop_damaged: use the good part of a damaged journal, and keep the rest in a file beside it
    """

    max_new_tokens: int | None = option(None, least=1)
    drop_damaged: bool = option(False)


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "resume",
        help="finish a run that was interrupted, or make one longer",
        description="Finish a run that generate --run-dir kept, with the tokens of the uninterrupted run. "
        "The continuation streams to standard output; the whole text is in the folder. --max-new-tokens "
        "makes a finished run longer.",
        epilog="Exit codes: 0 done (also when there was nothing left to do), 1 failed, 2 bad input, 129, "
        "130, 143 hung up, interrupted, terminated (the run is kept).",
    )
    add_options(parser, options.RunDir)
    add_options(parser, Longer)
    add_options(parser, Loops, unset=True, texts={"on_loop": LOOP})
    add_options(parser, options.Model, only=("threads", "device_map"), texts={"device_map": PLACED})
    add_json_option(parser, "write one JSON record to this file, as generate does")
    add_options(parser, options.Shown)


def run(args: argparse.Namespace) -> int:
    """Check the journal before anything is loaded; then go on."""
    from tokenswift.runs import folder as folders

    check_options(args, Longer)
    device_map = options.device_map_from(args)
    LoadConfig(threads=args.threads, device_map=device_map)
    record = check_record(args.json, files_of_run(args.run_dir))
    folder = Path(args.run_dir).expanduser()
    contents, state = folders.load(folder)
    if not args.drop_damaged:
        folders.check_whole(folder, contents, state)
    longer = args.max_new_tokens is not None and args.max_new_tokens > len(state.tokens)
    if state.end is not None and record is None and not (longer and state.end.reason == "length"):
        how = f"{counted(len(state.tokens), 'token')}, {ENDINGS.get(state.end.reason, state.end.reason)}"
        more = "; --max-new-tokens makes it longer" if state.end.reason == "length" else ""
        logger.info("%s is finished (%s): tokenswift text %s prints it%s", folder, how, folder, more)
        return 0

    logger.info("loading %s", state.header.model.model if state.header.model else state.header.name)
    with Stages(args.quiet, "loading") as stages:
        import torch

        from tokenswift.engine.resume import reload, request_of

        request = request_of(state, folder, args.max_new_tokens, args.on_loop, args.drop_damaged)
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        llm = reload(state, stages, device_map)
    logger.info("%s, %s on %s, from token %d", llm.name, llm.dtype, llm.device, len(state.tokens))
    progress = Progress(request.max_new_tokens, args.quiet, done=len(state.tokens), verbose=args.verbose)
    result = stream(llm, request, TextSink(None, record != STDOUT, args.raw_output), progress, state)
    if record is not None:
        write_json(record, record_of(llm, result, request.strategy, request.given, request.sampling))
    return 0
