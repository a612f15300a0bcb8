"""A request run by a command: its text, progress, summary and record."""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokenswift.chat.prompts import is_chat
from tokenswift.checks import counted
from tokenswift.cli.drafter_advice import advice_on_drafter
from tokenswift.cli.lengths import advice_on_cut_form, advice_on_early_end, advice_on_litany
from tokenswift.cli.progress import Stages
from tokenswift.cli.results import STDOUT, TextSink, summary, write_json
from tokenswift.cli.signals import Signals, saying_what_is_kept
from tokenswift.engine.json_records import record_of
from tokenswift.engine.request import Request
from tokenswift.types import Generation, RunError, Step

if TYPE_CHECKING:
    from tokenswift.engine.llm import LLM
    from tokenswift.engine.prefix_cache import PrefixCache
    from tokenswift.runs.records import RunState


logger = logging.getLogger("tokenswift")


def write(
    args: argparse.Namespace,
    llm: LLM,
    request: Request,
    earlier: RunState | None,
    file: Path | None = None,
) -> None:
    """Run a request: its text, summary and record go where the options have them.

    Args:
        earlier: as of :func:`stream`.
        file: for the text.
    """
    sink = TextSink(file, echo=args.json != str(STDOUT))
    result = stream(llm, request, sink, args.quiet, earlier)
    logger.info("%s", summary(result, args.verbose))
    is_answer = is_chat(request.prompt) or request.new_turn
    length = None if is_answer and args.max_new_tokens is None else request.max_new_tokens
    advice = advice_on_cut_form(result, request) or advice_on_early_end(result, request, length)
    for line in filter(None, (advice, advice_on_litany(result, request))):
        logger.info("%s", line)
    if not args.quiet:
        advice = advice_on_drafter(llm, getattr(args, "model", llm.name), request, result)
        if advice:
            logger.info("%s", advice)
    if args.json is not None:
        write_json(Path(args.json).expanduser(), record_of(llm, result, request))


def stream(
    llm: LLM,
    request: Request,
    sink: TextSink,
    quiet: bool,
    earlier: RunState | None = None,
    prefixes: PrefixCache | None = None,
) -> Generation:
    """Run a request with its text and progress shown.

    Args:
        earlier: the run as it is in its folder, when there is one to go on with.
        prefixes: what is prefilled already, as of ``LLM.start``.
    Raises:
        KeyboardInterrupt, RunError: saying what was kept of the text, and how to go on.
    """
    shown_run = ShownRun(request, sink, Stages(quiet, "starting"), earlier)
    try:
        with shown_run.stages, saying_what_is_kept(shown_run.what_is_kept) as signals:
            result = shown_run.finish(llm, prefixes, signals)
    except BrokenPipeError as error:
        message = "standard output was closed; nothing more was generated"
        raise RunError(message + shown_run.how_to_go_on) from error
    finally:
        with suppress(OSError):
            sink.close()
    return result


class ShownRun:
    """A request that is run, its text and progress shown.

    Args:
        request: what is run.
        sink: where its text goes.
        stages: the line of progress.
        earlier: the run as it is in its folder; None for a new one.

    Attributes:
        token_count: tokens written so far, those of earlier sessions among them.
        how_to_go_on: the end of a line about a run that stopped early; "" where nothing is kept.
    """

    def __init__(
        self, request: Request, sink: TextSink, stages: Stages, earlier: RunState | None
    ) -> None:
        self.request = request
        self.sink = sink
        self.stages = stages
        self.token_count = 0 if earlier is None else len(earlier.tokens)
        self.how_to_go_on = ""
        if request.run_dir is not None:
            self.how_to_go_on = f"; continue with: tokenswift resume {request.run_dir}"
        self._text_is_seen = sys.stdout.isatty()
        sink.write("" if earlier is None else earlier.text, again=True)

    def finish(self, llm: LLM, prefixes: PrefixCache | None, signals: Signals) -> Generation:
        """Run it to its end.

        Raises:
            Interrupted: a signal came.
        """
        request = replace(self.request, on_progress=self.stages)
        with llm.start(request, prefixes) as steps:
            for step in steps:
                self.show(step)
                signals.check()
            result = steps.result
        # what an earlier session held back; and a text of nothing makes its file, too
        self.sink.write(result.text[len(self.sink.text) :])
        self.sink.close()
        return result

    def show(self, step: Step) -> None:
        """Show a step's text, and how far the run is where the text itself does not show it."""
        if self._text_is_seen:
            self.stages.end()
        else:
            self.stages("generate", self.token_count, self.request.max_new_tokens)
        self.sink.write(step.text)
        self.token_count += len(step.token_ids)

    def what_is_kept(self) -> str:
        """What is kept of the text so far, in words; the line of progress ends."""
        self.stages.end()
        count = counted(self.token_count, "token was", "tokens were")
        return f"{count} written, {self.sink.location}{self.how_to_go_on}"
