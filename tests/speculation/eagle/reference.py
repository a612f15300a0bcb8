"""Drafting with an EAGLE-3 drafter in torch, row by row: what kernels and training are held
against.

The feature of position t goes with the embedding of token t + 1 and predicts token t + 2. One layer
reads both side by side, normed; what it makes stands for the feature at the next depth.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from tokenswift.kernels.attention import rotated
from tokenswift.loader.weights import unstored
from tokenswift.speculation.eagle.config import EagleWeights


@dataclass(slots=True)
class EagleCache:
    """Keys and values of a text's rows (kv heads, rows, d), those of deeper ones behind."""

    keys: Tensor | None = None
    values: Tensor | None = None
    positions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    def add(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Append rows; all keys and values."""
        self.keys = keys if self.keys is None else torch.cat((self.keys, keys), 1)
        self.values = values if self.values is None else torch.cat((self.values, values), 1)
        self.positions = torch.cat((self.positions, positions))
        return self.keys, self.values

    def cut(self, rows: int) -> None:
        """Drop all but the first rows."""
        if self.keys is not None and self.values is not None:
            self.keys = self.keys[:, :rows]
            self.values = self.values[:, :rows]
        self.positions = self.positions[:rows]


class EagleReference:
    """A drafter in float32.

    Args:
        weights: of `files.load_eagle`.
        embedding: the target's, (V, Ht); used where the drafter has none.
        lm_head: the target's, (V, Ht); its rows are used where the drafter has none.
        window: newest keys that a row sees, itself included, by their positions; None: as the
            drafter was trained.
    """

    def __init__(
        self,
        weights: EagleWeights,
        embedding: Float[Tensor, "V Ht"],
        lm_head: Float[Tensor, "V Ht"],
        window: int | None = None,
    ) -> None:
        self.config = weights.config
        self.d2t = weights.d2t
        t = {name: unstored(tensor, torch.float32) for name, tensor in weights.tensors.items()}
        self.t = t
        self.embedding = t.get("embed", embedding.float())
        target_rows = lm_head if weights.d2t is None else lm_head[weights.d2t]
        self.lm_head = t.get("lm_head", target_rows.float())
        if "narrow" in self.config.parts:
            self.embedding = self.embedding @ t["embed_proj"].T
            self.lm_head = self.lm_head @ t["out_proj"]
        self.rotary = weights.config.rotary()
        self.window = window or weights.config.window

    def _norm(self, x: Tensor, name: str) -> Tensor:
        if name not in self.t:
            return x
        return self.t[name] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.eps))

    def fuse(self, features: Float[Tensor, "n F"]) -> Float[Tensor, "n H"]:
        """What the first depth takes for a feature.

        Args:
            features: of the target's three layers, side by side.
        """
        parts = self._norm(features.float(), "features_norm").chunk(3, dim=-1)
        normed = [self._norm(part, f"fc_norm.{n}") for n, part in enumerate(parts)]
        return torch.cat(normed, -1) @ self.t["fc"].T

    def step(
        self,
        tokens: Int[Tensor, " n"],
        features: Float[Tensor, "n H"],
        positions: Int[Tensor, " n"],
        cache: EagleCache,
    ) -> tuple[Float[Tensor, "n H"], Float[Tensor, "n Vd"]]:
        """One pass over rows in the order of their positions, which see all rows of the cache
        before them.

        Args:
            tokens: the token behind each row's feature.
            features: of :meth:`fuse`, or what this gave at the depth before.
            positions: of the rows.
            cache: keys and values of earlier rows; these are added.
        Returns:
            What stands for features at the next depth, and logits over the drafter's tokens.
        """
        config = self.config
        t = self.t
        hidden = self._norm(features, "hidden_norm")
        x = torch.cat((self._norm(self.embedding[tokens], "input_norm"), hidden), -1)
        q, k, v = (F.linear(x, t[name], t.get(f"{name}_bias")) for name in "qkv")
        q, k, v = (rows.unflatten(-1, (-1, config.head_dim)).transpose(0, 1) for rows in (q, k, v))
        cos, sin = self.rotary.angles(positions)
        q = rotated(self._norm(q, "q_norm"), cos, sin)
        k = rotated(self._norm(k, "k_norm"), cos, sin)
        keys, values = cache.add(k, v, positions)
        seen = cache.positions[None] <= positions[:, None]
        if self.window:
            seen &= cache.positions[None] > positions[:, None] - self.window
        group = config.heads // config.kv_heads
        keys, values = (rows.repeat_interleave(group, dim=0) for rows in (keys, values))
        scores = q @ keys.transpose(1, 2) * config.head_dim**-0.5
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = (shares @ values).transpose(0, 1).flatten(1)
        residual = hidden if config.norm_before_residual else features
        rows = residual + F.linear(mixed, t["o"], t.get("o_bias"))
        x = self._norm(rows, "post_norm")
        rows = rows + (F.silu(x @ t["gate"].T) * (x @ t["up"].T)) @ t["down"].T
        normed = self._norm(rows, "norm")
        return normed if config.norm_output else rows, normed @ self.lm_head.T
