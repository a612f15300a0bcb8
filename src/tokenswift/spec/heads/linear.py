"""The paper's heads: ``h_i = h_{i-1} + Linear_i(RMSNorm_in,i(h_{i-1}))`` (section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tokenswift.spec.heads.modules import Heads, HeadsConfig, RMSNorm


class LinearHead(nn.Module):
    """One head of the paper; the names are those of the published checkpoints."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.hidden_size, config.hidden_size, bias=False, dtype=torch.float32)
        self.input_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.post_layernorm = RMSNorm(config.hidden_size, config.eps)
        nn.init.zeros_(self.linear.weight)

    def forward(self, previous: Tensor) -> Tensor:
        return previous + self.linear(self.input_layernorm(previous))


class LinearHeads(Heads, kind="linear"):
    """One linear layer a head, one after the other."""

    def made(self, config: HeadsConfig) -> Iterator[nn.Module]:
        """A layer each."""
        return (LinearHead(config) for _ in range(config.count))

    def step(self, i: int, previous: Tensor, base: Tensor, embeds: Tensor | None) -> Tensor:
        """Looks at the state of the head before alone."""
        return self.layers[i](previous)

    def normed(self, i: int, states: Tensor) -> Tensor:
        """Each head has a final norm of its own."""
        return self.layers[i].post_layernorm(states)  # type: ignore[operator]
