"""One recipe for every drafter: text → hidden states → distillation → the loss on what was held out.

Every stage leaves its outcome in the work folder, so the same command after a kill resumes where it stopped:
hidden states by whole batches, the student's start as a file, training by a checkpoint. What states and
losses depend on is hashed and kept beside them; a command with another hash is refused, so that a resumed
training equals an unbroken one. Paths, how often checkpoints are written and the like are not in it.

Which items a step takes follows from the seed and the step alone. What is trained is a `loss.Student`: of
`heads` or `eagle`.
"""

from __future__ import annotations

import csv
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, default_collate
from transformers import get_cosine_schedule_with_warmup

from tokenswift.config import settings_of
from tokenswift.files import line_of, replacing
from tokenswift.kernels.base import Backend
from tokenswift.loader.weights import TOLERANCE, BaseIdentity, digest_of
from tokenswift.train.data import fingerprint
from tokenswift.train.loss import Distillation, FrozenBase, Student
from tokenswift.train.options import DataOptions, Job, TrainingOptions
from tokenswift.train.states import HiddenStore, Windows, collect, counts, frequent, held_out, other_training
from tokenswift.types import InputError, OnProgress, RunError, shown

Report = Callable[[str], None]
VERSION = 5  # raised whenever the same options make other states
COLUMNS = ("step", "loss", "learning_rate", "seconds", "held_out_loss")
HELD_OUT = 64  # items that the held-out loss looks at


# ---- the recipe --------------------------------------------------------------------------------------------


