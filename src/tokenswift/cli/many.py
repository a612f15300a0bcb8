"""``tokenswift generate --prompts FILE``: concurrent texts, a run's folder for each."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from tokenswift.checks import check_integer
from tokenswift.cli import inputs, options, prompting
from tokenswift.cli.declare import RARE, check_options, option
from tokenswift.cli.output import check_folder, check_record, write_text
from tokenswift.cli.terminal import Interrupted, Signals, Stages
from tokenswift.config import CONTINUED_LENGTH, SamplingParams
from tokenswift.engine.records import EXAMPLE, Asked, asked, record_of
from tokenswift.files import is_address
from tokenswift.loader.prompts import is_chat
from tokenswift.types import Generation, InputError, RunError, Step
from tokenswift.words import counted

if TYPE_CHECKING:
    from tokenswift.engine.request import Request

logger = logging.getLogger("tokenswift")


@dataclass(frozen=True)
class Several:
    """Many prompts instead of one.

    Attributes:
        prompts: JSON Lines file of prompts: {"prompt": text to continue} or {"messages": a chat to answer},
            optionally with an id and settings of its own, such as seed and max_new_tokens; needs --out
        out: folder of the texts, with a run's folder for each prompt, by its id or line; the same command
            resumes what is missing
        at_once: sequences written concurrently (with --ray: by each actor), or auto: as many as fit in memory
            and make it faster
        ray: have a Ray cluster write them: local (this machine), auto (the cluster that it belongs to) or
            HOST:PORT of a head node; --out is a folder that all nodes see, or an address of fsspec, such as
            s3://bucket/texts (journals are copied there every ten seconds); needs the extra ray
        actors: with --ray, processes that write; default: as many as the cluster has room for
        actor_cores: with --ray, CPU cores of each actor; default: all of a node, shared among its GPUs
        actor_gpus: with --ray, GPUs of each actor; default: 1 where nodes have GPUs
    """

    prompts: str | None = option(None, "FILE")
    out: str | None = option(None, "DIR")
    at_once: str = option("auto", "N", shown="--max-num-seqs")
    ray: str | None = option(None, "ADDRESS", level=RARE)
    actors: int | None = option(None, least=1, level=RARE)
    actor_cores: int | None = option(None, least=1, level=RARE)
    actor_gpus: int | None = option(None, least=0, level=RARE)


def check_several(args: argparse.Namespace) -> None:
    """Refuse halves of a pair, and what goes with one prompt only.

    Raises:
        InputError: naming the options.
    """
    if args.prompts is None or args.out is None:
        there, missing = ("--prompts", "--out") if args.out is None else ("--out", "--prompts")
        raise InputError(f"{there} given without {missing}; valid: both")
    for name in ("actors", "actor_cores", "actor_gpus"):
        if args.ray is None and getattr(args, name) is not None:
            raise InputError(f"{name} is given without --ray; valid: both")
    check_alone(args)


def check_alone(args: argparse.Namespace) -> None:
    """Refuse what goes with one prompt only.

    Raises:
        InputError: naming the options.
    """
    given = {
        "PROMPT": args.prompt,
        "--prompt-file": args.prompt_file,
        "--prompt-ids": args.prompt_ids,
        "--explain": args.explain,
    }
    names = ("run_dir", "output")
    given |= {f"--{name.replace('_', '-')}": getattr(args, name, None) for name in names}
    for name, value in given.items():
        if value is not None:
            raise InputError(f"--prompts and {name} given; valid: one of them")


def at_once(text: str) -> Any:
    """The value of --max-num-seqs.

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
    for number, line in enumerate(inputs.read_named(name, "--prompts").split("\n"), 1):
        if not line.strip():
            continue
        try:
            one = asked(_json(line), f"{number:05}")
            if one.name in names:
                raise InputError(f"id is {one.name!r}, as in line {names[one.name]}; valid: another id")
        except InputError as error:
            raise InputError(f"--prompts {name}, line {number}: {error}") from error
        names[one.name] = number
        found.append(one)
    if not found:
        raise InputError(f"--prompts {name} holds no prompts; valid: a JSON object a line")
    return found


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not JSON ({error}); valid: an object such as {EXAMPLE}") from error


def shaped(args: argparse.Namespace, one: Asked) -> Asked:
    """A prompt as the command's options have it: text that is to be answered becomes messages."""
    if is_chat(one.prompt) or not (args.chat or args.system is not None):
        return one
    return replace(
        one, prompt=[*prompting.system_messages(args.system), {"role": "user", "content": one.prompt}]
    )


def prepared(args: argparse.Namespace) -> tuple[int | Literal["auto"], list[Asked], Path | None]:
    """How many sequences at once, the prompts, and the file of records."""
    side_by_side, prompts = at_once(args.at_once), [shaped(args, one) for one in read(args.prompts)]
    record = check_record(args.json, options.inputs_of(args))
    check_options(args, Several)
    return side_by_side, prompts, record


