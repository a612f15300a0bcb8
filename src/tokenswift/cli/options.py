"""Options that commands share: the model, its sampling, the strategy; and what is made of them."""

from __future__ import annotations

import argparse
import logging
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tokenswift.checks import check_choice
from tokenswift.cli.declare import Parser, add_option, add_options, help_texts, shown
from tokenswift.cli.progress import Stages
from tokenswift.config.fields import SHOWN, Option, field_types
from tokenswift.config.loading import HEAD_KINDS, LoadConfig
from tokenswift.config.sampling import ADJUSTING, SamplingParams, preset, sampling_over
from tokenswift.config.strategies import OPTIONS, MethodOptions, build_options, names_of
from tokenswift.loader.default_model import DEFAULT
from tokenswift.loader.find import HUB_ID, check_name
from tokenswift.types import InputError

if TYPE_CHECKING:
    from tokenswift.engine.llm import LLM

logger = logging.getLogger("tokenswift")
SAMPLING = [field.name for field in fields(SamplingParams) if field.name != "grammar"]
LOADING = [field.name for field in fields(LoadConfig)]
#: options of any strategy, each once
METHOD = list(dict.fromkeys(name for strategy in OPTIONS for name in names_of(strategy)))


@dataclass(frozen=True)
class Model:
    """Which model, and what drafts for it.

    Attributes:
        model: a name of tokenswift models, a folder, a GGUF file or a hub id; a GGUF file of the
            hub is owner/name:file.gguf; what is not on this machine is downloaded once; default:
            smollm2-135m
        heads: draft heads: a file, folder or hub id, auto or none; auto takes those that come with
            the package for the model; conditioned, linear (the paper's) and medusa name the kinds
            that do
        eagle: a trained drafter (EAGLE-3): a file, none or auto; a folder or a hub id works too,
            and shipped for the default model's; auto takes the one that was trained for the model,
            if there is one
    """

    model: Annotated[str, Option("M", shown=True, short="-m")] = DEFAULT
    heads: Annotated[str, Option("PATH")] = "auto"
    eagle: Annotated[str, Option("PATH", shown=True)] = "auto"


@dataclass(frozen=True)
class Preset:
    """Sampling settings that belong together.

    Attributes:
        preset: sampling settings by name: paper; other options override it
    """

    preset: str | None = None


@dataclass(frozen=True)
class Quiet:
    """Verbosity.

    Attributes:
        quiet: nothing on standard error except errors
    """

    quiet: Annotated[bool, SHOWN] = False


@dataclass(frozen=True)
class Record(Quiet):
    """Results as JSON.

    Attributes:
        json: write JSON records, one a line, to this file; with - or no FILE, to standard output in
            place of the text
    """

    json: Annotated[str | None, Option("FILE", shown=True, bare="-")] = None


@dataclass(frozen=True)
class Shown(Quiet):
    """Verbosity of summaries.

    Attributes:
        verbose: more figures in the summary: passes, acceptance, sources of drafts
    """

    verbose: Annotated[bool, Option(shown=True, short="-v")] = False


def add_model_options(parser: Parser, dtype: str = "auto") -> None:
    """The fields of :class:`Model` and of `LoadConfig`."""
    group = parser.add_argument_group("model")
    add_options(group, Model)
    add_options(group, LoadConfig, dtype=dtype)


def add_sampling_options(
    parser: Parser,
    title: str = "sampling (defaults for continued text; answers use the model's own settings)",
    plain: bool = False,
    **defaults: object,
) -> None:
    """The fields of `SamplingParams`, seed included, and --preset.

    Args:
        plain: without what goes by more of a text than the contextual penalty.
        defaults: those that the help shows.
    """
    group = parser.add_argument_group(title)
    names = [name for name in SAMPLING if not (plain and name in ADJUSTING)]
    add_options(group, SamplingParams, names, unset=True, **defaults)
    add_options(group, Preset)


