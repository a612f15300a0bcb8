"""``tokenswift generate``: one text, streamed; or many (see `cli.many`)."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenswift.cli import many, options
from tokenswift.cli.declare import RARE, Parser, add_options, command, option
from tokenswift.cli.output import (
    STDOUT,
    TextSink,
    check_folder,
    check_record,
    check_writable,
    files_of_run,
    summary,
    write_json,
)
from tokenswift.cli.terminal import Stages, keeping
from tokenswift.config import CONTINUED, CONTINUED_LENGTH
from tokenswift.engine.request import Request, record_of
from tokenswift.grammar import Grammar
from tokenswift.loader.prompts import is_chat
from tokenswift.types import Generation, InputError
from tokenswift.words import counted

if TYPE_CHECKING:
    from tokenswift.runs.state import RunState

logger = logging.getLogger("tokenswift")
MEASURED = 64  # new tokens from which on their speed is worth an estimate


@dataclass(frozen=True)
class Prompt:
    """What is answered or continued.

    Attributes:
        prompt: text to answer, or to continue (see --continue); text from a pipe is the prompt, or stands
            before PROMPT; - reads standard input
        prompt_file: UTF-8 file with that text; - reads standard input
        prompt_ids: token ids instead of text, 0 or more each
        raw: continue the prompt as it is; default: a model that has a chat template answers it, whether it
            comes as an argument, by a pipe or from a file
    """

    prompt: str | None = option(None, "PROMPT", place=True, nargs="?")
    prompt_file: str | None = option(None, "F")
    prompt_ids: list[int] | None = option(None, "1,2,3", type=options.token_ids, level=RARE)
    raw: bool = option(False, names=("--continue",))


@dataclass(frozen=True)
class Text:
    """What is written.

    Attributes:
        max_new_tokens: tokens to write at most, at least 1; default: an answer ends where the model ends it,
            a continued text after 200
        json_schema: write JSON that the JSON schema in this file describes
        regex: write text that this regular expression matches from its beginning to its end
        grammar: write text of the grammar in this file, in Lark's syntax or in llama.cpp's (GBNF)
        stop: end before this text, which is left out; may be given several times; default: none
        stop_ids: end after these tokens; the last one adds no text; may be given several times; default: none
        ignore_eos: continue after an end-of-text token
        on_loop: when the text repeats itself: report (continue and say so) or stop
    """

    max_new_tokens: int | None = option(None, least=1)
    json_schema: str | None = option(None, "FILE", level=RARE)
    regex: str | None = option(None, "TEXT", level=RARE)
    grammar: str | None = option(None, "FILE", level=RARE)
    stop: list[str] = option((), "TEXT", action="append", level=RARE)
    stop_ids: list[list[int]] = option((), "1,2,3", type=options.token_ids, action="append", level=RARE)
    ignore_eos: bool = option(False, level=RARE)
    on_loop: str = option("report", "W", level=RARE)


@dataclass(frozen=True)
class Results(options.Shown, options.Record):
    """What a run leaves behind.

    Attributes:
        output: write the text to this file too, as it comes
        run_dir: keep a journal of the run in this folder, so that resume DIR finishes it after a crash; with
            a run in it already, that run is resumed
    """

    output: str | None = option(None, "FILE")
    run_dir: str | None = option(None, "DIR")


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = command(subparsers, "generate", run, "write a text")
    add_call_options(parser)
    add_options(parser.add_argument_group("results"), Results)
    add_options(parser.add_argument_group("many prompts"), many.Several)


def add_call_options(parser: Parser) -> None:
    """What is to be written and how: prompt, length, model, method, sampling."""
    group = parser.add_argument_group("prompt and length")
    for kind in (Prompt, options.System, Text):
        add_options(group, kind)
    options.add_model_options(parser)
    options.add_strategy_options(parser)
    options.add_sampling_options(parser, usual=CONTINUED)


def _run_dir(name: str | None) -> tuple[Path | None, RunState | None]:
    """The folder of --run-dir, and the run that is there already."""
    if name is None:
        return None, None
    from tokenswift.runs import folder as folders

    folder = Path(name).expanduser()
    if not name or (folder.exists() and not folder.is_dir()):
        raise InputError(f"run_dir is {name!r}: it is not a folder; valid: a new or an empty folder")
    state = None
    if folders.has_run(folder):
        contents, state = folders.load(folder)
        folders.check_whole(folder, contents, state)
    else:
        folders.check_new(folder)
    check_folder("--run-dir", name)
    return folder, state


def call_from(args: argparse.Namespace) -> tuple[str | list[int], dict[str, Any]]:
    """The prompt as given, and what else a request needs; everything that needs no model is checked.
    :func:`with_model` makes the request."""
    options.check_chat_options(args)
    return options.prompt_from(args), settings_from(args)


def settings_from(args: argparse.Namespace) -> dict[str, Any]:
    """What a request needs besides its prompt, as far as it is known without a model."""
    sampling = replace(options.sampling_from(args, CONTINUED), grammar=grammar_from(args))
    options.check_model_options(args)
    settings = {
        "max_new_tokens": args.max_new_tokens,
        "strategy": args.strategy,
        "strategy_options": options.strategy_options_from(args),
        "sampling": sampling,
        "ignore_eos": args.ignore_eos,
        "stop": (*args.stop, *map(tuple, args.stop_ids)),
        "on_loop": args.on_loop,
        "template_options": dict(args.template_option) or None,
    }
    Request("", **settings)  # checks them
    return settings


def grammar_from(args: argparse.Namespace) -> Grammar | None:
    """What the text has to be like, as far as that is known without a model.

    Raises:
        InputError: several grammars, a file that cannot be read or that holds none, or what does not go with
            one.
    """
    made = {"json_schema": Grammar.json_schema, "regex": Grammar.regex, "grammar": Grammar.written}
    given = [name for name in made if getattr(args, name) is not None]
    if not given:
        return None
    names = [f"--{name.replace('_', '-')}" for name in given]
    if len(given) > 1:
        raise InputError(f"{' and '.join(names)} given; valid: one of them")
    text = getattr(args, given[0])
    content = text if given[0] == "regex" else options.read_named(text, names[0])
    try:
        return made[given[0]](content)
    except InputError as error:
        raise InputError(f"{names[0]} {text}: {error}") from error


def with_model(args: argparse.Namespace, llm: Any, prompt: Any, call: dict[str, Any]) -> Request:
    """The request, its prompt as the model takes it and its sampling settled; says which way both went."""
    prompt, told = options.shaped(args, llm, prompt)
    answered = is_chat(prompt)
    sampling = options.settled_sampling(args, call["sampling"], llm, answered)
    if answered:  # without a length, one that loops would go on to the last position
        if args.max_new_tokens is None and args.on_loop == Text.on_loop:
            call = {**call, "on_loop": "stop"}
        told += f", {options.sampling_words(sampling)}"
    logger.info("%s", told)
    return Request(prompt, **{**call, "sampling": sampling})


def run(args: argparse.Namespace) -> int:
    """Write a text. A chat model answers the prompt; with --continue, or without a chat template, it
    continues it. The text streams to standard output; progress and summary go to standard error."""
    if args.prompts is not None or args.out is not None:
        many.check_several(args)
        options.check_chat_options(args)
        return many.run(args, settings_from(args))
    prompt, call = call_from(args)
    inputs = options.inputs_of(args) | files_of_run(args.run_dir)
    if args.output == str(STDOUT):
        raise InputError("--output is -; valid: a file (the text is on standard output anyway)")
    output = check_writable("--output", args.output)
    record = check_record(args.json, inputs, {"--output": args.output, "--explain": args.explain})
    run_dir, before = _run_dir(args.run_dir)
    if call["strategy_options"].get("acceptance") == "published":
        logger.warning("the published acceptance rule is not lossless: the text differs from plain decoding")
    options.prepare(args)
    llm = options.load_model(args)
    request, cut = replace(with_model(args, llm, prompt, call), run_dir=run_dir), None
    if args.max_new_tokens is None:
        usual = "limit of an answer" if is_chat(request.prompt) else f"default of {CONTINUED_LENGTH} tokens"
        cut = f"stopped at the {usual}; --max-new-tokens sets another"
    result = write(args, llm, request, output, record, before, cut)
    drafted = llm.resources.eagle is not None or request.given.get("draft_model") is not None
    if args.heads == "auto" and not drafted:
        advise_heads(llm.name, args.strategy, result)
    return 0


def advise_heads(name: str, strategy: str, result: Generation) -> None:
    """Say, once a model, that a drafter could make it faster, and the hours that training it takes: the model
    writes the text that it learns from, at about the speed of plain decoding."""
    if strategy not in ("auto", "tokenswift") or result.heads is not None or len(result.token_ids) < MEASURED:
        return
    from tokenswift.loader.find import cache_dir
    from tokenswift.train.options import DataOptions

    advised = cache_dir() / "advised"
    with suppress(OSError):  # a cache that cannot be written is no reason to fail, nor to say it again
        if name in (advised.read_text(encoding="utf-8").splitlines() if advised.exists() else ()):
            return
        advised.parent.mkdir(parents=True, exist_ok=True)
        with advised.open("a", encoding="utf-8") as file:
            file.write(name + "\n")
        tokens = DataOptions("self").tokens
        plain = result.metrics.tokens_per_second / ((result.drafting or {}).get("gain") or 1.0)
        logger.info(
            "a drafter trained for this model can make it faster: tokenswift train --model %s (about %s "
            "hours here, once)",
            shlex.quote(name), f"{max(1, tokens / plain / 3600):,.0f}",
        )  # fmt: skip


def write(
    args: argparse.Namespace,
    llm: Any,
    request: Request,
    output: Path | None,
    record: Path | None,
    before: RunState | None = None,
    cut: str | None = None,
) -> Generation:
    """Run a request: its text, summary and record go where the options have them.

    Args:
        output, record: files of the text and of the record, where they are asked for.
        before: as of :func:`stream`.
        cut: what is said of an end at the length; None: that it was asked for.
    """
    sink = TextSink(output, echo=record != STDOUT, raw=args.raw_output)
    result = stream(llm, request, sink, args.quiet, before)
    logger.info("%s", summary(result, args.verbose, cut))
    if record is not None:
        write_json(record, record_of(llm, result, request.strategy, request.given, request.sampling))
    return result


def stream(
    llm: Any, request: Request, sink: TextSink, quiet: bool, before: RunState | None = None
) -> Generation:
    """Run a request with its text and progress shown.

    Args:
        before: the run as it is in its folder, when there is one to go on with.
    Raises:
        KeyboardInterrupt, RunError: saying what was kept of the text, and how to go on.
    """
    go_on = "" if request.run_dir is None else f"; continue with: tokenswift resume {request.run_dir}"
    tokens = 0 if before is None else len(before.tokens)
    sink.repeat("" if before is None else before.text)
    most = None if is_chat(request.prompt) else request.max_new_tokens or CONTINUED_LENGTH

    def kept() -> str:
        stages.end()
        with suppress(OSError):
            sink.close()
        return f"{counted(tokens, 'token was', 'tokens were')} written, {sink.kept}{go_on}"

    try:
        with Stages(quiet, "starting") as stages, keeping(kept) as signals:
            with llm.start(replace(request, on_progress=stages)) as steps:
                for step in steps:
                    if not tokens or sys.stdout.isatty():  # where the text itself shows how far it is
                        stages.end()
                    sink.write(step.text)
                    tokens += len(step.token_ids)
                    if not sys.stdout.isatty():
                        stages("generate", tokens, most)
                    signals.check()
                result = steps.result
            sink.write(result.text[sink.written :])  # what an earlier session held back; makes the file
            sink.close()
    except BrokenPipeError as error:
        error.run_dir = request.run_dir  # type: ignore[attr-defined]
        raise
    finally:
        with suppress(OSError):
            sink.close()
    return result
