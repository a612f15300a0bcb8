"""``tokenswift generate --prompts FILE``: many texts side by side, a run's folder for each."""

from __future__ import annotations

import argparse
import json
import logging
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tokenswift.cli import options, prompting
from tokenswift.cli.declare import option
from tokenswift.cli.output import check_folder, check_record, record_of, write_text
from tokenswift.cli.progress import Stages
from tokenswift.cli.signals import Interrupted, Signals
from tokenswift.config import SamplingParams, check_flag, check_integer, shown
from tokenswift.prompts import is_chat
from tokenswift.types import Generation, InputError, RunError, Step

if TYPE_CHECKING:
    from tokenswift.engine.request import Request

logger = logging.getLogger("tokenswift")
EXAMPLE = '{"prompt": "Once upon a time"}'
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
OWN = ("max_new_tokens", "ignore_eos", "stop")  # fields of a record that are no sampling settings
SAMPLING = tuple(one.name for one in fields(SamplingParams))


@dataclass(frozen=True)
class Several:
    """Many prompts instead of one.

    Attributes:
        prompts: many prompts, a JSON object a line: prompt (text, continued as it is) or messages (a chat,
            which is answered), with an id and settings of its own if need be, such as seed and
            max_new_tokens; with --out
        out: the folder of their texts: a run's folder for each prompt, by its id or its line. The same
            command goes on with what is missing there
        at_once: texts side by side at most, or auto (as many as the memory holds, and pay)
    """

    prompts: str | None = option(None, "FILE")
    out: str | None = option(None, "DIR")
    at_once: str = option("auto", "N")


@dataclass(frozen=True)
class Asked:
    """A line of the file.

    Attributes:
        name: of its folder.
        prompt: text, or messages.
        sampling: settings of its own.
        more: other arguments of a request.
    """

    name: str
    prompt: str | list[dict[str, Any]]
    sampling: dict[str, Any]
    more: dict[str, Any]


def check_several(args: argparse.Namespace) -> None:
    """Refuse what goes with one prompt only, and halves of a pair.

    Raises:
        InputError: naming the options.
    """
    if args.prompts is None or args.out is None:
        there, missing = ("--prompts", "--out") if args.out is None else ("--out", "--prompts")
        raise InputError(f"{there} given without {missing}; valid: both")
    given = {
        "PROMPT": args.prompt,
        "--prompt-file": args.prompt_file,
        "--prompt-ids": args.prompt_ids,
        "--run-dir": args.run_dir,
        "--output": args.output,
        "--explain": args.explain,
    }
    for name, value in given.items():
        if value is not None:
            raise InputError(f"--prompts and {name} given; valid: one of them")


def at_once(text: str) -> Any:
    """The value of --at-once.

    Raises:
        InputError: neither auto nor an integer from 1 on.
    """
    if text == "auto":
        return text
    try:
        number = int(text)
    except ValueError:
        raise InputError(f"at_once is {text!r}; valid: auto, or an integer of at least 1") from None
    return check_integer("at_once", number, 1)


def read(name: str) -> list[Asked]:
    """The prompts of a file.

    Raises:
        InputError: it cannot be read, or naming the line that is wrong.
    """
    found: list[Asked] = []
    names: dict[str, int] = {}
    for number, line in enumerate(options.read_named(name, "--prompts").split("\n"), 1):
        if not line.strip():
            continue
        try:
            one = _asked(line, number)
            if one.name in names:
                raise InputError(f"id is {one.name!r}, as in line {names[one.name]}; valid: another id")
        except InputError as error:
            raise InputError(f"--prompts {name}, line {number}: {error}") from error
        names[one.name] = number
        found.append(one)
    if not found:
        raise InputError(f"--prompts {name} holds no prompts; valid: a JSON object a line")
    return found


