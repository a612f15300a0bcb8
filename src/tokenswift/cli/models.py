"""``tokenswift models``: the models in the caches, what one would take, and room made again."""

from __future__ import annotations

import argparse
import logging
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenswift.checks import check_choice
from tokenswift.cli.declare import add_options
from tokenswift.cli.options import Quiet
from tokenswift.cli.output import add_json_option, check_record, give
from tokenswift.cli.terminal import table
from tokenswift.loader import cached
from tokenswift.loader.config import EMBEDDING, FAMILIES, head_width, read_config
from tokenswift.loader.default_model import KNOWN
from tokenswift.loader.find import cache_dir, check_name, gguf_in, header_of
from tokenswift.types import InputError
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")
ACTIONS = ("list", "show", "remove")
GIGA, MEGA = 1e9, 1e6
LENGTHS = (1024, 8192, 32_768)  # tokens of text whose memory is shown
SMALLER = 2  # times as many parameters has a model as one that drafts for it, at least
COLUMNS = ("model", "cache", "MB", "millions", "family", "stored", "drafts for it")


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "models",
        help="list cached models, show what a model needs, remove one",
        description="list: the models in the caches, ours and the hub's, with size, type and the drafters "
        "for them. show NAME: memory by length of the text, and context; the model need not be "
        "in a cache, and no weights of the hub are fetched. remove NAME: "
        "remove a model from its cache; of the hub, the whole repository.",
        epilog="Exit codes: 0 done, 1 it could not be removed, 2 bad input.",
    )
    parser.add_argument("action", nargs="?", default="list", metavar="ACTION", help="list, show or remove")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the model of show or remove")
    parser.add_argument("--known", action="store_true", help="list good small models, with their licences")
    parser.add_argument("-y", "--yes", action="store_true", help="remove without asking")
    add_json_option(parser)
    add_options(parser, Quiet)


def run(args: argparse.Namespace) -> int:
    """Check; list, show or remove."""
    check_choice("action", args.action, ACTIONS)
    if (args.name is None) != (args.action == "list"):
        valid = "list alone" if args.name is not None else f"{args.action} NAME"
        raise InputError(f"action is {args.action!r} with{'' if args.name else 'out'} a name; valid: {valid}")
    for name, action in (("known", "list"), ("yes", "remove")):
        if getattr(args, name) and args.action != action:
            raise InputError(f"{name} is given with {args.action}; valid: with {action}")
    record = check_record(args.json)
    if args.action == "remove":
        return _remove(args.name, args.yes, record)
    if args.known:
        made, text = _known()
    else:
        made, text = _show(args.name) if args.action == "show" else _list()
    give(record, made, text)
    return 0


# ---- list --------------------------------------------------------------------------------------------------


@dataclass
class About:
    """What the files of a cached model say.

    Attributes:
        parameters: how many.
        family: the architecture, by transformers' name or the GGUF file's.
        stored: types or formats of the matrices.
        native: whether the native decoder runs it.
        vocab: how many tokens it knows.
        heads: kinds of shipped heads.
        drafts: cached models that may be its ``draft_model``: native ones with as large a vocabulary, and at
            most half of its parameters.
        problem: why nothing is known; None otherwise.
    """

    parameters: int = 0
    family: str = ""
    stored: str = ""
    native: bool = False
    vocab: int = 0
    heads: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()
    problem: str | None = None


def _list() -> tuple[dict[str, Any], str]:
    logger.info("reading %s and %s", cache_dir(), cached.hub_dir())
    found, faults = cached.models()
    said = {one.name: about(one.name, one.path) for one in found}
    for name, info in said.items():
        info.heads = next((one.heads for one in KNOWN if one.name == name), ())
        small = {other: it for other, it in said.items() if it.native and it.vocab == info.vocab}
        fit = (other for other, it in small.items() if SMALLER * it.parameters <= info.parameters)
        info.drafts = tuple(fit) if info.native else ()
    for fault in faults:
        logger.warning("%s", fault)
    beside = cached.beside()
    caches = {cached.OWN: str(cache_dir()), cached.HUB: str(cached.hub_dir())}
    records = [asdict(one) | {"path": str(one.path)} | asdict(said[one.name]) for one in found]
    lines = [
        (
            one.name,
            one.cache,
            f"{one.nbytes / MEGA:,.1f}",
            f"{info.parameters / MEGA:,.0f}" if info.parameters else "",
            info.family + (" (transformers)" if info.family and not info.native else ""),
            info.problem or info.stored,
            ", ".join([*(f"{kind} heads" for kind in info.heads), *info.drafts]),
        )
        for one in found
        for info in [said[one.name]]
    ]
    rest = ", ".join(f"{cached.BESIDE[name]} {size / MEGA:,.1f} MB" for name, size in beside.items())
    text = [
        table(lines, COLUMNS, right=(2, 3)) if lines else "no models in the caches",
        "",
        *([f"also in {cache_dir()}: {rest}"] if rest else []),
        "good small models by name: tokenswift models list --known",
    ]
    return {"caches": caches, "models": records, "beside": beside}, "\n".join(text)


