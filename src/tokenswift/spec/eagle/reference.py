"""The forward pass of an EAGLE-3 drafter in torch: what kernels are held against, and what training runs.

The feature of position t goes with the embedding of token t + 1 and predicts token t + 2. One layer reads
both side by side, normed; what it makes stands for the feature at the next depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from tokenswift.loader.rope import Rotary
from tokenswift.loader.weights import unstored
from tokenswift.spec.eagle.checkpoint import EagleWeights
from tokenswift.spec.eagle.config import FEATURES, EagleConfig


def normed(x: Float[Tensor, "*m w"], weight: Float[Tensor, " w"], eps: float) -> Float[Tensor, "*m w"]:
    """RMS norm."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def turned(
    x: Float[Tensor, "*m n h d"], cos: Float[Tensor, "n half"], sin: Float[Tensor, "n half"]
) -> Float[Tensor, "*m n h d"]:
    """Rows at their positions: halves of a head are pairs."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class EagleLayer:
    """The parts of the forward pass before and after attention, of rows with any leading dimensions.

    Args:
        config: of the drafter.
        tensors: its float weights by canonical names; gradients reach them.
    """

    def __init__(self, config: EagleConfig, tensors: Mapping[str, Tensor]) -> None:
        self.config, self.tensors = config, tensors

    def fuse(self, features: Float[Tensor, "*m F"]) -> Float[Tensor, "*m H"]:
        """What the layer takes for a feature, of three rows of the target."""
        config, t = self.config, self.tensors
        if config.norm_before_fc:
            features = normed(features, t["features_norm"], config.eps)
        if config.fc_norm:
            parts = features.chunk(FEATURES, dim=-1)
            made = [normed(part, t[f"fc_norm.{n}"], config.eps) for n, part in enumerate(parts)]
            features = torch.cat(made, dim=-1)
        return F.linear(features, t["fc"])

    def enter(
        self,
        embeds: Float[Tensor, "*m n H"],
        g: Float[Tensor, "*m n H"],
        rotary: Rotary,
        positions: Int[Tensor, " n"],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries (*m, n, heads, d), keys and values (*m, n, kv heads, d), and the residual (*m, n, H)."""
        config, t = self.config, self.tensors
        hidden = normed(g, t["hidden_norm"], config.eps)
        x = torch.cat((normed(embeds, t["input_norm"], config.eps), hidden), dim=-1)
        q, k, v = (F.linear(x, t[name], t.get(f"{name}_bias")) for name in ("q", "k", "v"))
        q, k, v = (rows.unflatten(-1, (-1, config.head_dim)) for rows in (q, k, v))
        if config.qk_norm:
            q, k = normed(q, t["q_norm"], config.eps), normed(k, t["k_norm"], config.eps)
        cos, sin = rotary.angles(positions)
        residual = hidden if config.norm_before_residual else g
        return turned(q, cos, sin), turned(k, cos, sin), v, residual

    def leave(
        self, attended: Float[Tensor, "*m n heads d"], residual: Float[Tensor, "*m n H"]
    ) -> tuple[Float[Tensor, "*m n H"], Float[Tensor, "*m n H"]]:
        """What the next depth takes for a feature, and what the LM head reads."""
        config, t = self.config, self.tensors
        rows = residual + F.linear(attended.flatten(-2), t["o"], t.get("o_bias"))
        x = normed(rows, t["post_norm"], config.eps)
        gate, up = (F.linear(x, t[name], t.get(f"{name}_bias")) for name in ("gate", "up"))
        rows = rows + F.linear(F.silu(gate) * up, t["down"], t.get("down_bias"))
        read = normed(rows, t["norm"], config.eps)
        return read if config.norm_output else rows, read


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
        weights: of `checkpoint.load_eagle`.
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
        self.layer, self.rotary = EagleLayer(weights.config, tensors), weights.config.rotary()
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
        q, k, v, residual = self.layer.enter(self.embedding[tokens], features, self.rotary, positions)
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
