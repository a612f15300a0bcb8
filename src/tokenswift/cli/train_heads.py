"""`tokenswift train-heads`: draft heads for any model, in one command."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenswift.cli import options
from tokenswift.cli.options import DEFAULT_MODEL, add_sampling_options, integer, number, sampling_from
from tokenswift.cli.output import check_apart, check_folder, check_writable
from tokenswift.cli.progress import Stages
from tokenswift.cli.signals import Interrupted, Signals
from tokenswift.types import RunError

if TYPE_CHECKING:
    from tokenswift.config import SamplingParams
    from tokenswift.models.load import Loaded
    from tokenswift.train.options import DataOptions, Job, TrainingOptions

logger = logging.getLogger("tokenswift")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("train-heads", help="train draft heads for a model")
    add = parser.add_argument
    add(
        "--model",
        default=DEFAULT_MODEL,
        metavar="M",
        help="alias, folder or hub id of the base model; default: %(default)s",
    )
    add("--out", required=True, type=Path, metavar="FILE", help="heads file to write")
    add(
        "--recipe",
        default="own",
        metavar="NAME",
        help="own, or paper (its heads, loss and Table 9's settings; needs a large GPU); other options "
        "given win; default: %(default)s",
    )
    add(
        "--kind",
        choices=("linear", "conditioned", "medusa"),
        metavar="NAME",
        help="sort of heads: linear, conditioned or medusa (default conditioned)",
    )
    add("--num-heads", type=integer, metavar="N", help="number of heads (default 3)")
    add("--heads", type=integer, dest="num_heads", help=argparse.SUPPRESS)  # its earlier name
    add(
        "--inner", metavar="N", type=integer, help="hidden layer of conditioned heads; 0: none (default 1024)"
    )
    add("--blocks", metavar="N", type=integer, default=1, help="residual blocks of Medusa heads (default 1)")
    add(
        "--targets",
        metavar="NAME",
        help="model (its own distribution) or text (the next token); default model",
    )
    add("--start", metavar="NAME", help="ridge (closed form), or zero for linear and medusa; default ridge")
    add(
        "--coverage",
        type=number,
        default=0.92,
        metavar="X",
        help="tokens worth drafting: the most frequent ones that make up this share of the training text; "
        "default: %(default)s",
    )
    add_training_options(parser)


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """What train-heads and train-draft have in common: the data and the training."""
    add = parser.add_argument_group("data").add_argument
    add("--data", metavar="PATH", help="a text or JSONL file, a folder of them, self, or pg19")
    add(
        "--states",
        type=Path,
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="finished work folders of train-heads, instead of --data",
    )
    add(
        "--continued",
        action="store_true",
        default=None,
        help="learn from the model's continuations of the data",
    )
    add("--tokens", metavar="N", type=integer, help="tokens to learn from (default 300,000; CUDA 4,000,000)")
    add(
        "--sequence-length",
        "--block",
        dest="sequence_length",
        type=integer,
        metavar="N",
        help="tokens run through the model at once (default 768; CUDA 8192)",
    )
    add(
        "--prompt-lengths",
        type=lengths,
        default=(256,),
        metavar="N,N,…",
        help="tokens of a passage before the model goes on; several for contexts of several lengths "
        "(default 256)",
    )
    add("--prompt", type=lengths, dest="prompt_lengths", help=argparse.SUPPRESS)  # its earlier name
    add(
        "--write-batch",
        type=integer,
        metavar="N",
        help="texts that the model writes together (default 48; CUDA 32)",
    )
    add = parser.add_argument_group("training").add_argument
    add("--epochs", metavar="X", type=number, help="passes over the data; 0: the start alone (default 3)")
    add("--steps", metavar="N", type=integer, help="optimiser steps instead of epochs")
    add("--batch", metavar="N", type=integer, help="windows per device and forward (default 4)")
    add("--window", metavar="N", type=integer, help="positions per window (default 128)")
    add("--accumulate", metavar="N", type=integer, help="batches per optimiser step (default 1)")
    add("--lr", metavar="X", type=number, help="peak learning rate (default 0.001)")
    add("--weight-decay", type=number, metavar="X", help="AdamW's (default 0.01)")
    add("--beta2", type=number, metavar="X", help="AdamW's (default 0.98)")
    add("--warmup", metavar="N", type=integer, help="steps until the peak (default 30)")
    add(
        "--loss-vocabulary",
        type=integer,
        metavar="N",
        help="frequent tokens in the loss; 0: all (default 4096; CUDA all)",
    )
    add("--vocabulary", type=integer, dest="loss_vocabulary", help=argparse.SUPPRESS)  # its earlier name
    add(
        "--held-out",
        type=number,
        metavar="X",
        help="share of the sequences whose loss is only logged (default 0.02)",
    )
    add("--save-every", type=integer, metavar="N", help="steps between checkpoints (default 200)")
    add(
        "--work",
        type=Path,
        metavar="DIR",
        help="folder for states, checkpoints and log.csv (default OUT.work)",
    )
    add(
        "--dtype",
        metavar="T",
        default="auto",
        help="bfloat16, float32, or auto: what the hardware has",
    )
    add(
        "--device",
        metavar="D",
        default="auto",
        help="auto, cpu, cuda (torchrun: each its own) or cuda:N",
    )
    add("--tensorboard", action="store_true", help="also write TensorBoard logs to the work folder")
    add("--quiet", action="store_true", help="no progress lines")
    add_sampling_options(parser, "sampling (what the model writes, and the distribution that is learnt)")


def lengths(text: str) -> tuple[int, ...]:
    """An argparse type: ascending lengths with commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; valid: integers such as 256,1024") from None


