"""Several devices, layers on each: every layer's attention and cache are its own device's affair.

For models that run through transformers' own forward, which brings states from one device to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tokenswift.config import SamplingParams
from tokenswift.kernels.base import Backend
from tokenswift.kv.split import SplitCache, SplitSparse, places_of
from tokenswift.memory import Memory
from tokenswift.sampling.adjust import NO_RULES, TextRules
from tokenswift.sampling.ranking import Ranker


class SeveralBackend(Backend):
    """One backend for each device.

    Args:
        head: of the device where tokens are chosen.
        backends: by device, as ``devices`` names them.
        devices: of each layer.
    """

    name, decodes = "several", False

    def __init__(
        self, head: Backend, backends: dict[torch.device, Backend], devices: Sequence[torch.device]
    ) -> None:
        super().__init__(head.device)
        self.head, self.build = head, head.build
        found, self.places = places_of(devices)
        self.parts = [backends[device] for device in found]
        self.shares = [devices.count(device) / len(devices) for device in found]

    def new_cache(self, layers: int, kv_heads: int, width: int, capacity: int, dtype: torch.dtype) -> Any:
        """See :meth:`Backend.new_cache`."""
        counts = [sum(part == number for part, _ in self.places) for number in range(len(self.parts))]
        made = [
            part.new_cache(count, kv_heads, width, capacity, dtype)
            for part, count in zip(self.parts, counts, strict=True)
        ]
        return SplitCache(made, self.places)

    def partial_cache(self, full: Any, budget: int, sinks: int, scratch: int) -> Any:
        """See :meth:`Backend.partial_cache`."""
        return SplitSparse(full, budget, sinks, scratch)

    def memory(self) -> Memory | None:
        """What of a cache's bytes can be had: the device with the least room for its share counts."""
        found = [(part.memory(), share) for part, share in zip(self.parts, self.shares, strict=True)]
        known = [(memory, share) for memory, share in found if memory is not None]
        if not known:
            return None
        free, total = (min(int(memory[i] / share) for memory, share in known) for i in (0, 1))
        return Memory(free, total)

    def held(self) -> int:
        """Bytes that this process holds, on all devices."""
        return sum(part.held() for part in self.parts)

    def synchronize(self) -> None:
        """Wait for all devices."""
        for part in (*self.parts, self.head):
            part.synchronize()

    def processor(self) -> str:
        """What computes, in the order of the layers."""
        return " and ".join(part.processor() for part in self.parts)

    def attend(
        self,
        query: Tensor,
        layer: int,
        cache: Any,
        parents: Sequence[int] | None,
        scale: float,
        window: int = 0,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        notes: dict[Any, Any] | None = None,
    ) -> Tensor:
        """See :meth:`Backend.attend`; on the layer's device."""
        number, part, own = cache.at(layer)
        noted = None if notes is None else notes.setdefault(number, {})
        rest = (parents, scale, window, softcap, sinks, noted)
        return self.parts[number].attend(query, own, part, *rest)

    def ranker(self, params: SamplingParams, rules: TextRules = NO_RULES) -> Ranker | None:
        """That of the device where tokens are chosen."""
        return self.head.ranker(params, rules)

    def body(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Layers are transformers' affair.

        Raises:
            NotImplementedError: always; as `layers`, `linear` and `norm`.
        """
        raise NotImplementedError("models over several devices run through transformers' own forward")

    layers = linear = norm = body
