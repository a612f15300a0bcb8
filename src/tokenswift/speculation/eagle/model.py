"""An EAGLE-3 drafter on the kernels of its target, with packed weights.

Its layer is one of a decoder's but for its input: queries, keys and values are made of the normed
embedding and the normed feature side by side, which is a sum of two products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.kernels.batch import row_paths
from tokenswift.kernels.formats import Stored
from tokenswift.kernels.weights import LayerWeights, Packed, Shape, active_type
from tokenswift.kv.cache import FullCache, KVCache
from tokenswift.kv.memory import Arena
from tokenswift.kv.passes import Segment
from tokenswift.loader.rope import AngleTable
from tokenswift.loader.weights import unstored
from tokenswift.models.base import BaseTarget
from tokenswift.sampling.rows import Subset
from tokenswift.speculation.eagle.config import FEATURES, EagleWeights
from tokenswift.speculation.eagle.features import Features

#: the window of a drafter whose checkpoint names none
WINDOW = 2048
CHUNK = 512  # rows of a pass that reads features
SCRATCH = 32  # drafted rows in a cache


def _halves(weight: Tensor | Stored, width: int) -> tuple[Tensor | Stored, Tensor | Stored]:
    """The columns of embeddings and those of features, (N, width) each, of a weight (N, 2
    width)."""
    if not isinstance(weight, Stored):
        return weight[:, :width], weight[:, width:]
    if width % weight.format.block:
        return _halves(weight.decode(), width)
    size = weight.format.row_bytes(width)
    one, other = weight.blocks[:, :size], weight.blocks[:, size:]
    return Stored(weight.format, one.contiguous()), Stored(weight.format, other.contiguous())


class EagleModel:
    """A drafter, packed for a target. Threads may share it.

    Args:
        weights: of the drafter; it fits the target.
        target: whose features, and where the drafter has none of its own embedding and LM head, it
            reads.

    Attributes:
        name: of the checkpoint.
        window: newest keys that a token sees, itself included.
        subset: tokens that the columns of logits stand for; None: token ids.
        weight_bytes: bytes of weights that a pass over features reads.
    """

    def __init__(self, weights: EagleWeights, target: BaseTarget) -> None:
        self.name, self.config, self.target = weights.name, weights.config, target
        config, tensors = weights.config, weights.tensors
        self.window = min(config.window or WINDOW, config.trained)
        self.backend: Any = getattr(target.backend, "head", target.backend)
        self._dtype = torch.float32 if target.int8 else target.dtype
        self._angles = AngleTable(config.rotary().to(target.device))
        arena, device = Arena(), target.device

        def packed(*parts: Tensor | Stored) -> Packed:
            """Weights one below the other: quantized ones as they are stored, where all of them
            are."""
            if all(isinstance(part, Stored) for part in parts) and self.backend.formats:
                return self.backend.pack(parts, self._dtype, arena)
            dense = torch.cat([unstored(part, self._dtype) for part in parts]).to(device)
            return self.backend.pack_for_drafts(dense, target.int8)

        def vector(*names: str) -> Tensor | None:
            """Norms or biases in one, or None."""
            parts = [unstored(tensors[name], torch.float32) for name in names if name in tensors]
            return torch.cat(parts).to(device) if parts else None

        halves = [_halves(tensors[name], config.hidden) for name in "qkv"]
        layer = LayerWeights(
            qkv=packed(*(features for _, features in halves)),
            out=packed(tensors["o"]),
            gate_up=packed(tensors["gate"], tensors["up"]),
            down=packed(tensors["down"]),
            norm=None if config.norm_before_residual else vector("hidden_norm"),
            mlp_norm=vector("post_norm"),
            qkv_bias=vector("q_bias", "k_bias", "v_bias"),
            out_bias=vector("o_bias"),
            query_norm=vector("q_norm"),
            key_norm=vector("k_norm"),
            window=self.window,
            beside=packed(*(embeds for embeds, _ in halves)),
            beside_norm=vector("input_norm"),
        )
        self._hidden_norm, self._final = vector("hidden_norm"), vector("norm")
        self._features_norm = vector("features_norm")
        self._each_norm = [
            vector(f"fc_norm.{n}") for n in range(FEATURES) if f"fc_norm.{n}" in tensors
        ]
        self._fc = packed(tensors["fc"])
        self._embedding = self._row_table(tensors["embed"]) if "embed" in tensors else None
        self._head = packed(tensors["lm_head"]) if "lm_head" in tensors else None
        self._narrow = [
            packed(tensors[name]) for name in ("embed_proj", "out_proj") if name in tensors
        ]
        d2t = None if weights.d2t is None else weights.d2t.to(device)
        self.subset = None if d2t is None else Subset(d2t, target.vocab_size)
        self._rows = None if d2t is None or self._head is not None else target.head_rows(d2t)
        others = [self._fc, *self._narrow, *([] if self._head is None else [self._head])]
        self.weight_bytes = sum(weight.nbytes for weight in [*layer.packed(), *others])
        stored = all(weight.stored for weight in layer.packed())
        dtype = torch.float32 if stored else self._dtype
        self.shape = Shape(
            layers=1,
            hidden=config.hidden,
            inner=config.intermediate,
            heads=config.heads,
            kv_heads=config.kv_heads,
            width=config.head_dim,
            weights=dtype,
            keys=self._dtype,
            active=torch.int8 if stored else active_type(dtype),
            eps=config.eps,
            scale=config.head_dim**-0.5,
        )
        self._body = self.backend.body(self.shape, [layer])

    def _row_table(self, embedding: Tensor | Stored) -> Tensor | Packed:
        """An embedding, whose rows are taken one by one."""
        if isinstance(embedding, Stored) and self.backend.formats:
            return self.backend.pack(embedding, self._dtype)
        return unstored(embedding, self._dtype).to(self.target.device)

    # ---- what a text has -------------------------------------------------------------------------

    def new_cache(self) -> FullCache:
        """Room for the keys and values of a window, of a pass's rows behind them, and of drafted
        rows."""
        config = self.config
        capacity = self.window + CHUNK + SCRATCH
        return self.backend.new_cache(1, config.kv_heads, config.head_dim, capacity, self._dtype)

    def features(self) -> Features:
        """What keeps a text's features until they are read."""
        return Features(self.window)

    @property
    def nbytes(self) -> int:
        """Bytes that a text holds: the cache and, before they are read, features of a window."""
        config = self.config
        entry = (
            self.backend.new_cache(1, config.kv_heads, config.head_dim, 16, self._dtype).nbytes
            // 16
        )
        return (self.window + CHUNK + SCRATCH) * entry + self.window * 3 * config.target_hidden * 4

    # ---- passes ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def fuse(self, features: Float[Tensor, "3 n Ht"]) -> Float[Tensor, "n H"]:
        """What the layer reads of the target's features."""
        backend, eps = self.backend, self.config.eps
        parts = list(features)
        if self._each_norm:
            pairs = zip(parts, self._each_norm, strict=True)
            parts = [
                backend.norm(part.contiguous(), norm, eps, torch.float32) for part, norm in pairs
            ]
        rows = torch.cat(parts, dim=1)
        if self._features_norm is not None:
            rows = backend.norm(rows, self._features_norm, eps, torch.float32)
        return backend.draft_product(rows.to(self._dtype), self._fc)

    @torch.inference_mode()
    def run(
        self,
        tokens: list[int] | Int[Tensor, " n"],
        states: Float[Tensor, "n H"],
        at: int,
        cache: FullCache,
        parents: Sequence[int] | None = None,
    ) -> Float[Tensor, "n H"]:
        """A pass over rows at the positions ``at`` and on, each of a state and the token *behind*
        its position: the states behind the layer. Its keys and values go to the cache's scratch.

        Args:
            tokens: on the host, or where the target is if they arose there.
            parents: of a tree, the row that each row follows (-1: none of them, so that it stands
                at ``at``).
        """
        ids, count = tokens if isinstance(tokens, Tensor) else torch.tensor(tokens), len(tokens)
        positions = torch.arange(at, at + count)
        if parents is not None:
            positions = torch.tensor([at - 1 + len(path) for path in row_paths(count, parents)])
        segment = Segment(ids, positions, cast(KVCache, cache), parents)
        batch = self.backend.batch([segment], self.shape)
        embeds = self._embed(batch.tokens)
        if self.config.norm_before_residual:
            states = self.backend.norm(states, self._hidden_norm, self.config.eps, torch.float32)
        rows = torch.zeros_like(embeds)  # also rows that fill up the batch
        rows[:count] = states
        angles = self._angles.at(batch.positions)
        self.backend.layers(self._body, rows, *angles, batch, keep=False, beside=embeds)
        return rows[:count]

    def _embed(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n H"]:
        if self._embedding is None:
            embeds = self.target.embed(tokens).float().contiguous()
            if not self._narrow:
                return embeds
            return self.backend.draft_product(embeds.to(self._dtype), self._narrow[0])
        if isinstance(self._embedding, Packed):
            return self.backend.take(self._embedding, tokens).float()
        return self._embedding[tokens].float()

    @torch.inference_mode()
    def fed_back(self, states: Float[Tensor, "n H"]) -> Float[Tensor, "n H"]:
        """The states that the next rows read, of what :meth:`run` made."""
        final = (self._final, self.config.eps, torch.float32)
        return self.backend.norm(states, *final) if self.config.norm_output else states

    @torch.inference_mode()
    def logits(self, states: Float[Tensor, "n H"]) -> Float[Tensor, "n S"]:
        """Of the tokens behind those that rows were run with, from what :meth:`run` made; a column
        for each token of :attr:`subset`."""
        normed = self.backend.norm(states, self._final, self.config.eps, self._dtype)
        if self._narrow:
            normed = self.backend.draft_product(normed, self._narrow[1]).to(self._dtype)
        if self._head is None:
            return self.target.project(normed, self._rows)
        return self.backend.draft_product(normed, self._head)
