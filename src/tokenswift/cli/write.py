"""A request run by a command: its text, progress, summary and record."""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenswift.checks import counted
from tokenswift.cli.progress import Stages
from tokenswift.cli.results import STDOUT, TextSink, summary, write_json
from tokenswift.cli.signals import keeping
from tokenswift.engine.request import Request, record_of
from tokenswift.types import Generation, RunError

if TYPE_CHECKING:
    from tokenswift.runs.records import RunState


logger = logging.getLogger("tokenswift")


def write(
    args: argparse.Namespace,
    llm: Any,
    request: Request,
    before: RunState | None,
    file: Path | None = None,
) -> None:
    """Run a request: its text, summary and record go where the options have them.

    Args:
        before: as of :func:`stream`.
        file: for the text.
    """
    sink = TextSink(file, echo=args.json != str(STDOUT))
    result = stream(llm, request, sink, args.quiet, before)
    logger.info("%s", summary(result, args.verbose))
    if args.json is not None:
        made = record_of(llm, result, request)
        write_json(Path(args.json).expanduser(), made)


def stream(
    llm: Any,
    request: Request,
    sink: TextSink,
    quiet: bool,
    before: RunState | None = None,
    known: Any = None,
) -> Generation:
    """Run a request with its text and progress shown.

    Args:
        before: the run as it is in its folder, when there is one to go on with.
        known: what was prefilled already, as of ``LLM.start``.
    Raises:
        KeyboardInterrupt, RunError: saying what was kept of the text, and how to go on.
    """
    go_on = (
        "" if request.run_dir is None else f"; continue with: tokenswift resume {request.run_dir}"
    )
    tokens, live = 0 if before is None else len(before.tokens), sys.stdout.isatty()
    sink.write("" if before is None else before.text, again=True)

    def kept() -> str:
        stages.end()
        return f"{counted(tokens, 'token was', 'tokens were')} written, {sink.kept}{go_on}"

    try:
        with Stages(quiet, "starting") as stages, keeping(kept) as signals:
            with llm.start(replace(request, on_progress=stages), known) as steps:
                for step in steps:
                    if live:  # the text itself shows how far it is
                        stages.end()
                    else:
                        stages("generate", tokens, request.max_new_tokens)
                    sink.write(step.text)
                    tokens += len(step.token_ids)
                    signals.check()
                result = steps.result
            sink.write(
                result.text[len(sink.text) :]
            )  # what an earlier session held back; makes the file
            sink.close()
    except BrokenPipeError as error:
        raise RunError(f"standard output was closed; nothing more was generated{go_on}") from error
    finally:
        with suppress(OSError):
            sink.close()
    return result
