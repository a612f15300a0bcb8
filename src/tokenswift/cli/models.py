"""``tokenswift models show``: what a model takes."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from typing import Any

from tokenswift.checks import check_choice
from tokenswift.cli import options
from tokenswift.cli.declare import add_options, command, option
from tokenswift.cli.output import check_record, give
from tokenswift.cli.terminal import table
from tokenswift.loader.config import head_width
from tokenswift.loader.find import check_name, gguf_in, locate_config
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")
GIGA = 1e9
LENGTHS = (1024, 8192, 32_768)  # tokens of text whose memory is shown


@dataclass(frozen=True)
class Action:
    """What is done.

    Attributes:
        action: show: memory by length of the text, and context (the model need not be in a cache, and no
            weights of the hub are fetched)
        name: the model
    """

    action: str = option(metavar="ACTION", place=True)
    name: str = option(metavar="NAME", place=True)


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = command(subparsers, "models", run, "show what a model needs")
    add_options(parser, Action)
    add_options(parser, options.Record)


def run(args: argparse.Namespace) -> int:
    """Show what a model needs."""
    check_choice("action", args.action, ("show",))
    record = check_record(args.json)
    made, text = _show(args.name)
    give(record, made, text)
    return 0


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
