"""``tokenswift generate --prompts FILE``: concurrent texts, a folder for each, here or on a Ray cluster."""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tokenswift.cli import options, prompting
from tokenswift.cli.declare import RARE, option, reader
from tokenswift.cli.output import check_folder, check_record, write_text
from tokenswift.cli.terminal import Interrupted, Signals, Stages, table
from tokenswift.config import CONTINUED_LENGTH, SamplingParams
from tokenswift.engine.request import EXAMPLE, Asked, asked, record_of
from tokenswift.files import is_address
from tokenswift.loader.prompts import is_chat
from tokenswift.types import Generation, InputError, RunError, Step
from tokenswift.words import counted

if TYPE_CHECKING:
    from tokenswift.engine.request import Request

logger = logging.getLogger("tokenswift")


def _at_once(text: str) -> int | str:
    number = text if text == "auto" else int(text)
    if isinstance(number, int) and number < 1:
        raise ValueError
    return number


#: an argparse type: the value of --max-num-seqs
at_once = reader(_at_once, "auto, or an integer of at least 1")


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
    at_once: Any = option("auto", "N", names=("--max-num-seqs",), type=at_once)
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
    for number, line in enumerate(prompting.read_named(name, "--prompts").split("\n"), 1):
        if not line.strip():
            continue
        try:
            one = asked(_json(line), f"{number:05}")
            if one.name in names:
                raise InputError(f"id is {one.name!r}, as in line {names[one.name]}; valid: another id")
        except InputError as error:
            raise InputError(f"--prompts {name}, line {number}: {error}") from error
        names[one.name] = number
        if not is_chat(one.prompt) and (args.chat or args.system is not None):
            asks = {"role": "user", "content": one.prompt}
            one = replace(one, prompt=[*prompting.system_messages(args.system), asks])
        found.append(one)
    if not found:
        raise InputError(f"--prompts {name} holds no prompts; valid: a JSON object a line")
    return found


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not JSON ({error}); valid: an object such as {EXAMPLE}") from error


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
        sampling = options.answer_sampling(args, sampling, llm)
        if args.raw:
            given = call["template_options"] or {}
            call = {**call, "template_options": {**given, "continue_final_message": True}}
    return one.request(call, sampling, folder)


