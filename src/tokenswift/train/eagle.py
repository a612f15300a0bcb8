"""EAGLE-3 drafters: where they start, and their training by the recipe, with training-time test.

Training-time test (Li et al. 2025): what the layer makes of a position is its feature at the next depth, as
in drafting. There a row of depth i, drafted from position t, sees the rows of depth 0 up to t, and of its
own chain one row of each depth; so it is here, for all positions of a window at once.

The layer starts as the base model's last one, which reads the features alone: at first the drafter says about
what the base model says of the token before. The LM head stays the base model's, its rows those of the tokens
in the loss, which are the tokens that the drafter can name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from tokenswift.files import replacing
from tokenswift.json_files import line_of
from tokenswift.loader.checkpoint import head_width
from tokenswift.loader.made import RECORD
from tokenswift.spec.eagle.config import FEATURES, SHARED, EagleConfig, default_layers
from tokenswift.spec.eagle.files import INNER, OUTER
from tokenswift.spec.eagle.reference import EagleLayer
from tokenswift.train.collect import Report
from tokenswift.train.features import check_room, gathered
from tokenswift.train.loss import FrozenBase, Student
from tokenswift.train.options import Job, check_eagle_out
from tokenswift.train.recipe import Recipe
from tokenswift.train.store import HiddenStore
from tokenswift.train.work import first_process, once
from tokenswift.types import InputError, OnProgress, RunError

SCALED = 4096  # rows of features whose scale is looked at
#: tensors of the layer by their names in the base model's last one
LAST = {ours: theirs for theirs, ours in INNER.items() if theirs.endswith("weight")}


class EagleStudent(Student):
    """A drafter's layer, fed the text's own tokens, and from the second depth on what it made itself."""

    ahead = 1

    def __init__(self, config: EagleConfig, tensors: dict[str, Tensor], depths: int) -> None:
        super().__init__()
        self.config, self.levels, self.rotary = config, depths, config.rotary()
        self.weights = nn.ParameterDict({name.replace(".", "_"): value for name, value in tensors.items()})
        self.names = list(tensors)

    def tensors(self) -> dict[str, Tensor]:
        """The weights by canonical names."""
        return {name: self.weights[name.replace(".", "_")] for name in self.names}

    def forward(
        self, tokens: Int[Tensor, "b L"], hidden: Float[Tensor, "b n F"], base: FrozenBase
    ) -> list[Float[Tensor, "r D"]]:
        """See :class:`Student`; ``hidden`` are features."""
        m = hidden.shape[1] - self.extra
        layer = EagleLayer(self.config, self.tensors())
        rotary, positions = self.rotary.to(hidden.device), torch.arange(m, device=hidden.device)
        state = layer.fuse(hidden[:, :m].float())
        keys, values, made = [], [], []
        for i in range(self.levels):
            embeds = base.embed(tokens[:, 1 + i : 1 + i + m]).float()
            q, k, v, residual = layer.enter(embeds, state, rotary, positions + i)
            keys.append(k)
            values.append(v)
            state, read = layer.leave(attended(q, keys, values, self.config.window), residual)
            made.append(read.flatten(0, 1))
        return made


def attended(
    q: Float[Tensor, "b m h d"],
    keys: Sequence[Float[Tensor, "b m k d"]],
    values: Sequence[Float[Tensor, "b m k d"]],
    window: int | None,
) -> Float[Tensor, "b m h d"]:
    """Attention of the newest depth: over all positions' rows of depth 0, and its own position's rows of
    deeper ones.

    Args:
        keys, values: by depth, the newest last.
        window: newest positions that are seen; None: all.
    """
    m, depth = q.shape[1], len(keys) - 1
    q = q.unflatten(2, (keys[0].shape[2], -1))
    scale = q.shape[-1] ** -0.5
    behind = torch.arange(m, device=q.device)[:, None] - torch.arange(m, device=q.device)
    seen = behind >= 0
    if window is not None:
        seen &= behind + depth < window
    first = torch.einsum("bnkgd,bmkd->bnkgm", q, keys[0]).float() * scale
    scores = [first.masked_fill(~seen[:, None, None], -torch.inf)]
    scores += [(q * row[:, :, :, None]).sum(-1, keepdim=True).float() * scale for row in keys[1:]]
    shares = torch.cat(scores, dim=-1).softmax(-1)
    out = torch.einsum("bnkgm,bmkd->bnkgd", shares[..., :m], values[0])
    for number, row in enumerate(values[1:]):
        out = out + shares[..., m + number, None] * row[:, :, :, None]
    return out.flatten(2, 3)


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


@torch.no_grad()
def started(config: EagleConfig, model: Any, scale: float, seed: int) -> dict[str, Tensor]:
    """The weights that training starts from, float32.

    Args:
        scale: of the features of the last of the three layers, which its norm gives back.
    """
    made = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    there = model.base_model.layers[-1].state_dict() | {"norm.weight": model.base_model.norm.weight}
    for name, shape in config.shapes().items():
        if name in SHARED:
            continue
        std = 0.02 / (2 if name in ("o", "down") else 1)
        value = torch.ones(shape, dtype=torch.float32)
        if len(shape) > 1:
            value = torch.randn(shape, generator=made, dtype=torch.float32) * std
        last = there.get(LAST.get(name, f"{name}.weight"))
        if last is not None and last.shape == shape:
            value = last.float().cpu().clone()
        elif last is not None and name in ("q", "k", "v"):  # its columns are those of the features
            value[:, config.hidden :] = last.float().cpu()
        found[name] = value
    third = found["fc"][:, -config.hidden :]
    third += torch.eye(*third.shape, dtype=torch.float32)
    if "self_attn.q_norm.weight" in there:  # without these norms its queries and keys mean nothing
        for name in ("q", "k"):
            found[name] = torch.randn(found[name].shape, generator=made, dtype=torch.float32) * 0.02
    found["hidden_norm"] = there["input_layernorm.weight"].float().cpu().clone()
    found["input_norm"] = torch.ones(config.hidden, dtype=torch.float32)
    found[f"fc_norm.{FEATURES - 1}"].fill_(scale)
    return found


def scale_of(features: HiddenStore) -> float:
    """The median length of the last layer's features in a store, by the number."""
    _, bits = features.arrays()
    rows = torch.from_numpy(bits[:SCALED].copy()).view(torch.bfloat16).float()
    return float(rows.chunk(FEATURES, dim=-1)[-1].pow(2).mean(-1).sqrt().median())


def train_eagle(
    model: Any,
    tokenizer: Any,
    job: Job,
    report: Report,
    on_progress: OnProgress,
    *,
    depths: int = 3,
) -> dict[str, Any]:
    """The whole way to a checkpoint in the form of Speculators; returns the notes that stand beside it.

    Args:
        model, tokenizer, job, report, on_progress: see :class:`Recipe`.
        depths: tokens of a chain that are trained.
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
    start = started(config, model, scale_of(features[0]), job.training.seed)
    student = EagleStudent(config, start, depths).to(recipe.frozen.device)
    notes = {"kind": "eagle3", "depths": depths, "drafted": config.draft_vocab}
    notes |= recipe.distil(student, features)
    if first_process():
        save_eagle(student, model, recipe.frozen, job, notes)
    return notes


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
