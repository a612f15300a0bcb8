"""``tokenswift generate``: one text, streamed, or with ``--prompts`` many at once, a folder for
each. ``resume`` and ``runs``: what to do with runs that ``--run-dir`` kept."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tokenswift.cli import options
from tokenswift.cli.options import Parser, add_options, command, dashed, option
from tokenswift.cli.places import Input, check_written_apart
from tokenswift.cli.terminal import (
    ENDINGS,
    STDOUT,
    Stages,
    TextSink,
    check_record,
    check_writable,
    keeping,
    on_one_line,
    say,
    summary,
    table,
    write_json,
    write_text,
)
from tokenswift.config.sampling import CONTINUED
from tokenswift.engine.request import Asked, Request, asked, record_of
from tokenswift.grammar import Grammar
from tokenswift.loader.prompts import is_chat
from tokenswift.types import Generation, InputError, RunError, Step, counted

if TYPE_CHECKING:
    from tokenswift.runs.journal import RunState

#: options of one text
ALONE = ("prompt", "prompt_file", "prompt_ids", "raw", "system", "run_dir", "output")
logger = logging.getLogger("tokenswift")
ASKED = (
    "max_new_tokens",
    "strategy",
    "ignore_eos",
    "on_loop",
)  # options that are arguments of a request
SHOWN = 80  # characters of a grammar in a message
GRAMMARS = {"json_schema": Grammar.json_schema, "regex": Grammar.regex, "grammar": Grammar.lark}


@dataclass(frozen=True)
class Prompt:
    """What is answered or continued.

    Attributes:
        prompt: text to answer, or to continue (see --continue); text from a pipe is the prompt, or
            stands before PROMPT; - reads standard input
        prompt_file: UTF-8 file with that text; - reads standard input
        prompt_ids: token ids instead of text, 0 or more each
        raw: continue the prompt as it is; default: a model that has a chat template answers it,
            whether it comes as an argument, by a pipe or from a file
    """

    prompt: str | None = option(None, "PROMPT", place=True, nargs="?")
    prompt_file: str | None = option(None, "F")
    prompt_ids: list[int] | None = option(None, "1,2,3", type=options.token_ids)
    raw: bool = option(False, names=("--continue",))


@dataclass(frozen=True)
class Text:
    """What is written.

    Attributes:
        max_new_tokens: tokens to write at most, at least 1; default: an answer ends where the model
            ends it, a continued text after 200
        json_schema: write JSON that the JSON schema in this file describes; or the schema itself,
            such as {"type": "object"}
        regex: write text that this regular expression matches from its beginning to its end
        grammar: write text of the grammar in this file, in Lark's syntax
        stop: end before this text, which is left out; may be given several times; default: none
        stop_ids: end after these tokens; the last one adds no text; may be given several times;
            default: none
        ignore_eos: continue after an end-of-text token
        on_loop: when the text repeats itself: report (continue and say so) or stop
    """

    max_new_tokens: int | None = option(None, least=1)
    json_schema: str | None = option(None, "FILE")
    regex: str | None = option(None, "TEXT")
    grammar: str | None = option(None, "FILE")
    stop: list[str] = option((), "TEXT", action="append")
    stop_ids: list[list[int]] = option((), "1,2,3", type=options.token_ids, action="append")
    ignore_eos: bool = option(False)
    on_loop: str = option("report", "W")


@dataclass(frozen=True)
class Results(options.Shown, options.Record):
    """What a run leaves behind.

    Attributes:
        output: write the text to this file too, as it comes
        run_dir: keep a journal of the run in this folder, so that resume DIR finishes it after a
            crash; with a run in it already, that run is resumed
    """

    output: str | None = option(None, "FILE")
    run_dir: str | None = option(None, "DIR")


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

    prompts: str | None = option(None, "FILE")
    out: str | None = option(None, "DIR")
    at_once: int | None = option(None, names=("--max-num-seqs",), least=1)


@dataclass(frozen=True)
class Longer:
    """How a run goes on.

    Attributes:
        run_dir: the run's folder
        max_new_tokens: tokens of the whole run at most, counted from its prompt; default: as before
    """

    run_dir: str = option(metavar="DIR", place=True)
    max_new_tokens: int | None = option(None, least=1)


@dataclass(frozen=True)
class Listed(options.Record):
    """What is shown of runs.

    Attributes:
        folder: a run's folder, or one that has such folders in it; default: the current folder
        text: write the whole text of the run, or the text so far, to this file; with - or no FILE,
            to standard output
    """

    folder: str = option(".", "DIR", place=True, nargs="?")
    text: str | None = option(None, "FILE", nargs="?", const="-")


def add_parser(subparsers: Any) -> None:
    """Register the subcommands."""
    parser = command(subparsers, "generate", run, "write a text", "[PROMPT]")
    add_call_options(parser)
    add_options(parser.add_argument_group("results"), Results)
    add_options(parser.add_argument_group("many prompts"), Several)
    parser = command(
        subparsers, "resume", resume, "finish an interrupted run, or lengthen one", "DIR"
    )
    add_options(parser, Longer)
    add_options(parser, Text, ("on_loop",), on_loop=None)
    add_options(parser, options.Record)
    add_options(parser, options.Shown, ("verbose",))
    add_options(command(subparsers, "runs", list_runs, "list runs, or print one", "[DIR]"), Listed)


def add_call_options(parser: Parser) -> None:
    """What is to be written and how: prompt, length, model, method, sampling."""
    group = parser.add_argument_group("prompt and length")
    for kind in (Prompt, options.System, Text):
        add_options(group, kind)
    options.add_model_options(parser)
    options.add_strategy_options(parser)
    options.add_sampling_options(parser, **asdict(CONTINUED))


def call_from(args: argparse.Namespace) -> tuple[str | list[int], dict[str, Any]]:
    """The prompt as given, and the other arguments of a request; everything that needs no model is
    checked. :func:`with_model` makes the request."""
    continued = "--continue" if args.raw else None if args.prompt_ids is None else "--prompt-ids"
    if args.system is not None and continued:
        raise InputError(f"--system and {continued} given; valid: one of them")
    return options.prompt_from(args), settings_from(args)


def settings_from(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a request besides its prompt, those of its sampling that are given among
    them."""
    options.check_model_options(args)
    settings = {name: getattr(args, name) for name in ASKED} | options.given_sampling(args)
    settings |= {
        "strategy_options": options.strategy_options_from(args),
        "grammar": grammar_from(args),
        "stop": (*args.stop, *map(tuple, args.stop_ids)),
        "template_options": args.template_options,
    }
    Request.of("", lambda _: CONTINUED, **settings)  # checks them
    return settings


