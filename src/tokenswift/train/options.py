"""What drafters are trained from, and how. Fields are options of the commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tokenswift.config.fields import SHOWN, AtLeast, Between, Option, Rule, check_fields
from tokenswift.config.sampling import SEED, SamplingParams

#: How each kind is trained where no option says otherwise. ``linear`` is the paper's Table 9 (3
#: sequences of 8,192 tokens a device, accumulated 10 times, as 480 windows of 512 positions).
RECIPES: dict[str, dict[str, Any]] = {
    "conditioned": {},
    "medusa": {},
    "linear": {
        "targets": "text",
        "sequence_length": 8192,
        "prose": 0.0,
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
    "eagle": {
        "loss_vocabulary": 8192,
        "window": 1024,
        "batch": 1,
        "accumulate": 2,
        "epochs": 6,
        "warmup": 50,
        "held_out": 0.06,
        "weight_decay": 0.05,
    },
}


BETWEEN_0_AND_1 = Rule("between 0 and 1", lambda share: 0 < share < 1)
UP_TO_1 = Between(0, 1, "from 0 to 1")
UP_TO_A_MILLION = Between(0, 1e6, "from 0 to 1e6")
LEAST_TEXTS = 40  # that there would be if all were long


@dataclass(frozen=True, slots=True)
class DataOptions:
    """What is learnt from.

    Attributes:
        data: what the model writes after: self (questions that it answers, or nothing), a text
            file, or a folder of them, of which it continues passages, each a third of its text
        tokens: tokens to learn from (300,000, with CUDA 4,000,000, by default)
        sequence_length: tokens of a text at most (768, with CUDA 8,192, by default)
        write_batch: texts that the model writes together (16, with CUDA 32, by default)
        prose: share of the text that is long prose, where the model writes after itself: it
            continues beginnings of novels, letters and reports as ``generate --continue`` does, or
            passages of the texts of --from-runs; the rest are answers
        prose_length: tokens of such a text (3,072, with CUDA 8,192, by default), at most a fortieth
            of all
        from_runs: a folder of runs, of whose texts the model continues passages in turns with the
            questions
    """

    data: Annotated[str, Option("PATH", shown=True)]
    tokens: Annotated[int, AtLeast(256), SHOWN] = 300_000
    sequence_length: Annotated[int, AtLeast(32)] = 768
    write_batch: Annotated[int, AtLeast(1)] = 16
    prose: Annotated[float, UP_TO_1, SHOWN] = 0.3
    prose_length: Annotated[int, AtLeast(32)] = 3072
    from_runs: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def passage_length(self) -> int:
        """Tokens of a passage that the model continues."""
        return self.sequence_length // 3

    @property
    def long_length(self) -> int:
        """Tokens of a text of prose: so few that some of these texts can be held out."""
        return max(self.sequence_length, min(self.prose_length, self.tokens // LEAST_TEXTS))

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return self.long_length if self.prose else self.sequence_length


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How a drafter is trained from its start.

    Attributes:
        epochs: passes over the data; 0 keeps the initial weights
        steps: optimiser steps (0: as many as the epochs take)
        lr: peak learning rate (AdamW, cosine to zero after a warm-up)
        weight_decay, beta2: AdamW's
        warmup: steps of the warm-up
        batch: windows per forward pass
        window: positions per window
        accumulate: batches per optimiser step
        loss_vocabulary: frequent tokens in the loss, 0 for all; by default 4,096, of the kind eagle
            8,192, with CUDA all
        held_out: share of the sequences that are held out; their loss is logged
        save_every: steps between checkpoints, and between lines about the losses
        targets: "model" (its distribution, as decoding processes it) or "text" (the text's own
            tokens)
        seed: of the data, of what the model writes, and of the training
        bf16: mixed precision
    """

    epochs: Annotated[float, UP_TO_A_MILLION, SHOWN] = 3.0
    steps: Annotated[int, AtLeast(0), SHOWN] = 0
    lr: Annotated[float, BETWEEN_0_AND_1, SHOWN] = 1e-3
    weight_decay: Annotated[float, UP_TO_A_MILLION] = 0.01
    beta2: Annotated[float, BETWEEN_0_AND_1] = 0.98
    warmup: Annotated[int, AtLeast(0)] = 30
    batch: Annotated[int, AtLeast(1), SHOWN] = 4
    window: Annotated[int, AtLeast(16)] = 128
    accumulate: Annotated[int, AtLeast(1)] = 1
    loss_vocabulary: Annotated[int, AtLeast(0)] = 0
    held_out: Annotated[float, Between(0, 0.5, "from 0 to 0.5")] = 0.02
    save_every: Annotated[int, AtLeast(1)] = 200
    targets: str = "model"
    seed: Annotated[int, SEED] = 0
    bf16: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Job:
    """A training: what is learnt from, how, and where its parts lie.

    Attributes:
        data: where hidden states come from; None with ``states``.
        training: how to train.
        out: the file to write.
        work: folder for hidden states, the checkpoint and the log.
        name: the base model's, for the outcome's header.
        sampling: how the model writes; its temperature and filters shape the distribution that is
            learnt.
    """

    data: DataOptions
    training: TrainingOptions
    out: Path
    work: Path
    name: str
    sampling: SamplingParams = SamplingParams()