def about(name: str, path: Path) -> About:
    """What a cached model's files say; what is wrong with them is part of it.

    Args:
        name, path: see `loader.cached.Cached`.
    """

    try:
        file = gguf_in(path)
        return _folder(name, path) if file is None else _gguf(file)
    except InputError as error:
        return About(problem=str(error))


def _gguf(path: Path) -> About:
    from tokenswift.loader.gguf import GgufFile, architecture, formats, gguf_name, is_native

    file = GgufFile(path)
    count = sum(math.prod(entry.shape) for entry in file.tensors.values())
    embedding = file.tensors.get(gguf_name(EMBEDDING))
    vocab = embedding.shape[0] if embedding is not None and len(embedding.shape) == 2 else 0
    return About(count, architecture(file), formats(file), is_native(file), vocab)


def _folder(name: str, path: Path) -> About:
    from tokenswift.loader.weights import headers

    said = read_config(name, path / "config.json")
    shapes = headers(path)
    count = sum(math.prod(shape) for shape, _ in shapes.values())
    stored = "+".join(sorted({kind.lower() for shape, kind in shapes.values() if len(shape) > 1}))
    vocab, family = said.get("vocab_size"), said.get("model_type")
    return About(count, str(family), stored, family in FAMILIES, vocab if isinstance(vocab, int) else 0)


def _known() -> tuple[dict[str, Any], str]:
    lines = [
        (
            one.name,
            f"{one.parameters:,}",
            one.licence,
            ", ".join([*(f"{k} heads" for k in one.heads), one.draft or ""]),
        )
        for one in KNOWN
    ]
    shown = table(lines, ("model", "millions", "licence", "drafts for it"), right=(1,))
    note = "for every model, repeats of earlier text and passes over a partial KV cache can be drafted"
    return {"known": [asdict(one) for one in KNOWN]}, f"{shown}\n\n{note}"


# ---- show --------------------------------------------------------------------------------------------------


def sizes_of(name: str) -> dict[str, Any]:
    """What a model takes by its name, from its config.json or the header of its GGUF file alone: bytes of its
    weights and types as they are stored, bytes of keys and values of a token in bfloat16 (of all layers), and
    positions (None: no limit).

    Raises:
        InputError: there is no such model, or its config does not say enough.
    """
    from tokenswift.loader.gguf import FACTORS, GgufFile, config_of
    from tokenswift.loader.load import load_config, numbers_of
    from tokenswift.loader.rope import context_limit

    with header_of(name) as (source, local):
        if (path := gguf_in(Path(source))) is not None:
            file = GgufFile(path, whole=False)
            factors = file.tensors.get(FACTORS)
            if factors is not None and factors.start + factors.nbytes > path.stat().st_size:
                del file.tensors[FACTORS]  # cut off behind the header: sizes do not depend on it
            config, tensors = config_of(file), file.tensors.values()
            weights, types = sum(one.nbytes for one in tensors), sorted({one.kind for one in tensors})
        else:
            config = load_config(name, source, local)
            kind = str(config.dtype or "float32").removeprefix("torch.")
            weights, types = numbers_of(name, config) * (4 if kind == "float32" else 2), [kind]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    each = 2 * 2 * config.num_hidden_layers * heads * head_width(config)
    limit = context_limit(config)
    return {"weight_bytes": weights, "types": types, "token_bytes": each, "limit": limit}


def _show(name: str) -> tuple[dict[str, Any], str]:
    check_name(name)
    logger.info("reading %s", name)
    from tokenswift.memory import host_memory

    sizes = sizes_of(name)
    known = next((one for one in KNOWN if one.name == name), None)
    weights, types, each, limit = sizes.values()
    lengths = [n for n in LENGTHS if limit is None or n <= limit] or [limit or LENGTHS[0]]
    contexts = [{"context": n, "nbytes": weights + n * each} for n in lengths]
    said = None if known is None else asdict(known)
    made = {"model": name, "known": said, "sizes": sizes, "contexts": contexts}
    rows = [(f"{one['context']:,}", f"{one['nbytes'] / GIGA:.2f}") for one in contexts]
    most = "no limit" if limit is None else counted(limit, "token")
    text = [
        f"{name}: {weights / GIGA:.3f} GB of weights ({', '.join(types)}), "
        f"{each / 1e3:.1f} KB of keys and values a token in bfloat16; context: {most}",
        *([f"licence: {known.licence}"] if known is not None else []),
        "",
        table(rows, ("context", "GB"), right=range(2)),
        "",
        f"{host_memory().free / GIGA:.1f} GB of memory is available now; tokenswift plan measures a run",
    ]
    return made, "\n".join(text)


# ---- remove ------------------------------------------------------------------------------------------------


def _remove(name: str, yes: bool, record: Path | None) -> int:
    cached.check_removable(name)
    if not yes and not _agreed(name):
        print("nothing was removed", file=sys.stderr, flush=True)
        return 0
    freed = cached.remove(name)
    give(record, {"removed": name, "freed": freed}, f"{name} removed, {freed / MEGA:,.1f} MB freed")
    return 0


def _agreed(name: str) -> bool:
    """Whether the user says yes to the question.

    Raises:
        InputError: nobody is there who could.
    """
    if not sys.stdin.isatty():
        raise InputError("remove asks first, but standard input is not a terminal; valid: with --yes")
    print(f"remove {name}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
