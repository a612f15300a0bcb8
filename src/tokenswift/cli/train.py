"""``tokenswift train``: an EAGLE-3 drafter or draft heads for a model."""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from tokenswift.checks import LARGEST, check_choice
from tokenswift.cli import options
from tokenswift.cli.declare import Subparsers, add_options, command
from tokenswift.cli.progress import Stages
from tokenswift.cli.results import check_writable
from tokenswift.cli.signals import saying_what_is_kept
from tokenswift.config.fields import SHOWN, AtLeast, Option, field_types
from tokenswift.config.loading import LoadConfig
from tokenswift.config.sampling import NEUTRAL, SamplingParams
from tokenswift.files import replacing
from tokenswift.loader.default_model import DEFAULT, cache_dir, packaged_drafter
from tokenswift.loader.find import HEADS, check_name
from tokenswift.train.options import RECIPES, DataOptions, Job, TrainingOptions
from tokenswift.types import InputError

logger = logging.getLogger("tokenswift")
#: fields of `TrainingOptions` and `DataOptions` that are no options of their own
SET_OTHERWISE = ("data", "from_runs", "targets", "seed", "bf16")
MORE_LR = 3e-4  # peak learning rate of a training that goes on
HEAD_WIDTH = 64  # of eagle's attention
#: what a drafter of the kind eagle learns where no option of sampling is given
EAGLE_SAMPLING = {**NEUTRAL, "temperature": 0.8}
#: defaults of a CUDA device
CUDA_DEFAULTS = {
    "tokens": 4_000_000,
    "sequence_length": 8192,
    "write_batch": 32,
    "prose_length": 8192,
}


@dataclass(frozen=True)
class Drafter(options.Quiet):
    """What is trained, from what, and where.

    Attributes:
        model: the model that it drafts for, as for generate
        kind: eagle, conditioned, medusa or linear; eagle is a narrow layer that reads the inputs of
            three of the model's layers (EAGLE-3), the others are draft heads (linear: the paper's,
            by its Table 9, which needs a large GPU)
        out: file to write; by default one in the cache folder, which is found whenever the model is
            loaded
        num_heads: number of draft heads, for the kinds that are heads
        inner: width of the hidden layer of conditioned heads; 0: no such layer
        depths: length of the chains that eagle learns to draft, in tokens
        hidden: width of eagle, a multiple of 64
        data: what the model writes for the drafter to learn from: self (answers to questions,
            essays, stories, code, tables and long prose), or continuations of passages of a text
            file or of a folder of them
        more: continue from the drafter that is there already, with as many tokens of new texts; the
            better of the two on texts that were held out is kept
        from_runs: folder of runs, such as --run-dir of serve or generate: the model also continues
            passages of their texts, in turns with the questions
        work: folder for states and checkpoint; default: OUT.work, or with --more OUT.more, which is
            removed at the end
        dtype: of the model's passes, as for generate
        device: auto, cpu, cuda or cuda:N
    """

    model: Annotated[str, Option("M", shown=True, short="-m")] = DEFAULT
    kind: Annotated[str, SHOWN] = "eagle"
    out: Annotated[Path | None, SHOWN] = None
    num_heads: Annotated[int, AtLeast(1), SHOWN] = 3
    inner: Annotated[int, AtLeast(0, "at least 0 (0: no hidden layer)")] = 1024
    depths: Annotated[int, AtLeast(1)] = 3
    hidden: Annotated[int, AtLeast(HEAD_WIDTH)] = 768
    data: Annotated[str, Option("PATH", shown=True)] = "self"
    from_runs: Annotated[str | None, Option("DIR", shown=True)] = None
    more: Annotated[int | None, AtLeast(256), Option("N", shown=True)] = None
    work: Annotated[Path | None, Option("DIR", shown=True)] = None
    dtype: Annotated[str, SHOWN] = "auto"
    device: Annotated[str, SHOWN] = "auto"


def add_parser(subparsers: Subparsers) -> None:
    """Register the subcommand."""
    summary = "train an EAGLE-3 drafter or draft heads for a model"
    parser = command(subparsers, "train", run, summary)
    add_options(parser, Drafter)
    group = parser.add_argument_group("training (defaults of the kind eagle)")
    for kind in (DataOptions, TrainingOptions):
        names = [field.name for field in fields(kind) if field.name not in SET_OTHERWISE]
        add_options(group, kind, names, unset=True, **RECIPES["eagle"])
    title = "sampling of what is learnt (defaults of the kind eagle)"
    options.add_sampling_options(parser, title, plain=True, **EAGLE_SAMPLING)


def place_for(model: str, kind: str) -> Path:
    """Where what is trained for a model is found: a file of its own for each model and kind."""
    end = ".gguf" if kind == "eagle" else f".{kind}{HEADS}"
    return cache_dir() / "drafters" / f"{Path(model).absolute().name.removesuffix('.gguf')}{end}"