def run(args: argparse.Namespace, call: dict[str, Any]) -> int:
    """Write all texts that are missing.

    Args:
        call: what is common to the requests, as ``generate`` has it of its options.
    Raises:
        RunError: some of them failed; it names them.
        Interrupted: a signal came; what was written is kept.
    """
    side_by_side, prompts, record = prepared(args)
    if is_address(args.out):
        raise InputError(f"out is {args.out!r}: an address; valid: a folder, or the same with --ray")
    folder = check_out(args.out)
    llm = options.load_model(args, args.rope_scaling)
    logger.info("%s, %s on %s, %s", llm.name, llm.dtype, llm.device, args.strategy)
    sampling = options.model_sampling(args, call["sampling"], llm)
    requests = [request_of(args, llm, one, call, sampling, folder / one.name) for one in prompts]

    from tokenswift.engine.scheduler import Scheduler, run_all

    results: dict[int, Generation] = {}
    failed: dict[str, str] = {}
    stages = Stages(args.quiet)
    done, begun = 0, perf_counter()
    lengths = [request.max_new_tokens for request in requests]
    known = [length for length in lengths if length is not None]
    total = sum(known) if len(known) == len(lengths) else None

    def on_step(number: int, step: Step) -> None:
        nonlocal done
        done += len(step.token_ids)
        if total is None:
            stages("texts", len(results), len(requests))
        else:
            stages("generate", min(done, total - 1), total)

    try:
        with Signals(), Scheduler(llm, side_by_side) as scheduler:
            for number, result in run_all(scheduler, requests, on_step):
                if isinstance(result, Generation):
                    results[number] = result
                    continue
                failed[prompts[number].name] = " ".join(str(result).split())
                stages.end()
                logger.error("%s failed: %s", prompts[number].name, failed[prompts[number].name])
    except KeyboardInterrupt as interrupt:
        raise interrupted(interrupt, len(results), len(prompts)) from None
    finally:
        stages.end()
    cut = [
        n
        for n, result in results.items()
        if result.finish_reason == "length" and lengths[n] is None and not is_chat(prompts[n].prompt)
    ]
    if cut:
        logger.info(
            "%d of them stopped at the default of %s (--max-new-tokens); repeat with more to continue",
            len(cut), counted(CONTINUED_LENGTH, "token"),
        )  # fmt: skip
    records = {}
    if record is not None:
        for number, result in results.items():
            made = record_of(llm, result, args.strategy, call["strategy_options"], requests[number].sampling)
            records[prompts[number].name] = made
    names = [one.name for one in prompts]
    return end(args.out, record, names, records, failed, done / (perf_counter() - begun))


def check_out(name: str) -> Path:
    """The folder of --out, after making sure that it can be written.

    Raises:
        InputError: it cannot.
    """
    folder = Path(name).expanduser()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"out is {name!r}: it is not a folder; valid: a folder, or a new one")
    check_folder("--out", str(folder / "run"))
    return folder


def end(
    out: str,
    record: Path | None,
    names: Sequence[str],
    records: Mapping[str, dict[str, Any]],
    failed: Mapping[str, str],
    speed: float,
) -> int:
    """Say what was done, and write the records.

    Args:
        out: the folder.
        record: where the records go.
        names: of all prompts.
        records, failed: by name.
        speed: new tokens a second.
    Raises:
        RunError: some have failed; it names them.
    """
    written = len(names) - len(failed)
    texts = counted(len(names), "text is", "texts are")
    logger.info("%d of %s in %s (%.0f tokens/s)", written, texts, out, speed)
    if record is not None:
        lines = []
        for name in names:
            made = {"id": name, **({"error": failed.get(name)} | records.get(name, {}))}
            lines.append(json.dumps(made, ensure_ascii=False, allow_nan=False) + "\n")
        write_text(record, "".join(lines))
    if failed:
        raise RunError(f"{len(failed)} of {counted(len(names), 'prompt')} failed: {', '.join(failed)}")
    return 0


def request_of(
    args: argparse.Namespace,
    llm: Any,
    one: Asked,
    call: dict[str, Any],
    sampling: SamplingParams,
    folder: Path | None,
) -> Request:
    """The request of a line: the command's settings, its own over them."""
    if is_chat(one.prompt):
        prompting.check_template(llm, "--chat" if args.chat or args.system is not None else "messages")
        sampling = prompting.answer_sampling(args, sampling, llm)
        if args.raw:
            options = call["template_options"] or {}
            call = {**call, "template_options": {**options, "continue_final_message": True}}
    return one.request(call, sampling, folder)


def interrupted(interrupt: KeyboardInterrupt, written: int, texts: int) -> KeyboardInterrupt:
    """An interruption that says what of many texts is written."""
    kept = f"{written} of {counted(texts, 'text is', 'texts are')} written; the same command resumes"
    if isinstance(interrupt, Interrupted):
        return Interrupted(interrupt.number, kept)
    return KeyboardInterrupt(kept)
