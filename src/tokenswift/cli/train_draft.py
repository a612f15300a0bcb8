"""`tokenswift train-draft`: a small draft model for a target, in one command."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from tokenswift.cli.options import DEFAULT_MODEL, integer
from tokenswift.cli.train_heads import add_training_options, plan

logger = logging.getLogger("tokenswift")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "train-draft",
        help="train a small draft model for a model",
        description="A model of a few of the target's own layers, trained to the target's next-token law as "
        "decoding processes it. Embeddings and LM head stay the target's.",
    )
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="alias, folder or hub id of the target model")
    add("--out", required=True, type=Path, help="model folder to write")
    add("--layers", type=integer, default=2, help="layers of the draft model (default 2)")
    add("--pack", type=Path, metavar="FILE", help="also write the trained weights alone to a file")
    add_training_options(parser)


def run(args: argparse.Namespace) -> int:
    """Train and write the model folder."""
    from tokenswift.config import check_integer
    from tokenswift.models.load import load
    from tokenswift.train.draft import check_out, pack, train_draft
    from tokenswift.train.processes import first_process

    check_integer("layers", args.layers, 1)
    check_out(args.out)
    made = plan(args)
    loaded = load(args.model, dtype=made.dtype, device=made.device)
    notes = train_draft(
        loaded.model,
        loaded.tokenizer,
        made.data,
        made.training,
        out=args.out,
        work=args.work or args.out.with_name(args.out.name + ".work"),
        layers=args.layers,
        vocabulary=made.vocabulary,
        name=Path(args.model).name,
        report=logger.info,
        sampling=made.sampling,
        states=args.states,
    )
    logger.info("wrote %s: %s", args.out, ", ".join(f"{k} {v}" for k, v in notes.items()))
    if args.pack is not None and first_process():
        pack(args.out, args.pack)
        logger.info("wrote %s", args.pack)
    return 0
