"""What a work folder belongs to: everything that its states and losses depend on, and nothing else.

Two parts. ``states``: the base model, its tokenizer, the data's contents and how text was made of them; it
lies in the store's index. ``training``: those states, the heads, the loss and the optimiser; it lies in
``manifest.json`` beside the checkpoints. A command whose manifest differs is refused, so that a resumed run
equals an unbroken one. Paths, progress, how often checkpoints are written and the like are not in it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tokenswift.config import SamplingParams
from tokenswift.files import replacing
from tokenswift.loader.identity import digest_of
from tokenswift.train.processes import first_process, world_size
from tokenswift.types import InputError, RunError

if TYPE_CHECKING:
    from tokenswift.loader.identity import BaseIdentity
    from tokenswift.train.options import DataOptions, TrainingOptions
    from tokenswift.train.store import HiddenStore

#: raised whenever the same options make other states
VERSION = 2


def states_part(model: Any, tokenizer: Any, base: BaseIdentity, data: DataOptions) -> dict[str, Any]:
    """What hidden states depend on. Batches, seed and sampling count only where the model writes."""
    from tokenswift.train.data import fingerprint, prefix_of

    writes = data.continued or data.source == "self"
    part: dict[str, Any] = {
        "version": VERSION,
        "base": [base.vocab_size, base.hidden_size, round(float(base.sample.abs().sum()), 1)],
        "dtype": str(model.dtype),
        "tokenizer": digest_of([sorted(tokenizer.get_vocab().items()), prefix_of(tokenizer)], 16),
        "data": fingerprint(data.source),
        "continued": data.continued,
        "tokens": data.tokens,
        "sequence_length": data.sequence_length,
    }
    if writes:
        part |= {"write_batch": data.write_batch, "seed": data.seed, "sampling": processing(data.sampling)}
    if data.continued:
        part["prompt"] = list(data.prompt)
    return part


def training_part(
    stores: list[HiddenStore],
    training: TrainingOptions,
    sampling: SamplingParams,
    vocabulary: torch.Tensor,
    **more: Any,
) -> dict[str, Any]:
    """What losses and weights depend on.

    Args:
        stores: the hidden states, in order.
        training: how to train.
        sampling: the sampler whose distribution is learnt.
        vocabulary: ids of the tokens in the loss.
        more: further values, such as what the heads look like.
    """
    part = asdict(training) | {"vocabulary": digest_of(vocabulary.tolist(), 16)}
    for name in ("save_every", "log_every", "tensorboard"):
        del part[name]
    states = [digest_of([store.made_from, store.tokens_stored], 16) for store in stores]
    learnt = processing(sampling) if training.targets == "model" else None
    return json.loads(
        json.dumps({"states": states, "sampling": learnt, "processes": world_size(), **part, **more})
    )


def processing(sampling: SamplingParams) -> dict[str, Any]:
    """The fields of a sampler that its distribution depends on."""
    fields = asdict(sampling)
    del fields["seed"]
    if not sampling.window:
        del fields["penalty_window"]
    return fields


def refuse_other(work: Path, known: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raise :class:`InputError`, naming what differs, unless a folder's manifest is this one."""
    differing = [key for key in sorted({*known, *mine}) if known.get(key) != mine.get(key)]
    if differing:
        raise InputError(
            f"work folder {work} belongs to another training ({', '.join(differing)} differ); "
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
        refuse_other(work, known, part)
    elif first_process():
        try:
            with replacing(path) as file:
                file.write_text(json.dumps(part, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise RunError(f"cannot write to {work}: {error.strerror}") from error
