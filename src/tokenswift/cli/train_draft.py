"""`tokenswift train-draft`: a small draft model for a target, in one command."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenswift.cli.declare import add_options, check_options, option
from tokenswift.cli.output import check_folder
from tokenswift.cli.train_heads import Base, add_training_options, trained

logger = logging.getLogger("tokenswift")


@dataclass(frozen=True)
class Draft:
    """Which model is trained.

    Attributes:
        out: model folder to write, with the target's tokenizer: good for --draft-model and --model
        layers: layers of the draft model
    """

    out: Path = option(metavar="DIR")
    layers: int = option(2, least=1)


#: what is not as in the training of heads
RECIPE: dict[str, Any] = {"window": 256}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "train-draft",
        help="train a small draft model for a model",
        description="A model of the target's own first layers, trained to the target's next-token "
        "distribution as decoding processes it. Embeddings and LM head stay the target's.",
    )
    add_options(parser, Base, texts={"model": "alias, folder or hub id of the target model"})
    add_options(parser, Draft)
    add_training_options(parser, RECIPE)


def run(args: argparse.Namespace) -> int:
    """Train and write the model folder."""
    from tokenswift.loader.default_model import check_out

    check_options(args, Draft)
    check_folder("--out", args.out)
    check_out(args.out)

    def train(*given: Any) -> dict[str, Any]:
        from tokenswift.train.draft import train_draft

        return train_draft(*given, layers=args.layers)

    trained(args, RECIPE, train)
    return 0
