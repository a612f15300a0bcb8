"""CUDA graphs of passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Work = Callable[..., tuple[Tensor, ...]]


@dataclass(slots=True)
class _Recorded:
    """Buffers of a piece of work, what it left in them, and its graph; None where nothing is
    recorded."""

    given: tuple[Tensor, ...]
    graph: Any = None
    made: tuple[Tensor, ...] = ()


class Graphs:
    """Records work at its first call, and replays it from then on. Threads may share it.

    On a CPU the work is done every time, on the same buffers.

    Args:
        device: where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[Hashable, _Recorded] = {}
        self._lock = threading.Lock()
        self._pool: Any = None  # of all graphs: they run one after the other
        self._beside: Any = None

    @torch.inference_mode()
    def run(self, key: Hashable, work: Work, *given: Tensor) -> tuple[Tensor, ...]:
        """What ``work`` makes of tensors, which it leaves as they are; what comes back is the
        caller's.

        Args:
            key: of the work, for which it depends on numbers in ``given`` and on what never changes
                alone.
        """
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                kept = _Recorded(tuple(each.clone() for each in given))
            for buffer, each in zip(kept.given, given, strict=True):
                buffer.copy_(each)
            if self._device.type != "cuda":
                kept.made = work(*kept.given)
            elif kept.graph is None:
                self._record(kept, work)
            self._kept[key] = kept  # not what could not be recorded
            if kept.graph is not None:
                kept.graph.replay()
            return tuple(each.clone() for each in kept.made)

    def _record(self, kept: _Recorded, work: Work) -> None:
        with torch.cuda.device(self._device):
            if self._pool is None:
                self._pool, self._beside = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            current = torch.cuda.current_stream()
            self._beside.wait_stream(current)
            with torch.cuda.stream(self._beside):
                work(*kept.given)  # compiles kernels, and gives the library its room on this stream
            current.wait_stream(self._beside)
            kept.graph = torch.cuda.CUDAGraph()
            # other threads may use the device meanwhile
            how = {"pool": self._pool, "stream": self._beside, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(kept.graph, **how):
                kept.made = work(*kept.given)
