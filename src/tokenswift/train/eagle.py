"""Narrow EAGLE-3 drafters: their training by the recipe with training-time test.

Training-time test (Li et al. 2025): what the layer makes of a position is its feature at the next
depth, as in drafting. There a row of depth i, drafted from position t, sees the rows of depth 0 up
to t, and of its own chain one row of each depth; so it is here, for all positions of a window at
once.

The layer is narrower than the target's own ones, so that a drafted token costs a few hundredths of
a pass. It reads the target's embeddings through a projection to its width, and its states go
through another one to rows of the target's LM head, those of the tokens in the loss, which are the
tokens that it can name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from tokenswift.engine.llm import LLM
from tokenswift.files import replacing
from tokenswift.kernels.attention import rotated
from tokenswift.kernels.formats import Q8_0, Stored
from tokenswift.loader.gguf import GgufFile, permuted_rows
from tokenswift.loader.identity import file_digest
from tokenswift.speculation.eagle.config import FEATURES, NAMES, EagleConfig, EagleWeights
from tokenswift.speculation.eagle.files import BASE, load_eagle
from tokenswift.train.agreement import agreement, in_words
from tokenswift.train.distillation import FrozenBase, Student
from tokenswift.train.loop import Recipe, Report
from tokenswift.train.options import Job
from tokenswift.train.work import working_in
from tokenswift.types import InputError, OnProgress, RunError

HEAD = 64  # width of an attention head
WINDOW = 512  # newest keys that a row sees
PARTS = frozenset({"fc_norm", "narrow"})  # parts of the layer that not all drafters have
DROPOUT = 0.15  # of what the layer reads: texts are few for its weights
#: initial scales of products that end in a sum, which start small; of others: 1
SMALL_SCALES = {"o": 0.3, "down": 0.3, "out_proj": 0.5}


def eagle_config(llm: LLM, drafted: int, hidden: int) -> EagleConfig:
    """What the drafter to train looks like.

    Args:
        drafted: tokens that it can name.
        hidden: width of its rows, a multiple of 64.
    Raises:
        InputError: the model has too few layers, or a width that is no multiple.
    """
    target = llm.target
    layers = (2, target.layers // 2, target.layers)
    if len(set(layers)) < FEATURES:
        raise InputError(
            f"the model has {target.layers} layers; valid: 6 or more; three give features"
        )
    if hidden % HEAD or hidden < HEAD:
        raise InputError(f"hidden is {hidden}; valid: a multiple of {HEAD}", "hidden")
    heads = hidden // HEAD
    return EagleConfig(
        hidden=hidden,
        target_hidden=target.hidden_size,
        heads=heads,
        kv_heads=heads // 3 if heads % 3 == 0 else heads,
        head_dim=HEAD,
        intermediate=3 * hidden,
        eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 10_000.0},
        vocab=target.vocab_size,
        draft_vocab=drafted,
        feature_layers=layers,
        trained=llm.target.rotary.limit or 1 << 20,
        window=WINDOW,
        parts=PARTS,
    )


def train_eagle(
    llm: LLM,
    job: Job,
    report: Report,
    on_progress: OnProgress,
    *,
    depths: int = 3,
    hidden: int = 768,
    goes_on: bool = False,
) -> dict[str, object]:
    """The whole way to a GGUF file; returns notes about the training. A drafter of the model that
    is there already stays where it names more of what is held out.

    Args:
        llm, job, report, on_progress: see :class:`Recipe`.
        depths: tokens of a chain that are trained.
        hidden: see :func:`eagle_config`.
        goes_on: begin with the drafter that is there, whose width and tokens it keeps.
    Raises:
        InputError: there is none to go on from, an option out of range, too little data or disk, a
            work folder of another training or one in use, or a model whose layers are of another
            kind.
        RunError: the loss is not finite.
    """
    before = drafter_there(job.out, llm)
    if goes_on and before is None:
        raise InputError(
            f"{job.out} holds no drafter of this model to go on from; valid: train without --more"
        )
    plain = eagle_config(llm, 1, before.config.hidden if goes_on and before else hidden)
    weights = sum(math.prod(shape) for shape in plain.shapes().values())
    with working_in(job.work):
        recipe = Recipe(
            llm,
            job,
            report,
            on_progress,
            weights,
            layers=plain.feature_layers[:-1],
            named=named_by(before) if goes_on and before else None,
            eagle=[depths, plain.hidden, *([file_digest(job.out)] if goes_on else [])],
        )
        config = replace(plain, draft_vocab=recipe.frozen.size)

        def first() -> dict[str, Tensor]:
            if goes_on and before is not None:
                return float_tensors(before)
            return initial_weights(config, job.training.seed)

        tensors = recipe.start_weights(first)
        student = EagleStudent(config, tensors, depths)
        notes: dict[str, object] = {
            "kind": "eagle",
            "depths": depths,
            "drafted": config.draft_vocab,
            **recipe.distil(student),
        }
        if before is not None and stays(before, recipe, llm, notes.get("agreement")):
            notes["kept"] = "the one before"
        else:
            save_eagle(student, recipe, job)
    return notes


def drafter_there(path: Path, llm: LLM) -> EagleWeights | None:
    """A drafter that training has written for this very model; None: there is none."""
    if not path.is_file():
        return None
    try:
        sample = GgufFile(path).metadata.get(BASE)
        weights = load_eagle(path, llm.target.config)
    except (InputError, OSError):
        return None
    config = weights.config
    is_ours = config.parts == PARTS and config.feature_layers[-1] == llm.target.layers
    is_of_model = sample == llm.source.host.base.sample.tolist()
    return weights if is_ours and is_of_model else None


def named_by(weights: EagleWeights) -> Int[Tensor, " S"]:
    """The tokens that a drafter can name."""
    return torch.arange(weights.config.vocab) if weights.d2t is None else weights.d2t


def float_tensors(weights: EagleWeights) -> dict[str, Tensor]:
    """A drafter's weights in float32, by canonical names."""
    return {
        name: tensor.decode().float() if isinstance(tensor, Stored) else tensor.float()
        for name, tensor in weights.tensors.items()
    }


