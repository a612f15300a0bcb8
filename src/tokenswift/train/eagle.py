"""EAGLE-3 drafters: their sizes, and their training by the recipe, with training-time test.

The LM head stays the base model's, its rows those of the tokens in the loss, which are the tokens that the
drafter can name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import ConcatDataset

from tokenswift.files import line_of, replacing
from tokenswift.loader.config import head_width
from tokenswift.loader.default_model import RECORD
from tokenswift.spec.eagle.config import FEATURES, EagleConfig, default_layers
from tokenswift.spec.eagle.files import INNER, OUTER
from tokenswift.train.collect import Report
from tokenswift.train.eagle_gguf import packed
from tokenswift.train.eagle_start import started
from tokenswift.train.eagle_student import EagleStudent
from tokenswift.train.features import check_room, gathered
from tokenswift.train.loss import FrozenBase
from tokenswift.train.options import Job, check_eagle_out
from tokenswift.train.recipe import Recipe
from tokenswift.train.store import HiddenStore, PairedWindows, Windows, held_out
from tokenswift.train.work import first_process, once
from tokenswift.types import InputError, OnProgress, RunError


def eagle_config(model: Any, drafted: int, window: int) -> EagleConfig:
    """What the drafter to train looks like: a layer of the base model's sizes, with normed features.

    Args:
        drafted: tokens that it can name.
        window: positions that it learns from at once.
    Raises:
        InputError: the model has too few layers, or sizes of a kind of its own.
    """
    config = model.config
    layers = default_layers(config.num_hidden_layers)
    if len({*layers}) < FEATURES:
        raise InputError(
            f"the model has {config.num_hidden_layers} layers; valid: 7 or more, of which three give features"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in rope:
        raise InputError("the model has no rotary positions of one kind; valid: a model with them")
    return EagleConfig(
        hidden=config.hidden_size,
        target_hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_width(config),
        intermediate=config.intermediate_size,
        eps=float(config.rms_norm_eps),
        rope={"rope_type": "default", "rope_theta": rope["rope_theta"]},
        vocab=config.vocab_size,
        draft_vocab=drafted,
        feature_layers=layers,
        trained=window,
        fc_norm=True,
    )


def train_eagle(
    model: Any,
    tokenizer: Any,
    job: Job,
    report: Report,
    on_progress: OnProgress,
    *,
    depths: int = 3,
    pack: Path | None = None,
) -> dict[str, Any]:
    """The whole way to a checkpoint in the form of Speculators; returns the notes that stand beside it.

    Args:
        model, tokenizer, job, report, on_progress: see :class:`Recipe`.
        depths: tokens of a chain that are trained.
        pack: also write a GGUF file, see :func:`eagle_gguf.packed`.
    Raises:
        InputError: an option out of range, too little data, a work folder of another training, or a model
            whose layers are of another kind.
        RunError: the loss is not finite, the disk is full.
    """
    check_eagle_out(job.out)
    window = job.training.window
    layers = eagle_config(model, 1, window).feature_layers
    recipe = Recipe(model, tokenizer, job, report, on_progress, eagle=[depths, *layers])
    config = eagle_config(model, recipe.frozen.size, window)
    size = check_room(recipe.stores, FEATURES * config.hidden, job.work)
    weights = sum(shape.numel() for shape in map(torch.Size, config.shapes().values()))
    held = weights * 16  # weights, their gradients and two moments in float32
    report(f"features: {size / 1e9:.2f} GB on the disk; the drafter takes {held / 1e9:.2f} GB of memory")
    features = []
    for number, store in enumerate(recipe.stores):
        place = job.work / f"features-{number}"

        def gather(store: HiddenStore = store, place: Path = place) -> HiddenStore:
            return gathered(model, store, layers, place, on_progress)

        once(partial(_is_whole, place), gather)
        features.append(gather())
    student = EagleStudent(config, _start(config, recipe, features, depths), depths)
    notes = {"kind": "eagle3", "depths": depths, "drafted": config.draft_vocab}
    notes |= recipe.distil(student, features)
    if first_process():
        save_eagle(student, model, recipe.frozen, job, notes)
        if pack is not None:
            packed(job.out, model.config, pack)
    return notes


def _start(
    config: EagleConfig, recipe: Recipe, features: Sequence[HiddenStore], depths: int
) -> dict[str, Tensor]:
    """Where training starts, on the base's device: made once, then read from the work folder."""
    path, training = recipe.job.work / "start.safetensors", recipe.job.training

    def make() -> None:
        items = []
        for pair in zip(recipe.stores, features, strict=True):
            blocks, _ = held_out(pair[0], training.held_out)
            items.append(PairedWindows(*(Windows(one, depths, training.window, 0, blocks) for one in pair)))
        made = started(config, recipe.frozen, ConcatDataset(items), depths, training.seed)
        with replacing(path) as part:
            save_file({name: value.cpu().contiguous() for name, value in made.items()}, part)

    once(path.exists, make)
    return {name: value.to(recipe.frozen.device) for name, value in load_file(path).items()}


def _is_whole(folder: Path) -> bool:
    index = folder / "index.json"
    return index.exists() and bool(json.loads(index.read_text(encoding="utf-8"))["complete"])


def save_eagle(student: EagleStudent, model: Any, base: FrozenBase, job: Job, notes: dict[str, Any]) -> None:
    """Write the checkpoint, in bfloat16; embeddings stay the base model's.

    Raises:
        RunError: the disk is full.
    """
    config, named = student.config, {ours: theirs for theirs, ours in OUTER.items()}
    named |= {ours: f"layers.0.{theirs}" for theirs, ours in INNER.items()}
    weights = student.tensors() | {"lm_head": base.rows[: base.size]}
    tensors = {
        named[name]: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in weights.items()
    }
    for name, value in tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise RunError(f"tensor {name} is not finite in bfloat16; nothing was written")
    if config.draft_vocab < config.vocab:
        drafted = base.subset.cpu()
        tensors["d2t"] = drafted - torch.arange(len(drafted))
        tensors["t2d"] = torch.zeros(config.vocab, dtype=torch.bool).index_fill(0, drafted, True)
    try:
        job.out.mkdir(parents=True, exist_ok=True)
        said = said_of(config, model, job, student.levels)
        for name, value in ((RECORD, {"target": job.name, "notes": notes}), ("config.json", said)):
            with replacing(job.out / name) as part:
                part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        with replacing(job.out / "model.safetensors") as part:
            save_file(tensors, part, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot write the drafter to {job.out}: {line_of(error)}") from error


def said_of(config: EagleConfig, model: Any, job: Job, depths: int) -> dict[str, Any]:
    """The config.json of a drafter, as the package `speculators` reads it."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "target_hidden_size": config.target_hidden,
        "torch_dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depths}],
            "verifier": {
                "name_or_path": job.name,
                "architectures": list(getattr(model.config, "architectures", None) or []),
            },
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": config.hidden,
            "intermediate_size": config.intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": config.eps,
            "rope_parameters": dict(config.rope),
            "vocab_size": config.vocab,
            "max_position_embeddings": config.trained,
        },
    }
