"""`tokenswift train-heads`: draft heads for any model, in one command."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenswift.cli.options import DEFAULT_MODEL, integer, number

if TYPE_CHECKING:
    from tokenswift.train.pipeline import DataOptions
    from tokenswift.train.trainer import TrainingOptions

logger = logging.getLogger("tokenswift")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("train-heads", help="train draft heads for a model")
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="alias, folder or hub id of the base model")
    add("--data", required=True, help="a text or JSONL file, a folder of them, self, or pg19")
    add("--out", required=True, type=Path, help="heads file to write")
    add("--kind", default="conditioned", choices=("linear", "conditioned", "medusa"), help="sort of heads")
    add("--heads", type=integer, default=3, help="number of heads (default 3)")
    add(
        "--inner",
        type=integer,
        help="hidden layer (conditioned, default 1024), or blocks (medusa, default 1)",
    )
    add_training_options(parser)


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """What train-heads and train-draft have in common: the data and the training."""
    add = parser.add_argument
    add("--continued", action="store_true", help="learn from the model's continuations of the data")
    add("--tokens", type=integer, help="tokens to learn from (default 300,000; CUDA 4,000,000)")
    add("--block", type=integer, help="longest text run at once (default 768; CUDA 8192)")
    add("--prompt", type=integer, default=256, help="tokens of a passage before the model goes on")
    add("--batch", type=integer, help="texts that the model writes together (default 48; CUDA 32)")
    add("--epochs", type=number, default=3.0, help="passes over the data; 0: the start alone")
    add("--steps", type=integer, default=0, help="optimiser steps instead of epochs")
    add("--lr", type=number, default=1e-3, help="peak learning rate")
    add("--accumulate", type=integer, default=1, help="batches per optimiser step")
    add("--vocabulary", type=integer, help="frequent tokens in the loss (default 4096; CUDA all)")
    add("--save-every", type=integer, default=200, help="steps between checkpoints")
    add("--seed", type=integer, default=0)
    add("--work", type=Path, help="folder for states, checkpoints and log.csv (default OUT.work)")
    add("--dtype", default="auto", help="bfloat16, float32 or auto (bfloat16 where the hardware has it)")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--tensorboard", action="store_true", help="also write TensorBoard logs to the work folder")
    add("--quiet", action="store_true", help="no progress lines")


@dataclass(frozen=True, slots=True)
class Plan:
    """The common options, checked: data (None without --data), training, dtype, subset of the loss."""

    data: DataOptions | None
    training: TrainingOptions
    dtype: str
    vocabulary: int


def plan(args: argparse.Namespace) -> Plan:
    """Check the common options and fill in the defaults of the place to run.

    Raises:
        InputError: an option out of its range, or --data that names nothing.
    """
    from tokenswift.models.load import check_place, native_bfloat16
    from tokenswift.train.data import check_source
    from tokenswift.train.pipeline import DataOptions
    from tokenswift.train.trainer import TrainingOptions

    place = check_place(args.dtype, args.device)
    cuda = place != "cpu"
    dtype = args.dtype
    if dtype == "auto":
        dtype = "bfloat16" if native_bfloat16(place) else "float32"
    data = None
    if args.data is not None:
        data = DataOptions(
            source=args.data,
            continued=args.continued,
            tokens=args.tokens if args.tokens is not None else 4_000_000 if cuda else 300_000,
            block=args.block if args.block is not None else 8192 if cuda else 768,
            prompt=args.prompt,
            batch=args.batch if args.batch is not None else 32 if cuda else 48,
            seed=args.seed,
        )
        check_source(args.data)
    training = TrainingOptions(
        epochs=args.epochs,
        steps=args.steps,
        lr=args.lr,
        accumulate=args.accumulate,
        seed=args.seed,
        save_every=args.save_every,
        tensorboard=args.tensorboard,
        bf16=dtype == "bfloat16",
    )
    vocabulary = args.vocabulary if args.vocabulary is not None else 0 if cuda else 4096
    return Plan(data, training, dtype, vocabulary)


def run(args: argparse.Namespace) -> int:
    """Train and write the heads file."""
    from tokenswift.models.load import load
    from tokenswift.train.pipeline import train_heads
    from tokenswift.types import InputError

    if args.heads < 1:
        raise InputError(f"heads is {args.heads}; valid: an integer of at least 1")
    least = 1 if args.kind == "medusa" else 0
    if args.inner is not None and args.inner < least:
        raise InputError(f"inner is {args.inner}; valid: at least {least} for {args.kind} heads")
    made = plan(args)
    assert made.data is not None
    loaded = load(args.model, dtype=made.dtype, device=args.device)
    notes = train_heads(
        loaded.model,
        loaded.tokenizer,
        made.data,
        made.training,
        out=args.out,
        work=args.work or args.out.with_name(args.out.name + ".work"),
        kind=args.kind,
        count=args.heads,
        inner=args.inner,
        vocabulary=made.vocabulary,
        name=Path(args.model).name,
        report=logger.info,
    )
    logger.info("wrote %s: %s", args.out, ", ".join(f"{k} {v}" for k, v in notes.items()))
    return 0
