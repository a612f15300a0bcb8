"""A small draft model for a target: a few of its own layers, trained to its processed next-token chances.

The student has the target's config with fewer layers. Embeddings and LM head are the target's and stay
as they are; the layers and the final norm train. The data are a store's tokens and hidden states (the
same that heads are trained from), so the target itself is not run again: its distribution at every position
comes from the stored state. The outcome is an ordinary transformers folder, and, by :func:`pack`, a
small file with the trained weights alone.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM

from tokenswift.config import SamplingParams, check_integer
from tokenswift.files import replacing
from tokenswift.loader import draft as packed_draft
from tokenswift.loader._hf import making_models, quiet_transformers
from tokenswift.loader.identity import sample_of
from tokenswift.loader.made import RECORD
from tokenswift.train.collect import Report
from tokenswift.train.loss import FrozenBase, cross_entropy
from tokenswift.train.options import Job
from tokenswift.train.pipeline import Pipeline
from tokenswift.train.processes import first_process
from tokenswift.train.store import Block, HiddenStore
from tokenswift.types import InputError, RunError

WINDOW = 256  # tokens that the student reads at once
SHORTEST = 16  # tokens; shorter remainders of a block are left out


class TextWindows(Dataset[dict[str, Tensor]]):
    """Windows of a store's blocks, for a student with causal attention inside the window.

    An item holds ``tokens`` (chunk,) and ``hidden`` (chunk, D), padded at the end, ``valid`` (chunk,),
    and ``before`` (context,), the block's tokens before the window, -1 where there are none.

    Args:
        store: the states.
        chunk: tokens per window.
        context: tokens before it (for the penalty only).
        blocks: the blocks to use; None takes all.
    """

    def __init__(
        self, store: HiddenStore, chunk: int, context: int, blocks: list[Block] | None = None
    ) -> None:
        self.tokens, self.states = store.arrays()
        self.chunk, self.context = chunk, context
        self.items = [
            (block.start, start, min(chunk, block.length - start))
            for block in (store.blocks if blocks is None else blocks)
            for start in range(0, block.length, chunk)
            if block.length - start >= min(SHORTEST, chunk)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block, start, length = self.items[index]
        at, known = block + start, min(start, self.context)
        tokens = torch.zeros(self.chunk, dtype=torch.long)
        tokens[:length] = torch.from_numpy(self.tokens[at : at + length].astype(np.int64))
        before = torch.full((self.context,), -1, dtype=torch.long)
        before[self.context - known :] = torch.from_numpy(self.tokens[at - known : at].astype(np.int64))
        hidden = torch.zeros(self.chunk, self.states.shape[1], dtype=torch.bfloat16)
        hidden[:length] = torch.from_numpy(np.array(self.states[at : at + length])).view(torch.bfloat16)
        return {
            "before": before,
            "tokens": tokens,
            "hidden": hidden,
            "valid": torch.arange(self.chunk) < length,
        }


class DraftObjective(nn.Module):
    """A student's layers and final norm, plus the loss: a batch in, ``{"loss": …}`` out."""

    def __init__(self, student: Any, base: FrozenBase, sampling: SamplingParams) -> None:
        super().__init__()
        self.layers, self.norm = student.base_model.layers, student.base_model.norm
        self.sampling = sampling
        object.__setattr__(self, "body", student.base_model)  # its embeddings neither train nor are saved
        self.base = base
        self.body: Any

    def forward(
        self,
        before: Int[Tensor, "B c"],
        tokens: Int[Tensor, "B n"],
        hidden: Float[Tensor, "B n D"],
        valid: Bool[Tensor, "B n"],
    ) -> dict[str, Tensor]:
        """Mean cross-entropy, nats a token, over the valid positions; see :class:`TextWindows`."""
        embeds = self.base.embed(tokens).to(self.norm.weight.dtype)
        states = self.body(inputs_embeds=embeds, use_cache=False).last_hidden_state
        recent = self.base.recent(
            torch.cat((before, tokens), dim=1), before.shape[1], tokens.shape[1], self.sampling.window
        )
        shares, places = self.base.teacher(hidden, recent, self.sampling)
        scores = self.base.scores(states.flatten(0, 1), recent, self.sampling)
        rows = shares.flatten(0, 1), places.flatten(0, 1)
        return {"loss": cross_entropy(scores, *rows, valid.flatten().float())}


def layer_picks(layers: int, total: int) -> list[tuple[int, ...]]:
    """Which of the target's layers a student may start from: the first ones, or all but one and the last."""
    check_integer("layers", layers, 1, f"from 1 to {total}, the target's layers")
    if layers > total:
        raise InputError(f"layers is {layers}; valid: from 1 to {total}, the target's layers")
    first = tuple(range(layers))
    last = (*first[:-1], total - 1)
    return [first] if last == first else [first, last]


