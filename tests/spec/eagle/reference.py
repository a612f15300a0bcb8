"""Drafting with an EAGLE-3 drafter in torch, row by row: what kernels and training are held against.

The feature of position t goes with the embedding of token t + 1 and predicts token t + 2. One layer reads
both side by side, normed; what it makes stands for the feature at the next depth.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.loader.weights import unstored
from tokenswift.spec.eagle.files import EagleWeights
from tokenswift.train.eagle import EagleStudent


@dataclass(slots=True)
class EagleCache:
    """Keys and values of a text's rows, those of deeper ones behind.

    Attributes:
        keys, values: (rows, kv heads, d).
        positions: of the rows.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    positions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    def __len__(self) -> int:
        return len(self.positions)

    def add(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Append rows; all keys and values."""
        self.keys = keys if self.keys is None else torch.cat((self.keys, keys))
        self.values = values if self.values is None else torch.cat((self.values, values))
        self.positions = torch.cat((self.positions, positions))
        return self.keys, self.values

    def cut(self, rows: int) -> None:
        """Drop all but the first rows."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:rows], self.values[:rows]
        self.positions = self.positions[:rows]


class EagleReference:
    """A drafter in float32.

    Args:
        weights: of `files.load_eagle`.
        embedding: the target's, (V, Ht); used where the drafter has none.
        lm_head: the target's, (V, Ht); its rows are used where the drafter has none.
        window: newest keys that a row sees, itself included, by their positions; None: as the drafter was
            trained.
    """

    def __init__(
        self,
        weights: EagleWeights,
        embedding: Float[Tensor, "V Ht"],
        lm_head: Float[Tensor, "V Ht"],
        window: int | None = None,
    ) -> None:
        self.config, self.d2t = weights.config, weights.d2t
        tensors = {name: unstored(tensor, torch.float32) for name, tensor in weights.tensors.items()}
        self.embedding = tensors.get("embed", embedding.float())
        own = lm_head if weights.d2t is None else lm_head[weights.d2t]
        self.lm_head = tensors.get("lm_head", own.float())
        self.layer, self.rotary = EagleStudent(weights.config, tensors, 1).eval(), weights.config.rotary()
        self.layer.requires_grad_(False)
        self.window = window or weights.config.window

    def fuse(self, features: Float[Tensor, "n F"]) -> Float[Tensor, "n H"]:
        """What the first depth takes for a feature.

        Args:
            features: of the target's three layers, side by side.
        """
        return self.layer.fuse(features.float())

    def step(
        self,
        tokens: Int[Tensor, " n"],
        features: Float[Tensor, "n H"],
        positions: Int[Tensor, " n"],
        cache: EagleCache,
    ) -> tuple[Float[Tensor, "n H"], Float[Tensor, "n Vd"]]:
        """One pass over rows in the order of their positions, which see all rows of the cache before them.

        Args:
            tokens: the token behind each row's feature.
            features: of :meth:`fuse`, or what this gave at the depth before.
            positions: of the rows.
            cache: keys and values of earlier rows; these are added.
        Returns:
            What stands for features at the next depth, and logits over the drafter's tokens.
        """
        angles = self.rotary.angles(positions)
        q, k, v, residual = self.layer.enter(self.embedding[tokens], features, *angles)
        keys, values = cache.add(k, v, positions)
        seen = cache.positions[None] <= positions[:, None]
        if self.window:
            seen &= cache.positions[None] > positions[:, None] - self.window
        group = self.config.heads // self.config.kv_heads
        keys, values = (rows.repeat_interleave(group, dim=1) for rows in (keys, values))
        scores = torch.einsum("nhd,mhd->hnm", q, keys) * self.config.head_dim**-0.5
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        hidden, read = self.layer.leave(torch.einsum("hnm,mhd->nhd", shares, values), residual)
        return hidden, read @ self.lm_head.T
