"""``tokenswift models``: the models in the caches, and what one would take."""

from __future__ import annotations

import argparse
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenswift.checks import check_choice
from tokenswift.cli import options
from tokenswift.cli.declare import add_options, command, option
from tokenswift.cli.output import check_record, give
from tokenswift.cli.terminal import table
from tokenswift.loader import default_model
from tokenswift.loader.config import FAMILIES, head_width, read_config
from tokenswift.loader.find import cache_dir, check_name, gguf_in, locate_config
from tokenswift.types import InputError
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")
ACTIONS = ("list", "show")
GIGA, MEGA = 1e9, 1e6
LENGTHS = (1024, 8192, 32_768)  # tokens of text whose memory is shown
COLUMNS = ("model", "cache", "MB", "millions", "family", "stored")
ABOUT = ("parameters", "family", "stored", "native")


@dataclass(frozen=True)
class Action:
    """What is done.

    Attributes:
        action: list (the models in the caches, ours and the hub's, with size and type)
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


Found = tuple[str, str, Path, int]  # name as --model takes it, cache, folder or GGUF file, bytes


def _cached() -> list[Found]:
    """The models of both caches by name; what of the hub's cannot be read is a line each."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    name, found = default_model.NAME, list[Found]()
    file = cache_dir() / name / default_model.GGUF
    if file.is_file():
        found.append((name, "tokenswift", file, file.stat().st_size))
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
    return sorted(found, key=lambda one: one[0].lower())


def _hub_dir() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _in_repository(repo: Any) -> Iterator[Found]:
    """The models of a repository's revision that its name stands for: a checkpoint, and each GGUF file."""
    newest = max(repo.revisions, key=lambda one: ("main" in one.refs, one.last_modified))
    files = {os.path.relpath(file.file_path, newest.snapshot_path): file for file in newest.files}
    ggufs = [name for name in files if name.lower().endswith(".gguf")]
    for name in ggufs:
        file = files[name]
        yield f"{repo.repo_id}:{name}", "hub", Path(file.file_path), file.size_on_disk
    if "config.json" in files:
        sizes = [file.size_on_disk for name, file in files.items() if name not in ggufs]
        yield repo.repo_id, "hub", Path(newest.snapshot_path), sum(sizes)


def _list() -> tuple[dict[str, Any], str]:
    caches = {"tokenswift": str(cache_dir()), "hub": str(_hub_dir())}
    logger.info("reading %s and %s", *caches.values())
    records, lines = [], []
    for name, cache, path, size in _cached():
        one = {"name": name, "cache": cache, "path": str(path), "nbytes": size, **about(name, path)}
        family = one["family"] + ("" if one["native"] else " (transformers)")
        count = f"{one['parameters'] / MEGA:,.0f}"
        lines.append((name, cache, f"{size / MEGA:,.1f}", count, family, one["problem"] or one["stored"]))
        records.append(one)
    text = table(lines, COLUMNS, right=(2, 3)) if lines else "no models in the caches"
    return {"caches": caches, "models": records}, text


def about(name: str, path: Path) -> dict[str, Any]:
    """What a cached model's files say: how many parameters, the architecture's name, types or formats of the
    matrices, whether the native decoder runs it; or the problem that there is."""
    try:
        file = gguf_in(path)
        found = _folder(name, path) if file is None else _gguf(file)
        return {**dict(zip(ABOUT, found, strict=True)), "problem": None}
    except InputError as error:
        return {**dict(zip(ABOUT, (0, "", "", True), strict=True)), "problem": str(error)}


def _gguf(path: Path) -> tuple[int, str, str, bool]:
    from tokenswift.loader.gguf import GgufFile, architecture, formats, is_native

    file = GgufFile(path)
    count = sum(math.prod(entry.shape) for entry in file.tensors.values())
    return count, architecture(file), formats(file), is_native(file)


def _folder(name: str, path: Path) -> tuple[int, str, str, bool]:
    from tokenswift.loader.weights import headers

    family, shapes = read_config(name, path / "config.json").get("model_type"), headers(path)
    count = sum(math.prod(shape) for shape, _ in shapes.values())
    stored = "+".join(sorted({kind.lower() for shape, kind in shapes.values() if len(shape) > 1}))
    return count, str(family), stored, family in FAMILIES


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
