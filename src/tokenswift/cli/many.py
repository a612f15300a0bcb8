"""``tokenswift generate --prompts FILE``: concurrent texts, a folder for each, here or on a Ray cluster."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tokenswift.cli import options
from tokenswift.cli.declare import RARE, option, reader
from tokenswift.cli.output import check_folder, check_record, write_json
from tokenswift.cli.terminal import Stages, keeping
from tokenswift.engine.request import EXAMPLE, Asked, asked, record_of
from tokenswift.files import is_address
from tokenswift.loader.prompts import is_chat
from tokenswift.types import Generation, InputError, RunError, Step
from tokenswift.words import counted

if TYPE_CHECKING:
    from tokenswift.engine.request import Request

SEQUENCES = "auto, or an integer of at least 1"
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
        at_once: sequences written concurrently, or auto; auto is as many as fit in memory and make it faster;
            with --ray: by each actor
        ray: have a Ray cluster write them: local (this machine), auto (the cluster that it belongs to) or
            HOST:PORT of a head node; --out is a folder that all nodes see, or an address of fsspec, such as
            s3://bucket/texts (journals are copied there every ten seconds); needs the extra ray
        actors: with --ray, processes that write, among which nodes and GPUs are shared; default: one for each
            GPU, or for each node where there are none
    """

    prompts: str | None = option(None, "FILE")
    out: str | None = option(None, "DIR")
    at_once: Any = option("auto", "N", names=("--max-num-seqs",), type=reader(_at_once, SEQUENCES))
    ray: str | None = option(None, "ADDRESS", level=RARE)
    actors: int | None = option(None, least=1, level=RARE)


def check_several(args: argparse.Namespace) -> None:
    """Refuse halves of a pair, and what goes with one prompt only."""
    if args.prompts is None or args.out is None:
        there, missing = ("--prompts", "--out") if args.out is None else ("--out", "--prompts")
        raise InputError(f"{there} given without {missing}; valid: both")
    if args.ray is None and args.actors is not None:
        raise InputError("actors is given without --ray; valid: both")
    for name in ("prompt", "prompt_file", "prompt_ids", "explain", "run_dir", "output"):
        if getattr(args, name, None) is not None:
            shown = "PROMPT" if name == "prompt" else f"--{name.replace('_', '-')}"
            raise InputError(f"--prompts and {shown} given; valid: one of them")


def read(args: argparse.Namespace) -> list[Asked]:
    """The prompts of --prompts; text that is to be answered becomes messages.

    Raises:
        InputError: the file cannot be read, or naming the line that is wrong.
    """
    name, found = args.prompts, list[Asked]()
    names: dict[str, int] = {}
    for number, line in enumerate(options.read_named(name, "--prompts").split("\n"), 1):
        if not line.strip():
            continue
        try:
            one = asked(_read(line), f"{number:05}")
            if one.name in names:
                raise InputError(f"id is {one.name!r}, as in line {names[one.name]}; valid: another id")
        except InputError as error:
            raise InputError(f"--prompts {name}, line {number}: {error}") from error
        names[one.name] = number
        if not is_chat(one.prompt) and args.system is not None:
            asks = {"role": "user", "content": one.prompt}
            one = replace(one, prompt=[*options.system_messages(args.system), asks])
        found.append(one)
    if not found:
        raise InputError(f"--prompts {name} holds no prompts; valid: a JSON object a line")
    return found


