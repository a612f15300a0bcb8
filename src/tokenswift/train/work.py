"""A work folder: which training it belongs to, and how several processes (``torchrun``) share it.

What states and losses depend on is kept beside them: of the states in the store's index, of the training in
``manifest.json``. A command for which any of it differs is refused, so that a resumed run equals an unbroken
one. Paths, progress, how often checkpoints are written and the like are not in it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tokenswift.config import ADJUSTING, SamplingParams, settings_of
from tokenswift.files import replacing
from tokenswift.loader.identity import BaseIdentity, digest_of
from tokenswift.train.data import fingerprint, prefix_of
from tokenswift.train.options import DataOptions, Job
from tokenswift.types import InputError

#: raised whenever the same options make other states
VERSION = 3


def states_part(
    model: Any, tokenizer: Any, base: BaseIdentity, data: DataOptions, job: Job
) -> dict[str, Any]:
    """What hidden states depend on. Batches, seed and sampling count only where the model writes."""
    part = asdict(data) | {
        "version": VERSION,
        "base": [base.vocab_size, base.hidden_size, *base.sample.tolist()],
        "dtype": str(model.dtype),
        "tokenizer": digest_of([sorted(tokenizer.get_vocab().items()), prefix_of(tokenizer)], 16),
        "data": fingerprint(data.data),
        "seed": job.training.seed,
        "sampling": _law(job.sampling),
    }
    idle = () if data.continued else ("prompt_lengths",)
    idle = idle if data.writes else (*idle, "write_batch", "seed", "sampling")
    return {name: value for name, value in part.items() if name not in idle}


def training_part(
    states: Sequence[dict[str, Any]], job: Job, vocabulary: Int[Tensor, " S"], about: dict[str, Any]
) -> dict[str, Any]:
    """What losses and weights depend on.

    Args:
        states: what each store was made from.
        vocabulary: ids of the tokens in the loss.
        about: further values, such as what the heads look like.
    """
    part = asdict(job.training) | {
        "loss_vocabulary": digest_of(vocabulary.tolist(), 16),
        "states": [digest_of(made_from, 16) for made_from in states],
        "sampling": _law(job.sampling) if job.training.targets == "model" else None,
        "processes": world_size(),
    }
    del part["save_every"], part["log_every"]
    return part | about


def _law(sampling: SamplingParams) -> dict[str, Any]:
    """The fields of a sampler that its distribution depends on."""
    if sampling.grammar is not None:
        raise InputError("sampling has a grammar; valid: none, where heads and draft models learn", "grammar")
    if sampling.adjusts:
        names = ", ".join(settings_of(sampling).keys() & {*ADJUSTING})
        raise InputError(
            f"sampling has {names}; valid: none of it, where heads and draft models learn", "sampling"
        )
    return {**settings_of(sampling), "seed": 0, "penalty_window": sampling.window}


def refuse_other(folder: Path, known: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raise :class:`InputError`, naming what differs, unless a folder belongs to this training."""
    differing = [key for key in sorted({*known, *mine}) if known.get(key) != mine.get(key)]
    if differing:
        raise InputError(
            f"work folder {folder} belongs to another training ({', '.join(differing)} differ); "
            "name another --work folder"
        )


def claim(work: Path, part: dict[str, Any]) -> None:
    """Take a work folder for a training, or check that it is this training's."""
    path = work / "manifest.json"
    if path.exists():
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"work folder {work} has a broken manifest.json; name another --work") from error
        refuse_other(work, known, json.loads(json.dumps(part)))
    elif first_process():
        with replacing(path) as file:
            file.write_text(json.dumps(part, indent=1) + "\n", encoding="utf-8")


def world_size() -> int:
    """Number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process's number among them."""
    return int(os.environ.get("RANK", "0"))


def first_process() -> bool:
    """True in the process that writes the files."""
    return rank() == 0


def local_device(place: str) -> str:
    """The device of this process: "cuda" becomes the one of its local rank.

    Args:
        place: from `loader.load.check_place`.
    Raises:
        InputError: fewer devices than processes on this machine, or one device named for several processes.
    """
    if not place.startswith("cuda") or world_size() == 1:
        return place
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place != "cuda" or local >= count:
        raise InputError(
            f"device is {place!r} for {world_size()} processes, this one of local rank {local}; valid: cuda, "
            f"with a device for each (there are {count}), or cpu"
        )
    return f"cuda:{local}"


def once(done: Callable[[], bool], make: Callable[[], object]) -> None:
    """Run ``make`` in the first process unless its outcome is there; the others wait for the outcome.

    Args:
        done: whether the outcome, whole, lies in the work folder.
    """
    if first_process():
        if not done():
            make()
        return
    while not done():
        time.sleep(0.2)
