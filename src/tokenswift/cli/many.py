"""``tokenswift generate --prompts FILE``: concurrent texts, a folder for each."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from tokenswift.cli import options
from tokenswift.cli.declare import option, reader
from tokenswift.cli.output import check_folder, check_record, write_json
from tokenswift.cli.terminal import Stages, keeping
from tokenswift.engine.request import EXAMPLE, Asked, Request, asked, record_of
from tokenswift.loader.prompts import is_chat
from tokenswift.types import Generation, InputError, RunError, Step
from tokenswift.words import counted

SEQUENCES = "auto, or an integer of at least 1"
ALONE = ("prompt", "prompt_file", "prompt_ids", "raw", "explain", "run_dir", "output")  # of one text
logger = logging.getLogger("tokenswift")


def _at_once(text: str) -> int | str:
    if text != "auto" and int(text) < 1:
        raise ValueError
    return text if text == "auto" else int(text)


@dataclass(frozen=True)
class Several:
    """Many prompts instead of one.

    Attributes:
        prompts: JSON Lines file of prompts, with --out; a line is {"prompt": text to continue} or
            {"messages": a chat to answer}, with an id and settings of its own if wanted, such as seed and
            max_new_tokens
        out: folder of the texts, with a run's folder for each prompt, by its id or line; the same command
            resumes what is missing
        at_once: sequences written concurrently, or auto; auto is as many as fit in memory and make it faster
    """

    prompts: str | None = option(None, "FILE")
    out: str | None = option(None, "DIR")
    at_once: Any = option("auto", "N", names=("--max-num-seqs",), type=reader(_at_once, SEQUENCES))


def read(args: argparse.Namespace) -> list[Asked]:
    """The prompts of --prompts; with --system, text becomes a chat.

    Raises:
        InputError: the file cannot be read, or naming the line that is wrong.
    """
    name, found = args.prompts, dict[str, Asked]()
    for number, line in enumerate(options.read_named(name, "--prompts").split("\n"), 1):
        if not line.strip():
            continue
        try:
            one = asked(_parsed(line), f"{number:05}")
            if one.name in found:
                raise InputError(f"id is {one.name!r}, as in a line before; valid: another id")
        except InputError as error:
            raise InputError(f"--prompts {name}, line {number}: {error}") from error
        if isinstance(one.prompt, str) and args.system is not None:
            one = replace(one, prompt=options.asking(args.system, one.prompt))
        found[one.name] = one
    if not found:
        raise InputError(f"--prompts {name} holds no prompts; valid: a JSON object a line")
    return list(found.values())


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not JSON ({error}); valid: an object such as {EXAMPLE}") from error


def requests_of(
    args: argparse.Namespace, llm: Any, prompts: Sequence[Asked], call: dict[str, Any], folder: Path
) -> list[Request]:
    """The requests of all lines: the command's settings, their own over them."""
    if any(is_chat(one.prompt) for one in prompts):
        options.check_template(llm, "messages" if args.system is None else "--system")
    return [one.request(call, llm.default_sampling(one.prompt), folder / one.name) for one in prompts]


def run(args: argparse.Namespace, call: dict[str, Any]) -> int:
    """Write all texts that are missing.

    Args:
        call: what is common to the requests, as ``generate`` has it of its options.
    Raises:
        RunError: some of them failed; it names them.
        Interrupted: a signal came; what was written is kept.
    """
    if args.prompts is None or args.out is None:
        raise InputError("one of --prompts and --out given; valid: both")
    for name in ALONE:
        if getattr(args, name) not in (None, False):
            raise InputError(f"{name} is given beside --prompts; valid: one of them")
    prompts, record = read(args), check_record(args.json)
    folder = check_folder("--out", args.out)
    llm = options.load_model(args)
    requests = requests_of(args, llm, prompts, call, folder)

    from tokenswift.engine.scheduler import Scheduler, run_all

    done: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    stages, begun, written = Stages(args.quiet), perf_counter(), [0]

    def on_step(number: int, step: Step) -> None:
        written[0] += len(step.token_ids)
        stages("generate", written[0], None)

    def kept() -> str:
        texts = counted(len(prompts), "text is", "texts are")
        return f"{len(done) - len(failed)} of {texts} written; the same command resumes"

    with stages, keeping(kept), Scheduler(llm, args.at_once) as scheduler:
        for number, result in run_all(scheduler, requests, on_step):
            name, request = prompts[number].name, requests[number]
            if isinstance(result, Generation):
                made = record_of(llm, result, request.strategy, request.given, request.sampling)
                done[name] = {"id": name, "error": None, **made}
            else:
                logger.error("%s failed: %s", name, result)
                done[name] = {"id": name, "error": str(result)}
                failed.append(name)
    texts = counted(len(prompts), "text is", "texts are")
    speed = written[0] / (perf_counter() - begun)
    logger.info("%d of %s in %s (%.0f tokens/s)", len(done) - len(failed), texts, args.out, speed)
    if record is not None:
        write_json(record, *(done[one.name] for one in prompts))
    if failed:
        raise RunError(f"{len(failed)} of {counted(len(prompts), 'prompt')} failed: {', '.join(failed)}")
    return 0
