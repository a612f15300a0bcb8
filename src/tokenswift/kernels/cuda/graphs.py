"""Work of fixed shapes, recorded once as a CUDA graph: a pass is one launch instead of hundreds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenswift.kernels.cuda.plan import RECORDED

Made = Tensor | tuple[Tensor, ...]


@dataclass(slots=True)
class _Recorded:
    """Buffers of a piece of work, what it left in them, and its graph; None where nothing is recorded."""

    given: tuple[Tensor, ...]
    graph: Any = None
    made: Made = ()


class Graphs:
    """Records work at its first call, and replays it from then on (`kernels.base.Replays`). Threads may share
    it.

    On a CPU the work is done every time, on the same buffers.

    Args:
        device: where the work is done.
        most: pieces of work that are kept, those that were used last; None: all.
    """

    def __init__(self, device: torch.device, most: int | None = None) -> None:
        self._most = most
        self._device, self._records = device, device.type == "cuda"
        self._kept: dict[Hashable, _Recorded] = {}
        self._lock = threading.Lock()
        self._pool: Any = None  # of all graphs: they run one after the other

    @torch.inference_mode()
    def run(self, key: Hashable, work: Callable[..., Made], *given: Tensor) -> Any:
        """See `Replays.run`; what comes back is the caller's."""
        with self._lock:
            return _copied(self._replayed(key, work, given, [each.shape for each in given]))

    @torch.inference_mode()
    def rows(
        self, key: Hashable, work: Callable[..., Tensor], *given: Tensor, all_rows: Sequence[Tensor] = ()
    ) -> Tensor:
        """See `Replays.rows`; few rows are filled up to one of `RECORDED`."""
        count = len(given[0])
        if count > RECORDED[-1]:
            return work(*given, *all_rows)
        size = next(size for size in RECORDED if size >= count)
        shapes = [(size, *each.shape[1:]) for each in given] + [each.shape for each in all_rows]
        with self._lock:
            return self._replayed(key, work, (*given, *all_rows), shapes)[:count].clone()

    def _replayed(
        self,
        key: Hashable,
        work: Callable[..., Made],
        given: tuple[Tensor, ...],
        shapes: Sequence[tuple[int, ...]],
    ) -> Any:
        """What the work makes of tensors, in buffers of some shapes, which they fill up from the front."""
        types = [each.dtype for each in given]
        key = (key, *shapes, *types)
        kept = self._kept.pop(key, None)
        if kept is None:
            pairs = zip(shapes, types, strict=True)
            kept = _Recorded(tuple(torch.zeros(s, dtype=t, device=self._device) for s, t in pairs))
        self._kept[key] = kept  # behind those that were used before
        if self._most is not None and len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]
        for buffer, each in zip(kept.given, given, strict=True):
            buffer[: len(each)].copy_(each, non_blocking=True)
        if not self._records:
            return work(*kept.given)
        if kept.graph is None:
            kept.graph = self._recorded(kept, work)
        kept.graph.replay()
        return kept.made

    def _recorded(self, kept: _Recorded, work: Callable[..., Made]) -> Any:
        current, beside = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            work(*kept.given)  # compiles kernels, and asks the library what it has to be asked once
        current.wait_stream(beside)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # other threads may use the device meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            kept.made = work(*kept.given)
        return graph


def _copied(made: Made) -> Made:
    return made.clone() if isinstance(made, Tensor) else tuple(each.clone() for each in made)
