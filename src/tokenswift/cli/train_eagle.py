"""`tokenswift train-eagle`: an EAGLE-3 drafter for a model, in one command."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenswift.cli.declare import add_options, check_options, option
from tokenswift.cli.output import check_folder
from tokenswift.cli.train_heads import Base, add_training_options, trained
from tokenswift.train.options import check_eagle_out


@dataclass(frozen=True)
class Eagle:
    """Which drafter is trained.

    Attributes:
        out: folder to write, in the form of the package speculators
        depths: tokens of a chain that it learns to draft
    """

    out: Path = option(metavar="DIR")
    depths: int = option(3, least=1)


#: what is not as in the training of heads
RECIPE: dict[str, Any] = {"window": 256, "batch": 2, "lr": 5e-4, "warmup": 100}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "train-eagle",
        help="train an EAGLE-3 drafter for a model",
        description="Train a layer that reads the inputs of three of the model's layers. It learns the "
        "model's next-token distribution as decoding processes it, and reads its own output from the second "
        "token on. --states reuses the work folders of train-heads.",
    )
    add_options(parser, Base, texts={"model": "alias, folder or hub id of the target model"})
    add_options(parser, Eagle)
    add_training_options(parser, RECIPE)


def run(args: argparse.Namespace) -> int:
    """Train and write the checkpoint."""
    check_options(args, Eagle)
    check_folder("--out", args.out)
    check_eagle_out(args.out)

    def train(*given: Any) -> dict[str, Any]:
        from tokenswift.train.eagle import train_eagle

        return train_eagle(*given, depths=args.depths)

    trained(args, RECIPE, train)
    return 0
