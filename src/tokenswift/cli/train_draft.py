"""`tokenswift train-draft`: a small draft model for a target, in one command."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path

from tokenswift.cli.declare import add_options, check_options, option
from tokenswift.cli.output import check_folder, check_writable
from tokenswift.cli.train_heads import Base, add_training_options, job_of, keeping, load_base

logger = logging.getLogger("tokenswift")


@dataclass(frozen=True)
class Draft:
    """Which model is trained.

    Attributes:
        out: model folder to write, with the target's tokenizer: good for --draft-model and --model
        layers: layers of the draft model
        pack: also write the trained weights alone to a file
    """

    out: Path = option(metavar="DIR")
    layers: int = option(2, least=1)
    pack: Path | None = option(None)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "train-draft",
        help="train a small draft model for a model",
        description="A model of a few of the target's own layers, trained to the target's next-token "
        "distribution as decoding processes it. Embeddings and LM head stay the target's.",
    )
    add_options(parser, Base, texts={"model": "alias, folder or hub id of the target model"})
    add_options(parser, Draft)
    add_training_options(parser)


def run(args: argparse.Namespace) -> int:
    """Train and write the model folder."""
    from tokenswift.loader.draft import check_out
    from tokenswift.train.processes import first_process

    check_options(args, Draft)
    check_folder("--out", args.out)
    check_out(args.out)
    check_writable("--pack", args.pack, renamed=True)
    job = job_of(args)
    with keeping(job.work):
        loaded, job = load_base(args, job)
        from tokenswift.train.draft import pack, train_draft

        notes = train_draft(loaded.model, loaded.tokenizer, job, logger.info, layers=args.layers)
    logger.info("wrote %s: %s", args.out, ", ".join(f"{k} {v}" for k, v in notes.items()))
    if args.pack is not None and first_process():
        pack(args.out, args.pack)
        logger.info("wrote %s", args.pack)
    return 0
