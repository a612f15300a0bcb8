"""One recipe for every drafter: text → hidden states → distillation → the loss on what was held out.

Every stage leaves its outcome in the work folder, so the same command after a kill resumes where it stopped:
hidden states by whole batches, the student's start as a file, training by a checkpoint. What is trained is a
`loss.Student`: draft heads (`heads`), a draft model (`draft`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset

from tokenswift.loader.identity import TOLERANCE, BaseIdentity, base_of
from tokenswift.train.collect import Report, collect
from tokenswift.train.loop import Training
from tokenswift.train.loss import Distillation, FrozenBase, Student
from tokenswift.train.options import DataOptions, Job
from tokenswift.train.store import HiddenStore, PairedWindows, Windows, counts, frequent, held_out
from tokenswift.train.work import claim, once, states_part, training_part
from tokenswift.types import InputError, OnProgress


def gather(
    model: Any, tokenizer: Any, data: DataOptions, base: BaseIdentity, job: Job, on_progress: OnProgress
) -> HiddenStore:
    """The work folder's store, filled by the first process while others wait."""
    made_from = states_part(model, tokenizer, base, data, job)

    def store() -> HiddenStore:
        return HiddenStore(job.work / "states", base.hidden_size, made_from)

    once(lambda: store().complete, lambda: collect(model, tokenizer, data, job, store(), on_progress))
    return store()


def finished_store(folder: Path, base: BaseIdentity) -> HiddenStore:
    """The whole store of a work folder, whatever data and options it was made with.

    Raises:
        InputError: it is none, is not finished, or of another model.
    """
    for place in (folder / "states", folder):
        try:
            made_from = json.loads((place / "index.json").read_text(encoding="utf-8"))["made_from"]
            vocab_size, width, *sample = made_from["base"]
            break
        except (OSError, ValueError, KeyError, TypeError):
            continue
    else:
        raise InputError(f"states {folder} holds no hidden states; valid: a work folder of train-heads")
    if not BaseIdentity("", width, vocab_size, torch.tensor(sample)).distance(base) <= TOLERANCE:
        raise InputError(f"states {folder} are of another model")
    store = HiddenStore(place, width, made_from)
    if not store.complete or not store.blocks:
        raise InputError(f"states {folder} are not finished; run the command that makes them again")
    return store


class Recipe:
    """The states that a student learns from, and its training.

    Args:
        model, tokenizer: the loaded base; it stays as it is.
        job: what to learn from, how, and where.
        report: takes lines of what is done and found.
        on_progress: told how many tokens have states, and how many steps are done.
        about: what else the outcome depends on; a work folder of other values is refused.

    Attributes:
        base: the model's identity.
        stores: the hidden states, in order.
        counts: how often each token occurs in them.
        frozen: the parts of the model that the loss needs.

    Raises:
        InputError: too little data, foreign states, a work folder of another training.
    """

    def __init__(
        self, model: Any, tokenizer: Any, job: Job, report: Report, on_progress: OnProgress, **about: Any
    ) -> None:
        self.job, self.report, self.on_progress, self._begun = job, report, on_progress, time.monotonic()
        self.base = base_of(model, job.name)
        if job.data is None:
            self.stores = [finished_store(folder, self.base) for folder in job.states]
        else:
            if job.data.writes:
                report(
                    f"the model writes {job.data.tokens:,} tokens to learn from; --tokens for another number"
                )
            self.stores = [gather(model, tokenizer, job.data, self.base, job, on_progress)]
        report(f"hidden states: {sum(store.tokens_stored for store in self.stores):,} tokens")
        self.counts = counts(self.stores, self.base.vocab_size)
        subset = frequent(self.counts, job.training.loss_vocabulary)
        claim(job.work, training_part([store.made_from for store in self.stores], job, subset, about))
        self.frozen = FrozenBase(model, subset)

    def distil(self, student: Student, features: Sequence[HiddenStore] = ()) -> dict[str, Any]:
        """Train a student, in place, on the base's device; notes for its header.

        Args:
            features: of the stores' tokens, where the student reads those and not the states.
        Raises:
            InputError: no text is long enough.
            RunError: the loss is not finite, the disk is full, the checkpoint is damaged.
        """
        training, job = self.job.training, self.job
        objective = Distillation(student, self.frozen, job.sampling, training.targets)
        context, extra = objective.sampling.window, student.extra
        parts = [held_out(store, training.held_out) for store in self.stores]

        def windows(stores: Sequence[HiddenStore], context: int, k: int) -> list[Windows]:
            made = zip(stores, parts, strict=True)
            return [Windows(store, extra, training.window, context, part[k]) for store, part in made]

        def items(k: int) -> list[Any]:
            states = windows(self.stores, context, k)
            if not features:
                return states
            return [PairedWindows(*pair) for pair in zip(states, windows(features, 0, k), strict=True)]

        learnt, kept = (ConcatDataset(items(k)) for k in (0, 1))
        loop = Training(objective, learnt, kept, training, job.work, self.frozen.device)
        data = {"data": Path(job.data.data).name, "continued": job.data.continued} if job.data else {}
        return {
            **data,
            "tokens": sum(store.tokens_stored for store in self.stores),
            "vocabulary": self.frozen.size,
            **loop.run(self.report, self.on_progress),
            "minutes": round((time.monotonic() - self._begun) / 60, 1),
        }