def stays(before: EagleWeights, recipe: Recipe, llm: LLM, shares: object) -> bool:
    """Whether the drafter that was there names more tokens a step than a new one, which is said.

    Args:
        shares: the new one's agreement; nothing where no text is held out.
    """
    unseen = recipe.unseen
    layers = (*recipe.layers[:-1], llm.target.layers)
    if unseen is None or not isinstance(shares, list):
        return False
    if before.config.feature_layers != layers:
        return False
    base = FrozenBase(llm, named_by(before), recipe.frozen.dtype)
    old = EagleStudent(before.config, float_tensors(before), len(shares)).to(base.device)
    known = [round(share, 3) for share in agreement(old, base, unseen)]
    if sum(known) <= sum(shares):
        recipe.report(f"the one before names {in_words(known)}, no more, and is replaced")
        return False
    recipe.report(f"the one before names {in_words(known)}, which is more, and stays")
    return True


def initial_weights(config: EagleConfig, seed: int) -> dict[str, Tensor]:
    """The weights that training starts from, float32, by canonical names."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in config.shapes().items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape)
        else:
            noise = torch.randn(shape, generator=generator)
            tensors[name] = noise * SMALL_SCALES.get(name, 1.0) * shape[1] ** -0.5
    return tensors


class EagleStudent(Student):
    """A drafter's layer, fed the text's own tokens, and from the second depth on its own rows.

    The feature of position t goes with the embedding of token t + 1 and predicts token t + 2. One
    layer reads both side by side, normed; what it makes stands for the feature at the next depth.

    Args:
        config: the drafter's.
        tensors: its float weights by canonical names.
        depths: tokens of a chain.
    """

    def __init__(self, config: EagleConfig, tensors: Mapping[str, Tensor], depths: int) -> None:
        super().__init__()
        self.config = config
        self.levels = depths
        self.rotary = config.rotary()
        self.weights = nn.ParameterDict(
            {name.replace(".", "_"): value for name, value in tensors.items()}
        )
        self.names = list(tensors)

    def tensors(self) -> dict[str, Tensor]:
        """The weights by canonical names."""
        return {name: self.weights[name.replace(".", "_")] for name in self.names}

    def forward(
        self, tokens: Int[Tensor, "b L"], states: Float[Tensor, "b n F"], base: FrozenBase
    ) -> list[Float[Tensor, "r D"]]:
        """See :class:`Student`; the states are features."""
        m = states.shape[1] - self.levels
        weights = self.tensors()
        rotary = self.rotary.to(states.device)
        positions = torch.arange(m, device=states.device)
        parts = states[:, :m].float().chunk(FEATURES, dim=-1)
        normed = [self._norm(part, f"fc_norm.{n}") for n, part in enumerate(parts)]
        state = F.linear(torch.cat(normed, -1), weights["fc"])
        keys: list[Tensor] = []
        values: list[Tensor] = []
        rows: list[Tensor] = []
        for depth in range(self.levels):
            inputs = base.embed(tokens[:, 1 + depth : 1 + depth + m]).float()
            embeds = F.linear(inputs, weights["embed_proj"])
            angles = rotary.angles(positions + depth)
            state = self._layer(embeds, state, angles, keys, values)
            rows.append(F.linear(self._norm(state, "norm"), weights["out_proj"]).flatten(0, 1))
        return rows

    def _layer(
        self,
        embeds: Float[Tensor, "b m H"],
        state: Float[Tensor, "b m H"],
        angles: tuple[Tensor, Tensor],
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Float[Tensor, "b m H"]:
        """What stands for the feature at the next depth. Keys and values (b, kv heads, m, d) by
        depth: this depth's are added."""
        weights = self.tensors()
        cos, sin = angles
        x = torch.cat((self._norm(embeds, "input_norm"), self._norm(state, "hidden_norm")), dim=-1)
        x = F.dropout(x, DROPOUT, self.training)
        q, k, v = (
            F.linear(x, weights[name]).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for name in "qkv"
        )
        keys.append(rotated(k, cos, sin))
        values.append(v)
        mask = seen_rows(state.shape[1], len(keys) - 1, self.config.window).to(x.device)
        seen = F.scaled_dot_product_attention(
            rotated(q, cos, sin), torch.cat(keys, 2), torch.cat(values, 2), mask, enable_gqa=True
        )
        rows = state + F.linear(seen.transpose(1, 2).flatten(2), weights["o"])
        x = self._norm(rows, "post_norm")
        gated = F.silu(F.linear(x, weights["gate"])) * F.linear(x, weights["up"])
        return rows + F.linear(gated, weights["down"])

    def _norm(self, x: Float[Tensor, "*m w"], name: str) -> Float[Tensor, "*m w"]:
        return F.rms_norm(x.float(), x.shape[-1:], self.tensors()[name], self.config.eps)


