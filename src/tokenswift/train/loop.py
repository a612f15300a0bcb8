"""One recipe for every drafter: text → hidden states → distillation → the loss on what was held
out.

Every stage leaves its outcome in the work folder, so the same command after a kill resumes where it
stopped: hidden states by complete batches, the student's start as a file, training by a checkpoint.
What states and losses depend on is hashed and kept beside them; a command with another hash is
refused, so that a resumed training equals an unbroken one. Paths, how often checkpoints are written
and the like are not in it.

Which items a step takes follows from the seed and the step alone. What is trained is a
`Student`: of `heads` or `eagle`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from pickle import UnpicklingError
from statistics import mean

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import default_collate

from tokenswift.config.sampling import settings_of
from tokenswift.engine.llm import LLM
from tokenswift.files import replacing
from tokenswift.kernels.base import Backend
from tokenswift.loader.identity import digest_of
from tokenswift.loader.safetensors_file import SafetensorsFile
from tokenswift.train.agreement import agreement, in_words
from tokenswift.train.distillation import Distillation, FrozenBase, Student
from tokenswift.train.options import DataOptions, Job, TrainingOptions
from tokenswift.train.schedule import schedule_of
from tokenswift.train.states import collect
from tokenswift.train.store import HiddenStore, Windows, counts, frequent, held_out
from tokenswift.train.texts import fingerprint
from tokenswift.train.work import BadData, check_claim, check_disk, claim
from tokenswift.types import InputError, OnProgress, RunError

Report = Callable[[str], None]
VERSION = 7  # raised whenever the same options make other states
TRAINING = "training"
START = "start.safetensors"
CHECKPOINT = "checkpoint.pt"
OF_TRAINING = (TRAINING, START, CHECKPOINT)  # files of a training beside its states
HELD_OUT = 64  # items that the held-out loss looks at
NEWEST = 100  # steps whose mean loss is reported
MAX_GRADIENT_NORM = 1.0


# ---- the recipe ----------------------------------------------------------------------------------


class Recipe:
    """The states that a student learns from, and its training.

    Args:
        llm: the base.
        job: what to learn from, how, and where.
        report: called with lines about the progress.
        on_progress: called with how many tokens have states, and how many steps are done.
        weights: how many the student has, to reckon the disk.
        layers: layers whose input states are learnt from, beside those before the final norm.
        named: tokens that the student can name, ascending; None: the most frequent ones of the
            texts.
        about: what else the outcome depends on; a work folder of other values is refused.

    Attributes:
        base: the model's identity.
        store: the hidden states.
        counts: how often each token occurs in it.
        frozen: the parts of the model that the loss needs.
        unseen: items of the texts that are held out; None before they are known.

    Raises:
        InputError: too little data, too little disk, a work folder of another training.
    """

    def __init__(
        self,
        llm: LLM,
        job: Job,
        report: Report,
        on_progress: OnProgress,
        weights: int,
        layers: Sequence[int] = (),
        named: Tensor | None = None,
        **about: object,
    ) -> None:
        self.job = job
        self.report = report
        self.on_progress = on_progress
        self.unseen: Windows | None = None
        self._start_time = time.monotonic()
        self.base = replace(llm.source.host.base, name=job.name)
        self.layers = (*layers, llm.target.layers)
        report(f"the model writes {job.data.tokens:,} tokens to learn from (--tokens)")
        self.store = self._filled_store(llm, job.data, weights)
        report(f"hidden states: {self.store.tokens:,} tokens")
        self.counts = counts(self.store, self.base.vocab_size)
        subset = frequent(self.counts, job.training.loss_vocabulary) if named is None else named
        options = asdict(job.training)
        del options["save_every"]
        sampling = settings_of(job.sampling)
        self._key = digest_of([options, sampling, self.store.made_from, about, subset.tolist()])
        parts = ", ".join(OF_TRAINING)
        way_out = f", or remove {parts} there to train anew from its states"
        check_claim(job.work / TRAINING, self._key, way_out)
        dtype = torch.bfloat16 if job.training.bf16 else torch.float32
        self.frozen = FrozenBase(llm, subset, dtype)

    def _filled_store(self, llm: LLM, data: DataOptions, weights: int) -> HiddenStore:
        """The work folder's store, filled. Data that cannot be learnt from leave none."""
        job = self.job
        options = {**asdict(data), "data": fingerprint(data.data)}
        if data.from_runs is None:
            del options["from_runs"]  # as work folders of earlier versions have it
        else:
            options["from_runs"] = fingerprint(data.from_runs)
        writing = [job.training.seed, settings_of(job.sampling)]
        key = digest_of([VERSION, self.layers, options, writing, llm.resources.identity()])
        store = HiddenStore(job.work / "states", key)
        if store.complete:
            return store
        try:
            missing = max(0, data.tokens - store.tokens)
            check_disk(
                job.work,
                tokens=missing + data.write_batch * data.longest,
                width=llm.target.hidden_size * len(self.layers),
                weights=weights,
            )
            collect(llm, data, job, self.layers, store, self.on_progress)
        except InputError as error:
            if isinstance(error, BadData) or not store.texts:
                store.discard()
            raise
        return store

    def start_weights(self, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Weights at their start, on the base's device: made once, then read from the work
        folder."""
        path = self.job.work / START
        try:
            weights = tensors_in(path)
        except InputError:  # there is no file, or it is damaged
            weights = {name: value.cpu().contiguous() for name, value in make().items()}
            claim(self.job.work / TRAINING, self._key)
            with replacing(path) as part:
                part.write_bytes(save(weights))  # a full disk is an OSError
            weights = tensors_in(path)
        return {name: value.to(self.frozen.device) for name, value in weights.items()}

    def distil(self, student: Student) -> dict[str, object]:
        """Train a student, in place, on the base's device; notes for its header.

        Raises:
            InputError: no text is long enough.
            RunError: the loss is not finite.
        """
        job = self.job
        objective = Distillation(student, self.frozen, job.sampling, job.training.targets)
        learnt_texts, held_out_texts = held_out(self.store, job.training.held_out)
        window = job.training.window
        learnt = Windows(self.store, learnt_texts, student.levels, window)
        unseen = Windows(self.store, held_out_texts, student.levels, window)
        if len(learnt) == 0:
            for name in OF_TRAINING:
                (job.work / name).unlink(missing_ok=True)
            self.store.discard()
            raise BadData("the training data has no text long enough to learn from")
        self.unseen = unseen
        notes: dict[str, object] = {
            "data": Path(job.data.data).name,
            "tokens": self.store.tokens,
            "vocabulary": self.frozen.size,
            **Training(self, objective, learnt, unseen).run(),
            "minutes": round((time.monotonic() - self._start_time) / 60, 1),
        }
        shares = agreement(student, self.frozen, unseen)
        if shares:
            unseen_texts = "in texts that it has not learnt from"
            self.report(f"{unseen_texts}, the drafter names {in_words(shares)}")
            notes["agreement"] = [round(share, 3) for share in shares]
        return notes


def tensors_in(path: Path) -> dict[str, Tensor]:
    """The tensors of a file.

    Raises:
        InputError: there is none, or a damaged one.
    """
    file = SafetensorsFile(path, "file of first weights")
    return {name: file.read(name) for name in file.entries}


# ---- the loop ------------------------------------------------------------------------------------


def _order(items: int, seed: int) -> list[int]:
    return torch.randperm(items, generator=torch.Generator().manual_seed(seed)).tolist()


def picks(items: int, options: TrainingOptions, step: int) -> list[list[int]]:
    """The items of a step, in batches: each epoch has an order of its own."""
    count = options.accumulate * options.batch
    chosen = []
    for number in range(step * count, (step + 1) * count):
        epoch, place = divmod(number, items)
        chosen.append(_order(items, options.seed + epoch)[place])
    return [chosen[start : start + options.batch] for start in range(0, count, options.batch)]


class Training:
    """A training under way; its checkpoint lies in the work folder.

    Args:
        recipe: says how to train and where, and takes reports.
        objective: a module that turns a batch into losses to be summed; its parameters are trained,
            in place.
        data: items of that module's arguments (without the batch dimension), at least one.
        held_out: items whose loss is reported too.
    Raises:
        RunError: the checkpoint is damaged.
    """

    def __init__(
        self, recipe: Recipe, objective: nn.Module, data: Windows, held_out: Windows
    ) -> None:
        options = recipe.job.training
        self.recipe = recipe
        self.options = options
        self.data = data
        self.held_out = held_out
        self.device = recipe.frozen.device
        self.kind = Backend(self.device).kind
        self.checkpoint = recipe.job.work / CHECKPOINT
        self.parameters = [p for p in objective.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in self.parameters if p.ndim > 1]},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        epoch_steps = len(data) / options.batch / options.accumulate
        self.step = 0
        self.steps = options.steps or math.ceil(options.epochs * epoch_steps)
        self.objective = objective
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=options.lr,
            betas=(0.9, options.beta2),
            weight_decay=options.weight_decay,
            fused=True,
        )
        self.schedule = schedule_of(self.optimizer, options.warmup, self.steps)
        self.losses: list[float] = []  # of the newest steps
        if self.checkpoint.exists():
            self._load()

    def run(self) -> dict[str, float]:
        """Train to the end; returns the figures of the training.

        Raises:
            RunError: the loss is not finite.
            OSError: the disk takes no checkpoint; the one before is kept.
        """
        options = self.options
        report = self.recipe.report
        report(f"training: {self.steps - self.step:,} of {self.steps:,} steps to do")
        while self.step < self.steps:
            self.losses = [*self.losses[1 - NEWEST :], self._advance()]
            self.recipe.on_progress("train", self.step, self.steps)
            if self.step == self.steps or self.step % options.save_every == 0:
                figures = ", ".join(f"{name} {loss}" for name, loss in self._mean_losses().items())
                report(f"training: step {self.step} of {self.steps}, {figures}")
                self._save()
        return {"steps": self.step, "lr": options.lr, **self._mean_losses()}

    def _mean_losses(self) -> dict[str, float]:
        """The loss of the newest steps, and of what is held out."""
        losses = {"loss": round(mean(self.losses), 4)} if self.losses else {}
        if len(self.held_out):
            losses["held_out_loss"] = round(self.held_out_loss(), 4)
        return losses

    def _advance(self) -> float:
        """Take one step; returns its loss.

        Raises:
            RunError: the loss is not finite.
        """
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        # dropout's draws, the same after a resumption
        torch.manual_seed((self.options.seed + 1) * 1_000_003 + self.step)
        for items in picks(len(self.data), self.options, self.step):
            batch = default_collate([self.data[item] for item in items])
            loss = self._loss(batch) / self.options.accumulate
            loss.backward()
            total += loss.detach()
        if not bool(torch.isfinite(total)):
            raise RunError(f"loss is not finite at step {self.step + 1}; try a smaller --lr")
        nn.utils.clip_grad_norm_(self.parameters, MAX_GRADIENT_NORM)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        return float(total)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        arguments = {name: value.to(self.device) for name, value in batch.items()}
        with torch.autocast(self.kind, dtype=torch.bfloat16, enabled=self.options.bf16):
            return self.objective(**arguments).sum()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The loss over up to :data:`HELD_OUT` items spread over what is held out."""
        chosen = range(0, len(self.held_out), -(-len(self.held_out) // HELD_OUT))
        self.objective.eval()
        losses = [float(self._loss(default_collate([self.held_out[item]]))) for item in chosen]
        self.objective.train()
        return sum(losses) / len(chosen)

    def _parts(self) -> dict[str, nn.Module | Optimizer | LRScheduler]:
        """What a checkpoint holds the state of."""
        return {"objective": self.objective, "optimizer": self.optimizer, "schedule": self.schedule}

    def _save(self) -> None:
        """Replace the checkpoint, on the disk before the old one goes."""
        state = {name: part.state_dict() for name, part in self._parts().items()}
        state |= {"step": self.step, "losses": self.losses}
        with replacing(self.checkpoint) as part, part.open("wb") as file:
            torch.save(state, file)

    def _load(self) -> None:
        """Go on from the checkpoint.

        Raises:
            RunError: it is damaged.
        """
        try:
            state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
            for name, part in self._parts().items():
                part.load_state_dict(state[name])
            self.step = state["step"]
            self.losses = state["losses"]
        except (RuntimeError, ValueError, KeyError, EOFError, TypeError, UnpicklingError) as error:
            raise RunError(
                f"{self.checkpoint} is damaged ({type(error).__name__}); without it the same "
                "command trains from the start, with the hidden states that were kept"
            ) from error
