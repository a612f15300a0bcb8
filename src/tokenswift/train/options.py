"""What heads and draft models are trained from, and how; the named recipes."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenswift.config import SamplingParams, check_choice, check_integer, check_number
from tokenswift.types import InputError

#: Recipes: what options are where neither the command nor the machine says otherwise. ``paper`` is Table 9's
#: (3 sequences of 8,192 tokens a device, accumulated 10 times, as 480 windows of 512 positions).
RECIPES: dict[str, dict[str, Any]] = {
    "own": {},
    "paper": {
        "kind": "linear",
        "heads": 3,
        "start": "zero",
        "targets": "text",
        "continued": False,
        "sequence_length": 8192,
        "loss_vocabulary": 0,
        "batch": 3,
        "window": 512,
        "accumulate": 160,
        "steps": 200,
        "lr": 5e-3,
        "weight_decay": 0.1,
        "warmup": 50,
        "beta2": 0.999,
    },
}
TARGETS = ("model", "text")
STARTS = ("ridge", "zero")


@dataclass(frozen=True, slots=True)
class DataOptions:
    """What the heads learn from.

    Attributes:
        source: a text or JSONL file, a folder of them, "self" (the model writes from nothing), "pg19".
        continued: learn from passages of the source and the model's own continuations of them.
        tokens: limit of tokens to learn from (with ``continued``, or "self": that the model writes).
        sequence_length: tokens run through the model at once; with ``continued``, of the shortest prompt
            and its continuation.
        prompt: tokens of the passages that the model continues, ascending; several: in equal shares, so
            that heads see contexts of several lengths.
        write_batch: texts of ``sequence_length`` that the model writes together (fewer of longer ones).
        seed: of passages and of what the model writes.
        sampling: how the model writes, and the distribution that is learnt.
    """

    source: str
    continued: bool = False
    tokens: int = 300_000
    sequence_length: int = 768
    prompt: tuple[int, ...] = (256,)
    write_batch: int = 48
    seed: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        check_integer("tokens", self.tokens, 256)
        check_integer("sequence_length", self.sequence_length, 32)
        check_integer("write_batch", self.write_batch, 1)
        if not self.continued:
            return
        if self.source == "self":
            raise InputError("--continued needs a --data file or folder; self writes from nothing")
        most = self.sequence_length - 16
        if not self.prompt or list(self.prompt) != sorted(set(self.prompt)):
            raise InputError(f"prompt is {list(self.prompt)}; valid: one length, or several ascending ones")
        check_integer("prompt", self.prompt[0], 1, f"from 1 to sequence_length - 16 = {most}")
        if self.prompt[0] > most:
            raise InputError(f"prompt is {self.prompt[0]}; valid: from 1 to sequence_length - 16 = {most}")

    @property
    def new_tokens(self) -> int:
        """Tokens that the model writes after each passage."""
        return self.sequence_length - (self.prompt[0] if self.continued else 0)


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How heads or a draft model are trained from their start.

    Attributes:
        epochs: passes over the data; 0 keeps the start.
        steps: optimiser steps; 0 takes ``epochs``.
        lr: peak learning rate (AdamW, cosine to zero after a warm-up).
        weight_decay, beta2: AdamW's.
        warmup: steps of the warm-up.
        batch: windows per device and forward.
        window: positions per window.
        accumulate: batches per optimiser step.
        targets: "model" (the processed distribution of the model) or "text" (the text's own next token).
        start: of heads: "ridge" (closed form) or "zero" (they repeat the model).
        held_out: share of the sequences that are not learnt from; their loss is logged.
        seed: of the data order and random starts.
        save_every: steps between checkpoints, and between held-out losses.
        log_every: steps between log rows.
        tensorboard: also write TensorBoard logs.
        bf16: mixed precision.
    """

    epochs: float = 3.0
    steps: int = 0
    lr: float = 1e-3
    weight_decay: float = 0.01
    beta2: float = 0.98
    warmup: int = 30
    batch: int = 4
    window: int = 128
    accumulate: int = 1
    targets: str = "model"
    start: str = "ridge"
    held_out: float = 0.02
    seed: int = 0
    save_every: int = 200
    log_every: int = 20
    tensorboard: bool = False
    bf16: bool = True

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "seed", "warmup", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} is {getattr(self, name)!r}; valid: at least 0")
        for name in ("batch", "accumulate", "save_every", "log_every"):
            check_integer(name, getattr(self, name), 1)
        check_integer("window", self.window, 16)
        check_choice("targets", self.targets, TARGETS)
        check_choice("start", self.start, STARTS)
        check_number("held_out", self.held_out, "from 0 to 0.5", 0 <= self.held_out <= 0.5)
        check_number("lr", self.lr, "between 0 and 1", 0 < self.lr < 1)
        check_number("beta2", self.beta2, "between 0 and 1", 0 < self.beta2 < 1)
        if self.tensorboard and not any(map(find_spec, ("tensorboard", "tensorboardX"))):
            raise InputError("--tensorboard needs the package tensorboard; pip install tensorboard")


@dataclass(frozen=True, slots=True)
class Job:
    """A training: what is learnt from, how, and where its parts lie.

    Attributes:
        data: where hidden states come from; None with ``states``.
        training: how to train.
        out: the file or folder to write.
        work: folder for hidden states, checkpoints and the CSV log.
        vocabulary: frequent tokens that the loss looks at; 0 for all.
        name: the base model's, for the outcome's header.
        sampling: the sampler whose distribution is learnt; None takes ``data``'s.
        states: finished work folders of train-heads whose states are used instead of ``data``.
        dtype, device: of the base model in this process.
    """

    data: DataOptions | None
    training: TrainingOptions
    out: Path
    work: Path
    vocabulary: int
    name: str
    sampling: SamplingParams | None = None
    states: tuple[Path, ...] = ()
    dtype: str = "auto"
    device: str = "auto"

    @property
    def learnt(self) -> SamplingParams:
        """The sampler whose distribution is learnt."""
        return self.sampling or (self.data.sampling if self.data is not None else SamplingParams())