def job_of(args: argparse.Namespace) -> Job:
    """Check the common options and the places to write to; those not given come from the recipe, then from
    the place to run. Says what is about to be done before anything heavy is imported.

    Raises:
        InputError: an option out of its range, a place that cannot be written, or --data that names nothing.
    """
    from tokenswift.config import check_choice
    from tokenswift.models.load import check_name, check_place, check_place_names, native_bfloat16
    from tokenswift.train.data import check_source
    from tokenswift.train.options import RECIPES, Job
    from tokenswift.train.processes import local_device
    from tokenswift.types import InputError

    if (args.data is None) == (not args.states):
        raise InputError("--data or --states is needed, and not both: where the hidden states come from")
    check_choice("recipe", getattr(args, "recipe", "own"), tuple(RECIPES))
    check_name(args.model)
    check_place_names(args.dtype, args.device)
    sampling = sampling_from(args)
    work = check_folder("--work", args.work or args.out.with_name(args.out.name + ".work"))
    if args.data is not None:
        check_source(args.data)
    check_apart(
        {"--out": args.out, "--work": work, "--pack": getattr(args, "pack", None)}, options.inputs_of(args)
    )
    _options(args, sampling, cuda=False, bf16=False)

    logger.info("loading %s", args.model)
    device = local_device(check_place(args.dtype, args.device))
    dtype = args.dtype
    if dtype == "auto":
        dtype = "bfloat16" if native_bfloat16(device) else "float32"
    data, training, vocabulary = _options(args, sampling, cuda=device != "cpu", bf16=dtype == "bfloat16")
    name = Path(args.model).name
    return Job(data, training, args.out, work, vocabulary, name, sampling, tuple(args.states), dtype, device)


def _options(
    args: argparse.Namespace, sampling: SamplingParams, cuda: bool, bf16: bool
) -> tuple[DataOptions | None, TrainingOptions, int]:
    """Data, training and the loss's vocabulary on a place to run."""
    from tokenswift.config import check_integer
    from tokenswift.train.options import RECIPES, DataOptions, TrainingOptions

    place = {
        "tokens": 4_000_000 if cuda else 300_000,
        "sequence_length": 8192 if cuda else 768,
        "write_batch": 32 if cuda else 48,
        "loss_vocabulary": 0 if cuda else 4096,
    }
    given = {name: value for name, value in vars(args).items() if value is not None}
    given["prompt"] = given.pop("prompt_lengths")
    chosen = {**place, **RECIPES[getattr(args, "recipe", "own")], **given, "sampling": sampling, "bf16": bf16}

    def of(kind: type) -> dict[str, Any]:
        return {name: chosen[name] for name in kind.__dataclass_fields__ if name in chosen}

    check_integer("loss_vocabulary", chosen["loss_vocabulary"], 0)
    data = None if args.data is None else DataOptions(source=args.data, **of(DataOptions))
    return data, TrainingOptions(**of(TrainingOptions)), chosen["loss_vocabulary"]


def load_base(args: argparse.Namespace, job: Job) -> tuple[Loaded, Job]:
    """The model to train for, and the job with its sampling where that is asked for."""
    from tokenswift.models.load import load

    with Stages(args.quiet) as stages:
        loaded = load(args.model, dtype=job.dtype, device=job.device, on_progress=stages)
    sampling = options.model_sampling(args, job.learnt, loaded)
    data = None if job.data is None else replace(job.data, sampling=sampling)
    return loaded, replace(job, sampling=sampling, data=data)


@contextmanager
def keeping(work: Path) -> Iterator[None]:
    """Inside the block, whatever ends the command says what is kept of it in the work folder."""

    def kept() -> str:
        if not work.is_dir():
            return "nothing was kept"
        return f"states and checkpoints so far are in {work}; the same command goes on with them"

    with Signals():
        try:
            yield
        except Interrupted as error:
            raise Interrupted(error.number, kept()) from None
        except RunError as error:
            raise error if "kept" in str(error) else RunError(f"{error}; {kept()}") from error
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise RunError(f"{where}{error.strerror or error}; {kept()}") from error


def run(args: argparse.Namespace) -> int:
    """Train and write the heads file."""
    from tokenswift.config import check_integer, check_number
    from tokenswift.train.options import RECIPES

    recipe = RECIPES.get(args.recipe, {})
    kind = args.kind or recipe.get("kind", "conditioned")
    count = args.num_heads if args.num_heads is not None else recipe.get("heads", 3)
    check_integer("num_heads", count, 1)
    if args.inner is not None:
        check_integer("inner", args.inner, 0, "at least 0 (0: no hidden layer)")
    check_integer("blocks", args.blocks, 1, "at least 1 residual block")
    check_number("coverage", args.coverage, "above 0, at most 1", 0 < args.coverage <= 1)
    check_writable("--out", args.out, renamed=True)
    job = job_of(args)
    with keeping(job.work):
        loaded, job = load_base(args, job)
        from tokenswift.train.pipeline import train_heads

        notes = train_heads(
            loaded.model,
            loaded.tokenizer,
            job,
            logger.info,
            kind=kind,
            count=count,
            inner=args.inner,
            blocks=args.blocks,
            coverage=args.coverage,
        )
    logger.info("wrote %s: %s", args.out, ", ".join(f"{k} {v}" for k, v in notes.items()))
    return 0