def grammar_from(args: argparse.Namespace) -> Grammar | None:
    """What the text has to be like, as far as that is known without a model.

    Raises:
        InputError: several grammars, or a file that cannot be read or that holds none.
    """
    given = [name for name in GRAMMARS if getattr(args, name) is not None]
    if len(given) > 1:
        raise InputError(
            f"{' and '.join(f'--{dashed(name)}' for name in given)} given; valid: one of them"
        )
    for name in given:
        option, text = f"--{dashed(name)}", getattr(args, name)
        is_itself = name == "regex" or (name == "json_schema" and text.lstrip().startswith("{"))
        try:
            return GRAMMARS[name](text if is_itself else options.read_named(text, option))
        except InputError as error:
            raise InputError(f"{option} {text[:SHOWN]}: {error}") from error
    return None


def with_model(args: argparse.Namespace, llm: Any, prompt: Any, call: dict[str, Any]) -> Request:
    """The request, its prompt as the model takes it and its sampling settled; says which way."""
    prompt, told = options.shaped(args, llm, prompt)
    logger.info("%s", told)
    if is_chat(prompt) and args.max_new_tokens is None and args.on_loop == Text.on_loop:
        call = {**call, "on_loop": "stop"}  # one that loops would go on to the last position
    return Request.of(prompt, llm.default_sampling, **call)