class Recipe:
    """The states that a student learns from, and its training.

    Args:
        llm: the base, an ``LLM``.
        job: what to learn from, how, and where.
        report: takes lines of what is done and found.
        on_progress: told how many tokens have states, and how many steps are done.
        layers: whose entering states are learnt from, beside those before the final norm.
        subset: tokens that the loss looks at, ascending; None: the most frequent ones.
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
        self,
        llm: Any,
        job: Job,
        report: Report,
        on_progress: OnProgress,
        layers: Sequence[int] = (),
        subset: Tensor | None = None,
        **about: Any,
    ) -> None:
        self.job, self.report, self.on_progress, self._begun = job, report, on_progress, time.monotonic()
        self.base = replace(llm.source.host.base, name=job.name)
        self.layers = (*layers, llm.target.layers)
        if job.data is None:
            self.stores = [_finished(folder, self.base, self.layers) for folder in job.states]
        else:
            if job.data.writes:
                report(f"the model writes {job.data.tokens:,} tokens to learn from (--tokens)")
            self.stores = [self._gathered(llm, job.data)]
        report(f"hidden states: {sum(store.tokens for store in self.stores):,} tokens")
        self.counts = counts(self.stores, self.base.vocab_size)
        subset = frequent(self.counts, job.training.loss_vocabulary) if subset is None else subset
        self._claim([about, subset.tolist()])
        self.frozen = FrozenBase(llm, subset, torch.bfloat16 if job.training.bf16 else torch.float32)

    def _gathered(self, llm: Any, data: DataOptions) -> HiddenStore:
        """The work folder's store, filled."""
        job, base = self.job, self.base
        options = {**asdict(data), "data": fingerprint(data.data)}
        writing = [job.training.seed, settings_of(job.sampling)]
        key = digest_of([VERSION, self.layers, options, writing, llm.resources.identity()])
        sizes = [base.vocab_size, base.hidden_size, *base.sample.tolist()]
        made_from = {"key": key, "base": sizes, "layers": list(self.layers)}
        store = HiddenStore(job.work / "states", len(self.layers) * base.hidden_size, made_from)
        if not store.complete:
            collect(llm, data, job, self.layers, store, self.on_progress)
        return store

    def _claim(self, about: list[Any]) -> None:
        """Take the work folder for this training, or check that it is this training's.

        Args:
            about: what losses and weights depend on besides the states and options.
        """
        job = self.job
        options = {k: v for k, v in asdict(job.training).items() if k not in ("save_every", "log_every")}
        states = [store.made_from for store in self.stores]
        key, path = digest_of([options, settings_of(job.sampling), states, about]), job.work / "training"
        if path.exists() and path.read_text(encoding="utf-8") != key:
            raise other_training(job.work)
        with replacing(path) as file:
            file.write_text(key, encoding="utf-8")

    def started(self, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Weights at their start, on the base's device: made once, then read from the work folder."""
        path = self.job.work / "start.safetensors"
        if not path.exists():
            with replacing(path) as part:
                save_file({name: value.cpu().contiguous() for name, value in make().items()}, part)
        return {name: value.to(self.frozen.device) for name, value in load_file(path).items()}

    def distil(self, student: Student) -> dict[str, Any]:
        """Train a student, in place, on the base's device; notes for its header.

        Raises:
            InputError: no text is long enough.
            RunError: the loss is not finite, the disk is full, the checkpoint is damaged.
        """
        job = self.job
        objective = Distillation(student, self.frozen, job.sampling, job.training.targets)
        share, window = job.training.held_out, job.training.window
        parts = [(store, held_out(store, share)) for store in self.stores]
        learnt, kept = (
            ConcatDataset([Windows(store, blocks[k], student.levels, window) for store, blocks in parts])
            for k in (0, 1)
        )
        data = {"data": Path(job.data.data).name, "continued": job.data.continued} if job.data else {}
        return {
            **data,
            "tokens": sum(store.tokens for store in self.stores),
            "vocabulary": self.frozen.size,
            **Training(self, objective, learnt, kept).run(),
            "minutes": round((time.monotonic() - self._begun) / 60, 1),
        }


def _finished(folder: Path, base: BaseIdentity, layers: tuple[int, ...]) -> HiddenStore:
    """The whole store of a work folder, whatever data and options it was made with.

    Raises:
        InputError: it is none, is not finished, or of another model.
    """
    place = folder / "states" if (folder / "states").is_dir() else folder
    try:
        made_from = json.loads((place / "index.json").read_text(encoding="utf-8"))["made_from"]
        vocab_size, width, *sample = made_from["base"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"states {folder} holds no hidden states; valid: a work folder of tokenswift train"
        ) from error
    if not BaseIdentity("", width, vocab_size, torch.tensor(sample)).distance(base) <= TOLERANCE:
        raise InputError(f"states {folder} are of another model")
    if (stored := tuple(made_from.get("layers", ())))[-len(layers) :] != layers:
        raise InputError(f"states {folder} are of the layers {shown(list(stored))}; valid: {list(layers)}")
    store = HiddenStore(place, len(stored) * width, made_from)
    if not store.complete or not store.blocks:
        raise InputError(f"states {folder} are not finished; run the command that makes them again")
    return store


# ---- the loop ----------------------------------------------------------------------------------------------


def _order(items: int, seed: int) -> list[int]:
    return torch.randperm(items, generator=torch.Generator().manual_seed(seed)).tolist()


def picks(items: int, options: TrainingOptions, step: int) -> list[list[int]]:
    """The items of a step, in batches: each epoch has an order of its own."""
    first = step * options.accumulate * options.batch
    starts = range(first, first + options.accumulate * options.batch, options.batch)
    places = (range(start, start + options.batch) for start in starts)
    return [[_order(items, options.seed + k // items)[k % items] for k in ks] for ks in places]


class Training:
    """A training under way; checkpoint and log.csv lie in the work folder.

    Args:
        recipe: says how to train, where, and who is told.
        objective: a module that turns a batch into ``{"loss": …}``; its parameters are trained, in place.
        data: a dataset of that module's arguments (without the batch dimension), with a length.
        held_out: one whose loss is logged beside.
    Raises:
        InputError: there is nothing to learn from.
        RunError: the checkpoint is damaged.
    """

    def __init__(self, recipe: Recipe, objective: nn.Module, data: Any, held_out: Any) -> None:
        if len(data) == 0:
            raise InputError("the training data has no text long enough to learn from")
        options = recipe.job.training
        self.recipe, self.options = recipe, options
        self.data, self.held_out = data, held_out
        self.device, self.kind = recipe.frozen.device, Backend(recipe.frozen.device).kind
        self.checkpoint, self.log = recipe.job.work / "checkpoint.pt", recipe.job.work / "log.csv"
        self.parameters = [p for p in objective.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in self.parameters if p.ndim > 1]},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        betas = (0.9, options.beta2)
        optimizer = torch.optim.AdamW(
            groups, options.lr, betas, weight_decay=options.weight_decay, fused=True
        )
        epoch = len(data) / options.batch / options.accumulate
        self.step, self.steps = 0, options.steps or math.ceil(options.epochs * epoch)
        schedule = get_cosine_schedule_with_warmup(optimizer, options.warmup, self.steps)
        self.objective, self.optimizer, self.schedule = objective, optimizer, schedule
        self.losses, self.fresh = list[float](), list[float]()  # of the log's last rows; since the last one
        if self.checkpoint.exists():
            self._load()

    def run(self) -> dict[str, float]:
        """Train to the end; the figures of it.

        Raises:
            RunError: the loss is not finite, or the disk takes no checkpoint.
        """
        begun, options, report = time.monotonic(), self.options, self.recipe.report
        report(f"training: {self.steps - self.step:,} of {self.steps:,} steps to do")
        while self.step < self.steps:
            self.fresh.append(self._advance())
            self.recipe.on_progress("train", self.step, self.steps)
            last = self.step == self.steps
            if last or self.step % options.log_every == 0:
                report(self._row(time.monotonic() - begun))
            if last or self.step % options.save_every == 0:
                self._save()
        found: dict[str, float] = {"steps": self.step, "lr": options.lr}
        if self.losses:
            found["loss"] = round(sum(self.losses) / len(self.losses), 4)
        if len(self.held_out):
            found["held_out_loss"] = round(self.held_out_loss(), 4)
        return found

    def _advance(self) -> float:
        """One step; its loss."""
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        # dropout's draws, the same after a resumption
        torch.manual_seed((self.options.seed + 1) * 1_000_003 + self.step)
        for places in picks(len(self.data), self.options, self.step):
            loss = self._loss(default_collate([self.data[i] for i in places])) / self.options.accumulate
            loss.backward()
            total += loss.detach()
        if not bool(torch.isfinite(total)):
            raise RunError(f"loss is not finite at step {self.step + 1}; try a smaller --lr")
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        return float(total)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(self.kind, dtype=torch.bfloat16, enabled=self.options.bf16):
            return self.objective(**{name: value.to(self.device) for name, value in batch.items()})["loss"]

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The loss over up to :data:`HELD_OUT` items spread over what is held out."""
        chosen = range(0, len(self.held_out), -(-len(self.held_out) // HELD_OUT))
        self.objective.eval()
        found = sum(float(self._loss(default_collate([self.held_out[i]]))) for i in chosen) / len(chosen)
        self.objective.train()
        return found

    def _row(self, seconds: float) -> str:
        """A row of the log, and what it says in words; about as often as there are checkpoints, with the
        held-out loss."""
        loss = sum(self.fresh) / len(self.fresh)
        self.losses, self.fresh = [*self.losses[-4:], loss], []
        due = self.step % self.options.save_every < self.options.log_every or self.step == self.steps
        held_out = f"{self.held_out_loss():.6f}" if due and len(self.held_out) else ""
        new = not self.log.exists()
        with self.log.open("a", newline="") as file:
            rows = csv.writer(file)
            rows.writerows([COLUMNS] * new)
            rate = self.schedule.get_last_lr()[0]
            rows.writerow([self.step, loss, rate, f"{seconds:.1f}", held_out])
        told = f", held out {float(held_out):.4f}" if held_out else ""
        return f"training: step {self.step} of {self.steps}, loss {loss:.4f}{told}"

    def _parts(self) -> dict[str, Any]:
        return {"objective": self.objective, "optimizer": self.optimizer, "schedule": self.schedule}

    def _save(self) -> None:
        """Replace the checkpoint, on the disk before the old one goes."""
        state = {name: part.state_dict() for name, part in self._parts().items()}
        state |= {"step": self.step, "losses": self.losses, "fresh": self.fresh}
        try:
            with replacing(self.checkpoint) as part, part.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:  # torch's writer has errors of its own
            raise RunError(f"cannot write {self.checkpoint}: {line_of(error)}") from error

    def _load(self) -> None:
        try:
            state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
            for name, part in self._parts().items():
                part.load_state_dict(state[name])
            self.step, self.losses, self.fresh = (state[name] for name in ("step", "losses", "fresh"))
        except Exception as error:  # a damaged file fails in many ways
            raise RunError(
                f"cannot read {self.checkpoint} ({type(error).__name__}); without it training starts anew"
            ) from error
