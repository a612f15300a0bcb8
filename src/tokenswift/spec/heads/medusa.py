"""Medusa-1's heads (Cai et al. 2024): residual blocks on the base model's final state."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tokenswift.spec.heads.modules import Heads, HeadsConfig, RMSNorm


class MedusaHead(nn.Module):
    """One Medusa-1 head: ``x + SiLU(Linear(x))`` blocks on the final-normed base state."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.final_norm = RMSNorm(width, config.eps)
        self.blocks = nn.ModuleList(
            nn.Linear(width, width, dtype=torch.float32) for _ in range(config.blocks)
        )
        self.lm_head = (
            nn.Linear(width, config.vocab_size, bias=False, dtype=torch.float32)
            if config.own_lm_heads
            else None
        )

    def forward(self, base: Tensor) -> Tensor:
        state = self.final_norm(base)
        for block in self.blocks:
            state = state + nn.functional.silu(block(state))
        return state


class MedusaHeads(Heads, kind="medusa"):
    """Heads side by side: none looks at another."""

    def made(self, config: HeadsConfig) -> Iterator[nn.Module]:
        """A head each."""
        return (MedusaHead(config) for _ in range(config.count))

    def step(self, i: int, previous: Tensor, base: Tensor, embeds: Tensor | None) -> Tensor:
        """Looks at the base state alone."""
        return self.layers[i](base)

    def own_logits(self, i: int, states: Tensor) -> Tensor:
        """By the head's own LM head, where it has one."""
        lm_head = self.layers[i].lm_head
        if not isinstance(lm_head, nn.Linear):
            return super().own_logits(i, states)
        return lm_head(states).float()
