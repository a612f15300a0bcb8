"""Heads that also see the embedding of the token drafted before their own.

With x the normed previous state, base state and embedding side by side,
``h_i = A x + B relu(C x + b) + c``. All heads share one step after the first norm, so a file serves any
number of levels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tokenswift.spec.heads.modules import Heads, HeadsConfig, RMSNorm


class ConditionedStep(nn.Module):
    """One conditioned head, or all of them when they share it.

    The state it makes lives where the LM head reads (after the final norm), so no norm follows and
    its length can say how sure the head is.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.first_norm = RMSNorm(width, config.eps)  # of the base model's own state, as `previous`
        self.state_norm = RMSNorm(width, config.eps)  # of a head's state, as `previous`
        self.base_norm = RMSNorm(width, config.eps)
        self.embed_norm = RMSNorm(width, config.eps)
        self.linear = nn.Linear(3 * width, width, dtype=torch.float32)
        self.inner = nn.Linear(3 * width, config.inner, dtype=torch.float32) if config.inner else None
        self.outer = nn.Linear(config.inner, width, bias=False, dtype=torch.float32) if config.inner else None
        if self.outer is not None:
            nn.init.zeros_(self.outer.weight)

    def inputs(self, previous: Tensor, base: Tensor, embeds: Tensor, first: bool) -> Tensor:
        """The step's input x, (m, 3 D)."""
        state = self.first_norm(previous) if first else self.state_norm(previous)
        return torch.cat((state, self.base_norm(base), self.embed_norm(embeds)), dim=-1)

    def forward(self, previous: Tensor, base: Tensor, embeds: Tensor, first: bool) -> Tensor:
        x = self.inputs(previous, base, embeds, first)
        state = self.linear(x)
        if self.inner is not None and self.outer is not None:
            state = state + self.outer(torch.relu(self.inner(x)))
        return state


class ConditionedHeads(Heads, kind="conditioned"):
    """One step, shared by all heads."""

    conditioned = True

    def made(self, config: HeadsConfig) -> Iterator[nn.Module]:
        """The step."""
        yield ConditionedStep(config)

    def step(self, i: int, previous: Tensor, base: Tensor, embeds: Tensor | None) -> Tensor:
        """The first head's `previous` is the base state, which has a norm of its own."""
        return self.layers[0](previous, base, embeds, i == 0)
