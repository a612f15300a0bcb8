"""The training loop: transformers' Trainer over stored hidden states.

Schedule, accumulation, mixed precision, several processes (torchrun), checkpoints and TensorBoard are
the Trainer's. Added here: the CSV log, plain progress lines, the choice of the last *whole* checkpoint
to go on from, and the stop on a loss that is not finite.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import shutil
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from tokenswift.train.collect import Report
from tokenswift.types import InputError, RunError


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How heads or a draft model are trained from their start.

    Attributes:
        epochs: passes over the data; 0 keeps the start.
        steps: optimiser steps; 0 takes ``epochs``.
        lr: peak learning rate (AdamW, cosine to zero after a warm-up).
        batch: items of the dataset per device and step.
        accumulate: batches per optimiser step.
        seed: of the data order.
        save_every: steps between checkpoints.
        log_every: steps between log rows.
        tensorboard: also write TensorBoard logs.
        bf16: mixed precision.
    """

    epochs: float = 3.0
    steps: int = 0
    lr: float = 1e-3
    batch: int = 4
    accumulate: int = 1
    seed: int = 0
    save_every: int = 200
    log_every: int = 20
    tensorboard: bool = False
    bf16: bool = True

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)!r}; valid: at least 0")
        for name in ("batch", "accumulate", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)!r}; valid: an integer of at least 1")
        if self.tensorboard and not any(map(find_spec, ("tensorboard", "tensorboardX"))):
            raise InputError("--tensorboard needs the package tensorboard; pip install tensorboard")
        if not 0 < self.lr < 1:
            raise InputError(f"lr is {self.lr!r}; valid: between 0 and 1")


class _Log(TrainerCallback):
    """CSV rows, progress lines with the time left."""

    def __init__(self, path: Path, report: Report) -> None:
        self.path, self.report = path, report
        self.begun = time.monotonic()
        self.first = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun, self.first = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        seconds = time.monotonic() - self.begun
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(["step", "epoch", "loss", "learning_rate", "seconds"])
            row = [state.global_step, f"{state.epoch:.4f}", logs["loss"], logs.get("learning_rate")]
            writer.writerow([*row, f"{seconds:.1f}"])
        done = state.global_step - self.first
        left = (state.max_steps - state.global_step) * seconds / max(done, 1) / 60
        self.report(
            f"training: step {state.global_step} of {state.max_steps}, loss {logs['loss']:.4f}, "
            f"{left:.1f} min left"
        )


class _Trainer(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not bool(torch.isfinite(loss)):
            raise RunError(
                f"loss is not finite at step {self.state.global_step + 1}; checkpoints in "
                f"{self.args.output_dir} are kept; try a smaller --lr"
            )
        return loss


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint; broken newer ones (a kill while writing) are removed."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]), reverse=True)
    for path in found:
        if all((path / name).exists() for name in ("trainer_state.json", "optimizer.pt", "scheduler.pt")):
            try:
                torch.load(path / "optimizer.pt", weights_only=True, map_location="cpu")
                return path
            except Exception:  # a truncated file fails in many ways
                pass
        shutil.rmtree(path, ignore_errors=True)
    return None


def train(
    lesson: nn.Module, data: Any, options: TrainingOptions, work: Path, device: str, report: Report
) -> dict[str, float]:
    """Train a lesson in place; goes on from the last checkpoint in ``work`` if there is one.

    Args:
        lesson: a module that turns a batch into ``{"loss": …}``; its parameters are what is trained.
        data: a dataset of that module's arguments (without the batch dimension), with a length.
        options: how to train.
        work: folder for checkpoints and log.csv.
        device: "cpu" or "cuda".
        report: takes progress lines.
    """
    if len(data) == 0:
        raise InputError("the training data has no text long enough to learn from")
    logging.getLogger("transformers.trainer").setLevel(logging.ERROR)
    args = TrainingArguments(
        output_dir=str(work / "checkpoints"),
        num_train_epochs=options.epochs,
        max_steps=options.steps or -1,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        warmup_steps=30,
        weight_decay=0.01,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        seed=options.seed,
        save_steps=options.save_every,
        save_total_limit=2,
        logging_steps=options.log_every,
        logging_nan_inf_filter=False,
        report_to=["tensorboard"] if options.tensorboard else [],
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        use_cpu=device == "cpu",
        ddp_backend="gloo" if device == "cpu" and int(os.environ.get("WORLD_SIZE", "1")) > 1 else None,
        bf16=options.bf16,
    )
    trainer = _Trainer(
        model=lesson, args=args, train_dataset=data, callbacks=[_Log(work / "log.csv", report)]
    )
    trainer.remove_callback(PrinterCallback)
    last = last_checkpoint(work / "checkpoints")
    if last is not None:
        report(f"going on from {last}")
    if last is not None and _finished(last, len(data), options):
        trainer._load_from_checkpoint(str(last))  # Trainer itself would take one step more
        return _figures(json.loads((last / "trainer_state.json").read_text(encoding="utf-8")), options)
    try:
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    except (OSError, SafetensorError, RuntimeError) as error:
        writing = not isinstance(error, RuntimeError) or "PytorchStreamWriter" in str(error)
        if not writing:
            raise
        reason = getattr(error, "strerror", None) or "the disk took no more"
        raise RunError(f"cannot write a checkpoint to {work}: {reason}; older ones are kept") from error
    return _figures(asdict(trainer.state), options)


def _finished(checkpoint: Path, items: int, options: TrainingOptions) -> bool:
    """True when a checkpoint holds all the steps that the options ask for."""
    done = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
    batches = math.ceil(items / (options.batch * int(os.environ.get("WORLD_SIZE", "1"))))
    return done >= (options.steps or math.ceil(options.epochs * math.ceil(batches / options.accumulate)))


def _figures(state: dict[str, Any], options: TrainingOptions) -> dict[str, float]:
    """Steps, mean of the last five logged losses (if any was logged), and the peak learning rate."""
    losses = [row["loss"] for row in state["log_history"] if "loss" in row][-5:]
    loss = {"loss": sum(losses) / len(losses)} if losses else {}
    return {"steps": float(state["global_step"]), **loss, "lr": options.lr}