def run(args: argparse.Namespace) -> int:
    """Train a drafter for a model. It learns the model's next-token distribution, as decoding
    processes it, from hidden states that the model computes once. The same command resumes an
    interrupted training."""
    return trained(args, Stages(args.quiet))


def trained(args: argparse.Namespace, progress: Stages) -> int:
    """See :func:`run`; ``progress`` is told how far it is."""
    _check_request(args)
    job, dtype, device = job_of(args)
    logger.info("loading %s", args.model)

    from tokenswift.engine.llm import LLM
    from tokenswift.train.eagle import train_eagle
    from tokenswift.train.heads import train_heads

    def what_is_kept() -> str:
        if not job.work.is_dir():
            return "nothing was kept"
        return f"what is done so far is kept in {job.work}; the same command resumes it"

    with saying_what_is_kept(what_is_kept), progress as stages:
        llm = LLM(args.model, dtype, device, heads=None, eagle=None, on_progress=stages)
        if args.kind == "eagle":
            notes = train_eagle(
                llm,
                job,
                logger.info,
                stages,
                depths=args.depths,
                hidden=args.hidden,
                goes_on=args.more is not None,
            )
        else:
            notes = train_heads(
                llm,
                job,
                logger.info,
                stages,
                kind=args.kind,
                count=args.num_heads,
                inner=args.inner,
            )
    if args.more is not None:  # the next one begins with another drafter
        shutil.rmtree(job.work, ignore_errors=True)
    figures = ", ".join(f"{name} {value}" for name, value in notes.items())
    logger.info("%s %s: %s", "kept" if "kept" in notes else "wrote", args.out, figures)
    return 0


def _check_request(args: argparse.Namespace) -> None:
    """Check what is trained and where it is written; ``out`` is set where it is not given.

    Raises:
        InputError: a kind or a width that there is not, a place that cannot be written, or a
            training to go on from that is not there.
    """
    check_choice("kind", args.kind, tuple(RECIPES))
    if args.hidden % HEAD_WIDTH:
        raise InputError(f"hidden is {args.hidden}; valid: a multiple of {HEAD_WIDTH}", "hidden")
    if args.out is None:
        args.out = place_for(args.model, args.kind)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        shipped = packaged_drafter(args.model)
        if args.kind == "eagle" and shipped is not None and not args.out.exists():
            # to go on from; and a worse one does not take its place
            with replacing(args.out) as part:
                shutil.copyfile(shipped, part)
    check_writable("--out", args.out, "regular file")
    if args.more is not None and args.kind != "eagle":
        raise InputError(f"more is given with kind {args.kind}; valid: kind eagle", "more")
    if args.more is not None and not args.out.is_file():
        text = f"{args.out}, which --more continues, is not there"
        raise InputError(f"{text}; valid: train without --more first", "more")


def job_of(args: argparse.Namespace) -> tuple[Job, str, str]:
    """The job, and the model's dtype and device. Options that are not given come from the kind's
    recipe, then from the place to run.

    Raises:
        InputError: an option out of its range, a place that cannot be written, or --data that names
            nothing.
    """
    from tokenswift.loader.identity import file_digest
    from tokenswift.loader.load import check_place, native_bfloat16
    from tokenswift.train.texts import files_of

    check_name(args.model)
    device = check_place(LoadConfig(args.dtype, args.device))
    eagles = SamplingParams(**EAGLE_SAMPLING)
    sampling = options.sampling_from(args, eagles if args.kind == "eagle" else None)
    ending = "work" if args.more is None else "more"
    work = check_writable("--work", args.work or f"{args.out}.{ending}", "folder")
    if args.from_runs is not None:
        if args.data != "self":
            text = f"from_runs is given together with data {args.data}"
            raise InputError(f"{text}; valid: one of the two", "from_runs")
        files_of(args.from_runs, "--from-runs")
    if args.data != "self":
        files_of(args.data)
    values: dict[str, Any] = {"loss_vocabulary": 4096}
    values |= {} if device == "cpu" else CUDA_DEFAULTS
    values |= RECIPES[args.kind]
    values |= {name: value for name, value in vars(args).items() if value is not None}
    if args.more is not None:  # other texts than those before, and smaller steps from the start on
        values["tokens"] = args.more
        values["lr"] = args.lr or MORE_LR
        number = int(file_digest(args.out)[:6], 16)
        sampling = replace(sampling, seed=(sampling.seed + 1 + number) % LARGEST)
    values |= {"seed": sampling.seed, "bf16": native_bfloat16(device)}
    job = Job(
        data=DataOptions(**values_of(DataOptions, values)),
        training=TrainingOptions(**values_of(TrainingOptions, values)),
        out=args.out,
        work=work,
        name=Path(args.model).name,
        sampling=sampling,
    )
    return job, args.dtype, device


def values_of(options_class: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that are fields of a class of options."""
    names = field_types(options_class)
    return {name: values[name] for name in names if name in values}