class Texts:
    """How far many texts are: what is shown while they are written, and told at the end.

    Args:
        names: of all prompts.
        lengths: the most new tokens of each; None: nobody knows.

    Attributes:
        stages: shows how far they are.
        written, failed: texts, by name; what was wrong with the others.
        records: of the texts, by name.
        tokens: new tokens.
    """

    def __init__(self, args: argparse.Namespace, names: Sequence[str], lengths: Sequence[int | None]) -> None:
        self._args, self._names, self.stages = args, names, Stages(args.quiet)
        known = [length for length in lengths if length is not None]
        self._total = sum(known) if len(known) == len(lengths) else None
        self.written: set[str] = set()
        self.failed: dict[str, str] = {}
        self.records: dict[str, Any] = {}
        self.tokens, self._begun = 0, perf_counter()

    def show(self, tokens: int) -> None:
        """Show that so many tokens are written."""
        if self._total is None:
            self.stages("texts", len(self.written), len(self._names))
        else:
            self.stages("generate", min(tokens, self._total - 1), self._total)

    def fail(self, name: str, why: str) -> None:
        """A text has failed."""
        self.failed[name] = " ".join(why.split())
        logger.error("%s failed: %s", name, self.failed[name])

    @contextmanager
    def writing(self) -> Iterator[None]:
        """While texts are written; an interruption says how many are."""
        try:
            with Signals():
                yield
        except KeyboardInterrupt as interrupt:
            texts = counted(len(self._names), "text is", "texts are")
            kept = f"{len(self.written)} of {texts} written; the same command resumes"
            number = getattr(interrupt, "number", None)
            raise (KeyboardInterrupt(kept) if number is None else Interrupted(number, kept)) from None
        finally:
            self.stages.end()

    def end(self, record: Path | None) -> int:
        """Say what was done, and write the records.

        Args:
            record: where they go.
        Raises:
            RunError: some have failed; it names them.
        """
        speed = self.tokens / (perf_counter() - self._begun)
        done, texts = len(self._names) - len(self.failed), counted(len(self._names), "text is", "texts are")
        logger.info("%d of %s in %s (%.0f tokens/s)", done, texts, self._args.out, speed)
        if record is not None:
            rows = [
                {"id": name, "error": self.failed.get(name)} | self.records.get(name, {})
                for name in self._names
            ]
            lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
            write_text(record, "".join(lines))
        if self.failed:
            prompts = counted(len(self._names), "prompt")
            raise RunError(f"{len(self.failed)} of {prompts} failed: {', '.join(self.failed)}")
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
    record = check_record(args.json, options.inputs_of(args))
    if args.ray is not None:
        return _on_ray(args, call, prompts, record)
    if is_address(args.out):
        raise InputError(f"out is {args.out!r}: an address; valid: a folder, or the same with --ray")
    folder = check_out(args.out)
    llm = options.load_model(args)
    sampling = options.model_sampling(args, call["sampling"], llm)
    requests = [request_of(args, llm, one, call, sampling, folder / one.name) for one in prompts]

    from tokenswift.engine.scheduler import Scheduler, run_all

    names, cut = [one.name for one in prompts], 0
    texts = Texts(args, names, [request.max_new_tokens for request in requests])

    def on_step(number: int, step: Step) -> None:
        texts.tokens += len(step.token_ids)
        texts.show(texts.tokens)

    with texts.writing(), Scheduler(llm, args.at_once) as scheduler:
        for number, result in run_all(scheduler, requests, on_step):
            name, request = names[number], requests[number]
            if not isinstance(result, Generation):
                texts.fail(name, str(result))
                continue
            texts.written.add(name)
            continued = request.max_new_tokens is None and not is_chat(request.prompt)
            cut += continued and result.finish_reason == "length"
            if record is not None:
                given = args.strategy, call["strategy_options"], request.sampling
                texts.records[name] = record_of(llm, result, *given)
    if cut:
        usual = counted(CONTINUED_LENGTH, "token")
        told = "%d of them stopped at the default of %s (--max-new-tokens); repeat with more to continue"
        logger.info(told, cut, usual)
    return texts.end(record)


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
    lengths = [one.given.get("max_new_tokens", args.max_new_tokens) for one in prompts]
    texts, rows = Texts(args, list(requests), lengths), list[dict[str, Any]]()
    with texts.writing(), cluster.connected(args.ray):
        each = None if args.at_once == "auto" else args.at_once
        how = cluster.laid_out(len(prompts), args.actors, args.actor_cores, args.actor_gpus, each)
        nodes = len(cluster.nodes())
        logger.info(
            "%s; %s with %s and %s each, %s at once each",
            counted(nodes, "node"), counted(how.actors, "actor"), counted(how.cores, "core"),
            counted(how.gpus, "GPU"), counted(how.at_once, "text"),
        )  # fmt: skip
        for row in cluster.write(requests, out, how, settings):
            if isinstance(row, int):
                texts.show(row)
                before, nodes = nodes, len(cluster.nodes())
                if nodes < before:
                    left = counted(nodes, "is", "are")
                    logger.warning("a node was lost, %s left; its texts are resumed on the others", left)
                continue
            rows.append(row)
            texts.tokens += _new(row)
            if row["error"] is not None:
                texts.fail(row["name"], row["error"])
                continue
            texts.written.add(row["name"])
            if row.get("record"):
                texts.records[row["name"]] = json.loads(row["record"])
    for line in by_node(rows).splitlines():
        logger.info("%s", line)
    return texts.end(record)


def _settings(args: argparse.Namespace, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `distributed.Generator` that the command's options are."""
    sampling = {"sampling": "model" if args.sampling == "model" else None, **options.given_sampling(args)}
    if call["sampling"].grammar is not None:
        sampling["grammar"] = call["sampling"].grammar
    loading = {name: value for name, value in options.loading_of(args).items() if value is not None}
    model, loading["heads"] = _whole(args.model), _whole(args.heads)
    loading["eagle"] = _whole(args.eagle)
    if args.threads is not None:
        loading["threads"] = args.threads
    rest = {name: value for name, value in call.items() if name != "sampling"}
    return {"model": model, "loading": loading, **rest, **sampling}


def _whole(name: str) -> str:
    """A path from the root, where there is one of that name: actors have other working folders."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def _new(row: Mapping[str, Any]) -> int:
    """Tokens that an actor has written of a text, beside those that it found."""
    return (row["new_tokens"] or 0) - (row["went_on_at"] or 0)


def by_node(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of what each node has done; texts that an actor found begun are counted once more."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        of = counts.setdefault(row["node"], Counter())
        of["failed" if row["error"] is not None else "texts"] += 1
        of["tokens"] += _new(row)
        of["resumed"] += 0 < (row["went_on_at"] or 0) < (row["new_tokens"] or 0)
    columns = ("texts", "tokens", "resumed", "failed")
    cells = [(node, *(f"{counts[node][name]:,}" for name in columns)) for node in sorted(counts)]
    return table(cells, ("node", *columns), right=range(1, 5))
