"""An EAGLE-3 drafter under training, with training-time test.

Training-time test (Li et al. 2025): what the layer makes of a position is its feature at the next depth, as
in drafting. There a row of depth i, drafted from position t, sees the rows of depth 0 up to t, and of its
own chain one row of each depth; so it is here, for all positions of a window at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tokenswift.spec.eagle.config import EagleConfig
from tokenswift.spec.eagle.reference import EagleLayer
from tokenswift.train.loss import FrozenBase, Student


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
        return [read.flatten(0, 1) for *_, read in self.chain(tokens, hidden, base)]

    def chain(
        self, tokens: Int[Tensor, "b L"], features: Float[Tensor, "b n F"], base: FrozenBase
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each level, of all positions: attention's rows, the residual, and what the LM head reads."""
        m = features.shape[1] - self.extra
        layer = EagleLayer(self.config, self.tensors())
        rotary, positions = self.rotary.to(features.device), torch.arange(m, device=features.device)
        state = layer.fuse(features[:, :m].float())
        keys, values = [], []
        for i in range(self.levels):
            embeds = base.embed(tokens[:, 1 + i : 1 + i + m]).float()
            q, k, v, residual = layer.enter(embeds, state, rotary, positions + i)
            keys.append(k)
            values.append(v)
            seen = attended(q, keys, values, self.config.window)
            state, read = layer.leave(seen, residual)
            yield seen, residual, read


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
