"""An EAGLE-3 drafter on the kernels of its target, with packed weights.

Its layer is one of a decoder's but for its input: queries, keys and values are made of the normed
embedding and the normed feature side by side, which is a sum of two products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.kernels.base import Backend
from tokenswift.kernels.batch import LayerPass, row_paths
from tokenswift.kernels.formats import Stored
from tokenswift.kernels.packed import Packed
from tokenswift.kernels.weights import LayerWeights, Shape, active_type
from tokenswift.kv.cache import FullCache
from tokenswift.kv.memory import Arena
from tokenswift.kv.passes import Segment
from tokenswift.loader.rotary import AngleTable
from tokenswift.loader.weights import unstored
from tokenswift.models.base import BaseTarget
from tokenswift.sampling.rows import Subset
from tokenswift.speculation.eagle.config import FEATURES, EagleConfig, EagleWeights
from tokenswift.speculation.eagle.features import Features

#: the window of a drafter whose checkpoint names none
WINDOW = 2048
CHUNK = 512  # rows of a pass that reads features
SCRATCH = 32  # drafted rows in a cache
#: weight of the target's noise where little was learnt: logits are half as far apart
NARROW_NOISE = 0.5


def halves(weight: Tensor | Stored, width: int) -> tuple[Tensor | Stored, Tensor | Stored]:
    """The columns of embeddings and those of features, (N, width) each, of a weight (N, 2
    width)."""
    if not isinstance(weight, Stored):
        return weight[:, :width], weight[:, width:]
    if width % weight.format.block:
        return halves(weight.decode(), width)
    size = weight.format.row_bytes(width)
    embeds = Stored(weight.format, weight.blocks[:, :size].contiguous())
    features = Stored(weight.format, weight.blocks[:, size:].contiguous())
    return embeds, features


@dataclass(frozen=True)
class _Packer:
    """Packs a drafter's tensors for the kernels of its target.

    Attributes:
        tensors: the tensors by canonical names.
        target: the target.
        dtype: type of products.
        arena: memory that the weights share.
    """

    tensors: Mapping[str, Tensor | Stored]
    target: BaseTarget
    dtype: torch.dtype
    arena: Arena

    def matrix(self, *parts: Tensor | Stored) -> Packed:
        """Weights one below the other: quantized ones as they are stored, where all of them are."""
        backend = self.target.backend
        if all(isinstance(part, Stored) for part in parts) and backend.formats:
            return backend.pack(parts, self.dtype, self.arena)
        dense = torch.cat([unstored(part, self.dtype) for part in parts])
        return backend.pack_for_drafts(dense.to(self.target.device), self.target.int8)

    def optional_matrix(self, name: str) -> Packed | None:
        """The matrix of this name; None where the drafter has none."""
        return self.matrix(self.tensors[name]) if name in self.tensors else None

    def vector(self, name: str) -> Tensor:
        """The norm of this name."""
        return unstored(self.tensors[name], torch.float32).to(self.target.device)

    def optional_vector(self, *names: str) -> Tensor | None:
        """Norms or biases in one; None where the drafter has none."""
        parts = [self.vector(name) for name in names if name in self.tensors]
        return torch.cat(parts) if parts else None

    def row_table(self, name: str) -> Tensor | Packed | None:
        """An embedding, whose rows are taken one by one; None where the drafter has none."""
        embedding = self.tensors.get(name)
        if embedding is None:
            return None
        if isinstance(embedding, Stored) and self.target.backend.formats:
            return self.target.backend.pack(embedding, self.dtype)
        return unstored(embedding, self.dtype).to(self.target.device)

    def layer(self, config: EagleConfig, window: int) -> LayerWeights:
        """The drafter's layer."""
        tensors = self.tensors
        parts = [halves(tensors[name], config.hidden) for name in "qkv"]
        return LayerWeights(
            qkv=self.matrix(*(features for _, features in parts)),
            out=self.matrix(tensors["o"]),
            gate_up=self.matrix(tensors["gate"], tensors["up"]),
            down=self.matrix(tensors["down"]),
            norm=None if config.norm_before_residual else self.vector("hidden_norm"),
            mlp_norm=self.vector("post_norm"),
            qkv_bias=self.optional_vector("q_bias", "k_bias", "v_bias"),
            out_bias=self.optional_vector("o_bias"),
            query_norm=self.optional_vector("q_norm"),
            key_norm=self.optional_vector("k_norm"),
            window=window,
            second_qkv=self.matrix(*(embeds for embeds, _ in parts)),
            second_norm=self.vector("input_norm"),
        )