def make_student(model: Any, picks: Sequence[int]) -> Any:
    """A model of the target's class with copies of these layers and its final norm, float32.

    Embeddings and LM head are the target's own modules, shared and frozen.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(picks)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[pick] for pick in picks]
    with making_models():
        student: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    student.set_input_embeddings(model.get_input_embeddings())
    student.set_output_embeddings(model.get_output_embeddings())
    for place, pick in enumerate(picks):
        student.base_model.layers[place].load_state_dict(model.base_model.layers[pick].state_dict())
    student.base_model.norm.load_state_dict(model.base_model.norm.state_dict())
    for part in (student.base_model.layers, student.base_model.norm):
        part.to(device=model.device, dtype=torch.float32).requires_grad_(True)
    student.base_model.rotary_emb.to(model.device)
    model.requires_grad_(False)
    return student.train()


@torch.no_grad()
def start_loss(
    student: Any, base: FrozenBase, sampling: SamplingParams, windows: Dataset[dict[str, Tensor]]
) -> float:
    """A student's mean loss over up to 16 windows spread over the data."""
    objective = DraftObjective(student, base, sampling)
    size: int = len(windows)  # type: ignore[arg-type]
    chosen = [windows[i] for i in range(0, size, max(1, size // 16))][:16]
    device = base.device
    return float(
        np.mean([objective(**{k: v[None].to(device) for k, v in i.items()})["loss"].item() for i in chosen])
    )


def train_draft(model: Any, tokenizer: Any, job: Job, report: Report, *, layers: int) -> dict[str, Any]:
    """The whole way; returns the notes that are also written to the folder's ``tokenswift.json``.

    Args:
        model, tokenizer, job, report: see `pipeline.Pipeline`.
        layers: layers of the student, from 1 to the target's.
    Raises:
        InputError: layers out of range, too little data, ``job.out`` is something else, foreign states.
        RunError: the loss is not finite, the disk is full.
    """
    picks = layer_picks(layers, len(model.base_model.layers))
    packed_draft.check_out(job.out)
    sampling = job.learnt
    line = Pipeline(model, tokenizer, job, report, layers=layers)
    windows, kept = line.windows(lambda store, part: TextWindows(store, WINDOW, sampling.window, part))
    if len(windows) == 0:
        raise InputError("the training data has no text long enough to learn from")
    torch.manual_seed(job.training.seed)
    starts = {pick: start_loss(make_student(model, pick), line.frozen, sampling, windows) for pick in picks}
    pick = min(picks, key=lambda p: starts[p])
    for which, loss in starts.items():
        report(f"start from the target's layers {', '.join(map(str, which))}: loss {loss:.4f}")
    student = make_student(model, pick)
    notes: dict[str, Any] = {"layers": layers, "from": list(pick), "start_loss": round(starts[pick], 4)}
    notes |= line.notes() | line.train(DraftObjective(student, line.frozen, sampling), windows, kept)
    notes["minutes"] = line.minutes
    if first_process():
        record = {"name": job.out.name, "target": line.base.name, "notes": notes}
        save_draft(student, tokenizer, job.out, record, model.dtype)
    return notes


def save_draft(student: Any, tokenizer: Any, out: Path, record: dict[str, Any], dtype: torch.dtype) -> None:
    """Write the transformers folder, with the target's tokenizer; a failure leaves what was there before."""
    out = Path(os.path.realpath(out))
    part, old = (out.with_name(f".{out.name}.{os.getpid()}.{end}") for end in ("part", "old"))
    try:
        part.mkdir(parents=True)
        with quiet_transformers():
            student.to(dtype).eval().save_pretrained(part, max_shard_size="1TB")
            tokenizer.save_pretrained(part)
        config = json.loads((part / "config.json").read_text(encoding="utf-8"))
        config["dtype"] = str(dtype).removeprefix("torch.")
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (part / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        for path in part.iterdir():  # the weights come out readable by their owner only
            path.chmod(0o644)
        packed_draft.check_out(out)
        if out.exists():
            out.rename(old)
        part.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error)
        raise RunError(f"cannot write the draft model to {out}: {reason}; checkpoints are kept") from error


def pack(folder: Path, file: Path) -> None:
    """Write a small file with the trained weights of a draft model's folder, bfloat16.

    Args:
        folder: a folder from :func:`train_draft`.
        file: the safetensors file; see :func:`tokenswift.loader.draft.build` for the way back.
    Raises:
        InputError: the folder is no draft model, or the file cannot be written.
    """
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        with safe_open(folder / "model.safetensors", framework="pt") as source:
            tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
        own = {n: t for n, t in tensors.items() if not n.endswith(packed_draft.SHARED)}
        embedding = next(t for n, t in tensors.items() if n.endswith(packed_draft.SHARED[0]))
        header = {"version": packed_draft.VERSION, "target": record["target"], "notes": record["notes"]}
    except (OSError, ValueError, KeyError, SafetensorError, StopIteration) as error:
        raise InputError(f"{folder} is no draft model of train-draft ({error})") from error
    config = {key: value for key, value in config.items() if not re.match("_|transformers_version", key)}
    packed = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in own.items()}
    packed[packed_draft.SAMPLE] = sample_of(embedding)
    metadata = {packed_draft.METADATA_KEY: json.dumps({**header, "config": config})}
    try:
        with replacing(file) as part:
            save_file(packed, part, metadata=metadata)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"pack {file} cannot be written: {reason}") from error
