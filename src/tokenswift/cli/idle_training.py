"""``tokenswift serve --train-when-idle``: what is trained, whether there is memory for it, and the
program that does it (`idle_child`)."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tokenswift.cli.drafter_advice import LEAST_LAYERS
from tokenswift.cli.train import place_for
from tokenswift.loader.default_model import packaged_drafter
from tokenswift.serve.settings import Settings
from tokenswift.types import InputError

if TYPE_CHECKING:
    from tokenswift.engine.llm import LLM
    from tokenswift.serve.idle import IdleProgram

logger = logging.getLogger("tokenswift")
PROGRAM = "tokenswift.cli.idle_child"
NAME = "training when idle"
SAVE_EVERY = 100  # steps: what a restart of the server repeats at most
TEXTS = ".texts"  # end of the folder that keeps the texts of runs, as they were at the start
#: bytes of a training besides the model, its texts under way and their states: the drafter with
#: gradients and moments, logits of a window, and torch's own
TRAINING_BYTES = 1_300_000_000
STATES_BYTES = 2  # of a number of a token's states
FEATURES = 3  # states of a token
SPARE = 256 << 20  # bytes that stay free


def check_training(args: argparse.Namespace, settings: Settings) -> None:
    """What can be checked before the model is loaded.

    Raises:
        InputError: options that contradict each other, or texts that are not there.
    """
    if not settings.train_when_idle:
        return
    for name, usual in (("weights", "stored"), ("eagle", "auto")):
        value = getattr(args, name)
        if value != usual:
            text = f"train_when_idle is given with {name} {value}"
            raise InputError(f"{text}; valid: {name} {usual}", "train_when_idle")
    place = place_for(args.model, "eagle")
    is_there = place.is_file() or packaged_drafter(args.model) is not None
    if settings.train_more is not None and not is_there:
        text = f"{place} is not there to go on from"
        raise InputError(f"{text}; valid: train_when_idle without train_more first", "train_more")
    if settings.train_from_runs is not None and not texts_of(place).is_dir():
        files = sorted(Path(settings.train_from_runs).expanduser().rglob("*.txt"))
        if not files:
            text = f"train_from_runs {settings.train_from_runs} holds no text"
            raise InputError(f"{text}; valid: a folder of runs", "train_from_runs")


def idle_training(args: argparse.Namespace, settings: Settings, llm: LLM) -> IdleProgram | None:
    """The training that a server is to have beside it; None: none, or all is done.

    Raises:
        InputError: it does not fit the memory, or runs on a CPU alone.
        OSError: the texts of runs cannot be copied.
    """
    if not settings.train_when_idle:
        resources = llm.resources
        is_plain = resources.eagle is None and resources.heads is None
        if is_plain and llm.device == "cpu" and llm.target.layers >= LEAST_LAYERS:
            logger.info("nothing was trained to draft for this model; --train-when-idle does it")
        return None
    if llm.device != "cpu":
        text = f"train_when_idle is given with device {llm.device}"
        raise InputError(f"{text}; valid: device cpu", "train_when_idle")
    place = place_for(args.model, "eagle")
    if llm.resources.eagle is not None and settings.train_more is None:
        text = "the model has a drafter; --train-more N goes on from one that was trained"
        logger.info("%s: %s", NAME, text)
        return None
    from tokenswift.serve.idle import IdleProgram

    check_memory(llm)
    place.parent.mkdir(parents=True, exist_ok=True)
    command = [PROGRAM, "-m", args.model, "--dtype", args.dtype, "--device", "cpu"]
    command += ["--save-every", str(SAVE_EVERY)]
    if settings.train_tokens is not None:
        command += ["--tokens", str(settings.train_tokens)]
    if settings.train_more is not None:
        command += ["--more", str(settings.train_more)]
    if settings.train_from_runs is not None:
        command += ["--from-runs", str(copied_texts(settings.train_from_runs, texts_of(place)))]
    logger.info("%s: a drafter for %s, written to %s", NAME, llm.name, place)

    def take() -> None:
        shutil.rmtree(texts_of(place), ignore_errors=True)
        if llm.resources.take_trained():
            logger.info("drafter: trained for this model, from now on")

    return IdleProgram(command, NAME, args.threads, take)


def check_memory(llm: LLM) -> None:
    """See that the memory of this machine holds a training, which loads the model once more.

    Raises:
        InputError: with what it needs, and what is available.
    """
    from tokenswift.memory import resident
    from tokenswift.train.options import DataOptions

    memory = llm.target.backend.memory()
    if memory is None:
        return
    data = DataOptions("self")
    cache = llm.target.cache_bytes(data.longest)
    states = data.longest * FEATURES * llm.target.hidden_size * STATES_BYTES
    needed = resident() + data.write_batch * (cache + states) + TRAINING_BYTES + SPARE
    if needed > memory.free:
        text = f"train_when_idle needs {needed:,} bytes of memory beside the model that is served"
        valid = "without it, or a machine with more memory"
        raise InputError(
            f"{text}, {memory.free:,} bytes are available; valid: {valid}", "train_when_idle"
        )


def texts_of(place: Path) -> Path:
    """The folder that keeps the texts of runs that a drafter is trained on."""
    return place.with_name(f"{place.name}{TEXTS}")


def copied_texts(source: str, folder: Path) -> Path:
    """The folder with the texts of a folder of runs, which are copied unless they are there
    already: a training that goes on after a restart learns from the same ones.

    Raises:
        OSError: as the system says.
    """
    if folder.is_dir():
        return folder
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(mode=0o700, parents=True)
    for number, file in enumerate(sorted(Path(source).expanduser().rglob("*.txt"))):
        shutil.copyfile(file, part / f"{number:06}.txt")
    os.replace(part, folder)
    return folder