def _shape(config: EagleConfig, layer: LayerWeights, dtype: torch.dtype) -> Shape:
    """The sizes of a drafter's pass, whose keys are of this type."""
    stored = all(weight.stored for weight in layer.packed())
    weights = torch.float32 if stored else dtype
    return Shape(
        layers=1,
        hidden=config.hidden,
        inner=config.intermediate,
        heads=config.heads,
        kv_heads=config.kv_heads,
        width=config.head_dim,
        weights=weights,
        keys=dtype,
        active=torch.int8 if stored else active_type(weights),
        eps=config.eps,
        scale=config.head_dim**-0.5,
    )


def drafted_rows(
    tokens: list[int] | Int[Tensor, " n"],
    start: int,
    cache: FullCache,
    parents: Sequence[int] | None,
) -> Segment:
    """The rows of a drafter's pass, at the positions from ``start`` on; in a tree each behind its
    parent's position."""
    count = len(tokens)
    ids = tokens if isinstance(tokens, Tensor) else torch.tensor(tokens)
    positions = torch.arange(start, start + count)
    if parents is not None:
        positions = torch.tensor([start - 1 + len(path) for path in row_paths(count, parents)])
    return Segment(ids, positions, cache, parents)


class EagleModel:
    """A drafter, packed for a target. Threads may share it.

    Args:
        weights: weights of a drafter that fits the target.
        target: the model whose features it reads, and whose embedding and LM head where it has none
            of its own.

    Attributes:
        name: name of the checkpoint.
        config: what the drafter is made of.
        backend: computes its passes.
        window: newest keys that a token sees, itself included.
        subset: tokens that the columns of logits stand for; None: token ids.
        weight_bytes: bytes of weights that a pass over features reads.
        title: what it is called in sentences.
        noise: weight of the target's noise in its drafts.
    """

    title = "the EAGLE-3 drafter"

    def __init__(self, weights: EagleWeights, target: BaseTarget) -> None:
        config = weights.config
        self.name = weights.name
        self.noise = NARROW_NOISE if "narrow" in config.parts else 1.0
        self.config = config
        self.target = target
        self.window = min(config.window or WINDOW, config.trained)
        self.backend: Backend = target.backend
        self._dtype = torch.float32 if target.int8 else target.dtype
        self._angles = AngleTable(config.rotary().to(target.device))
        packer = _Packer(weights.tensors, target, self._dtype, Arena())
        layer = packer.layer(config, self.window)
        self.shape = _shape(config, layer, self._dtype)
        self._hidden_norm = packer.vector("hidden_norm")
        self._final_norm = packer.vector("norm")
        self._features_norm = packer.optional_vector("features_norm")
        names = [f"fc_norm.{n}" for n in range(FEATURES)]
        self._each_norm = [packer.vector(name) for name in names if name in weights.tensors]
        self._fc = packer.matrix(weights.tensors["fc"])
        self._embedding = packer.row_table("embed")
        self._head = packer.optional_matrix("lm_head")
        self._embed_proj = packer.optional_matrix("embed_proj")
        self._out_proj = packer.optional_matrix("out_proj")
        d2t = None if weights.d2t is None else weights.d2t.to(target.device)
        self.subset = None if d2t is None else Subset(d2t, target.vocab_size)
        self._target_rows = None  # of the target's LM head, where the drafter has none
        if d2t is not None and self._head is None:
            self._target_rows = target.head_rows(d2t)
        others = [self._fc, self._embed_proj, self._out_proj, self._head]
        read = [*layer.packed(), *(weight for weight in others if weight is not None)]
        self.weight_bytes = sum(weight.nbytes for weight in read)
        self._body = self.backend.body(self.shape, [layer])

    # ---- what a text has -------------------------------------------------------------------------

    def new_cache(self) -> FullCache:
        """Room for the keys and values of a window, of a pass's rows behind them, and of drafted
        rows."""
        return self._cache(self.window + CHUNK + SCRATCH)

    def _cache(self, capacity: int) -> FullCache:
        return self.backend.new_cache(
            layers=1,
            kv_heads=self.config.kv_heads,
            width=self.config.head_dim,
            capacity=capacity,
            dtype=self._dtype,
        )

    def features(self) -> Features:
        """What keeps a text's features until they are read."""
        return Features(self.window)

    @property
    def nbytes(self) -> int:
        """Bytes that a text holds: the cache and, before they are read, features of a window."""
        cache_row = self._cache(16).nbytes // 16
        features_row = FEATURES * self.config.target_hidden * 4
        return (self.window + CHUNK + SCRATCH) * cache_row + self.window * features_row

    # ---- passes ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def fuse(self, features: Float[Tensor, "3 n Ht"]) -> Float[Tensor, "n H"]:
        """What the layer reads of the target's features."""
        parts = list(features)
        if self._each_norm:
            pairs = zip(parts, self._each_norm, strict=True)
            parts = [self._normed(part.contiguous(), norm) for part, norm in pairs]
        rows = torch.cat(parts, dim=1)
        if self._features_norm is not None:
            rows = self._normed(rows, self._features_norm)
        return self.backend.draft_product(rows.to(self._dtype), self._fc)

    def _normed(self, states: Tensor, weight: Tensor) -> Tensor:
        return self.backend.norm(states, weight, self.config.eps, torch.float32)

    @torch.inference_mode()
    def run(
        self,
        tokens: list[int] | Int[Tensor, " n"],
        states: Float[Tensor, "n H"],
        start: int,
        cache: FullCache,
        parents: Sequence[int] | None = None,
    ) -> Float[Tensor, "n H"]:
        """A pass over rows at the positions from ``start`` on, each of a state and the token
        *behind* its position: the states behind the layer. Its keys and values go to the cache's
        scratch rows.

        Args:
            tokens: token ids on the host, or where the target is if they arose there.
            parents: in a tree, the row that each row follows (-1: none of them, so that it stands
                at ``start``); None: a chain.
        """
        count = len(tokens)
        segment = drafted_rows(tokens, start, cache, parents)
        batch = self.backend.batch([segment], self.shape)
        embeds = self._embed(batch.tokens)
        if self.config.norm_before_residual:
            states = self._normed(states, self._hidden_norm)
        rows = torch.zeros_like(embeds)  # also rows that fill up the batch
        rows[:count] = states
        cos, sin = self._angles.at(batch.positions)
        layer_pass = LayerPass(
            batch=batch,
            states=rows,
            cos=cos,
            sin=sin,
            keep_queries=False,
            second_input=embeds,
        )
        self.backend.layers(self._body, layer_pass)
        return rows[:count]

    def _embed(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n H"]:
        if self._embedding is None:
            embeds = self.target.embed(tokens).float().contiguous()
            if self._embed_proj is None:
                return embeds
            return self.backend.draft_product(embeds.to(self._dtype), self._embed_proj)
        if isinstance(self._embedding, Packed):
            return self.backend.take(self._embedding, tokens).float()
        return self._embedding[tokens].float()

    @torch.inference_mode()
    def fed_back(self, states: Float[Tensor, "n H"]) -> Float[Tensor, "n H"]:
        """The states that the next rows read, from those that :meth:`run` returned."""
        return self._normed(states, self._final_norm) if self.config.norm_output else states

    @torch.inference_mode()
    def logits(self, states: Float[Tensor, "n H"]) -> Float[Tensor, "n S"]:
        """Logits of the tokens behind those that rows were run with, from the states that
        :meth:`run` returned; a column for each token of :attr:`subset`."""
        normed = self.backend.norm(states, self._final_norm, self.config.eps, self._dtype)
        if self._out_proj is not None:
            normed = self.backend.draft_product(normed, self._out_proj).to(self._dtype)
        if self._head is None:
            return self.target.project(normed, self._target_rows)
        return self.backend.draft_product(normed, self._head)
