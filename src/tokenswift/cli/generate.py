"""``tokenswift generate``: one text, streamed; or many (see `cli.many`)."""

from __future__ import annotations

import argparse
import logging
import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenswift.checks import check_choice
from tokenswift.cli import many, options, prompting
from tokenswift.cli.declare import RARE, Parser, add_options, command, option
from tokenswift.cli.main import reason
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
from tokenswift.cli.terminal import Interrupted, Progress, Signals
from tokenswift.config import CONTINUED, CONTINUED_LENGTH, ON_LOOP
from tokenswift.engine.request import record_of
from tokenswift.grammar import Grammar
from tokenswift.loader.prompts import is_chat
from tokenswift.types import Generation, InputError, RunError
from tokenswift.words import counted

if TYPE_CHECKING:
    from tokenswift.engine.request import Request
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
    """

    prompt: str | None = option(None, "PROMPT", place=True, nargs="?")
    prompt_file: str | None = option(None, "F")
    prompt_ids: list[int] | None = option(None, "1,2,3", type=prompting.token_ids, level=RARE)


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
    stop_ids: list[list[int]] = option((), "1,2,3", type=prompting.token_ids, action="append", level=RARE)
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
    for kind in (Prompt, prompting.Chat, prompting.System, Text):
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
    prompting.check_chat_options(args)
    return prompting.prompt_from(args), settings_from(args)


def settings_from(args: argparse.Namespace) -> dict[str, Any]:
    """What a request needs besides its prompt, as far as it is known without a model."""
    sampling = replace(options.sampling_from(args, CONTINUED), grammar=grammar_from(args))
    check_choice("on_loop", args.on_loop, ON_LOOP)
    if "" in args.stop:
        raise InputError("stop is ''; valid: text of at least one character")
    options.check_model_options(args)
    return {
        "max_new_tokens": args.max_new_tokens,
        "strategy": args.strategy,
        "strategy_options": options.strategy_options_from(args),
        "sampling": sampling,
        "ignore_eos": args.ignore_eos,
        "stop": (*args.stop, *map(tuple, args.stop_ids)),
        "on_loop": args.on_loop,
        "template_options": dict(args.template_option) or None,
    }


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
    if args.ignore_eos:
        raise InputError(f"--ignore-eos beside {names[0]}; valid: one of the two", "ignore_eos")
    text = getattr(args, given[0])
    if given[0] == "regex":
        return Grammar.regex(text)
    content = prompting.read_named(text, names[0])
    try:
        return made[given[0]](content)
    except InputError as error:
        raise InputError(f"{names[0]} {text}: {error}") from error


def with_model(args: argparse.Namespace, llm: Any, prompt: Any, call: dict[str, Any]) -> Request:
    """The request, its prompt as the model takes it and its sampling settled; says which way both went."""
    from tokenswift.engine.request import Request

    sampling = options.model_sampling(args, call["sampling"], llm)
    prompt, told = prompting.shaped(args, llm, prompt)
    if is_chat(prompt):  # without a length, one that loops would go on to the last position
        if args.max_new_tokens is None and args.on_loop == Text.on_loop:
            call = {**call, "on_loop": "stop"}
        sampling = options.answer_sampling(args, sampling, llm)
        told += f", {options.sampling_words(sampling)}"
    logger.info("%s", told)
    return Request(prompt, **{**call, "sampling": sampling})


def run(args: argparse.Namespace) -> int:
    """Write a text. A chat model answers the prompt; with --continue, or without a chat template, it
    continues it. The text streams to standard output; progress and summary go to standard error."""
    if args.prompts is not None or args.out is not None:
        many.check_several(args)
        prompting.check_chat_options(args)
        return many.run(args, settings_from(args))
    prompt, call = call_from(args)
    inputs = options.inputs_of(args) | files_of_run(args.run_dir)
    if args.output == str(STDOUT):
        raise InputError("--output is -; valid: a file (the text is on standard output anyway)")
    output = check_writable("--output", args.output)
    record = check_record(args.json, inputs, {"--output": args.output, "--explain": args.explain})
    run_dir, before = _run_dir(args.run_dir)
    given = call["strategy_options"]
    if given.get("acceptance") == "published":
        logger.warning("the published acceptance rule is not lossless: the text differs from plain decoding")
    prompting.prepare(args)
    llm = options.load_model(args)
    request = replace(with_model(args, llm, prompt, call), run_dir=run_dir)

    new, cut = args.max_new_tokens, None
    if new is None:
        cut = default_length(args.run_dir, answered := is_chat(request.prompt))
        new = None if answered else CONTINUED_LENGTH
    sink = TextSink(output, echo=record != STDOUT, raw=args.raw_output)
    done = len(before.tokens) if before else 0
    result = stream(llm, request, sink, Progress(new, args.quiet, done), before)
    logger.info("%s", summary(result, args.verbose, cut))
    if record is not None:
        write_json(record, record_of(llm, result, args.strategy, given, request.sampling))
    if args.heads == "auto" and llm.resources.eagle is None and given.get("draft_model") is None:
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


def default_length(run_dir: str | None, answered: bool) -> str:
    """What is said of a text that ended at a length nobody asked for."""
    if answered:
        return "reached the limit of an answer (--max-new-tokens)"
    more = "--max-new-tokens 1000"
    again = f"the same command with {more} continues this text"
    if run_dir is not None:
        again = f"continue with: tokenswift resume {run_dir} {more}"
    return f"stopped at the default of {counted(CONTINUED_LENGTH, 'token')} (--max-new-tokens); {again}"


def stream(
    llm: Any, request: Request, sink: TextSink, progress: Progress, before: RunState | None = None
) -> Generation:
    """Run a request with its text and progress shown.

    Args:
        before: the run as it is in its folder, when there is one to go on with.
    Raises:
        KeyboardInterrupt, RunError: saying what was kept of the text, and how to go on.
    """
    run_dir = request.run_dir
    go_on = "" if run_dir is None else f"; continue with: tokenswift resume {run_dir}"
    already = before.text if before is not None else ""
    sink.repeat(already)

    with Signals() as signals:
        try:
            with llm.start(replace(request, on_progress=progress)) as steps:
                for step in steps:
                    sink.write(step.text)
                    progress.update(step)
                    signals.check()
                result = steps.result
            sink.write(result.text[sink.written :])  # what an earlier session held back; makes the file
        except BaseException as error:
            progress.end()
            with suppress(OSError):
                sink.close()
            kept = f"{counted(progress.tokens, 'token was', 'tokens were')} written, {sink.kept}{go_on}"
            number = signals.number or getattr(error, "number", 0)
            if number and isinstance(error, KeyboardInterrupt | OSError):  # a hung up terminal takes no text
                raise Interrupted(number, kept) from None
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(kept) from None
            if isinstance(error, BrokenPipeError):
                error.run_dir = run_dir  # type: ignore[attr-defined]
                raise
            if not isinstance(error, Exception) or isinstance(error, InputError) or "kept" in str(error):
                raise
            raise RunError(f"{reason(error)}; {kept}") from error
    sink.close()
    progress.end()
    return result