def add_strategy_options(parser: Parser, strategy: str = "auto") -> None:
    """--strategy, and every field of the strategies' options, with the default of each that has
    it."""
    group = parser.add_argument_group("method (changes the speed, never the text)")
    names = [*OPTIONS, *(["all"] if strategy == "all" else [])]
    words = f"how to draft: {', '.join(names)}; default: {strategy}"
    group.add_argument("--strategy", default=strategy, metavar="S", help=words)
    texts = help_texts(MethodOptions)
    for name in METHOD:
        owners = []
        for strategy, kind in OPTIONS.items():
            default = next((field.default for field in fields(kind) if field.name == name), MISSING)
            if default is not MISSING:
                owners.append(strategy if default is None else f"{strategy}: {shown(default)}")
                field_type = field_types(kind)[name]
        add_option(group, name, field_type, f"{texts[name]} ({'; '.join(owners)})", None)


def sampling_from(
    args: argparse.Namespace, defaults: SamplingParams | None = None
) -> SamplingParams:
    """The sampling parameters: what the command line names, over ``defaults``, else the class's.

    Raises:
        InputError: naming the bad field.
    """
    return sampling_over(defaults or SamplingParams(), sampling_options(args))


def sampling_options(args: argparse.Namespace) -> dict[str, object]:
    """The sampling settings that the command line names, those of --preset included."""
    settings: dict[str, object] = {} if args.preset is None else dict(preset(args.preset))
    for name in SAMPLING:
        value = getattr(args, name, None)
        if value is not None and value is not False:
            settings[name] = value
    return settings


def strategy_options_from(args: argparse.Namespace) -> dict[str, object]:
    """The strategy options that the command line names, checked against the strategy; with ``all``
    each must suit the strategies that have it, which get it.

    Raises:
        InputError: naming the bad one.
    """
    values = {name: getattr(args, name) for name in METHOD if getattr(args, name) is not None}
    if args.strategy == "all":
        for strategy in OPTIONS:
            names = names_of(strategy)
            build_options(strategy, {name: values[name] for name in values if name in names})
    else:
        check_choice("strategy", args.strategy, tuple(OPTIONS))
        build_options(args.strategy, values)
    return values


def check_model_options(args: argparse.Namespace) -> None:
    """What can be checked before anything is loaded."""
    check_name(args.model)
    LoadConfig(**loading_of(args))
    check_heads(args.heads)
    check_name(args.eagle, "eagle")


def check_heads(heads: str) -> None:
    """Raise :class:`InputError` where --heads names a file that is not there."""
    path = Path(heads).expanduser()
    may_be_hub_id = path.suffix != ".safetensors" and HUB_ID.fullmatch(heads) and ".." not in heads
    if heads in ("auto", "none", *HEAD_KINDS) or path.exists() or may_be_hub_id:
        return
    kinds = ", ".join(HEAD_KINDS)
    valid = (
        f"auto, none, shipped ones by kind ({kinds}), a heads file, or a folder or hub id "
        f"with heads"
    )
    raise InputError(f"heads is {heads!r}: no such file; valid: {valid}")


def load_model(args: argparse.Namespace) -> LLM:
    """The model that its options name; says so before anything heavy is imported."""
    logger.info("loading %s", args.model)
    with Stages(args.quiet, "loading") as stages:
        from tokenswift.engine.llm import LLM

        llm = LLM(
            args.model, **loading_of(args), heads=args.heads, eagle=args.eagle, on_progress=stages
        )
    strategy = f", {args.strategy}" if hasattr(args, "strategy") else ""
    logger.info("%s, %s on %s%s", llm.name, llm.dtype, llm.device, strategy)
    if line := drafter_line(llm, args):
        logger.info("%s", line)
    wide_layers = llm.target.wide_layers
    if getattr(args, "verbose", False) and wide_layers:
        logger.info("keys are of 16 bits in layers %s", ", ".join(map(str, wide_layers)))
    return llm


def drafter_line(llm: LLM, args: argparse.Namespace) -> str:
    """Which drafter the adaptive strategy has for the model; "" where it has none, or is not
    used."""
    eagle = llm.resources.eagle
    if getattr(args, "strategy", "auto") != "auto" or eagle is None:
        return ""
    from tokenswift.speculation.eagle.mtp import MtpModel

    if isinstance(eagle, MtpModel):
        return "drafter: the model's own layer (MTP)"
    return "drafter: trained for this model" if args.eagle == "auto" else f"drafter: {args.eagle}"


def loading_of(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `LoadConfig`, as the model options have them."""
    return {name: getattr(args, name) for name in LOADING}
