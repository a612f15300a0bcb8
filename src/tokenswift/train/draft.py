"""A small draft model for a target: its own first layers, trained to its processed next-token distribution.

The student has the target's config with fewer layers. Embeddings and LM head are the target's and stay
as they are; the layers and the final norm train. The data are a store's tokens and hidden states (the
same that heads are trained from), so the target itself is not run again: its distribution at every position
comes from the stored state. The outcome is an ordinary transformers folder.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM

from tokenswift.files import line_of
from tokenswift.loader.default_model import RECORD, check_out
from tokenswift.loader.load import quiet_transformers
from tokenswift.train.loop import Recipe, Report, first_process
from tokenswift.train.loss import FrozenBase, Student
from tokenswift.train.options import Job
from tokenswift.types import InputError, OnProgress, RunError


class DraftStudent(Student):
    """The layers and the final norm of a draft model, which reads a window of the text."""

    levels, ahead = 1, 0

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layers, self.norm = model.base_model.layers, model.base_model.norm
        object.__setattr__(self, "body", model.base_model)  # its embeddings neither train nor are saved
        self.body: Any

    def forward(
        self, tokens: Int[Tensor, "b L"], states: Float[Tensor, "b n W"], base: FrozenBase
    ) -> list[Float[Tensor, "r D"]]:
        """See :class:`Student`."""
        embeds = base.embed(tokens[:, : states.shape[1]]).to(self.norm.weight.dtype)
        return [self.body(inputs_embeds=embeds, use_cache=False).last_hidden_state.flatten(0, 1)]


def make_student(model: Any, layers: int) -> Any:
    """A model of the target's class with copies of its first layers and its final norm, float32.

    Embeddings and LM head are the target's own modules, shared and frozen.

    Raises:
        InputError: the target has no so many layers.
    """
    total = len(model.base_model.layers)
    if not 1 <= layers <= total:
        raise InputError(f"layers is {layers}; valid: from 1 to {total}, the target's layers")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    with quiet_transformers():
        student: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    student.set_input_embeddings(model.get_input_embeddings())
    student.set_output_embeddings(model.get_output_embeddings())
    student.base_model.layers.load_state_dict(model.base_model.layers[:layers].state_dict())
    student.base_model.norm.load_state_dict(model.base_model.norm.state_dict())
    model.requires_grad_(False)
    for part in (student.base_model.layers, student.base_model.norm):
        part.to(device=model.device, dtype=torch.float32).requires_grad_(True)
    student.base_model.rotary_emb.to(model.device)
    return student.eval()  # without dropout


def train_draft(
    llm: Any,
    job: Job,
    report: Report,
    on_progress: OnProgress,
    *,
    layers: int,
) -> dict[str, Any]:
    """The whole way to a model folder; returns the notes that are also written to its ``tokenswift.json``.

    Args:
        llm, job, report, on_progress: see :class:`Recipe`.
        layers: of the student, from 1 to the target's.
    Raises:
        InputError: layers out of range, too little data, ``job.out`` is something else, foreign states.
        RunError: the loss is not finite, the disk is full.
    """
    student = make_student(llm.model, layers)
    check_out(job.out)
    recipe = Recipe(llm, job, report, on_progress, draft=layers)
    notes = {"layers": layers, **recipe.distil(DraftStudent(student))}
    if first_process():
        record = {"name": job.out.name, "target": recipe.base.name, "notes": notes}
        save_draft(student, llm.tokenizer, job.out, record, llm.model.dtype)
    return notes


def save_draft(student: Any, tokenizer: Any, out: Path, record: dict[str, Any], dtype: torch.dtype) -> None:
    """Write the transformers folder, with the target's tokenizer; a failure leaves what was there before.

    Raises:
        InputError: something else is there.
        RunError: the disk is full.
    """
    out = Path(os.path.realpath(out))
    part, old = (out.with_name(f".{out.name}.{os.getpid()}.{end}") for end in ("part", "old"))
    student.config.dtype = dtype
    try:
        with quiet_transformers():
            student.to(dtype).save_pretrained(part, max_shard_size="1TB")
            tokenizer.save_pretrained(part)
        (part / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        for path in part.iterdir():  # the weights come out readable by their owner only
            path.chmod(0o644)
        check_out(out)
        if out.exists():
            out.rename(old)
        part.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise RunError(f"cannot write the draft model to {out}: {line_of(error)}") from error
