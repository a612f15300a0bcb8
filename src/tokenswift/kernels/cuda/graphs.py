"""CUDA graphs of passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

#: takes inputs by their names
Work = Callable[..., tuple[Tensor, ...]]


@dataclass(slots=True)
class _Recording:
    """A piece of work with buffers for its inputs, the outputs that it leaves, and its graph; None
    where nothing is recorded."""

    inputs: dict[str, Tensor]
    outputs: tuple[Tensor, ...] = ()
    graph: torch.cuda.CUDAGraph | None = None


class Graphs:
    """Records work at its first call, and replays it from then on. Threads may share it.

    On a CPU the work is done every time, on the same buffers.

    Args:
        device: where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recordings: dict[Hashable, _Recording] = {}
        self._lock = threading.Lock()
        #: memory of all graphs, which run one after the other, and the stream they are recorded on
        self._pool: torch.cuda._POOL_HANDLE | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def count(self) -> int:
        """How many pieces of work are recorded."""
        return len(self._recordings)

    @torch.inference_mode()
    def run(self, key: Hashable, work: Work, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The outputs of ``work``, copied for the caller; it leaves its inputs as they are.

        Args:
            key: stands for the work, which depends on the numbers in ``inputs`` and otherwise on
                what never changes.
        """
        with self._lock:
            recording = self._recordings.get(key)
            if recording is None:
                buffers = {name: tensor.clone() for name, tensor in inputs.items()}
                recording = _Recording(buffers)
            for name, buffer in recording.inputs.items():
                buffer.copy_(inputs[name])
            if self._device.type != "cuda":
                recording.outputs = work(**recording.inputs)
            elif recording.graph is None:
                self._record(recording, work)
            self._recordings[key] = recording  # not what could not be recorded
            if recording.graph is not None:
                recording.graph.replay()
            return tuple(each.clone() for each in recording.outputs)

    def _record(self, recording: _Recording, work: Work) -> None:
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._pool = torch.cuda.graph_pool_handle()
                self._stream = torch.cuda.Stream()
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                # compiles kernels, and gives the library its room on this stream
                work(**recording.inputs)
            current.wait_stream(self._stream)
            recording.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                recording.graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",  # other threads may use the device meanwhile
            ):
                recording.outputs = work(**recording.inputs)
