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
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from tokenswift.kernels.torch import TorchBackend
from tokenswift.train.collect import Report
from tokenswift.train.options import TrainingOptions
from tokenswift.train.processes import first_process, world_size
from tokenswift.types import InputError, RunError

COLUMNS = ("step", "epoch", "loss", "learning_rate", "seconds", "held_out_loss")
HELD_OUT = 64  # items that the held-out loss looks at


class _Log(TrainerCallback):
    """CSV rows, progress lines with the time left, the loss on what is held out."""

    def __init__(self, path: Path, held_out: Callable[[], float] | None, every: int, report: Report) -> None:
        self.path, self.held_out, self.every, self.report = path, held_out, every, report
        self.begun = time.monotonic()
        self.first = self.measured = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun, self.first, self.measured = time.monotonic(), state.global_step, state.global_step
        if state.is_world_process_zero:
            self.report(f"training: steps to do {state.max_steps:,}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        step, held_out = state.global_step, ""
        due = step >= self.measured + self.every or step == state.max_steps
        if self.held_out is not None and due:
            self.measured, held_out = step, f"{self.held_out():.6f}"
        seconds = time.monotonic() - self.begun
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(COLUMNS)
            row = [step, f"{state.epoch:.4f}", logs["loss"], logs.get("learning_rate"), f"{seconds:.1f}"]
            writer.writerow([*row, held_out])
        left = (state.max_steps - step) * seconds / max(step - self.first, 1) / 60
        told = f", held out {float(held_out):.4f}" if held_out else ""
        self.report(
            f"training: step {step} of {state.max_steps}, loss {logs['loss']:.4f}{told}, {left:.1f} min left"
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


def arguments(options: TrainingOptions, work: Path, device: torch.device) -> TrainingArguments:
    """The Trainer's arguments for one process on one device."""
    cpu = TorchBackend(device).kind == "cpu"
    args = TrainingArguments(
        output_dir=str(work / "checkpoints"),
        num_train_epochs=options.epochs,
        max_steps=options.steps or -1,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        warmup_steps=options.warmup,
        weight_decay=options.weight_decay,
        adam_beta2=options.beta2,
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
        use_cpu=cpu,
        ddp_backend="gloo" if cpu and world_size() > 1 else None,
        bf16=options.bf16,
    )
    if not cpu and world_size() == 1:  # the Trainer would take the first device, and all of them together
        torch.cuda.set_device(device)
        args.__dict__["_setup_devices"] = device
        args._n_gpu = 1
    return args


def train(
    objective: nn.Module,
    data: Any,
    options: TrainingOptions,
    work: Path,
    device: torch.device,
    report: Report,
    held_out: Any = None,
) -> dict[str, float]:
    """Train an objective in place; goes on from the last checkpoint in ``work`` if there is one.

    Args:
        objective: a module that turns a batch into ``{"loss": …}``; its parameters are what is trained.
        data: a dataset of that module's arguments (without the batch dimension), with a length.
        options: how to train.
        work: folder for checkpoints and log.csv.
        device: where the objective lies.
        report: takes progress lines.
        held_out: a dataset whose loss is logged beside.
    """
    if len(data) == 0:
        raise InputError("the training data has no text long enough to learn from")
    logging.getLogger("transformers.trainer").setLevel(logging.ERROR)
    args = arguments(options, work, device)
    measure = None
    if held_out is not None and len(held_out):
        measure = partial(mean_loss, objective, held_out, options, device)
    log = _Log(work / "log.csv", measure, options.save_every, report)
    trainer = _Trainer(model=objective, args=args, train_dataset=data, callbacks=[log])
    trainer.remove_callback(PrinterCallback)
    last = last_checkpoint(work / "checkpoints")
    if last is not None:
        report(f"going on from {last}")
    if last is not None and _finished(last, len(data), options):
        trainer._load_from_checkpoint(str(last))  # Trainer itself would take one step more
        state = json.loads((last / "trainer_state.json").read_text(encoding="utf-8"))
    else:
        try:
            trainer.train(resume_from_checkpoint=str(last) if last else None)
        except (OSError, SafetensorError, RuntimeError) as error:
            writing = not isinstance(error, RuntimeError) or "PytorchStreamWriter" in str(error)
            if not writing:
                raise
            reason = getattr(error, "strerror", None) or "the disk took no more"
            raise RunError(f"cannot write a checkpoint to {work}: {reason}; older ones are kept") from error
        state = asdict(trainer.state)
    figures = _figures(state, options)
    if measure is not None and first_process():
        figures["held_out_loss"] = round(measure(), 4)
    return figures


@torch.no_grad()
def mean_loss(objective: nn.Module, data: Any, options: TrainingOptions, device: torch.device) -> float:
    """The loss of an objective as it is, over up to :data:`HELD_OUT` items spread over the data."""
    chosen = range(0, len(data), -(-len(data) // HELD_OUT))
    total = 0.0
    with torch.autocast(TorchBackend(device).kind, dtype=torch.bfloat16, enabled=options.bf16):
        for i in chosen:
            item = {name: value[None].to(device) for name, value in data[i].items()}
            total += float(objective(**item)["loss"])
    return total / len(chosen)


def _finished(checkpoint: Path, items: int, options: TrainingOptions) -> bool:
    """True when a checkpoint holds all the steps that the options ask for."""
    done = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
    batches = math.ceil(items / (options.batch * world_size()))
    return done >= (options.steps or math.ceil(options.epochs * math.ceil(batches / options.accumulate)))


def _figures(state: dict[str, Any], options: TrainingOptions) -> dict[str, float]:
    """Steps, mean of the last five logged losses (if any was logged), and the peak learning rate."""
    losses = [row["loss"] for row in state["log_history"] if "loss" in row][-5:]
    loss = {"loss": sum(losses) / len(losses)} if losses else {}
    return {"steps": float(state["global_step"]), **loss, "lr": options.lr}