def _asked(line: str, number: int) -> Asked:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is no JSON ({error}); valid: an object such as {EXAMPLE}") from error
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise InputError(f"it has not one of prompt and messages; valid: an object such as {EXAMPLE}")
    for key in record:
        if key not in ("id", "prompt", "messages", *OWN, *SAMPLING):
            valid = ", ".join(("id", "prompt", "messages", *OWN, *SAMPLING))
            raise InputError(f"{shown(key)} is no field; valid: {valid}")
    name = str(record.get("id", f"{number:05}"))
    if not NAME.fullmatch(name):
        raise InputError(f"id is {shown(name)}; valid: up to 100 letters, digits, dots, - and _")
    prompt: Any = record.get("prompt", record.get("messages"))
    if "prompt" in record and not (isinstance(prompt, str) and prompt):
        raise InputError(f"prompt is {shown(prompt)}; valid: text of at least one character")
    if "messages" in record and not is_chat(prompt):
        raise InputError(f"messages is {shown(prompt)}; valid: a list of objects with role and content")
    more = {key: record[key] for key in OWN if key in record}
    if "max_new_tokens" in more:
        check_integer("max_new_tokens", more["max_new_tokens"], 1)
    if "ignore_eos" in more:
        check_flag("ignore_eos", more["ignore_eos"])
    sampling = {key: record[key] for key in SAMPLING if key in record}
    SamplingParams(**sampling)
    return Asked(name, prompt, sampling, more)


def run(args: argparse.Namespace, call: dict[str, Any]) -> int:
    """Write all texts that are missing.

    Args:
        call: what is common to the requests, as ``generate`` has it of its options.
    Raises:
        RunError: some of them failed; it names them.
        Interrupted: a signal came; what was written is kept.
    """
    side_by_side, asked = at_once(args.at_once), read(args.prompts)
    record = check_record(args.json, options.inputs_of(args))
    folder = Path(args.out).expanduser()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"out is {args.out!r}: it is no folder; valid: a folder, or a new one")
    check_folder("--out", str(folder / "run"))
    llm = options.load_model(args, args.rope_scaling)
    logger.info("%s, %s on %s, %s", llm.name, llm.dtype, llm.device, args.strategy)
    sampling = options.model_sampling(args, call["sampling"], llm)
    requests = [_request(args, llm, one, {**call, "sampling": sampling}, folder) for one in asked]

    from tokenswift.engine.scheduler import Scheduler, run_all

    results: dict[int, Generation] = {}
    failed: dict[str, str] = {}
    stages = Stages(args.quiet)
    done, total, begun = 0, sum(request.max_new_tokens for request in requests), perf_counter()

    def on_step(number: int, step: Step) -> None:
        nonlocal done
        done += len(step.token_ids)
        stages("generate", min(done, total - 1), total)

    try:
        with Signals(), Scheduler(llm, side_by_side) as scheduler:
            for number, result in run_all(scheduler, requests, on_step):
                if isinstance(result, Generation):
                    results[number] = result
                    continue
                failed[asked[number].name] = " ".join(str(result).split())
                stages.end()
                logger.error("%s failed: %s", asked[number].name, failed[asked[number].name])
    except KeyboardInterrupt as interrupt:
        kept = f"{len(results)} of {len(asked)} texts are written; the same command goes on"
        if isinstance(interrupt, Interrupted):
            raise Interrupted(interrupt.number, kept) from None
        raise KeyboardInterrupt(kept) from None
    finally:
        stages.end()
    speed = done / (perf_counter() - begun)
    logger.info("%d of %d texts are in %s (%.0f tokens/s)", len(results), len(asked), folder, speed)
    if record is not None:
        lines = []
        for number, (one, request) in enumerate(zip(asked, requests, strict=True)):
            made: dict[str, Any] = {"error": failed.get(one.name)}
            if number in results:
                given = call["strategy_options"]
                made = record_of(llm, results[number], args.strategy, given, request.sampling)
            lines.append(json.dumps({"id": one.name, **made}, ensure_ascii=False, allow_nan=False) + "\n")
        write_text(record, "".join(lines))
    if failed:
        raise RunError(f"{len(failed)} of {len(asked)} prompts failed: {', '.join(failed)}")
    return 0


def _request(args: argparse.Namespace, llm: Any, one: Asked, call: dict[str, Any], folder: Path) -> Request:
    """The request of a line: the command's settings, its own over them."""
    from tokenswift.engine.request import Request

    prompt: Any = one.prompt
    if isinstance(prompt, str) and (args.chat or args.system is not None):
        prompt = [*prompting.system_messages(args.system), {"role": "user", "content": prompt}]
    sampling = call["sampling"]
    if is_chat(prompt):
        prompting.check_template(llm, "messages" if one.prompt is prompt else "--chat")
        sampling = prompting.answer_sampling(args, sampling)
    sampling = replace(sampling, **one.sampling)
    return Request(prompt, **{**call, **one.more, "sampling": sampling, "run_dir": folder / one.name})
