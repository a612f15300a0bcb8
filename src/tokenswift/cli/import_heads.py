"""`tokenswift import-heads`: heads of published checkpoints, and back to their layout."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenswift.cli import options
from tokenswift.cli.declare import add_options, option
from tokenswift.cli.output import check_folder, check_writable
from tokenswift.cli.progress import Stages
from tokenswift.types import InputError
from tokenswift.words import counted

logger = logging.getLogger("tokenswift")


@dataclass(frozen=True)
class Conversion(options.Quiet):
    """What is converted.

    Attributes:
        checkpoint: folder or hub id to import
        out: heads file to write
        model: the base model: checked against the checkpoint's; Medusa heads need it
        heads: heads file to export
        export: folder to write in the published layout, with the base model's tokenizer; --model takes it,
            too
    """

    checkpoint: str | None = option(None, "M")
    out: Path | None = option(None)
    model: str | None = option(None, "M")
    heads: str | None = option(None, "PATH")
    export: Path | None = option(None, "DIR")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "import-heads",
        help="convert published heads to a heads file, or back",
        description="Read a checkpoint in TokenSwift's published layout, or Medusa-1 heads. With --export, "
        "write linear heads and their base model as a checkpoint in the published layout.",
    )
    add_options(parser, Conversion)


def run(args: argparse.Namespace) -> int:
    """Import, or export."""
    if args.export is not None:
        if args.heads is None or args.model is None or args.checkpoint or args.out:
            raise InputError("--export takes --heads and --model, and neither --checkpoint nor --out")
        return _export(args)
    if args.checkpoint is None or args.out is None or args.heads:
        raise InputError("import-heads takes --checkpoint and --out, or --heads, --model and --export")
    check_writable("--out", args.out, renamed=True)
    logger.info("reading %s", args.checkpoint)

    from tokenswift.spec.heads.checkpoint import save_heads
    from tokenswift.spec.heads.published import checkpoint_folder, import_checkpoint, read_config

    folder = checkpoint_folder(args.checkpoint)
    read_config(folder)  # a wrong folder shows before a model is loaded
    model = _load(args).model if args.model else None
    heads, base = import_checkpoint(folder, model)
    save_heads(heads, args.out, base, notes={"imported": Path(args.checkpoint).resolve().name})
    logger.info("wrote %s: %s for %s", args.out, counted(heads.count, f"{heads.kind} head"), base.name)
    return 0


def _export(args: argparse.Namespace) -> int:
    if not Path(args.heads).expanduser().is_file():
        raise InputError(f"heads is {args.heads!r}: no such file; valid: a heads file")
    check_folder("--export", args.export)
    if args.export.exists() and any(args.export.iterdir()):
        raise InputError(f"--export {args.export} exists and is not empty; valid: a new or empty folder")
    logger.info("loading %s", args.model)

    from tokenswift.spec.heads.checkpoint import load_heads
    from tokenswift.spec.heads.published import export_checkpoint

    loaded = _load(args)
    export_checkpoint(load_heads(args.heads, loaded.model), loaded.model, args.export, loaded.tokenizer)
    logger.info("wrote %s", args.export)
    return 0


def _load(args: argparse.Namespace) -> Any:
    from tokenswift.loader.load import load

    with Stages(args.quiet) as stages:
        return load(args.model, device="cpu", on_progress=stages)
