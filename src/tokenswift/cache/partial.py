"""The dynamic partial KV cache (paper section 3.3): B entries that stand for the whole context."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenswift.cache.full import FullCache


class PartialCache:
    """B entries per layer and KV head: sinks, then the selection by falling importance.

    A position's importance is the dot product of the newest query with its key, summed over the
    query heads of the group. Newly accepted tokens overwrite the selection from its least important
    end; when they have used it up, :attr:`exhausted` asks for a new selection. Keys keep the rotary
    position that they were written with, so their order in the cache does not matter.

    Args:
        full: the cache to select from.
        budget: B; must be at least ``sinks + 1``.
        sinks: S, first positions always held.
        scratch: tokens of a draft pass that fit behind the budget.
        window: a layer's sliding window in tokens (None: it sees everything), by layer.
    """

    def __init__(
        self, full: FullCache, budget: int, sinks: int, scratch: int, window: list[int | None]
    ) -> None:
        layers2, kv_heads, _, head_dim = full.data.shape
        self.full = full
        self.budget = budget
        self.sinks = sinks
        self.window = window
        self.data = torch.empty(
            layers2, kv_heads, budget + scratch, head_dim, dtype=full.data.dtype, device=full.data.device
        )
        #: position in the text of every slot, (layers, K, B)
        self.positions = torch.zeros(
            layers2 // 2, kv_heads, budget, dtype=torch.long, device=full.data.device
        )
        self.selections = 0
        self._free = sinks  # slots [sinks, _free) still hold selected entries, the rest newer tokens

    @property
    def length(self) -> int:
        """Entries that a draft pass attends to: always the whole budget."""
        return self.budget

    @property
    def exhausted(self) -> bool:
        """True when newly accepted tokens have replaced the whole selection (or none was made yet)."""
        return self._free <= self.sinks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """B, under the name that transformers asks for."""
        return self.budget

    def select(self, queries: list[Tensor], row: int) -> None:
        """Choose anew from the full cache.

        Args:
            queries: per layer, rotated queries (1, H, n, d) of the pass that holds the newest token.
            row: the newest token's row in that pass.
        Raises:
            ValueError: if the full cache holds fewer than B tokens.
        """
        total = self.full.length
        if total < self.budget:
            raise ValueError(f"the full cache holds {total} tokens, fewer than the budget {self.budget}")
        kv_heads = self.data.shape[1]
        head = torch.arange(self.sinks, device=self.data.device).expand(kv_heads, -1)
        for layer, query in enumerate(queries):
            grouped = query[0, :, row].view(kv_heads, -1, query.shape[-1]).sum(1)  # (K, d)
            importance = torch.einsum("kd,ktd->kt", grouped, self.full.keys(layer)[:, self.sinks :]).float()
            window = self.window[layer]
            if window is not None and total - window > self.sinks:
                importance[:, : total - window - self.sinks] = -torch.inf
            best = importance.topk(self.budget - self.sinks, dim=1).indices + self.sinks  # falling importance
            chosen = torch.cat([head, best], dim=1)  # (K, B)
            self.positions[layer] = chosen
            rows = chosen[:, :, None].expand(-1, -1, self.data.shape[-1])
            for part in (2 * layer, 2 * layer + 1):
                self.data[part, :, : self.budget] = self.full.data[part].gather(1, rows)
        self._free = self.budget
        self.selections += 1

    def append(self, start: int, end: int) -> None:
        """Take in positions [start, end) of the full cache, newly committed; they replace the least
        important entries. When they do not all fit, the cache becomes :attr:`exhausted`."""
        count = end - start
        if count > self._free - self.sinks:
            self._free = self.sinks
            return
        slots = slice(self._free - count, self._free)
        self.data[:, :, slots] = self.full.data[:, :, start:end]
        self.positions[:, :, slots] = torch.arange(start, end, device=self.positions.device)
        self._free -= count

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write a draft pass's entries behind the budget; return views of all (1, K, B + n, d)."""
        end = self.budget + key_states.shape[2]
        keys, values = self.data[2 * layer_idx], self.data[2 * layer_idx + 1]
        keys[:, self.budget : end] = key_states[0]
        values[:, self.budget : end] = value_states[0]
        return keys[None, :, :end], values[None, :, :end]
