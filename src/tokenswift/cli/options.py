"""Options that subcommands share, and how their values are read. Light: no torch in here."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tokenswift.checks import check_choice
from tokenswift.cli.declare import HIDDEN, KEY, RARE, add_option, add_options, option, texts_of
from tokenswift.cli.inputs import read_named
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
    sampling_by,
    sampling_over,
)
from tokenswift.loader.find import HUB_ID, check_eagle, check_name
from tokenswift.types import InputError

DEFAULT_MODEL = "smollm2-135m"
logger = logging.getLogger("tokenswift")
SAMPLING = {f.name: f.default for f in fields(SamplingParams) if f.name != "grammar"}
#: over texts of `SamplingParams`, in words of the command line
SAMPLING_TEXTS = {
    "repetition_penalty": "penalty of tokens that are among the last ones (see --penalty-window); 1 is off",
    "seed": "0 or more: the same seed, the same text, whatever the method",
    "presence_penalty": "from -2 to 2: subtracted from the logit of every new token among the last ones (see "
    "--penalty-window); 0 is off",
    "frequency_penalty": "from -2 to 2: the same, for each time that the token occurs there; 0 is off",
    "dry_breakers": "DRY sees no repetition across tokens that contain this text; may be given several "
    "times; none: no such text; default: none for continued text, else line break, colon, quotation mark, "
    "asterisk",
    "logit_bias": "token ids and what is added to their logits, -100 to 100; default: none",
    "bad_words": "a text whose usual tokens are never written; may be given several times; default: none",
}
#: fields that every help shows
USUAL_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
#: option name → strategy → field
STRATEGY: dict[str, dict[str, Field[Any]]] = {}
METHOD_TEXTS = texts_of(MethodOptions)
for _name, _options in OPTIONS.items():
    for _field in fields(_options):
        STRATEGY.setdefault(_field.name, {})[_name] = _field


@dataclass(frozen=True)
class Model:
    """Which model, and where it runs.

    Attributes:
        model: alias, folder or hub id of a transformers checkpoint, a GGUF file, or owner/name:file.gguf of
            the hub; default: smollm2-135m, downloaded once
        dtype: compute dtype: float32, bfloat16, float16, int8, or auto: the checkpoint's (for quantized
            weights int8 on a CPU, bfloat16 on CUDA)
        device: auto (CUDA where there is one), cpu or cuda
        heads: draft heads: a file, a published checkpoint (folder or hub id), auto (those that ship with the
            model), none, or a kind that ships: conditioned, linear (the paper's) or medusa
        eagle: an EAGLE-3 drafter for the model: folder, GGUF file, hub id, or shipped; default: none
        threads: CPU threads, at least 1; default: torch's choice, at most one a usable processor
        weights: number format of the weights in memory: stored (as in the files), float32, bfloat16, or
            quantized at loading, which makes another model: q8_0, q4_0, q4_1
        activations: what quantized weights are multiplied with: float, or int8 (see --dtype int8)
        kv_cache_dtype: dtype of the KV cache: auto (the compute dtype), float32, bfloat16, or int8, half the
            memory of bfloat16
        device_map: spread the layers over several devices: auto (over cards, then memory, then disk), or a
            JSON file with a device for each module; default: all on --device
        backend: kernel backend: auto (the device's own; torch where that does not work), cpu, cuda or torch
        cuda_graphs: whether passes on a GPU are captured as CUDA graphs: auto or off
    """

    model: str = option(DEFAULT_MODEL, "M")
    dtype: str = option("auto", "T")
    device: str = option("auto", "D")
    heads: str = option("auto", "PATH")
    eagle: str | None = option(None, "PATH", level=RARE)
    threads: int | None = option(None, level=RARE)
    weights: str = option("stored", "W", level=RARE)
    activations: str = option("float", "T", level=HIDDEN)  # --dtype int8 has taken its place
    kv_cache_dtype: str = option("auto", "T", level=RARE)
    device_map: str | None = option(None, "MAP", level=RARE)
    backend: str = option("auto", "B", level=KEY)
    cuda_graphs: str = option("auto", "G", level=KEY)


@dataclass(frozen=True)
class Source:
    """Where sampling settings come from.

    Attributes:
        sampling: where settings that are not given come from: default (continued text has the defaults above;
            answers take the model's generation_config.json or GGUF file, else temperature 0.7, min-p 0.05 and
            no penalty) or model (the model's for every text; what it does not name is off); default: default
    """

    sampling: str = option("default", level=RARE)


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
class Shown(Quiet):
    """Verbosity, and how text is shown.

    Attributes:
        verbose: figures of drafting in the summary: passes, acceptance, sources of drafts
        raw_output: let control characters and escape sequences in the text reach a terminal; default: they
            are shown there, as \\u001b and the like (files and pipes get the text as it is)
    """

    verbose: bool = option(False, names=("-v",), level=RARE)
    raw_output: bool = option(False, level=RARE)


def add_model_options(parser: argparse.ArgumentParser, dtype: str = "auto") -> None:
    """The fields of :class:`Model`."""
    add_options(parser.add_argument_group("model"), Model, dtype=dtype)


def add_sampling_options(
    parser: argparse.ArgumentParser,
    title: str = "sampling (defaults of continued text; answers take the model's own settings)",
    texts: Mapping[str, str] | None = None,
    usual: SamplingParams | None = None,
    plain: bool = False,
) -> Any:
    """The fields of `config.SamplingParams`, seed included, in a group, which is returned; ``texts`` over
    those of the docstring, and the defaults that are told are those of ``usual``. ``plain``: without what
    goes by more of a text than the contextual penalty."""
    group = parser.add_argument_group(title)
    defaults = {} if usual is None else asdict(usual)
    rare = [name for name in SAMPLING if name not in USUAL_SAMPLING]
    said = SAMPLING_TEXTS | dict(texts or {})
    only = [name for name in SAMPLING if not (plain and name in ADJUSTING)]
    add_options(group, SamplingParams, only, unset=True, texts=said, rare=rare, **defaults)
    add_options(group, Source, texts=texts)
    return group


def add_strategy_options(parser: argparse.ArgumentParser) -> None:
    """--strategy, and every field of the strategies' options, by --method-option."""
    group = parser.add_argument_group("method (changes the speed, never the text)")
    group.add_argument(
        "--strategy",
        default="auto",
        metavar="S",
        help="drafting method: auto (adaptive drafting), autoregressive (plain decoding), "
        f"{', '.join(name for name in OPTIONS if name not in ('auto', 'autoregressive'))}; "
        "--method-option help lists the options of each; default: %(default)s",
    )
    for owners in STRATEGY.values():
        first = next(iter(owners.values()))
        add_option(group, first, METHOD_TEXTS[first.name], level=KEY)


def shown_default(option: Field[Any]) -> str:
    """A default as help texts show it."""
    if option.default is None:
        return "none" if option.name in ("draft_model", "explain") else "auto"
    if isinstance(option.default, tuple):
        return ",".join(map(str, option.default))
    return str(option.default)


def print_keys(args: argparse.Namespace) -> int:
    """Print what ``--method-option help`` asks for: the keys that a command takes, of its strategy."""
    from tokenswift.cli.terminal import table

    name = getattr(args, "strategy", "auto")
    said, level = texts_of(Model), {one.name: one.metadata.get("level") for one in fields(Model)}
    if name != "all":
        check_strategy(name)
    groups: dict[str, list[tuple[Field[Any], str]]] = {
        one: [(field, METHOD_TEXTS[field.name]) for field in fields(OPTIONS[one])]
        for one in (OPTIONS if name == "all" else [name])
    }
    groups["kernels of every method"] = [(f, said[f.name]) for f in fields(Model) if level[f.name] == KEY]
    shown = []
    for title, keys in groups.items():
        rows = [
            (f"{key.name}={args.method_help[key.name].metavar}", text, shown_default(key))
            for key, text in keys
            if key.name in args.method_help
        ]
        if rows:
            shown.append(f"{title}\n{table(rows, ('--method-option', 'what it is', 'default'), indent=2)}")
    print("\n\n".join(shown), flush=True)
    return 0


def sampling_from(args: argparse.Namespace, usual: SamplingParams | None = None) -> SamplingParams:
    """The sampling parameters as far as they are known without a model (see :func:`model_sampling`): those of
    ``usual``, the class's by default, and what the command line names over them.

    Says which of the given ones have no effect.

    Raises:
        InputError: naming the bad field.
    """
    check_choice("sampling", args.sampling, ("default", "model"))
    given = given_sampling(args)
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
    """The sampling settings that the command line names."""
    given = {name: getattr(args, name, None) for name in SAMPLING}
    return {name: value for name, value in given.items() if value is not None and value is not False}


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

    taken = check_named(llm.named_sampling(), llm.name)
    given = given_sampling(args)
    left = {key: value for key, value in taken.items() if key not in given}
    words = ", ".join(f"{key} {value}" for key, value in left.items()) or "nothing (all of it is given)"
    logger.info("sampling from the model's generation_config.json: %s; the rest is off", words)
    return replace(sampling_by(taken, given), grammar=made.grammar)


def sampling_words(sampling: SamplingParams) -> str:
    """The settings that are on, but for the seed."""
    if sampling.greedy:
        on = {"greedy": ""}
    else:
        on = {"temperature": f" {sampling.temperature:g}"}
    values = {name: getattr(sampling, name) for name in NEUTRAL}
    skipped = NEUTRAL if sampling.greedy else ("temperature",)
    on |= {n: f" {v:g}" for n, v in values.items() if v != NEUTRAL[n] and n not in skipped}
    if sampling.window:
        on["repetition_penalty"] = f" {sampling.repetition_penalty:g}"
    return ", ".join(name.replace("_", "-") + value for name, value in on.items())


def strategy_options_from(args: argparse.Namespace) -> dict[str, Any]:
    """The strategy options that were given, checked against the strategy; InputError names the bad one."""
    given = {name: getattr(args, name) for name in STRATEGY if getattr(args, name) is not None}
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
    LoadConfig(
        dtype=args.dtype,
        device=args.device,
        threads=args.threads,
        weights=args.weights,
        activations=args.activations,
        kv_cache_dtype=args.kv_cache_dtype,
        device_map=device_map_from(args),
        backend=args.backend,
        cuda_graphs=args.cuda_graphs,
    )
    check_heads(args.heads)
    if getattr(args, "eagle", None) is not None:
        check_eagle(args.eagle)


def check_heads(heads: str) -> None:
    """Raise :class:`InputError` where ``--heads`` names a file that is not there."""
    path = Path(heads).expanduser()
    shaped = path.suffix != ".safetensors" and HUB_ID.fullmatch(heads) and ".." not in heads
    if heads not in ("auto", "none", *HEAD_KINDS) and not path.exists() and not shaped:
        kinds = ", ".join(HEAD_KINDS)
        raise InputError(
            f"heads is {heads!r}: no such file; valid: auto, none, shipped ones by kind ({kinds}), a heads "
            "file, or the folder or hub id of a published checkpoint with heads"
        )


def device_map_from(args: argparse.Namespace) -> str | dict[str, Any] | None:
    """Where layers lie: None, also for commands that know no such thing, "auto", or what a JSON file says.

    Raises:
        InputError: the file cannot be read, or holds something else.
    """
    given = getattr(args, "device_map", None)
    if given in (None, "auto"):
        return given
    try:
        found = json.loads(read_named(given, "--device-map"))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f'--device-map {given} is not JSON ({error}); valid: {{"model.layers.0": 0, …}}'
        ) from error
    if not isinstance(found, dict):
        raise InputError(f'--device-map {given} holds no object; valid: {{"model.layers.0": 0, …}}')
    return found


def inputs_of(args: argparse.Namespace) -> dict[str, Any]:
    """Option → the file that a command reads through it, for `output.check_apart`."""
    names = ("prompt_file", "prompts", "heads", "eagle", "data", "device_map", "json_schema", "grammar")
    given = {f"--{name.replace('_', '-')}": getattr(args, name, None) for name in names}
    return {
        option: name for option, name in given.items() if name not in ("auto", "none", "self", "shipped", "-")
    }


def load_model(args: argparse.Namespace, rope_scaling: str | None = None) -> Any:
    """The ``LLM`` that the model options name; says so before anything heavy is imported."""
    logger.info("loading %s", args.model)
    with Stages(args.quiet, "loading") as stages:
        import torch

        from tokenswift.engine.llm import LLM

        if args.threads is not None:
            torch.set_num_threads(args.threads)
        loading = loading_of(args)
        return LLM(args.model, **loading, rope_scaling=rope_scaling, on_progress=stages)


def loading_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``LLM`` that say how the model is loaded, but for threads."""
    names = ("dtype", "device", "heads", "weights", "activations", "kv_cache_dtype", "backend", "cuda_graphs")
    more = {"device_map": device_map_from(args), "eagle": getattr(args, "eagle", None)}
    return {name: getattr(args, name) for name in names} | more
