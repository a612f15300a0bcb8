"""The backend: computes model passes on a device. This one, in plain torch, is the reference for
the others; its passes are in `kernels.reference`.

A backend packs weights, allocates KV caches, runs a decoder's layers over a *batch* of segments
(rows of one or several sequences, each with its own cache and tree), multiplies with the LM head
and ranks tokens. In a pass, the model asks for a batch, embeds its tokens, and gives their states
to :meth:`Backend.layers`.

`kernels.cpu` has compiled kernels by the specification of docs/exactness.md, `kernels.cuda` those
for a GPU; torch runs where neither works. Torch sums in an order of its own, so that a row's bits
may depend on the other rows. Code elsewhere asks a backend for its abilities, never for its device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift import memory
from tokenswift.config.sampling import SamplingParams
from tokenswift.kernels.batch import Batch, Body, check_ids
from tokenswift.kernels.formats import Q8_0, STORED_IN, Stored
from tokenswift.kernels.packed import Packed, WritePanels
from tokenswift.kernels.recurrence import replay
from tokenswift.kernels.reference import ReferenceLayers
from tokenswift.kernels.weights import LayerWeights, Shape
from tokenswift.kv.cache import FullCache
from tokenswift.kv.entries import Entries
from tokenswift.kv.memory import Arena
from tokenswift.kv.passes import Segment
from tokenswift.kv.states import Recurrence, States
from tokenswift.sampling.rows import Ranker


class Backend(ReferenceLayers):
    """Computes on one device with torch's operations. It keeps no state between passes; threads may
    share it.

    Args:
        device: the device of all tensors.
        decodes: whether it runs a decoder's layers; None: on a CPU. Elsewhere that is slow, and
            transformers' own forward usually runs instead.

    Attributes:
        name: its name in messages and files.
        build: compiler, flags and version of its kernels; None: nothing is compiled.
        equal_bits: whether a row's bits depend on its own context alone, so that plain decoding and
            verify passes agree in every bit.
        prefill_keeps_bits: whether that holds for prefill too. Otherwise a prompt is prefilled in
            chunks with fixed borders, and generated tokens of a resumed text are run again by
            decode passes.
        decodes: whether it can run a decoder's layers; otherwise models use transformers' own
            forward.
        mixtures: whether its layers may have experts.
        recurrences: whether its layers may be recurrent.
        fused: whether it has kernels for products and norms, for which draft heads are packed too.
        formats: quantized formats that its products read as stored, also with int8 activations.
        kind: type of the device, "cpu" or "cuda".
        on_host: whether tensors are in the host's memory, so that reading a value does not wait for
            a device.
    """

    name = "torch"
    build: str | None = None
    equal_bits = False
    prefill_keeps_bits = True
    mixtures = True
    recurrences = True
    fused = False
    formats: tuple[str, ...] = ()

    def __init__(self, device: torch.device | str = "cpu", decodes: bool | None = None) -> None:
        self.device = torch.device(device)
        self.kind = self.device.type
        self.on_host = self.kind == "cpu"
        self.decodes = self.on_host if decodes is None else decodes

    # ---- memory ----------------------------------------------------------------------------------

    def keeps(self, form: str, dtype: torch.dtype) -> bool:
        """Whether products of this type read weights of a quantized format as stored."""
        return form in self.formats and dtype in STORED_IN

    def pack(
        self,
        weight: Tensor | Stored | Sequence[Tensor | Stored],
        dtype: torch.dtype | None = None,
        arena: Arena | None = None,
    ) -> Packed:
        """Pack a linear layer's weight (N, K), or several of them one below the other, for
        products.

        Args:
            dtype: type of its values in products; default: the tensors' own, float32 for quantized
                formats.
            arena: memory shared with other weights.
        """
        return Packed(weight, self._panel_writer(), dtype, arena)

    def _panel_writer(self) -> WritePanels | None:
        """Writes quantized weights into panels; None: packed weights are matrices."""
        return None

    def pack_for_drafts(self, weight: Float[Tensor, "N K"], int8: bool) -> Packed:
        """Pack a matrix that is used only to draft: as Q8_0 if products are in ``int8``."""
        if int8 and Q8_0.name in self.formats and weight.shape[1] % Q8_0.block == 0:
            return self.pack(Stored(Q8_0, Q8_0.encode(weight.float())), torch.float32)
        return self.pack(weight)

    def draft_product(
        self, states: Float[Tensor, "n K"], weight: Packed, bias: Tensor | None = None
    ) -> Float[Tensor, "n N"]:
        """:meth:`linear` with a weight from :meth:`pack_for_drafts`."""
        return self.linear(states, weight, bias, torch.int8 if weight.stored else None)

    def take(self, weight: Packed, ids: Int[Tensor, " m"]) -> Float[Tensor, "m K"]:
        """Some rows of a packed weight, in the type of its products.

        Raises:
            InputError: an id (on the host) without a row.
        """
        check_ids(ids, weight.rows)
        return weight.take(ids)

    def new_cache(
        self,
        layers: int,
        kv_heads: int,
        width: int,
        capacity: int,
        dtype: torch.dtype,
        wide_keys: Sequence[bool] = (),
    ) -> FullCache:
        """An empty full cache for ``capacity`` tokens, scratch rows included.

        Args:
            wide_keys: in int8, of each layer whether its keys are of 16 bits; empty: none are.
        """
        return FullCache(Entries(layers, kv_heads, width, capacity, dtype, self.device))

    def new_states(self, recurrence: Recurrence, layers: int) -> States:
        """States of recurrent layers, of a text without tokens."""
        return States(recurrence, layers, replay, self.device)

    def has_int8_keys(self, width: int) -> bool:
        """Whether keys and values of heads of this width may be int8."""
        return False

    def has_wide_keys(self, width: int) -> bool:
        """Whether keys of heads of this width may be integers of 16 bits, beside values in int8."""
        return False

    def memory(self) -> memory.Memory | None:
        """Memory of the device; None if unknown."""
        return memory.memory_of(self.device)

    def memory_used(self) -> int:
        """Bytes of the device's memory that this process uses."""
        if self.kind == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return memory.resident()

    def processor(self) -> str:
        """The processor with its instruction sets, or the accelerator's name."""
        if self.kind == "cuda":
            return torch.cuda.get_device_name(self.device)
        from tokenswift.kernels.cpu.library import processor

        return processor()

    # ---- passes ----------------------------------------------------------------------------------

    def body(self, shape: Shape, weights: list[LayerWeights]) -> Body:
        """Prepare layers for :meth:`layers`."""
        return Body(shape, weights)

    def batch(self, segments: Sequence[Segment], shape: Shape) -> Batch:
        """Prepare the rows of a pass for :meth:`layers`.

        Raises:
            ValueError: as for :meth:`layers`, which may check instead.
        """
        if self.on_host and len(segments) == 1:
            return Batch(segments, segments[0].tokens, segments[0].positions)
        tokens = torch.cat([segment.tokens.to(self.device) for segment in segments])
        positions = torch.cat([segment.positions.to(self.device) for segment in segments])
        return Batch(segments, tokens, positions)

    def ranker(self, params: SamplingParams) -> Ranker | None:
        """Compiled code that ranks tokens; None: `sampling.sampler.Sampler` does it in torch."""
        return None
