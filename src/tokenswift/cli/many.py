"""``tokenswift generate --prompts``: many texts at once, a folder for each."""

from __future__ import annotations

import argparse
import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, TypeAlias

from tokenswift.chat.prompts import is_chat
from tokenswift.checks import counted
from tokenswift.cli import options
from tokenswift.cli.lengths import default_min_tokens
from tokenswift.cli.progress import Stages
from tokenswift.cli.prompts import check_template, read_named
from tokenswift.cli.results import check_record, check_writable, write_json
from tokenswift.cli.signals import saying_what_is_kept
from tokenswift.config.fields import AtLeast, Option
from tokenswift.engine.arguments import CallArguments
from tokenswift.engine.json_records import PromptRecord, parse_prompt_record, record_of
from tokenswift.engine.request import Request
from tokenswift.types import Generation, InputError, RunError, Step

if TYPE_CHECKING:
    from tokenswift.engine.llm import LLM

logger = logging.getLogger("tokenswift")

#: what ``--json`` writes of a text
Record: TypeAlias = dict[str, object]

#: options that are of one text, and not of many
OPTIONS_OF_ONE = ("prompt", "prompt_file", "prompt_ids", "raw", "system", "run_dir", "output")


@dataclass(frozen=True)
class Several:
    """Many prompts instead of one.

    Attributes:
        prompts: JSON Lines file of prompts, with --out; a line is {"prompt": text to continue} or
            {"messages": a chat to answer}, with an id and settings of its own if wanted, such as
            seed and max_new_tokens
        out: folder of the texts; with a run's folder for each prompt, by its id or line; the same
            command resumes what is missing
        at_once: sequences written concurrently; default: as many as fit in memory and make it
            faster
    """

    prompts: Annotated[str | None, Option("FILE", shown=True)] = None
    out: Annotated[str | None, Option("DIR", shown=True)] = None
    at_once: Annotated[int | None, AtLeast(1), Option(shown=True, names=("--max-num-seqs",))] = None


def read_prompts(args: argparse.Namespace) -> list[PromptRecord]:
    """The prompts of --prompts.

    Raises:
        InputError: the file cannot be read, or naming the line that is wrong.
    """
    file = args.prompts
    prompts: dict[str, PromptRecord] = {}
    for number, line in enumerate(read_named(file, "--prompts").split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompt = parse_prompt_record(json.loads(line), f"{number:05}")
            if prompt.name in prompts:
                raise InputError(f"id is {prompt.name!r}, as in a line before; valid: another id")
        except (ValueError, RecursionError) as error:
            raise InputError(f"--prompts {file}, line {number}: {error}") from error
        prompts[prompt.name] = prompt
    if not prompts:
        raise InputError(f"--prompts {file} holds no prompts; valid: a JSON object a line")
    return list(prompts.values())


def write_all(args: argparse.Namespace, settings: CallArguments) -> int:
    """Write all texts that are missing.

    Args:
        settings: arguments of all requests, as :func:`~tokenswift.cli.call.settings_from` has them
            of the options.
    Raises:
        RunError: some of them failed; it names them.
        Interrupted: a signal came; what was written is kept.
    """
    if args.prompts is None or args.out is None:
        raise InputError("one of --prompts and --out given; valid: both")
    for name in OPTIONS_OF_ONE:
        if getattr(args, name) not in (None, False):
            raise InputError(f"{name} is given together with --prompts; valid: one of them")
    prompts = read_prompts(args)
    record_path = check_record(args.json)
    folder = check_writable("--out", args.out, "folder")
    llm = options.load_model(args)
    if any(is_chat(prompt.prompt) for prompt in prompts):
        check_template(llm, "messages")
    requests = {
        prompt.name: request_in(folder / prompt.name, prompt, settings, llm) for prompt in prompts
    }
    session = Session(llm, requests, Stages(args.quiet))
    start = perf_counter()
    session.run(args.at_once)
    speed = session.token_count / (perf_counter() - start)
    logger.info("%s in %s (%.0f tokens/s)", session.progress(), args.out, speed)
    if record_path is not None:
        write_json(record_path, *(session.records[name] for name in requests))
    failed = session.failed()
    if failed:
        count = counted(len(prompts), "prompt")
        raise RunError(f"{len(failed)} of {count} failed: {', '.join(failed)}")
    return 0


def request_in(folder: Path, prompt: PromptRecord, settings: CallArguments, llm: LLM) -> Request:
    """The request of one of many prompts, whose run is in a folder: long continued texts have
    their length, as a single one has."""
    from tokenswift.runs import folder as folders

    earlier = None
    if folders.has_run(folder):
        with suppress(InputError):  # a run that cannot be read is told when its turn comes
            _, earlier = folders.load(folder)
    arguments = {**settings, **prompt.arguments}
    if "min_tokens" not in arguments:
        arguments["min_tokens"] = default_min_tokens(prompt.prompt, arguments, earlier)
    return prompt.request(arguments, llm.default_sampling(prompt.prompt), folder)


class Session:
    """Several texts that are written at once.

    Args:
        llm: the model.
        requests: by the names of their folders.
        stages: the line of progress.

    Attributes:
        records: of the texts that have ended, by name; of a failed one its ``error``.
        token_count: new tokens of this session so far.
    """

    def __init__(self, llm: LLM, requests: dict[str, Request], stages: Stages) -> None:
        self._llm = llm
        self._requests = requests
        self._stages = stages
        self.records: dict[str, Record] = {}
        self.token_count = 0

    def run(self, at_once: int | None) -> None:
        """Write all of them.

        Args:
            at_once: sequences that run at once, at most; None: as many as fit.
        Raises:
            Interrupted, RunError: saying what is kept.
        """
        from tokenswift.engine.many import run_all
        from tokenswift.engine.scheduler import Scheduler

        names = list(self._requests)
        with (
            self._stages,
            saying_what_is_kept(self._what_is_kept),
            Scheduler(self._llm, at_once or "auto") as scheduler,
        ):
            for number, result in run_all(scheduler, self._requests.values(), self._count):
                self._end(names[number], result)

    def failed(self) -> list[str]:
        """The names of those that failed."""
        return [name for name, record in self.records.items() if record["error"] is not None]

    def progress(self) -> str:
        """How many of how many are written, in words."""
        written = len(self.records) - len(self.failed())
        return f"{written} of {counted(len(self._requests), 'text is', 'texts are')}"

    def _count(self, number: int, step: Step) -> None:
        self.token_count += len(step.token_ids)
        self._stages("generate", self.token_count, None)

    def _end(self, name: str, result: Generation | Exception) -> None:
        """Take the result of a text, or what made it fail."""
        if isinstance(result, Generation):
            record = record_of(self._llm, result, self._requests[name])
            self.records[name] = {"id": name, "error": None, **record}
        else:
            logger.error("%s failed: %s", name, result)
            self.records[name] = {"id": name, "error": str(result)}

    def _what_is_kept(self) -> str:
        return f"{self.progress()} written; the same command resumes"