def _read(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not JSON ({error}); valid: an object such as {EXAMPLE}") from error


def request_of(
    args: argparse.Namespace,
    llm: Any,
    one: Asked,
    call: dict[str, Any],
    folder: Path,
) -> Request:
    """The request of a line: the command's settings, its own over them."""
    if is_chat(one.prompt):
        options.check_template(llm, "messages" if args.system is None else "--system")
        if args.raw:
            given = call["template_options"] or {}
            call = {**call, "template_options": {**given, "continue_final_message": True}}
    return one.request(call, llm.default_sampling(one.prompt), folder)


class Texts:
    """How far many texts are: what is shown while they are written, and told at the end.

    Args:
        names: of all prompts.

    Attributes:
        stages: shows how far they are.
        done: records of the texts that are over, by name; of a failed one its ``error``.
        tokens: new tokens.
    """

    def __init__(self, args: argparse.Namespace, names: Sequence[str]) -> None:
        self._args, self._names, self.stages = args, names, Stages(args.quiet)
        self.done: dict[str, dict[str, Any]] = {}
        self.tokens, self._begun = 0, perf_counter()

    def add(self, tokens: int) -> None:
        """New tokens are there."""
        self.tokens += tokens
        self.stages("generate", self.tokens, None)

    def fail(self, name: str, why: str) -> None:
        """A text has failed."""
        self.done[name] = {"error": " ".join(why.split())}
        logger.error("%s failed: %s", name, self.done[name]["error"])

    @property
    def failed(self) -> list[str]:
        """Names of those that have failed."""
        return [name for name, made in self.done.items() if made.get("error") is not None]

    def kept(self) -> str:
        """What is kept when the command ends early."""
        texts = counted(len(self._names), "text is", "texts are")
        return f"{len(self.done) - len(self.failed)} of {texts} written; the same command resumes"

    def end(self, record: Path | None) -> int:
        """Say what was done, and write the records.

        Args:
            record: where they go.
        Raises:
            RunError: some have failed; it names them.
        """
        speed, failed = self.tokens / (perf_counter() - self._begun), self.failed
        done, texts = len(self._names) - len(failed), counted(len(self._names), "text is", "texts are")
        logger.info("%d of %s in %s (%.0f tokens/s)", done, texts, self._args.out, speed)
        if record is not None:
            rows = ({"id": name, "error": None} | self.done.get(name, {}) for name in self._names)
            write_json(record, *rows)
        if failed:
            prompts = counted(len(self._names), "prompt")
            raise RunError(f"{len(failed)} of {prompts} failed: {', '.join(failed)}")
        return 0


def run(args: argparse.Namespace, call: dict[str, Any]) -> int:
    """Write all texts that are missing.

    Args:
        call: what is common to the requests, as ``generate`` has it of its options.
    Raises:
        RunError: some of them failed; it names them.
        Interrupted: a signal came; what was written is kept.
    """
    prompts = read(args)
    record = check_record(args.json)
    if args.ray is not None:
        return _on_ray(args, call, prompts, record)
    if is_address(args.out):
        raise InputError(f"out is {args.out!r}: an address; valid: a folder, or the same with --ray")
    folder = check_out(args.out)
    llm = options.load_model(args)
    requests = [request_of(args, llm, one, call, folder / one.name) for one in prompts]

    from tokenswift.engine.scheduler import Scheduler, run_all

    texts = Texts(args, [one.name for one in prompts])

    def on_step(number: int, step: Step) -> None:
        texts.add(len(step.token_ids))

    with texts.stages, keeping(texts.kept), Scheduler(llm, args.at_once) as scheduler:
        for number, result in run_all(scheduler, requests, on_step):
            name, given = prompts[number].name, (args.strategy, call["strategy_options"])
            if isinstance(result, Generation):
                made = record and record_of(llm, result, *given, requests[number].sampling)
                texts.done[name] = made or {}
            else:
                texts.fail(name, str(result))
    return texts.end(record)


def check_out(name: str) -> Path:
    """The folder of --out; InputError where it cannot be written."""
    folder = Path(name).expanduser()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"out is {name!r}: it is not a folder; valid: a folder, or a new one")
    check_folder("--out", str(folder / "run"))
    return folder


# ---- on a Ray cluster --------------------------------------------------------------------------------------


def _on_ray(args: argparse.Namespace, call: dict[str, Any], prompts: list[Asked], record: Path | None) -> int:
    """As :func:`run`, by the actors of a cluster."""
    for name in ("ray", "pyarrow", "fsspec"):
        if find_spec(name) is None:
            valid = "pip install 'tokenswift-exact[ray]'"
            raise InputError(f"the package {name} is not installed; valid: {valid}")
    out = args.out
    if is_address(out):
        from tokenswift.runs.remote import open_address

        open_address(out)
    else:
        out = str(check_out(out).absolute())
    from tokenswift import distributed as cluster

    settings = _settings(args, call) | {"records": record is not None}
    requests = {one.name: one.record() for one in prompts}
    texts = Texts(args, list(requests))
    with texts.stages, keeping(texts.kept), cluster.connected(args.ray):
        each = None if args.at_once == "auto" else args.at_once
        how = cluster.laid_out(len(prompts), args.actors, each)
        logger.info("%s, %d texts at once each", counted(how["actors"], "actor"), how["at_once"])
        for row in cluster.write(requests, out, how, settings):
            texts.add((row["new_tokens"] or 0) - (row["went_on_at"] or 0))  # without those it found
            if row["error"] is not None:
                texts.fail(row["name"], row["error"])
            else:
                texts.done[row["name"]] = json.loads(row.get("record") or "{}")
    return texts.end(record)


def _settings(args: argparse.Namespace, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `distributed.Generator` that the command's options are."""
    loading = {name: value for name, value in options.loading_of(args).items() if value is not None}
    model, loading["heads"] = _whole(args.model), _whole(args.heads)
    loading["eagle"] = _whole(args.eagle)
    if args.threads is not None:
        loading["threads"] = args.threads
    return {"model": model, "loading": loading, **call}


def _whole(name: str) -> str:
    """A path from the root, where there is one of that name: actors have other working folders."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name
