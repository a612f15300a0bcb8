"""``tokenswift models``: the models in the caches, and what one would take."""

from __future__ import annotations

import argparse
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenswift.checks import check_choice
from tokenswift.cli import options
from tokenswift.cli.declare import add_options, command, option
from tokenswift.cli.output import check_record, give
from tokenswift.cli.terminal import table
from tokenswift.loader import default_model
from tokenswift.loader.config import EMBEDDING, FAMILIES, head_width, read_config
from tokenswift.loader.find import cache_dir, check_name, gguf_in, locate_config
from tokenswift.types import InputError
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")
ACTIONS = ("list", "show")
GIGA, MEGA = 1e9, 1e6
LENGTHS = (1024, 8192, 32_768)  # tokens of text whose memory is shown
SMALLER = 2  # times as many parameters has a model as one that drafts for it, at least
COLUMNS = ("model", "cache", "MB", "millions", "family", "stored", "drafts for it")


@dataclass(frozen=True)
class Action:
    """What is done.

    Attributes:
        action: list (the models in the caches, ours and the hub's, with size, type and the drafters for them)
            or show (memory by length of the text, and context; the model need not be in a cache, and no
            weights of the hub are fetched)
        name: the model of show
    """

    action: str = option("list", "ACTION", place=True, nargs="?")
    name: str | None = option(None, place=True, nargs="?")


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = command(subparsers, "models", run, "list cached models, show what a model needs")
    add_options(parser, Action)
    add_options(parser, options.Record)


def run(args: argparse.Namespace) -> int:
    """List the models in the caches, or show what one needs."""
    check_choice("action", args.action, ACTIONS)
    if (args.name is None) != (args.action == "list"):
        valid = "list alone" if args.name is not None else f"{args.action} NAME"
        raise InputError(f"action is {args.action!r} with{'' if args.name else 'out'} a name; valid: {valid}")
    record = check_record(args.json)
    made, text = _show(args.name) if args.action == "show" else _list()
    give(record, made, text)
    return 0


# ---- list --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cached:
    """A model in a cache.

    Attributes:
        name: as ``LLM`` and ``--model`` take it.
        cache: "tokenswift" or "hub".
        path: a folder in transformers' format, or a GGUF file.
        nbytes: of its files.
    """

    name: str
    cache: str
    path: Path
    nbytes: int


def _cached() -> list[Cached]:
    """The models of both caches by name; what of the hub's cannot be read is a line each."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    name, found = default_model.NAME, list[Cached]()
    file = cache_dir() / name / default_model.GGUF
    if file.is_file():
        found.append(Cached(name, "tokenswift", file, file.stat().st_size))
    try:
        scanned = scan_cache_dir(_hub_dir())
    except (CacheNotFound, ValueError, OSError) as error:
        if not isinstance(error, CacheNotFound):
            logger.warning("%s cannot be read (%s)", _hub_dir(), error)
        return found
    for fault in scanned.warnings:
        logger.warning("%s", " ".join(str(fault).split()))
    for repo in scanned.repos:
        if repo.repo_type == "model" and repo.revisions:
            found += _in_repository(repo)
    return sorted(found, key=lambda one: one.name.lower())


def _hub_dir() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _in_repository(repo: Any) -> Iterator[Cached]:
    """The models of a repository's revision that its name stands for: a checkpoint, and each GGUF file."""
    newest = max(repo.revisions, key=lambda one: ("main" in one.refs, one.last_modified))
    files = {os.path.relpath(file.file_path, newest.snapshot_path): file for file in newest.files}
    ggufs = [name for name in files if name.lower().endswith(".gguf")]
    for name in ggufs:
        file = files[name]
        yield Cached(f"{repo.repo_id}:{name}", "hub", Path(file.file_path), file.size_on_disk)
    if "config.json" in files:
        sizes = [file.size_on_disk for name, file in files.items() if name not in ggufs]
        yield Cached(repo.repo_id, "hub", Path(newest.snapshot_path), sum(sizes))


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
    caches = {"tokenswift": str(cache_dir()), "hub": str(_hub_dir())}
    logger.info("reading %s and %s", *caches.values())
    found = _cached()
    said = {one.name: about(one.name, one.path) for one in found}
    for name, info in said.items():
        info.heads = ("conditioned",) if name == default_model.NAME else ()
        small = {other: it for other, it in said.items() if it.native and it.vocab == info.vocab}
        fit = (other for other, it in small.items() if SMALLER * it.parameters <= info.parameters)
        info.drafts = tuple(fit) if info.native else ()
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
    text = table(lines, COLUMNS, right=(2, 3)) if lines else "no models in the caches"
    return {"caches": caches, "models": records}, text


def about(name: str, path: Path) -> About:
    """What a cached model's files say; what is wrong with them is part of it.

    Args:
        name, path: see :class:`Cached`.
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


# ---- show --------------------------------------------------------------------------------------------------


def sizes_of(name: str) -> dict[str, Any]:
    """What a model takes by its name, from its config.json or the header of its GGUF file alone: bytes of its
    weights and types as they are stored, bytes of keys and values of a token in bfloat16 (of all layers), and
    positions (None: no limit).

    Raises:
        InputError: there is no such model, or its config does not say enough.
    """
    from tokenswift.loader.gguf import GgufFile, config_of
    from tokenswift.loader.load import load_config, numbers_of
    from tokenswift.loader.rope import context_limit

    source = locate_config(name)
    if (path := gguf_in(source)) is not None:
        file = GgufFile(path)
        config, tensors = config_of(file), file.tensors.values()
        weights, types = sum(one.nbytes for one in tensors), sorted({one.kind for one in tensors})
    else:
        config = load_config(name, source)
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
    weights, types, each, limit = sizes.values()
    lengths = [n for n in LENGTHS if limit is None or n <= limit] or [limit or LENGTHS[0]]
    contexts = [{"context": n, "nbytes": weights + n * each} for n in lengths]
    made = {"model": name, "sizes": sizes, "contexts": contexts}
    rows = [(f"{one['context']:,}", f"{one['nbytes'] / GIGA:.2f}") for one in contexts]
    most = "no limit" if limit is None else counted(limit, "token")
    text = [
        f"{name}: {weights / GIGA:.3f} GB of weights ({', '.join(types)}), "
        f"{each / 1e3:.1f} KB of keys and values a token in bfloat16; context: {most}",
        "",
        table(rows, ("context", "GB"), right=range(2)),
        "",
        f"{host_memory().free / GIGA:.1f} GB of memory is available now; tokenswift plan measures a run",
    ]
    return made, "\n".join(text)
