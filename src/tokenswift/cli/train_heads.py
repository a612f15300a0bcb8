"""`tokenswift train-heads`: draft heads for any model, in one command."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenswift.cli import options
from tokenswift.cli.declare import add_options, check_options, option
from tokenswift.cli.options import DEFAULT_MODEL, add_sampling_options, sampling_from
from tokenswift.cli.output import check_apart, check_folder, check_writable
from tokenswift.cli.progress import Stages
from tokenswift.cli.signals import Interrupted, Signals
from tokenswift.train.options import RECIPES, DataOptions, Job, TrainingOptions
from tokenswift.types import InputError, RunError

if TYPE_CHECKING:
    from tokenswift.config import SamplingParams
    from tokenswift.loader.load import Loaded

logger = logging.getLogger("tokenswift")


def lengths(text: str) -> tuple[int, ...]:
    """An argparse type: ascending lengths with commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; valid: integers such as 256,1024") from None


@dataclass(frozen=True)
class Base:
    """Which model is trained for.

    Attributes:
        model: alias, folder or hub id of the base model
    """

    model: str = option(DEFAULT_MODEL, "M")


@dataclass(frozen=True)
class Heads:
    """Which heads are trained.

    Attributes:
        out: heads file to write
        recipe: own, or paper (its heads, loss and Table 9's settings; needs a large GPU); other options
            given win
        kind: sort of heads: linear, conditioned or medusa (default conditioned)
        num_heads: number of heads (default 3)
        inner: hidden layer of conditioned heads; 0: none (default 1024)
        blocks: residual blocks of Medusa heads
        coverage: tokens worth drafting: the most frequent ones that make up this share of the training text
    """

    out: Path = option(metavar="FILE")
    recipe: str = option("own")
    kind: str | None = option(None, choices=("linear", "conditioned", "medusa"))
    num_heads: int | None = option(None, earlier="--heads")
    inner: int | None = option(None, least=0, valid="at least 0 (0: no hidden layer)")
    blocks: int = option(1, least=1, valid="at least 1 residual block")
    coverage: float = option(0.92)


@dataclass(frozen=True)
class Data:
    """Where the hidden states come from.

    Attributes:
        data: a text or JSONL file, a folder of them, self, or pg19
        states: finished work folders of train-heads, instead of --data
        continued: learn from the model's continuations of the data
        tokens: tokens to learn from (default 300,000; CUDA 4,000,000)
        sequence_length: tokens run through the model at once (default 768; CUDA 8192)
        prompt_lengths: tokens of a passage before the model goes on; several for contexts of several lengths
            (default 256)
        write_batch: texts that the model writes together (default 48; CUDA 32)
    """

    data: str | None = option(None, "PATH")
    states: list[Path] = option((), "FOLDER", type=Path, nargs="+")
    continued: bool | None = option(None)
    tokens: int | None = option(None)
    sequence_length: int | None = option(None, earlier="--block")
    prompt_lengths: tuple[int, ...] = option((256,), "N,N,…", type=lengths, earlier="--prompt")
    write_batch: int | None = option(None)


@dataclass(frozen=True)
class Place:
    """Where training runs, and what it leaves.

    Attributes:
        loss_vocabulary: frequent tokens in the loss; 0: all (default 4096; CUDA all)
        work: folder for states, checkpoints and log.csv (default OUT.work)
        dtype: bfloat16, float32, or auto: what the hardware has
        device: auto, cpu, cuda (torchrun: each its own) or cuda:N
        quiet: no progress lines
    """

    loss_vocabulary: int | None = option(None, earlier="--vocabulary")
    work: Path | None = option(None, "DIR")
    dtype: str = option("auto", "T")
    device: str = option("auto", "D")
    quiet: bool = option(False)


#: of `train.options.TrainingOptions`, what the command line has, of heads and of any model
OF_HEADS = ("targets", "start")
OF_ALL = (
    *("epochs", "steps", "lr", "weight_decay", "beta2", "warmup", "batch", "window", "accumulate"),
    *("held_out", "save_every", "tensorboard"),
)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("train-heads", help="train draft heads for a model")
    add_options(parser, Base)
    add_options(parser, Heads)
    add_options(parser, TrainingOptions, only=OF_HEADS, unset=True)
    add_training_options(parser)


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """What train-heads and train-draft have in common: the data and the training."""
    add_options(parser.add_argument_group("data"), Data)
    group = parser.add_argument_group("training")
    add_options(group, TrainingOptions, only=OF_ALL, unset=True)
    add_options(group, Place)
    add_sampling_options(parser, "sampling (what the model writes, and the distribution that is learnt)")


def job_of(args: argparse.Namespace) -> Job:
    """Check the common options and the places to write to; those not given come from the recipe, then from
    the place to run. Says what is about to be done before anything heavy is imported.

    Raises:
        InputError: an option out of its range, a place that cannot be written, or --data that names nothing.
    """
    from tokenswift.config import LoadConfig, check_choice
    from tokenswift.loader.find import check_name
    from tokenswift.loader.load import check_place, native_bfloat16
    from tokenswift.train.data import check_source
    from tokenswift.train.processes import local_device

    if (args.data is None) == (not args.states):
        raise InputError("--data or --states is needed, and not both: where the hidden states come from")
    check_choice("recipe", getattr(args, "recipe", "own"), tuple(RECIPES))
    check_name(args.model)
    how = LoadConfig(args.dtype, args.device)
    sampling = sampling_from(args)
    work = check_folder("--work", args.work or args.out.with_name(args.out.name + ".work"))
    if args.data is not None:
        check_source(args.data)
    check_apart(
        {"--out": args.out, "--work": work, "--pack": getattr(args, "pack", None)}, options.inputs_of(args)
    )
    _options(args, sampling, cuda=False, bf16=False)

    logger.info("loading %s", args.model)
    device = local_device(check_place(how))
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
    from tokenswift.loader.load import load

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

    recipe = RECIPES.get(args.recipe, {})
    kind = args.kind or recipe.get("kind", "conditioned")
    count = args.num_heads if args.num_heads is not None else recipe.get("heads", 3)
    check_integer("num_heads", count, 1)
    check_options(args, Heads)
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
