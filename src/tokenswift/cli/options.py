"""Options that subcommands share, and how their values are read. Light: no torch in here."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tokenswift.checks import check_choice
from tokenswift.cli.declare import RARE, Parser, add_option, add_options, option, shown, texts_of
from tokenswift.cli.output import check_writable
from tokenswift.cli.terminal import Stages
from tokenswift.config import (
    ADJUSTING,
    HEAD_KINDS,
    NEUTRAL,
    OPTIONS,
    LoadConfig,
    MethodOptions,
    SamplingParams,
    build_options,
    check_strategy,
    preset,
    sampling_by,
    sampling_over,
)
from tokenswift.loader.find import HUB_ID, check_eagle, check_name
from tokenswift.types import InputError

DEFAULT_MODEL = "smollm2-135m"
logger = logging.getLogger("tokenswift")
SAMPLING = [one.name for one in fields(SamplingParams) if one.name != "grammar"]
LOADING = [one.name for one in fields(LoadConfig) if one.name != "tp"]
METHOD = list(dict.fromkeys(one.name for kind in OPTIONS.values() for one in fields(kind)))
#: fields that every help shows
USUAL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "dtype", "device")


@dataclass(frozen=True)
class Model:
    """Which model, and what drafts for it.

    Attributes:
        model: alias, folder or hub id of a transformers checkpoint, a GGUF file, or owner/name:file.gguf of
            the hub; default: smollm2-135m, downloaded once
        heads: draft heads: a file, a published checkpoint (folder or hub id), auto (those that ship with the
            model), none, or a kind that ships: conditioned, linear (the paper's) or medusa
        eagle: an EAGLE-3 drafter for the model: folder, GGUF file, hub id, shipped, none, or auto (the one
            that tokenswift train made for it)
    """

    model: str = option(DEFAULT_MODEL, "M")
    heads: str = option("auto", "PATH")
    eagle: str = option("auto", "PATH", level=RARE)


@dataclass(frozen=True)
class Source:
    """Where sampling settings that are not given come from.

    Attributes:
        sampling: default (continued text has the defaults above; answers take the model's
            generation_config.json or GGUF file, else temperature 0.7, min-p 0.05 and no penalty) or model
            (the model's for every text; what it does not name is off)
        preset: the paper's settings by name, such as paper, top-p or qwen2.5-7b; other options override it
    """

    sampling: str = option("default", level=RARE)
    preset: str | None = option(None, level=RARE)


@dataclass(frozen=True)
class RunDir:
    """Which run.

    Attributes:
        run_dir: the run's folder
    """

    run_dir: str = option(metavar="DIR", place=True)


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
        json: write one JSON record to this file; with - or no FILE, to standard output in place of the text
    """

    json: str | None = option(None, "FILE", nargs="?", const="-")


@dataclass(frozen=True)
class Shown(Quiet):
    """Verbosity, and how text is shown.

    Attributes:
        verbose: figures of drafting in the summary: passes, acceptance, sources of drafts
        raw_output: let control characters and escape sequences in the text reach a terminal; default: they
            are shown there, as \\u001b and the like (files and pipes get the text as it is)
    """

    verbose: bool = option(False, names=("-v",), level=RARE)
    raw_output: bool = option(False, level=RARE)


def add_model_options(parser: Parser, dtype: str = "auto") -> None:
    """The fields of :class:`Model` and of `config.LoadConfig`."""
    group = parser.add_argument_group("model")
    add_options(group, Model)
    add_options(group, LoadConfig, LOADING, rare=set(LOADING) - {*USUAL}, dtype=dtype)


def add_sampling_options(
    parser: Parser,
    title: str = "sampling (defaults of continued text; answers take the model's own settings)",
    texts: Mapping[str, str] | None = None,
    usual: SamplingParams | None = None,
    plain: bool = False,
) -> None:
    """The fields of `config.SamplingParams`, seed included, and where they come from.

    Args:
        texts: over those of the docstrings.
        usual: whose defaults are told.
        plain: without what goes by more of a text than the contextual penalty.
    """
    group = parser.add_argument_group(title)
    only = [name for name in SAMPLING if not (plain and name in ADJUSTING)]
    defaults = {} if usual is None else asdict(usual)
    add_options(group, SamplingParams, only, True, texts, set(SAMPLING) - {*USUAL}, **defaults)
    add_options(group, Source, texts=texts)


def add_strategy_options(parser: Parser, strategy: str = "auto") -> None:
    """--strategy, and every field of the strategies' options, with the default of each that has it."""
    group = parser.add_argument_group("method (changes the speed, never the text)")
    texts = texts_of(MethodOptions)
    group.add_argument(
        "--strategy",
        default=strategy,
        metavar="S",
        help="drafting method: auto (adaptive drafting), autoregressive (plain decoding), "
        f"{', '.join(name for name in OPTIONS if name not in ('auto', 'autoregressive'))}"
        f"{', or all' * (strategy == 'all')}; --help-all shows the options of each; default: {strategy}",
    )
    for name in METHOD:
        owners = {key: one for key, kind in OPTIONS.items() for one in fields(kind) if one.name == name}
        usual: dict[str, list[str]] = {}  # default → strategies
        for key, one in owners.items():
            usual.setdefault("" if one.default is None else f": {shown(one.default)}", []).append(key)
        words = "; ".join(", ".join(keys) + value for value, keys in usual.items())
        first = next(iter(owners.values()))
        add_option(group, first, f"{texts[name]} ({words})", None, unset=True, rare=True)


def sampling_from(args: argparse.Namespace, usual: SamplingParams | None = None) -> SamplingParams:
    """The sampling parameters as far as they are known without a model (see :func:`model_sampling`): those of
    ``usual``, the class's by default, and what the command line names over them.

    Says which of the given ones have no effect.

    Raises:
        InputError: naming the bad field.
    """
    check_choice("sampling", args.sampling, ("default", "model"))
    given = given_sampling(args)
    if args.preset is not None:
        named = {name: value for name, value in preset(args.preset).items() if value != NEUTRAL.get(name)}
        words = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in named.items())
        logger.info("preset %s: %s; the rest is off", args.preset, words)
    made = sampling_over(usual or SamplingParams(), given)
    warn_idle(made, given)
    return made


def warn_idle(made: SamplingParams, given: Mapping[str, Any], prefix: str = "--") -> None:
    """Say which of the given settings have no effect, as decoding is greedy."""
    looked_at = ("seed", "repetition_penalty", "penalty_window", "greedy", *ADJUSTING)
    idle = [
        prefix + name.replace("_", "-")
        for name, value in given.items()
        if made.greedy and name in NEUTRAL and name not in looked_at and value not in (NEUTRAL[name], 0)
    ]
    if idle:
        logger.warning("greedy decoding takes the likeliest token: %s without effect", " and ".join(idle))


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling settings that the command line names, those of --preset included."""
    given = {name: getattr(args, name, None) for name in SAMPLING}
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    return given if args.preset is None else {**preset(args.preset), **given}


def model_sampling(args: argparse.Namespace, made: SamplingParams, llm: Any) -> SamplingParams:
    """The sampling parameters once the model is there: with --sampling model, those of its
    ``generation_config.json``, and what the command line names over them; one line says what was taken.

    Args:
        made: from :func:`sampling_from`, returned without --sampling model.
        llm: the ``LLM`` or loaded model: says what it names, and its name for messages.
    Raises:
        InputError: the file names no sampling setting, or one out of its range.
    """
    if args.sampling != "model":
        return made
    from tokenswift.loader.config import check_named

    taken, given = check_named(llm.named_sampling(), llm.name), given_sampling(args)
    words = ", ".join(f"{key} {value}" for key, value in taken.items() if key not in given)
    words = words or "nothing (all of it is given)"
    logger.info("sampling from the model's generation_config.json: %s; the rest is off", words)
    return replace(sampling_by(taken, given), grammar=made.grammar)


def answer_sampling(args: argparse.Namespace, made: SamplingParams, llm: Any) -> SamplingParams:
    """The sampling parameters of an answer: what is usual for one, and what the command line names over it.

    Args:
        made: from the command line, with --sampling model the model's own included.
    """
    if args.sampling != "default":
        return made
    usual = llm.default_sampling([{"role": "user", "content": ""}])
    return replace(sampling_over(usual, given_sampling(args)), grammar=made.grammar)


def sampling_words(sampling: SamplingParams) -> str:
    """The settings that are on, but for the seed."""
    on = {"greedy": ""} if sampling.greedy else {"temperature": f" {sampling.temperature:g}"}
    values = {name: getattr(sampling, name) for name in NEUTRAL if not sampling.greedy and name not in on}
    on |= {name: f" {value:g}" for name, value in values.items() if value != NEUTRAL[name]}
    if sampling.window:
        on["repetition_penalty"] = f" {sampling.repetition_penalty:g}"
    return ", ".join(name.replace("_", "-") + value for name, value in on.items())


def given_strategy_options(args: argparse.Namespace) -> dict[str, Any]:
    """The strategy options that the command line names."""
    return {name: getattr(args, name) for name in METHOD if getattr(args, name) is not None}


def strategy_options_from(args: argparse.Namespace) -> dict[str, Any]:
    """The strategy options that were given, checked against the strategy; InputError names the bad one."""
    given = given_strategy_options(args)
    check_strategy(args.strategy)
    build_options(OPTIONS[args.strategy], args.strategy, given)
    check_writable("--explain", given.get("explain"))
    if given.get("draft_model") is not None:
        try:
            check_name(given["draft_model"])
        except InputError as error:
            raise InputError(f"draft_{error}") from None
    return given


def check_model_options(args: argparse.Namespace) -> None:
    """What can be checked before anything is loaded."""
    check_name(args.model)
    LoadConfig(**loading_of(args))
    check_heads(args.heads)
    check_eagle(args.eagle)


def check_heads(heads: str, name: str = "heads") -> None:
    """Raise :class:`InputError` where an option (``--heads`` by default) names a file that is not there."""
    path = Path(heads).expanduser()
    shaped = path.suffix != ".safetensors" and HUB_ID.fullmatch(heads) and ".." not in heads
    if heads not in ("auto", "none", *HEAD_KINDS) and not path.exists() and not shaped:
        kinds = ", ".join(HEAD_KINDS)
        raise InputError(
            f"{name} is {heads!r}: no such file; valid: auto, none, shipped ones by kind ({kinds}), a heads "
            "file, or the folder or hub id of a published checkpoint with heads"
        )


def inputs_of(args: argparse.Namespace) -> dict[str, Any]:
    """Option → the file that a command reads through it, for `output.check_apart`."""
    names = ("prompt_file", "prompts", "heads", "eagle", "data", "json_schema", "grammar")
    given = {f"--{name.replace('_', '-')}": getattr(args, name, None) for name in names}
    words = ("auto", "none", "self", "shipped", "-")
    return {name: file for name, file in given.items() if file not in words}


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
