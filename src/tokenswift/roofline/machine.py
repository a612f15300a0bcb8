"""What this machine reads and computes in a second, measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from tokenswift.kernels.base import Backend
from tokenswift.kernels.formats.format import Stored
from tokenswift.kernels.formats.panels import PANEL
from tokenswift.kernels.formats.registry import FORMATS
from tokenswift.kernels.weights import Packed
from tokenswift.kv.pages import large_empty
from tokenswift.models.target import backend_for
from tokenswift.roofline.cards import Card
from tokenswift.roofline.passes import ITEM, Machine, Sizes, stored_bytes
from tokenswift.roofline.timer import times
from tokenswift.words import counted

BLOCK = 1 << 29  # bytes read to measure bandwidth, more than caches hold
SIDE = 8192  # of the square matrices that an accelerator multiplies
MOST = 96 << 20  # bytes of weights, or of keys and values, that products and attention are timed with
KEYS = 4096  # of a layer, of those
SECONDS, RUNS = 0.1, 5  # that the calls of a figure take, about, and how many there are at least


def machine_at(device: str) -> Machine:
    """The processor or accelerator here; ``device``: from `loader.load.check_place`."""
    if device == "cpu":
        return Processor(backend_for())
    return accelerator(torch.cuda.get_device_name(device), torch.device(device))


def accelerator(name: str, device: torch.device) -> Card:
    """A device whose figures are measured now, those of all types."""
    figures = {dtype: arithmetic(device, getattr(torch, dtype), SIDE) for dtype in ITEM}
    return Card(name, "measured here", bandwidth(device), figures, backend_for(device).formats)


class Processor:
    """The CPU here (implements `passes.Machine`); a figure is measured when it is first asked for.

    Products and attention are those of the kernels that texts are written with, by format and rows. They
    are timed over as many weights and keys as a model of these sizes has, up to more than caches hold: what
    they wait for memory is in the figure, as it is in a pass.

    Args:
        backend: the CPU's.
    """

    source, device = "measured here", "cpu"

    def __init__(self, backend: Backend) -> None:
        self.name = f"CPU, {counted(torch.get_num_threads(), 'thread')}"
        self._backend = backend
        self._read = cache(lambda: bandwidth(torch.device("cpu")))
        self._packed = cache(self._pack)
        self._product, self._attend = cache(self._time_product), cache(self._time_attention)

    @property
    def bandwidth(self) -> float:
        """See `passes.Machine`."""
        return self._read()

    def keeps(self, kind: str, dtype: str) -> bool:
        """See `passes.Machine`."""
        wide = self._backend.panels and (kind, dtype) == ("bfloat16", "float32")
        return wide or self._backend.keeps(kind, getattr(torch, dtype))

    def products(self, sizes: Sizes, stored: str, rows: int) -> float:
        """See `passes.Machine`."""
        return self._product(sizes.hidden, stored, sizes.weights[stored], sizes.dtype, sizes.whole, rows)

    def attention(self, sizes: Sizes, rows: int) -> float:
        """See `passes.Machine`."""
        layers = max(1, min(len(sizes.windows), MOST // (KEYS * sizes.layer_bytes)))
        kinds = sizes.dtype, sizes.keys or sizes.dtype
        return self._attend(layers, sizes.heads, sizes.kv_heads, sizes.width, *kinds, rows)

    def _time_product(
        self, hidden: int, stored: str, count: int, dtype: str, whole: bool, rows: int
    ) -> float:
        weight = self._packed(hidden, stored, count, dtype)
        states, active = torch.randn(rows, weight.columns, dtype=torch.float32), torch.int8 if whole else None
        taken = least(lambda: self._backend.linear(states, weight, None, active))
        return 2 * rows * weight.rows * weight.columns / taken

    def _time_attention(
        self, layers: int, heads: int, kv_heads: int, width: int, dtype: str, keys: str, rows: int
    ) -> float:
        query = torch.randn(heads, rows, width, dtype=torch.float32).to(getattr(torch, dtype))
        kept = self._backend.new_cache(layers, kv_heads, width, KEYS + rows, getattr(torch, keys))
        kept.fill_random()
        kept.commit(tuple(range(KEYS)))
        attend, scale = self._backend.attend, width**-0.5
        taken = least(lambda: [attend(query, layer, kept, None, scale) for layer in range(layers)])
        return 4 * rows * heads * width * KEYS * layers / taken

    def _pack(self, hidden: int, stored: str, count: int, dtype: str) -> Packed:
        """Weights of zeros: what they hold does not matter to the time."""
        block = 1 if stored in ITEM else FORMATS[stored].block
        columns = -(-hidden // block) * block
        count = min(count, MOST * count // stored_bytes(stored, count))
        if stored in ITEM:
            zeros: torch.Tensor | Stored = torch.zeros(PANEL, columns, dtype=getattr(torch, stored))
        else:
            form = FORMATS[stored]
            zeros = Stored(form, torch.zeros(PANEL, form.row_bytes(columns), dtype=torch.uint8))
        weight = self._backend.pack(zeros, getattr(torch, dtype))
        copies, one = -(-count // (columns * PANEL)), weight.data  # packing all of it would take seconds
        many = large_empty(copies, *one.shape, dtype=one.dtype).copy_(one).flatten(0, 1)
        weight.parts, weight.rows = [replace(weight.parts[0], data=many, rows=copies * PANEL)], copies * PANEL
        return weight


def bandwidth(device: torch.device) -> float:
    """Bytes of memory that all threads, or an accelerator, read in a second."""
    block = large_empty(BLOCK // 4, dtype=torch.float32, device=device).fill_(1.0)
    return BLOCK / least(block.sum)


def arithmetic(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Operations in a second of torch's product of two square matrices."""
    square = torch.randn(side, side, device=device, dtype=dtype)
    return 2 * side**3 / least(lambda: square @ square)


@torch.inference_mode()
def least(work: Callable[[], object]) -> float:
    """Seconds of the fastest call after a first one."""
    return min(times(work, RUNS, SECONDS)) / 1e3
