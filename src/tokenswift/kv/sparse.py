"""A KV cache of fixed size that stands for a longer text, and room for the draft passes over it.

Every drafter that looks at part of the context uses this one cache; they differ in what they load into
it (`kv.select`). It is never read by a verify pass.
"""

from __future__ import annotations

from weakref import proxy

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.kv import KVCache
from tokenswift.kv.full import FullCache, Tail, to_device


class SparseCache(KVCache):
    """B slots per layer and KV head, and scratch rows behind them.

    The first S slots hold sinks and are never given up. A new committed token takes a free slot, or else
    replaces the next one in a ring over the other slots; loading a selection in rising importance makes
    the least important ones go first. Keys keep the rotary position they were written with, so their
    order in the cache does not matter.

    Layers with windows that stand apart in the full cache are read there: they are small.

    Draft passes write behind the slots: :meth:`grow` keeps rows of the last pass as context of the next,
    :meth:`rewind` drops them, :meth:`settle` gives them slots.

    Args:
        like: a full cache, for layers, heads, width, dtype and device.
        budget: B; must be at least ``sinks + 1``.
        sinks: S, first positions always held.
        scratch: rows of draft passes that fit behind the slots.
    """

    ordered = False

    def __init__(self, like: FullCache, budget: int, sinks: int, scratch: int) -> None:
        self.budget, self.sinks, self.scratch = budget, sinks, scratch
        # of a text that has ended somebody may still have the drafts, but nobody needs the full cache
        self._full: FullCache | None = None if like.tail is None else proxy(like)
        self.entries = like.entries.like(budget + scratch)
        self.data = self.entries.data.zero_()  # what nobody wrote are numbers, too
        self.work = torch.empty(0, dtype=torch.uint8, device="cpu")
        #: position in the text of every slot, (layers, K, B)
        shape = (like.layers, like.data.shape[1], budget)
        self.positions = torch.zeros(shape, dtype=torch.long, device=like.data.device)
        self.filled = 0
        self.drafted = 0  # scratch rows that count as context
        self.replaced = 0  # slots that newer tokens have taken since the last selection
        self.selections = 0
        self._next = sinks  # of the slots after the sinks, the next one to replace

    @property
    def length(self) -> int:
        """Entries that a draft pass attends to besides its own tokens."""
        return self.filled + self.drafted

    @property
    def tail(self) -> Tail | None:
        """The full cache's."""
        return None if self._full is None else self._full.tail

    @property
    def tail_length(self) -> int:
        """See :class:`KVCache`."""
        return self.length if self._full is None else self._full.tail_length + self.drafted

    def make_room(self, rows: int) -> None:
        """See :class:`KVCache`."""
        if self._full is not None:
            self._full.make_room(self.drafted + rows)

    @property
    def exhausted(self) -> bool:
        """True when newer tokens have replaced the whole selection (or none was made yet)."""
        return not self.selections or self.replaced >= self.budget - self.sinks

    # ---- draft passes ---------------------------------------------------------------------------

    def grow(self, rows: int) -> None:
        """Keep the first ``rows`` rows of the last pass as context of the next one."""
        self.drafted += rows

    def rewind(self, rows: int = 0) -> None:
        """Drop all draft rows but the first ``rows``."""
        self.drafted = rows

    def settle(self, rows: int, start: int) -> None:
        """Give the first ``rows`` draft rows slots, as positions from ``start`` on; drop the others."""
        self.drafted = 0
        if rows:
            self._put(self, self.filled, rows, start)

    # ---- committed tokens -----------------------------------------------------------------------

    def load(self, full: FullCache, chosen: list[Int[Tensor, "K n"]]) -> None:
        """Replace everything by positions of the full cache, per layer and KV head.

        Args:
            chosen: n ≤ B positions each: sinks first, then the others in rising importance.
        """
        chosen = [places.to(self.data.device) for places in chosen]
        self.filled = chosen[0].shape[1] if chosen else 0
        for layer, places in enumerate(chosen):
            self.positions[layer, :, : self.filled] = places
        if chosen:
            self.entries.copy(full.entries, range(self.filled), torch.cat(chosen))
        self.drafted = self.replaced = 0
        self._next = self.sinks
        self.selections += 1

    def append(self, full: FullCache, start: int, end: int) -> None:
        """Take in positions [start, end) of the full cache, newly committed."""
        self._put(full, start, end - start, start)

    def _put(self, source: FullCache | SparseCache, first: int, count: int, start: int) -> None:
        """Give ``count`` entries of a cache, from ``first`` on, slots as positions from ``start`` on; of too
        many, the newest."""
        ring = self.budget - self.sinks
        free = min(count, self.budget - self.filled)
        slots = list(range(self.filled, self.filled + free))
        slots += [self.sinks + (self._next - self.sinks + i) % ring for i in range(count - free)]
        if count > free:
            self._next = self.sinks + (self._next - self.sinks + count - free) % ring
        if count - free > ring:  # the ring turned more than once: only the last turn stays
            slots = slots[:free] + slots[free:][-ring:]
        kept = [*range(free), *range(max(free, count - ring), count)]
        self.filled += free
        self.replaced += count
        self.entries.copy(source.entries, slots, [first + at for at in kept])
        into, places = to_device(slots, self.data.device), to_device(kept, self.data.device)
        self.positions[:, :, into] = places + start

    def first_keys(self) -> Float[Tensor, "L K S d"]:
        """The sinks' keys as they are now, for `turn_sinks`."""
        return self.entries.keys(slice(None), 0, self.sinks).clone()

    def turn_sinks(self, by: int, frequencies: Float[Tensor, " half"], origin: Tensor) -> None:
        """Rotate the sinks' keys as if they stood ``by`` positions later (StreamingLLM, Xiao et al. 2024).

        Args:
            frequencies: the model's rotary frequencies, (d / 2,).
            origin: the sinks' keys as first written, (layers, K, S, d).
        """
        self.entries.put_keys(0, _turned(origin, by, frequencies))

    def turn_window(self, by: int, frequencies: Float[Tensor, " half"]) -> None:
        """Rotate the keys of all slots but the sinks as if they stood ``by`` positions later.

        Each turn rounds the keys once in the cache's dtype, so turn seldom and far.
        """
        keys = self.entries.keys(slice(None), self.sinks, self.filled)
        self.entries.put_keys(self.sinks, _turned(keys, by, frequencies))


def _turned(keys: Tensor, by: int, frequencies: Float[Tensor, " half"]) -> Tensor:
    """Rotated keys (…, d) in float32 as if written ``by`` positions later."""
    angle = (by * frequencies.double()).float()
    cos, sin = (torch.cat([part, part]) for part in (angle.cos(), angle.sin()))
    first, second = keys.float().chunk(2, dim=-1)
    return keys.float() * cos + torch.cat([-second, first], dim=-1) * sin