def run(args: argparse.Namespace) -> int:
    """Write a text. A chat model answers the prompt; with --continue, or without a chat template,
    it continues it. The text streams to standard output; progress and summary go to standard
    error."""
    if args.prompts is not None or args.out is not None:
        return write_all(args, settings_from(args))
    prompt, call = call_from(args)
    if args.output == str(STDOUT):
        raise InputError("--output is -; valid: a file (the text is on standard output anyway)")
    file = args.output and check_writable("--output", args.output)
    check_record(args.json)
    before = None
    if args.run_dir is not None:
        from tokenswift.runs import folder as folders

        args.run_dir = check_writable("--run-dir", args.run_dir, "folder")
        if folders.has_run(args.run_dir):
            before = folders.load_whole(args.run_dir)
        else:
            folders.check_new(args.run_dir)
    if call["strategy_options"].get("acceptance") == "published":
        logger.warning(
            "the published acceptance rule is not lossless: the text differs from plain decoding"
        )
    if not args.raw and args.prompt_ids is None:
        from tokenswift.loader.prompts import prepare

        prepare()  # what renders chat templates starts while the model is loaded
    llm = options.load_model(args)
    request = replace(with_model(args, llm, prompt, call), run_dir=args.run_dir)
    write(args, llm, request, before, file)
    return 0


def write(
    args: argparse.Namespace,
    llm: Any,
    request: Request,
    before: RunState | None,
    file: Path | None = None,
) -> None:
    """Run a request: its text, summary and record go where the options have them.

    Args:
        before: as of :func:`stream`.
        file: for the text.
    """
    sink = TextSink(file, echo=args.json != str(STDOUT))
    result = stream(llm, request, sink, args.quiet, before)
    logger.info("%s", summary(result, args.verbose))
    if args.json is not None:
        made = record_of(llm, result, request)
        write_json(Path(args.json).expanduser(), made)


def stream(
    llm: Any,
    request: Request,
    sink: TextSink,
    quiet: bool,
    before: RunState | None = None,
    known: Any = None,
) -> Generation:
    """Run a request with its text and progress shown.

    Args:
        before: the run as it is in its folder, when there is one to go on with.
        known: what was prefilled already, as of ``LLM.start``.
    Raises:
        KeyboardInterrupt, RunError: saying what was kept of the text, and how to go on.
    """
    go_on = (
        "" if request.run_dir is None else f"; continue with: tokenswift resume {request.run_dir}"
    )
    tokens, live = 0 if before is None else len(before.tokens), sys.stdout.isatty()
    sink.write("" if before is None else before.text, again=True)

    def kept() -> str:
        stages.end()
        return f"{counted(tokens, 'token was', 'tokens were')} written, {sink.kept}{go_on}"

    try:
        with Stages(quiet, "starting") as stages, keeping(kept) as signals:
            with llm.start(replace(request, on_progress=stages), known) as steps:
                for step in steps:
                    if live:  # the text itself shows how far it is
                        stages.end()
                    else:
                        stages("generate", tokens, request.max_new_tokens)
                    sink.write(step.text)
                    tokens += len(step.token_ids)
                    signals.check()
                result = steps.result
            sink.write(
                result.text[len(sink.text) :]
            )  # what an earlier session held back; makes the file
            sink.close()
    except BrokenPipeError as error:
        raise RunError(f"standard output was closed; nothing more was generated{go_on}") from error
    finally:
        with suppress(OSError):
            sink.close()
    return result


# ---- many prompts --------------------------------------------------------------------------------


def read_prompts(args: argparse.Namespace) -> list[Asked]:
    """The prompts of --prompts.

    Raises:
        InputError: the file cannot be read, or naming the line that is wrong.
    """
    name, found = args.prompts, dict[str, Asked]()
    for number, line in enumerate(options.read_named(name, "--prompts").split("\n"), 1):
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
        options.check_template(llm, "messages")
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
    from tokenswift.engine.scheduler import Scheduler, run_all

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


