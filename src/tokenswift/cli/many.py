"""``tokenswift generate --prompts``: many texts at once, a folder for each."""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import dataclass
from time import perf_counter
from typing import Annotated, Any

from tokenswift.chat.prompts import is_chat
from tokenswift.checks import counted
from tokenswift.cli import options
from tokenswift.cli.progress import Stages
from tokenswift.cli.prompts import check_template, read_named
from tokenswift.cli.results import check_record, check_writable, write_json
from tokenswift.cli.signals import keeping
from tokenswift.config.fields import AtLeast, Option
from tokenswift.engine.request import Asked, Request, asked, record_of
from tokenswift.types import Generation, InputError, RunError, Step

logger = logging.getLogger("tokenswift")

#: options of one text
ALONE = ("prompt", "prompt_file", "prompt_ids", "raw", "system", "run_dir", "output")


@dataclass(frozen=True)
class Several:
    """Many prompts instead of one.

    Attributes:
        prompts: JSON Lines file of prompts, with --out; a line is {"prompt": text to continue} or
            {"messages": a chat to answer}, with an id and settings of its own if wanted, such as
            seed and max_new_tokens
        out: folder of the texts, with a run's folder for each prompt, by its id or line; the same
            command resumes what is missing
        at_once: sequences written concurrently; default: as many as fit in memory and make it
            faster
    """

    prompts: Annotated[str | None, Option("FILE", shown=True)] = None
    out: Annotated[str | None, Option("DIR", shown=True)] = None
    at_once: Annotated[int | None, AtLeast(1), Option(shown=True, names=("--max-num-seqs",))] = None


def read_prompts(args: argparse.Namespace) -> list[Asked]:
    """The prompts of --prompts.

    Raises:
        InputError: the file cannot be read, or naming the line that is wrong.
    """
    name, found = args.prompts, dict[str, Asked]()
    for number, line in enumerate(read_named(name, "--prompts").split("\n"), 1):
        if not line.strip():
            continue
        try:
            one = asked(json.loads(line), f"{number:05}")
            if one.name in found:
                raise InputError(f"id is {one.name!r}, as in a line before; valid: another id")
        except (ValueError, RecursionError) as error:
            raise InputError(f"--prompts {name}, line {number}: {error}") from error
        found[one.name] = one
    if not found:
        raise InputError(f"--prompts {name} holds no prompts; valid: a JSON object a line")
    return list(found.values())


def write_all(args: argparse.Namespace, call: dict[str, Any]) -> int:
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
    prompts, record = read_prompts(args), check_record(args.json)
    folder = check_writable("--out", args.out, "folder")
    llm = options.load_model(args)
    if any(is_chat(one.prompt) for one in prompts):
        check_template(llm, "messages")
    requests = [
        one.request(call, llm.default_sampling(one.prompt), folder / one.name) for one in prompts
    ]
    begun = perf_counter()
    done, tokens = written(args, llm, [one.name for one in prompts], requests)
    failed = [name for name, made in done.items() if made["error"] is not None]
    texts, speed = counted(len(prompts), "text is", "texts are"), tokens / (perf_counter() - begun)
    logger.info("%d of %s in %s (%.0f tokens/s)", len(done) - len(failed), texts, args.out, speed)
    if record is not None:
        write_json(record, *(done[one.name] for one in prompts))
    if failed:
        raise RunError(
            f"{len(failed)} of {counted(len(prompts), 'prompt')} failed: {', '.join(failed)}"
        )
    return 0


def written(
    args: argparse.Namespace, llm: Any, names: list[str], requests: list[Request]
) -> tuple[dict[str, dict[str, Any]], int]:
    """The records of texts that are written at once, by name, in the order in which they end; of a
    failed one its ``error``. And the new tokens of this session."""
    from tokenswift.engine.many import run_all
    from tokenswift.engine.scheduler import Scheduler

    done, tokens, stages = dict[str, dict[str, Any]](), 0, Stages(args.quiet)

    def on_step(number: int, step: Step) -> None:
        nonlocal tokens
        tokens += len(step.token_ids)
        stages("generate", tokens, None)

    def kept() -> str:
        there = sum(made["error"] is None for made in done.values())
        return (
            f"{there} of {counted(len(names), 'text is', 'texts are')} written; the same "
            f"command resumes"
        )

    with stages, keeping(kept), Scheduler(llm, args.at_once or "auto") as scheduler:
        for number, result in run_all(scheduler, requests, on_step):
            name, one = names[number], requests[number]
            if isinstance(result, Generation):
                made = record_of(llm, result, one)
                done[name] = {"id": name, "error": None, **made}
            else:
                logger.error("%s failed: %s", name, result)
                done[name] = {"id": name, "error": str(result)}
    return done, tokens
