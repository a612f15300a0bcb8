"""Options that subcommands share, and how their values are read; prompts, and how they are taken.

Text is answered where the model has a chat template, however it comes; token ids are continued.
``--continue`` has text continued, too; ``--system`` insists on an answer. Light: no torch in here.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import stat
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tokenswift import config
from tokenswift.cli.declare import Parser, add_option, add_options, option, reader, texts_of
from tokenswift.cli.declare import shown as shown_default
from tokenswift.cli.terminal import Stages
from tokenswift.config import HEAD_KINDS, OPTIONS, LoadConfig, SamplingParams, names_of
from tokenswift.files import line_of
from tokenswift.loader.find import HUB_ID, check_name
from tokenswift.types import InputError

DEFAULT_MODEL = "smollm2-135m"
logger = logging.getLogger("tokenswift")
SAMPLING = [one.name for one in fields(SamplingParams) if one.name != "grammar"]
LOADING = [one.name for one in fields(LoadConfig)]
METHOD = list(dict.fromkeys(one.name for kind in OPTIONS.values() for one in fields(kind)))


@dataclass(frozen=True)
class Model:
    """Which model, and what drafts for it.

    Attributes:
        model: alias, folder, hub id or GGUF file; a GGUF file of the hub is owner/name:file.gguf; the default
            is downloaded once; default: smollm2-135m
        heads: draft heads: a file, folder or hub id, auto or none; auto takes those that ship with the model;
            conditioned, linear (the paper's) and medusa are kinds that ship
        eagle: an EAGLE-3 drafter for the model: folder, GGUF file, hub id, shipped, none, or auto (the one
            that tokenswift train made for it)
    """

    model: str = option(DEFAULT_MODEL, "M")
    heads: str = option("auto", "PATH")
    eagle: str = option("auto", "PATH")


@dataclass(frozen=True)
class Preset:
    """Sampling settings that belong together.

    Attributes:
        preset: sampling settings by name: paper; other options override it
    """

    preset: str | None = option(None)


@dataclass(frozen=True)
class Quiet:
    """Verbosity.

    Attributes:
        quiet: nothing on standard error except errors
    """

    quiet: bool = option(False)


@dataclass(frozen=True)
class Record(Quiet):
    """Results as JSON.

    Attributes:
        json: write JSON records, one a line, to this file; with - or no FILE, to standard output in place of
            the text
    """

    json: str | None = option(None, "FILE", nargs="?", const="-")


@dataclass(frozen=True)
class Shown(Quiet):
    """Verbosity of summaries.

    Attributes:
        verbose: figures of drafting in the summary: passes, acceptance, sources of drafts
    """

    verbose: bool = option(False)


def add_model_options(parser: Parser, dtype: str = "auto") -> None:
    """The fields of :class:`Model` and of `config.LoadConfig`."""
    group = parser.add_argument_group("model")
    add_options(group, Model)
    add_options(group, LoadConfig, dtype=dtype)


def add_sampling_options(
    parser: Parser,
    title: str = "sampling (defaults of continued text; answers take the model's own settings)",
    plain: bool = False,
    **usual: Any,
) -> None:
    """The fields of `config.SamplingParams`, seed included, and --preset.

    Args:
        plain: without what goes by more of a text than the contextual penalty.
        usual: defaults that are told.
    """
    group = parser.add_argument_group(title)
    only = [name for name in SAMPLING if not (plain and name in config.ADJUSTING)]
    add_options(group, SamplingParams, only, unset=True, **usual)
    add_options(group, Preset)


def add_strategy_options(parser: Parser, strategy: str = "auto") -> None:
    """--strategy, and every field of the strategies' options, with the default of each that has it."""
    group = parser.add_argument_group("method (changes the speed, never the text)")
    names = [*OPTIONS, *(["all"] if strategy == "all" else [])]
    words = f"drafting method: {', '.join(names)}; --help-all shows the options of each; default: {strategy}"
    group.add_argument("--strategy", default=strategy, metavar="S", help=words)
    texts = texts_of(config.MethodOptions)
    for name in METHOD:
        owners = {key: one for key, kind in OPTIONS.items() for one in fields(kind) if one.name == name}
        usual = [
            key if one.default is None else f"{key}: {shown_default(one.default)}"
            for key, one in owners.items()
        ]
        add_option(group, next(iter(owners.values())), f"{texts[name]} ({'; '.join(usual)})", None)


def sampling_from(args: argparse.Namespace, usual: SamplingParams | None = None) -> SamplingParams:
    """The sampling parameters: what the command line names, over ``usual``, by default the class's.

    Raises:
        InputError: naming the bad field.
    """
    return config.sampling_over(usual or SamplingParams(), given_sampling(args))


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling settings that the command line names, those of --preset included."""
    given = {name: getattr(args, name, None) for name in SAMPLING}
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    return given if args.preset is None else {**config.preset(args.preset), **given}


def strategy_options_from(args: argparse.Namespace) -> dict[str, Any]:
    """The strategy options that were given, checked against the strategy; with ``all`` each must suit the
    strategies that have it, which get it. InputError names the bad one."""
    given = {name: getattr(args, name) for name in METHOD if getattr(args, name) is not None}
    for strategy in OPTIONS if args.strategy == "all" else [args.strategy]:
        config.check_strategy(strategy)
        known = given if args.strategy != "all" else [name for name in given if name in names_of(strategy)]
        config.build_options(strategy, {name: given[name] for name in known})
    return given


def check_model_options(args: argparse.Namespace) -> None:
    """What can be checked before anything is loaded."""
    check_name(args.model)
    LoadConfig(**loading_of(args))
    check_heads(args.heads)
    check_name(args.eagle, "eagle")


def check_heads(heads: str) -> None:
    """Raise :class:`InputError` where --heads names a file that is not there."""
    path, kinds = Path(heads).expanduser(), ", ".join(HEAD_KINDS)
    shaped = path.suffix != ".safetensors" and HUB_ID.fullmatch(heads) and ".." not in heads
    if heads not in ("auto", "none", *HEAD_KINDS) and not path.exists() and not shaped:
        valid = f"auto, none, shipped ones by kind ({kinds}), a heads file, or a folder or hub id with heads"
        raise InputError(f"heads is {heads!r}: no such file; valid: {valid}")


def load_model(args: argparse.Namespace) -> Any:
    """The ``LLM`` that the model options name; says so before anything heavy is imported."""
    logger.info("loading %s", args.model)
    with Stages(args.quiet, "loading") as stages:
        from tokenswift.engine.llm import LLM

        llm = LLM(args.model, **loading_of(args), heads=args.heads, eagle=args.eagle, on_progress=stages)
    strategy = f", {args.strategy}" if hasattr(args, "strategy") else ""
    logger.info("%s, %s on %s%s", llm.name, llm.dtype, llm.device, strategy)
    return llm


def loading_of(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `config.LoadConfig` that the model options are."""
    return {name: getattr(args, name) for name in LOADING}


# ---- prompts: what is read ---------------------------------------------------------------------------------


def _ids(text: str) -> list[int]:
    ids = [int(token) for token in text.replace(",", " ").split()]
    if min(ids, default=0) < 0:
        raise ValueError
    return ids


#: an argparse type: token ids with commas or spaces between them
token_ids = reader(_ids, "integers such as 1,2,3, no negative ids")


def prompt_from(args: argparse.Namespace) -> str | list[int]:
    """The one prompt given: text, the text of a file or of standard input (``-``, or nothing else), or token
    ids. What a pipe brings beside an argument stands before it."""
    text, file = (None, "-") if args.prompt == "-" else (args.prompt, args.prompt_file)
    sources = {"PROMPT": text, "--prompt-file": file, "--prompt-ids": args.prompt_ids}
    given = [name for name, value in sources.items() if value is not None]
    piped = piped_text(text is not None) if given in ([], ["PROMPT"]) else None
    if len(given) > 1 or (not given and piped is None):
        what = " and ".join(given) or "no prompt"
        valid = f"one of {', '.join(sources)}, or a pipe (- reads standard input)"
        raise InputError(f"{what} given; valid: {valid}")
    if file is not None:
        text = read_named(file, "--prompt-file")
    elif piped:
        text = f"{piped}\n\n{text}" if text else piped
    prompt = args.prompt_ids or text
    if not prompt:
        raise InputError(f"{given[0] if given else 'standard input'} is empty; valid: at least one token")
    return prompt


def piped_text(beside: bool) -> str | None:
    """The text of a pipe or a file at standard input; None: it is a terminal, a device, or closed.

    Args:
        beside: an argument is the prompt already. A socket, which programs that start this one may leave
            open for ever, is not read then.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return None
    waits = stat.S_ISFIFO(mode) or (stat.S_ISSOCK(mode) and not beside)
    if waits and beside:  # whoever started this may have left it open
        logger.info("reading standard input, which stands before PROMPT (</dev/null leaves it out)")
    return read_named("-", "standard input") if waits or stat.S_ISREG(mode) else None


def read_named(name: str, option: str) -> str:
    """The UTF-8 text of a file, or of standard input: without a byte order mark, CRLF as LF, and without
    the one line end that shells and editors put at the end."""
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        return content.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{option} {name} is not UTF-8 (byte {error.start}); valid: UTF-8 text") from error
    except (AttributeError, OSError, ValueError) as error:  # standard input may be closed
        valid = "valid: a UTF-8 text file"
        raise InputError(f"{option} {name} cannot be read ({line_of(error)}); {valid}") from error


# ---- prompts: how they are taken ---------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """What stands before a conversation.

    Attributes:
        system: system prompt; default: the chat template's own
        template_options: variables of the model's chat template, such as {"enable_thinking": false}
    """

    system: str | None = option(None, "TEXT")
    template_options: Any = option(None, "JSON", type=reader(json.loads, "a JSON object"))


def shaped(args: argparse.Namespace, llm: Any, prompt: str | list[int]) -> tuple[Any, str]:
    """The prompt as ``LLM.generate`` takes it, and a line that says how it was taken.

    Returns:
        chat messages when it is to be answered, else the prompt itself.
    Raises:
        InputError: a chat is asked for and the model has no template.
    """
    if not isinstance(prompt, str):
        return prompt, "prompt: token ids, continued as they are"
    if args.raw:
        return prompt, "prompt: continued as it is"
    if args.system is not None:
        check_template(llm, "--system")
    elif not llm.has_chat_template:
        return prompt, "prompt: continued as it is (the model has no chat template)"
    told = "prompt: answered, through the model's chat template (--continue continues it instead)"
    return asking(args.system, prompt), told


def check_template(llm: Any, what: str) -> None:
    """Refuse a model without a chat template; ``what`` asks for one."""
    if not llm.has_chat_template:
        raise InputError(
            f"{what} needs a chat template, and the model {llm.name} has none; valid: a model made for chat, "
            f"or tokenswift generate --continue"
        )


def asking(system: str | None, text: str) -> list[dict[str, str]]:
    """A conversation that begins with a text of the user."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]