# ---- runs that were kept -------------------------------------------------------------------------


def resume(args: argparse.Namespace) -> int:
    """Finish a run that generate --run-dir kept, with the tokens of the uninterrupted run. The
    continuation streams to standard output; the whole text is in the folder. --max-new-tokens makes
    a finished run longer.
    """
    from tokenswift.runs import folder as folders

    check_record(args.json)
    folder = Path(args.run_dir).expanduser()
    state = folders.load_whole(folder)
    if is_finished(state, args.max_new_tokens, args.on_loop):
        if args.json is None and folders.has_text(folder, state.text + state.tail):
            logger.info("%s", finished(folder, state))
            return 0
    names = models_of(state)
    check_written_apart(args, [Input("the run's model", Path(name)) for name in names])
    logger.info("loading %s", ", ".join(names) or state.header.name)
    with Stages(args.quiet, "loading") as stages:
        from tokenswift.engine.llm import reload, request_of

        request = request_of(state, folder, args.max_new_tokens, args.on_loop)
        llm = reload(state, stages)
    logger.info("%s, %s on %s, from token %d", llm.name, llm.dtype, llm.device, len(state.tokens))
    write(args, llm, request, state)
    return 0


def is_finished(state: RunState, max_new_tokens: int | None, on_loop: str | None) -> bool:
    """Whether nothing is left to write of a run.

    Args:
        max_new_tokens, on_loop: of `resume`; None: as before.
    Raises:
        InputError: the run has more tokens than it is to have.
    """
    has = len(state.tokens)
    most = state.session.max_new_tokens if max_new_tokens is None else max_new_tokens
    if most < has:
        line = f"max_new_tokens is {most}; the run has {counted(has, 'token')} already"
        raise InputError(f"{line}; valid: at least as many", "max_new_tokens")
    if state.end is None:
        return False
    ended_for_good = state.end.reason in ("eos", "stop")
    stays_at_loop = state.end.reason == "loop" and on_loop != "report"
    return ended_for_good or stays_at_loop or most == has


def finished(folder: Path, state: RunState) -> str:
    """What is said of a finished run: its tokens, why it ended, and how to see its text."""
    reason = "" if state.end is None else f", {ENDINGS[state.end.reason]}"
    has = counted(len(state.tokens), "token")
    return f"{folder} is finished ({has}{reason}); tokenswift runs {folder} --text prints it"


def models_of(state: RunState) -> list[str]:
    """The names of the model of a run and of what drafts for it, as far as it says them."""
    how = state.header.model
    if how is None:
        return []
    names = (how.model, how.heads, how.eagle, state.session.options.get("draft_model"))
    return [str(name) for name in names if name not in (None, "auto", "none")]


# ---- what needs no model -------------------------------------------------------------------------


def list_runs(args: argparse.Namespace) -> int:
    """List the runs that were kept with generate --run-dir, with state and figures; or print the
    text of one (--text). No model is needed."""
    from tokenswift.runs import folder as folders
    from tokenswift.runs.folder import COLUMNS, cells, summaries

    folder = Path(args.folder).expanduser()
    record, text = check_record(args.json), check_record(args.text, "--text")
    if text is not None:
        contents, state = folders.load(folder)
        if contents.damaged:
            logger.warning(
                "the journal is damaged at byte %d; what is before it is taken", contents.good
            )
        end = "\n" if text == STDOUT and sys.stdout.isatty() else ""
        write_text(text, state.text + state.tail + end)
        return 0
    rows = summaries(folder)
    if record is not None:
        write_json(record, *rows)
    if record != STDOUT:
        lines = [[cells(row).get(column, "") for column in COLUMNS] for row in rows]
        say(
            (
                table(tuple(COLUMNS), lines, right=range(2, 8))
                if rows
                else f"no runs in {on_one_line(args.folder)}"
            )
            + "\n"
        )
    return 0
