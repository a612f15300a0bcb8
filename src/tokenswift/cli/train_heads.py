"""`tokenswift train-heads`: draft heads for any model, in one command."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tokenswift.cli import options
from tokenswift.cli.declare import add_options, check_options, option
from tokenswift.cli.options import DEFAULT_MODEL, add_sampling_options, sampling_from
from tokenswift.cli.output import check_apart, check_folder, check_writable
from tokenswift.cli.terminal import Interrupted, Signals, Stages
from tokenswift.train.options import RECIPES, DataOptions, Job, TrainingOptions
from tokenswift.types import InputError, RunError

logger = logging.getLogger("tokenswift")


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
        kind: conditioned; linear (the paper's, by its Table 9, which needs a large GPU: other options given
            win); or medusa
        num_heads: number of heads
        inner: hidden layer of conditioned heads; 0: none
    """

    out: Path = option(metavar="FILE")
    kind: str = option("conditioned", choices=tuple(RECIPES))
    num_heads: int = option(3, earlier="--heads", least=1)
    inner: int = option(1024, least=0, valid="at least 0 (0: no hidden layer)")


@dataclass(frozen=True)
class Source:
    """Where the hidden states come from.

    Attributes:
        data: a text or JSONL file, a folder of them, self (the model writes the text), or pg19
        states: finished work folders of earlier trainings, instead of --data
    """

    data: str | None = option(None, "PATH")
    states: list[Path] = option((), "FOLDER", type=Path, nargs="+")


@dataclass(frozen=True)
class Place:
    """Where training runs, and what it leaves.

    Attributes:
        work: folder for states, checkpoint and log.csv (default OUT.work)
        dtype: bfloat16, float32, or auto: what the hardware has
        device: auto, cpu, cuda (torchrun: each its own) or cuda:N
        quiet: no progress lines
    """

    work: Path | None = option(None, "DIR")
    dtype: str = option("auto", "T")
    device: str = option("auto", "D")
    quiet: bool = option(False)


#: fields of `train.options.TrainingOptions` that are no options of their own
ASIDE = ("targets", "log_every", "seed", "bf16")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("train-heads", help="train draft heads for a model")
    add_options(parser, Base)
    add_options(parser, Heads)
    add_training_options(parser)


def add_training_options(parser: Any, recipe: Mapping[str, Any] | None = None) -> None:
    """What training commands have in common; ``recipe``: defaults of this command alone."""
    group = parser.add_argument_group("data")
    add_options(group, Source)
    add_options(group, DataOptions, {one.name for one in fields(DataOptions)} - {"data"}, unset=True)
    group = parser.add_argument_group("training")
    known = {one.name for one in fields(TrainingOptions)} - {*ASIDE}
    add_options(group, TrainingOptions, known, unset=True, **(recipe or {}))
    add_options(group, Place)
    title = "sampling (what the model writes, and the distribution that is learnt)"
    add_sampling_options(parser, title, plain=True)


def job_of(args: argparse.Namespace, recipe: dict[str, Any]) -> tuple[Job, str, str]:
    """The job, and the model's dtype and device. Options that are not given come from the recipe, then from
    the place to run. Says what is about to be done before anything heavy is imported.

    Raises:
        InputError: an option out of its range, a place that cannot be written, or --data that names nothing.
    """
    from tokenswift.config import LoadConfig
    from tokenswift.loader.find import check_name
    from tokenswift.train.data import check_source

    if (args.data is None) == (not args.states):
        raise InputError("--data or --states is needed, and not both: where the hidden states come from")
    check_name(args.model)
    how = LoadConfig(args.dtype, args.device)
    sampling = sampling_from(args)
    work = check_folder("--work", args.work or args.out.with_name(args.out.name + ".work"))
    if args.data is not None:
        check_source(args.data)
    outputs = {"--out": args.out, "--work": work}
    check_apart(outputs, options.inputs_of(args))
    given = {name: value for name, value in vars(args).items() if value is not None}

    def job(usual: dict[str, Any], bf16: bool) -> Job:
        chosen = {"loss_vocabulary": 4096, **usual, **recipe, **given, "seed": sampling.seed, "bf16": bf16}
        data, training = (
            {one.name: chosen[one.name] for one in fields(kind) if one.name in chosen}
            for kind in (DataOptions, TrainingOptions)
        )
        source = None if args.data is None else DataOptions(**data)
        name = Path(args.model).name
        return Job(source, TrainingOptions(**training), args.out, work, name, sampling, tuple(args.states))

    job({}, False)  # ranges show before anything heavy is imported
    logger.info("loading %s", args.model)
    from tokenswift.loader.load import check_place, native_bfloat16
    from tokenswift.train.loop import local_device

    device = local_device(check_place(how))
    dtype = args.dtype
    if dtype == "auto":
        dtype = "bfloat16" if native_bfloat16(device) else "float32"
    cuda = {"tokens": 4_000_000, "sequence_length": 8192, "write_batch": 32, "loss_vocabulary": 0}
    return job({} if device == "cpu" else cuda, dtype == "bfloat16"), dtype, device


def trained(args: argparse.Namespace, recipe: dict[str, Any], train: Callable[..., dict[str, Any]]) -> None:
    """Load the model, train for it, and say what came out.

    Args:
        train: takes the model, its tokenizer, the job, and where lines and progress go; returns notes.
    """
    job, dtype, device = job_of(args, recipe)

    from tokenswift.loader.load import load
    from tokenswift.train.loop import first_process

    if not first_process():
        logger.setLevel(logging.ERROR)  # one of them is enough
    with keeping(job.work), Stages(args.quiet or not first_process()) as stages:

        def report(line: str) -> None:
            stages.end()  # its line is its own
            logger.info(line)

        loaded = load(args.model, dtype=dtype, device=device, on_progress=stages)
        job = replace(job, sampling=options.model_sampling(args, job.sampling, loaded))
        notes = train(loaded.model, loaded.tokenizer, job, report, stages)
    logger.info("wrote %s: %s", args.out, ", ".join(f"{k} {v}" for k, v in notes.items()))


@contextmanager
def keeping(work: Path) -> Iterator[None]:
    """Inside the block, whatever ends the command says what is kept of it in the work folder."""

    def kept() -> str:
        if not work.is_dir():
            return "nothing was kept"
        return f"what is done so far is kept in {work}; the same command resumes it"

    with Signals():
        try:
            yield
        except Interrupted as error:
            raise Interrupted(error.number, kept()) from None
        except RunError as error:
            raise RunError(f"{error}; {kept()}") from error
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise RunError(f"{where}{error.strerror or error}; {kept()}") from error


def run(args: argparse.Namespace) -> int:
    """Train and write the heads file."""
    check_options(args, Heads)
    check_writable("--out", args.out, renamed=True)

    def train(*given: Any) -> dict[str, Any]:
        from tokenswift.train.heads import train_heads

        return train_heads(*given, kind=args.kind, count=args.num_heads, inner=args.inner)

    trained(args, RECIPES[args.kind], train)
    return 0
