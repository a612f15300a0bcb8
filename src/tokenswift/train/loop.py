"""The training loop: AdamW over stored hidden states, resumed from its checkpoint.

Which items a step takes follows from the seed and the step alone, so a resumed training equals an unbroken
one. Several processes (torchrun) share the items of a step and average their gradients.
"""

from __future__ import annotations

import csv
import math
import os
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import get_cosine_schedule_with_warmup

from tokenswift.files import replacing
from tokenswift.kernels.torch import TorchBackend
from tokenswift.train.collect import Report
from tokenswift.train.options import TrainingOptions
from tokenswift.train.work import first_process, rank, world_size
from tokenswift.types import InputError, OnProgress, RunError

COLUMNS = ("step", "loss", "learning_rate", "seconds", "held_out_loss")
HELD_OUT = 64  # items that the held-out loss looks at


@lru_cache(maxsize=2)
def _order(items: int, seed: int) -> list[int]:
    return torch.randperm(items, generator=torch.Generator().manual_seed(seed)).tolist()


def picks(items: int, options: TrainingOptions, step: int) -> list[list[int]]:
    """The items of a step that this process takes, in batches: each epoch has an order of its own."""
    size = options.batch * world_size()
    starts = range(step * options.accumulate * size, (step + 1) * options.accumulate * size, size)
    places = (range(start + rank() * options.batch, start + (rank() + 1) * options.batch) for start in starts)
    return [[_order(items, options.seed + k // items)[k % items] for k in ks] for ks in places]


def steps_of(items: int, options: TrainingOptions) -> int:
    """How many steps are asked for."""
    each = options.batch * options.accumulate * world_size()
    return options.steps or math.ceil(options.epochs * items / each)


class Training:
    """A training under way.

    Args:
        objective: a module that turns a batch into ``{"loss": …}``; its parameters are trained, in place.
        data: a dataset of that module's arguments (without the batch dimension), with a length.
        held_out: one whose loss is logged beside.
        options: how to train.
        work: folder for the checkpoint and log.csv.
        device: where the objective lies.
    Raises:
        InputError: there is nothing to learn from.
        RunError: the checkpoint is damaged.
    """

    def __init__(
        self,
        objective: nn.Module,
        data: Any,
        held_out: Any,
        options: TrainingOptions,
        work: Path,
        device: torch.device,
    ) -> None:
        if len(data) == 0:
            raise InputError("the training data has no text long enough to learn from")
        self.data, self.held_out, self.options = data, held_out, options
        self.device, self.kind = device, TorchBackend(device).kind
        self.checkpoint, self.log = work / "checkpoint.pt", work / "log.csv"
        self.parameters = [p for p in objective.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in self.parameters if p.ndim > 1]},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        betas = (0.9, options.beta2)
        optimizer = torch.optim.AdamW(groups, options.lr, betas, weight_decay=options.weight_decay)
        self.step, self.steps = 0, steps_of(len(data), options)
        schedule = get_cosine_schedule_with_warmup(optimizer, options.warmup, self.steps)
        self.objective, self.optimizer, self.schedule = objective, optimizer, schedule
        self.losses, self.fresh = list[float](), list[float]()  # of the log's last rows; since the last one
        if self.checkpoint.exists():
            self._load()

    def run(self, report: Report, on_progress: OnProgress) -> dict[str, float]:
        """Train to the end; the figures of it.

        Raises:
            RunError: the loss is not finite, or the disk takes no checkpoint.
        """
        begun, options = time.monotonic(), self.options
        report(f"training: {self.steps - self.step:,} of {self.steps:,} steps to do")
        if world_size() > 1:
            dist.init_process_group("gloo" if self.kind == "cpu" else "nccl")
        while self.step < self.steps:
            self.fresh.append(self._advance())
            on_progress("train", self.step, self.steps)
            last = self.step == self.steps
            if last or self.step % options.log_every == 0:
                report(self._row(time.monotonic() - begun))
            if last or self.step % options.save_every == 0:
                self._save()
        if world_size() > 1:
            dist.destroy_process_group()
        found: dict[str, float] = {"steps": self.step, "lr": options.lr}
        if self.losses:
            found["loss"] = round(sum(self.losses) / len(self.losses), 4)
        if len(self.held_out):
            found["held_out_loss"] = round(self.held_out_loss(), 4)
        return found

    def _advance(self) -> float:
        """One step; its loss."""
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for places in picks(len(self.data), self.options, self.step):
            loss = self._loss(default_collate([self.data[i] for i in places])) / self.options.accumulate
            loss.backward()
            total += loss.detach()
        if world_size() > 1:
            for tensor in (total, *(p.grad for p in self.parameters if p.grad is not None)):
                dist.all_reduce(tensor)
                tensor /= world_size()
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
        return sum(float(self._loss(default_collate([self.held_out[i]]))) for i in chosen) / len(chosen)

    def _row(self, seconds: float) -> str:
        """A row of the log, and what it says in words; about as often as there are checkpoints, with the
        held-out loss."""
        loss = sum(self.fresh) / len(self.fresh)
        self.losses, self.fresh = [*self.losses[-4:], loss], []
        due = self.step % self.options.save_every < self.options.log_every or self.step == self.steps
        held_out = f"{self.held_out_loss():.6f}" if due and len(self.held_out) else ""
        if first_process():
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
        if not first_process():
            return
        state = {name: part.state_dict() for name, part in self._parts().items()}
        state |= {"step": self.step, "losses": self.losses, "fresh": self.fresh}
        try:
            with replacing(self.checkpoint) as part, part.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:  # torch's writer has errors of its own
            reason = getattr(error, "strerror", None) or "the disk took no more"
            raise RunError(f"cannot write {self.checkpoint}: {reason}") from error

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
