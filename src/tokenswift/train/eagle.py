"""EAGLE-3 drafters: their training by the recipe with training-time test, and their start in closed form.

Training-time test (Li et al. 2025): what the layer makes of a position is its feature at the next depth, as
in drafting. There a row of depth i, drafted from position t, sees the rows of depth 0 up to t, and of its
own chain one row of each depth; so it is here, for all positions of a window at once.

The LM head stays the base model's, its rows those of the tokens in the loss, which are the tokens that the
drafter can name.

The start is by ridge regressions on the text; the layer starts as a recurrence. What stands for a feature is
about the base model's normed state: `fc` reads it off the features, and what the layer makes of it and of the
token's embedding is about the next state, at every depth. The embedding comes in by attention, through one
query head of each KV head that reads its own row alone: its queries and keys are the same constant, which a
product with normed embeddings can be made to say, in the fastest pairs of dimensions, where rotary positions
part rows that are a few tokens away. It goes where states vary least. Of the MLP's units the first are
linear, their gates constant; the others have random gates, and its last product is a regression over all
depths.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from tokenswift.files import line_of, replacing
from tokenswift.loader.config import head_width
from tokenswift.loader.default_model import RECORD
from tokenswift.loader.rope import Rotary
from tokenswift.spec.eagle.files import FEATURES, FLAGS, NAMES, SHARED, EagleConfig, default_layers
from tokenswift.train.heads import Regression, norm_weight
from tokenswift.train.loop import Recipe, Report, first_process, once
from tokenswift.train.loss import FrozenBase, Student
from tokenswift.train.options import Job, check_eagle_out
from tokenswift.train.states import HiddenStore, gather_features
from tokenswift.types import InputError, OnProgress, RunError

MOST = 40_000  # positions that a regression looks at
SHARP = 20.0  # score of a row's own key; those of others are lower by their distance
AMPLITUDE = 0.25  # of what embeddings add to a row, a dimension
GATE = 2.0  # of linear units


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
    training = job.training
    layers = eagle_config(model, 1, training.window).feature_layers
    recipe = Recipe(model, tokenizer, job, report, on_progress, eagle=[depths, *layers])
    config = eagle_config(model, recipe.frozen.size, training.window)
    size = sum(store.tokens_stored for store in recipe.stores) * FEATURES * config.hidden * 2
    held = sum(torch.Size(shape).numel() for shape in config.shapes().values()) * 16  # with two moments
    report(f"features: {size / 1e9:.2f} GB on the disk; the drafter takes {held / 1e9:.2f} GB of memory")
    features = list[HiddenStore]()
    for number, store in enumerate(recipe.stores):
        place = job.work / f"features-{number}"

        def gather(store: HiddenStore = store, place: Path = place) -> HiddenStore:
            return gather_features(model, store, layers, place, on_progress)

        once(lambda place=place: _is_whole(place), gather)
        features.append(gather())

    def make() -> dict[str, Tensor]:
        items = recipe.items(0, depths, 0, features)
        return started(config, recipe.frozen, items, depths, training.seed)

    student = EagleStudent(config, recipe.started(make), depths)
    notes = {"kind": "eagle3", "depths": depths, "drafted": config.draft_vocab}
    notes |= recipe.distil(student, features)
    if first_process():
        save_eagle(student, model, recipe.frozen, job, notes)
    return notes


def _is_whole(folder: Path) -> bool:
    index = folder / "index.json"
    return index.exists() and bool(json.loads(index.read_text(encoding="utf-8"))["complete"])


# ---- the forward pass --------------------------------------------------------------------------------------


def normed(x: Float[Tensor, "*m w"], weight: Float[Tensor, " w"], eps: float) -> Float[Tensor, "*m w"]:
    """RMS norm."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _turned(
    x: Float[Tensor, "*m n h d"], cos: Float[Tensor, "n half"], sin: Float[Tensor, "n half"]
) -> Float[Tensor, "*m n h d"]:
    """Rows at their positions: halves of a head are pairs."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class EagleStudent(Student):
    """A drafter's layer, fed the text's own tokens, and from the second depth on what it made itself.

    The feature of position t goes with the embedding of token t + 1 and predicts token t + 2. One layer reads
    both side by side, normed; what it makes stands for the feature at the next depth.

    Args:
        config: of the drafter.
        tensors: its float weights by canonical names.
        depths: tokens of a chain.
    """

    ahead = 1

    def __init__(self, config: EagleConfig, tensors: Mapping[str, Tensor], depths: int) -> None:
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
        return [read.flatten(0, 1) for *_, read in self.chain(tokens, hidden, base)]

    def chain(
        self, tokens: Int[Tensor, "b L"], features: Float[Tensor, "b n F"], base: FrozenBase
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each level, of all positions: attention's rows, the residual, and what the LM head reads."""
        m = features.shape[1] - self.extra
        rotary, positions = self.rotary.to(features.device), torch.arange(m, device=features.device)
        state = self.fuse(features[:, :m].float())
        keys, values = list[Tensor](), list[Tensor]()
        for i in range(self.levels):
            embeds = base.embed(tokens[:, 1 + i : 1 + i + m]).float()
            q, k, v, residual = self.enter(embeds, state, *rotary.angles(positions + i))
            keys.append(k)
            values.append(v)
            seen = attended(q, keys, values, self.config.window)
            state, read = self.leave(seen, residual)
            yield seen, residual, read

    def fuse(self, features: Float[Tensor, "*m F"]) -> Float[Tensor, "*m H"]:
        """What the layer takes for a feature, of three rows of the target."""
        config, t = self.config, self.tensors()
        if config.norm_before_fc:
            features = normed(features, t["features_norm"], config.eps)
        if config.fc_norm:
            parts = features.chunk(FEATURES, dim=-1)
            made = [normed(part, t[f"fc_norm.{n}"], config.eps) for n, part in enumerate(parts)]
            features = torch.cat(made, dim=-1)
        return F.linear(features, t["fc"])

    def enter(
        self, embeds: Float[Tensor, "*m n H"], g: Float[Tensor, "*m n H"], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries (*m, n, heads, d), keys and values (*m, n, kv heads, d), and the residual (*m, n, H)."""
        config, t = self.config, self.tensors()
        hidden = normed(g, t["hidden_norm"], config.eps)
        x = torch.cat((normed(embeds, t["input_norm"], config.eps), hidden), dim=-1)
        q, k, v = (F.linear(x, t[name], t.get(f"{name}_bias")) for name in "qkv")
        q, k, v = (rows.unflatten(-1, (-1, config.head_dim)) for rows in (q, k, v))
        if config.qk_norm:
            q, k = normed(q, t["q_norm"], config.eps), normed(k, t["k_norm"], config.eps)
        return _turned(q, cos, sin), _turned(k, cos, sin), v, hidden if config.norm_before_residual else g

    def leave(
        self, seen: Float[Tensor, "*m n heads d"], residual: Float[Tensor, "*m n H"]
    ) -> tuple[Float[Tensor, "*m n H"], Float[Tensor, "*m n H"]]:
        """What the next depth takes for a feature, and what the LM head reads."""
        config, t = self.config, self.tensors()
        rows = residual + F.linear(seen.flatten(-2), t["o"], t.get("o_bias"))
        x = normed(rows, t["post_norm"], config.eps)
        gate, up = (F.linear(x, t[name], t.get(f"{name}_bias")) for name in ("gate", "up"))
        rows = rows + F.linear(F.silu(gate) * up, t["down"], t.get("down_bias"))
        read = normed(rows, t["norm"], config.eps)
        return read if config.norm_output else rows, read


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


# ---- the checkpoint ----------------------------------------------------------------------------------------


def save_eagle(student: EagleStudent, model: Any, base: FrozenBase, job: Job, notes: dict[str, Any]) -> None:
    """Write the checkpoint, in bfloat16; embeddings stay the base model's.

    Raises:
        RunError: the disk is full.
    """
    config = student.config
    weights = student.tensors() | {"lm_head": base.rows[: base.size]}
    tensors = {
        NAMES[name][0].replace("midlayer", "layers.0") + ".weight": value.detach().to("cpu", torch.bfloat16)
        for name, value in weights.items()
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
        said = _said(config, model, job, student.levels)
        for name, value in ((RECORD, {"target": job.name, "notes": notes}), ("config.json", said)):
            with replacing(job.out / name) as part:
                part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        with replacing(job.out / "model.safetensors") as part:
            kept = {name: value.contiguous() for name, value in tensors.items()}
            save_file(kept, part, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot write the drafter to {job.out}: {line_of(error)}") from error


def _said(config: EagleConfig, model: Any, job: Job, depths: int) -> dict[str, Any]:
    """The config.json of a drafter, as the package `speculators` reads it."""
    architectures = list(getattr(model.config, "architectures", None) or [])
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        **{name: getattr(config, name) for name in FLAGS},
        "target_hidden_size": config.target_hidden,
        "torch_dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depths}],
            "verifier": {"name_or_path": job.name, "architectures": architectures},
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


# ---- the start ---------------------------------------------------------------------------------------------


@torch.no_grad()
def started(config: EagleConfig, base: FrozenBase, data: Any, depths: int, seed: int) -> dict[str, Tensor]:
    """The weights that training starts from, float32, on the base's device.

    Args:
        data: a dataset of `states.Windows` with features, ``depths`` further states and no tokens before.
        depths: tokens of a chain.
    Raises:
        InputError: the base model's final norm is no RMS norm.
    """
    made, found = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, shape in config.shapes().items():
        if name in SHARED:
            continue
        drawn = torch.randn(shape, generator=made, dtype=torch.float32)
        drawn *= config.hidden**-0.5 if name in ("gate", "up") else 0.02
        found[name] = (drawn if len(shape) > 1 else torch.ones_like(drawn)).to(base.device)
    for name in ("o", "down"):
        found[name].zero_()
    every = max(1, len(data) * len(data[0]["valid"]) // MOST)
    chosen = [
        {name: value.to(base.device) for name, value in data[k].items()} for k in range(0, len(data), every)
    ]
    found["norm"] = norm_weight(base) * _recurrence(config, base, found, chosen)
    student = EagleStudent(config, found, depths)
    _linear_units(student, base, chosen)
    for levels in sorted({1, depths}):
        _last_product(student, base, chosen, levels)
    return student.tensors()


def _recurrence(
    config: EagleConfig, base: FrozenBase, found: dict[str, Tensor], items: Sequence[Any]
) -> float:
    """Set `fc` and attention; how long a predicted state is, a dimension, where a true one is 1."""
    wide, d, eps = config.hidden, config.head_dim, config.eps
    state = Regression(FEATURES * config.target_hidden, wide, base.device)  # of features
    after = Regression(2 * wide, wide, base.device)  # of the state and an embedding
    constant = Regression(wide, 1, base.device)  # of an embedding
    for item in items:
        m = int(item["valid"].sum())
        parts = item["features"][:m].float().chunk(FEATURES, dim=-1)
        embeds = _unit(base.embed(item["tokens"][1 : m + 1]).float(), eps)
        hidden = _unit(item["hidden"][: m + 1].float(), eps)
        state.add(torch.cat([_unit(part, eps) for part in parts], dim=-1), hidden[:-1])
        after.add(torch.cat((hidden[:-1], embeds), dim=-1), hidden[1:])
        constant.add(embeds, torch.ones_like(embeds[:, :1]))
    gram, rank = after.gram(), min(wide // 2, len(found["v"]))
    _, axes = torch.linalg.eigh(gram[:wide, :wide])  # those in which states vary least are the first
    found["fc"].copy_((state.weights() @ axes[:, rank:] @ axes[:, rank:].T).T)
    gram = gram[wide:, wide:]
    root = torch.linalg.cholesky(gram)
    u, s, _ = torch.linalg.svd(root.T @ after.weights()[wide:])  # what of embeddings matters most
    inner = torch.linalg.solve_triangular(root.T, (u * s)[:, :rank], upper=True)
    found["v"][:rank, :wide] = inner.T * (AMPLITUDE / float((inner * (gram @ inner)).sum(0).sqrt().mean()))
    pairs = _pairs(config.rotary(), config.trained)
    same = constant.weights().T * (SHARP * d**0.5 / pairs) ** 0.5
    for head in range(config.kv_heads):
        first, part = head * d * (config.heads // config.kv_heads), axes[:, :rank][:, head * d : head * d + d]
        found["o"][:, first : first + part.shape[1]] = part
        found["k"][head * d : head * d + pairs, :wide] = same
        found["q"][first : first + pairs, :wide] = same
    return after.explained() ** 0.5


def _unit(x: Float[Tensor, "*m D"], eps: float) -> Float[Tensor, "*m D"]:
    return normed(x, x.new_ones(x.shape[-1]), eps)


def _pairs(rotary: Rotary, window: int) -> int:
    """In how many of the fastest pairs of dimensions a constant key outdoes the window's others by most."""
    cos, _ = rotary.angles(torch.arange(1, max(2, window)))
    means = cos.cumsum(-1) / torch.arange(1, cos.shape[1] + 1)
    return int(torch.exp(SHARP * (means - 1)).sum(0).argmin()) + 1


def _before_mlp(
    student: EagleStudent, base: FrozenBase, items: Sequence[Any], levels: int
) -> Iterator[tuple[Float[Tensor, "m D"], Float[Tensor, "m D"], Float[Tensor, "m D"]]]:
    """Rows before the MLP, the same normed, and the states to predict, of so many depths."""
    t, eps = student.tensors(), student.config.eps
    for item in items:
        m, states = int(item["valid"].sum()), _unit(item["hidden"].float(), eps)
        chain = student.chain(item["tokens"][None], item["features"][None], base)
        for i, (seen, residual, _) in enumerate(islice(chain, levels)):
            rows = (residual + F.linear(seen.flatten(-2), t["o"]))[0, :m]
            yield rows, normed(rows, t["post_norm"], eps), states[1 + i : 1 + i + m]


def _linear_units(student: EagleStudent, base: FrozenBase, items: Sequence[Any]) -> None:
    """Make the MLP's first units linear: their gates say the same of all rows."""
    t, wide = student.tensors(), student.config.hidden
    constant = Regression(wide, 1, base.device)
    for _, x, _ in _before_mlp(student, base, items, 1):
        constant.add(x, torch.ones_like(x[:, :1]))
    units = min(wide, len(t["gate"]) // 2)
    t["gate"][:units] = constant.weights().T * GATE
    t["up"][:units] = torch.eye(wide, dtype=torch.float32, device=base.device)[:units]


def _last_product(student: EagleStudent, base: FrozenBase, items: Sequence[Any], levels: int) -> None:
    """Set the MLP's last product, from so many depths."""
    t = student.tensors()
    rest = Regression(student.config.intermediate, student.config.hidden, base.device)
    for rows, x, states in _before_mlp(student, base, items, levels):
        rest.add(F.silu(F.linear(x, t["gate"])) * F.linear(x, t["up"]), states - rows)
    t["down"].copy_(rest.weights().T)