def seen_rows(m: int, depth: int, window: int | None) -> Bool[Tensor, "m n"]:
    """Which rows those of a depth see.

    Of depth 0 they see the rows of positions up to theirs, within the window; of deeper ones those
    of their own position.
    """
    behind = torch.arange(m)[:, None] - torch.arange(m)
    first = (behind >= 0) & (behind + depth < (window or m + depth))
    return torch.cat([first, *[torch.eye(m, dtype=torch.bool)] * depth], dim=1)


# ---- the file ------------------------------------------------------------------------------------


def save_eagle(student: EagleStudent, recipe: Recipe, job: Job) -> None:
    """Write what was trained, see :func:`write_eagle`."""
    base = recipe.base.sample.tolist()
    named = recipe.frozen.subset.cpu()
    write_eagle(job.out, student.config, student.tensors(), named, base, job.name)


def write_eagle(
    path: Path,
    config: EagleConfig,
    tensors: Mapping[str, Tensor],
    named: Int[Tensor, " S"],
    base: list[float],
    target: str,
) -> None:
    """Write a GGUF file of the architecture eagle3, its matrices in int8, with the identity of the
    model that it drafts for, whose embeddings and LM head it shares.

    Args:
        path: the file.
        config: the drafter's.
        tensors: its float weights by canonical names.
        named: tokens that it can name.
        base: the sample of the model's weights that identifies it.
        target: the model's name.
    Raises:
        RunError: a weight is not finite.
        OSError: the disk is full.
    """
    with replacing(path) as part:
        writer = gguf.GGUFWriter(part, "eagle3")
        _add_config(writer, config, target)
        writer.add_array(BASE, base)
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise RunError(f"tensor {name} is not finite; nothing was written")
            rows = _in_file_order(name, tensor.detach().cpu(), config)
            _add_tensor(writer, NAMES[name][1], rows)
        writer.add_tensor("d2t", named.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add_config(writer: gguf.GGUFWriter, config: EagleConfig, target: str) -> None:
    """The config, as `speculation.eagle` reads it."""
    writer.add_name(f"drafter for {target}")
    for name, number in {
        "context_length": config.trained,
        "embedding_length": config.hidden,
        "block_count": 1,
        "feed_forward_length": config.intermediate,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.sliding_window": config.window or 0,
        "vocab_size": config.vocab,
    }.items():
        writer.add_uint32(f"eagle3.{name}", number)
    writer.add_float32("eagle3.attention.layer_norm_rms_epsilon", config.eps)
    theta = config.rope["rope_theta"]
    if not isinstance(theta, int | float):
        raise RunError(f"rope_theta is {theta!r}; valid: a number")
    writer.add_float32("eagle3.rope.freq_base", theta)
    writer.add_array("eagle3.target_layers", list(config.feature_layers))


def _in_file_order(name: str, tensor: Tensor, config: EagleConfig) -> Tensor:
    """Queries and keys with the rows of a pair beside each other, as the architecture has them."""
    heads = {"q": config.heads, "k": config.kv_heads}.get(name)
    if heads is None:
        return tensor
    return torch.empty_like(tensor).index_copy(0, permuted_rows(len(tensor), heads), tensor)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor) -> None:
    """A matrix in int8 where its rows are whole blocks; anything else in float32."""
    if tensor.ndim < 2 or tensor.shape[1] % Q8_0.block:
        writer.add_tensor(name, tensor.float().numpy())
    else:
        writer.add_tensor(
            name, Q8_0.encode(tensor).numpy(), raw_dtype=gguf.GGMLQuantizationType(Q8_0.code)
        )
