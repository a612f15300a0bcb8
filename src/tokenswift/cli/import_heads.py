"""`tokenswift import-heads`: heads of published checkpoints, and back to their layout."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

logger = logging.getLogger("tokenswift")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "import-heads",
        help="convert published heads to a heads file, or back",
        description="Reads a checkpoint in TokenSwift's published layout, or Medusa-1 heads. With --export, "
        "writes linear heads and their base model as a checkpoint in the published layout.",
    )
    add = parser.add_argument
    add("--checkpoint", help="folder or hub id to import")
    add("--out", type=Path, help="heads file to write")
    add("--model", help="the base model: checked against the checkpoint's; Medusa heads need it")
    add("--heads", type=Path, help="heads file to export")
    add("--export", type=Path, help="folder to write in the published layout")
    add("--quiet", action="store_true", help="no summary")


def run(args: argparse.Namespace) -> int:
    """Import, or export."""
    from tokenswift.heads.checkpoint import load_heads, save_heads
    from tokenswift.heads.published import (
        checkpoint_folder,
        export_checkpoint,
        import_checkpoint,
        read_config,
    )
    from tokenswift.models.load import load
    from tokenswift.types import InputError

    if args.export is not None:
        if args.heads is None or args.model is None or args.checkpoint or args.out:
            raise InputError("--export takes --heads and --model, and neither --checkpoint nor --out")
        model = load(args.model, device="cpu").model
        export_checkpoint(load_heads(args.heads, model), model, args.export)
        logger.info("wrote %s", args.export)
        return 0
    if args.checkpoint is None or args.out is None or args.heads:
        raise InputError("import-heads takes --checkpoint and --out, or --heads, --model and --export")
    folder = checkpoint_folder(args.checkpoint)
    read_config(folder)  # a wrong folder shows before a model is loaded
    model = load(args.model, device="cpu").model if args.model else None
    heads, base = import_checkpoint(folder, model)
    save_heads(heads, args.out, base, notes={"imported": Path(args.checkpoint).resolve().name})
    logger.info("wrote %s: %d %s heads for %s", args.out, heads.count, heads.kind, base.name)
    return 0
