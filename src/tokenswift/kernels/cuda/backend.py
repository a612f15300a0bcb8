"""The CUDA backend by the protocol of `kernels.base`: kernels and products put together to passes.

Passes of rows that are decoded or checked go through the kernels, each row with bits of its own. A
prompt is read by torch's attention and by products of all rows at once: that is fast, but its bits
are the chunk's. What runs through transformers' own forward has torch's attention. :func:`started`
asks once a process, before the first model is loaded, whether the kernels work on the card at hand:
a small random model's last positions have to be near what torch makes of them, and equal byte by
byte alone, at once, in trees and beside a text.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from tokenswift.files import line_of
from tokenswift.kernels.base import Backend, Body, Taps, capped
from tokenswift.kernels.check import TAIL, WIDTH, Case, keeps_bits
from tokenswift.kernels.cuda.plan import SIZES, CudaBatch, Tables, queries_of
from tokenswift.kernels.weights import LayerWeights, Packed, Shape, Stored
from tokenswift.kv.memory import Arena, to_device
from tokenswift.kv.passes import Segment

logger = logging.getLogger("tokenswift")
CAPABLE = (8, 0)  # compute capability
USUAL = 128  # width of most models' heads
#: greatest relative distance of states from torch's, by type
NEAR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
Work = Callable[..., tuple[Tensor, ...]]
Product = Callable[[Tensor, Tensor], Tensor]


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


# ---- products: cuBLASLt picks its kernel by the number of rows, so rows are filled up to few
# counts. Whether a row's bits are then the same at every place, beside all others and at both
# counts, is asked of each shape of weight when it is packed.


def settle() -> None:
    """Settings of the library, for this process: no sums that are split or rounded on the way.
    Those in the environment count where the library has not been started."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.preferred_blas_library("cublaslt")


def cublas(states: Float[Tensor, "n K"], weight: Float[Tensor, "N K"]) -> Float[Tensor, "n N"]:
    """Rows times a weight's transpose, float32."""
    if states.dtype == torch.float32:
        return states @ weight.T
    return torch.mm(states, weight.T, out_dtype=torch.float32)


def padded(
    product: Product, states: Tensor, weight: Tensor, sizes: tuple[int, ...] = SIZES
) -> Tensor:
    """A product whose number of rows is one of ``sizes``; of more rows than the last, one a
    part."""
    parts = []
    for rows in states.split(sizes[-1]):
        size = next(size for size in sizes if size >= len(rows))
        given = rows if size == len(rows) else pad(rows, (0, 0, 0, size - len(rows)))
        parts.append(product(given, weight)[: len(rows)])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def products_keep_bits(
    product: Product, weight: Float[Tensor, "N K"], sizes: tuple[int, ...]
) -> bool:
    """Whether rows have bits of their own: alone, at several places, beside others, at all of some
    counts."""
    most, made = sizes[-1], torch.Generator().manual_seed(1)
    rows = torch.randn(most, weight.shape[1], generator=made, dtype=torch.float32)
    rows = rows.to(weight.device, weight.dtype)
    expected = product(rows, weight)
    for size in sizes:
        for first in (0, 5, most - size):
            part = slice(first, min(most, first + size))
            if not torch.equal(padded(product, rows[part], weight, (size,)), expected[part]):
                return False
        for row in (0, 1, most - 1):  # alone, at another place
            given = torch.zeros_like(rows[:size])
            given[size // 2] = rows[row]
            if not torch.equal(product(given, weight)[size // 2], expected[row]):
                return False
    return True


def sizes_that_keep(product: Product, weight: Float[Tensor, "N K"]) -> tuple[int, ...]:
    """The row counts at which products with a weight keep rows' bits: all of :data:`SIZES`, the
    last alone, or none."""
    return next(
        (sizes for sizes in (SIZES, SIZES[-1:]) if products_keep_bits(product, weight, sizes)), ()
    )


# ---- the backend ---------------------------------------------------------------------------------


class CudaBackend(Backend):
    """Triton kernels and cuBLASLt on a device.

    Args:
        device: where tensors are.
        ops: `kernels.Kernels`; None: those of the device.
        product: rows and a weight (N, K) → their float32 product.

    Attributes:
        records: whether passes of few rows are recorded and replayed. On a CPU (Triton's
            interpreter) their buffers are used, and nothing is recorded.
    """

    name = "cuda"
    prefill_keeps_bits = False

    def __init__(
        self, device: torch.device | str = "cuda", ops: Any = None, product: Product = cublas
    ) -> None:
        super().__init__(device)
        self.decodes, self.on_host = True, False
        if ops is None:
            from tokenswift.kernels.cuda.kernels import Kernels

            ops = Kernels(self.device)
        self.ops, self.records = ops, True
        self._product = product
        self._sizes: dict[tuple[int, int, torch.dtype], tuple[int, ...]] = {}
        self._origin = torch.empty(64, dtype=torch.uint8, device=self.device)

    # ---- memory ----------------------------------------------------------------------------------

    def pack(
        self,
        weight: Tensor | Stored | Sequence[Tensor | Stored],
        dtype: torch.dtype | None = None,
        arena: Arena | None = None,
    ) -> Packed:
        """See :meth:`Backend.pack`; quantized weights become floats, and nothing needs an arena."""
        given = [weight] if isinstance(weight, Tensor | Stored) else weight
        made = Packed([self._here(part) for part in given], None, dtype)
        key = (made.rows, made.columns, made.dtype)
        if key not in self._sizes:
            self._sizes[key] = sizes_that_keep(self._product, made.data)
            if not self._sizes[key]:
                logger.warning(
                    "products with a weight of %d x %d, %s, do not keep rows' bits here: "
                    "strategies may "
                    "write different texts where two tokens are nearly as likely",
                    *key,
                )
                self.equal_bits = False
        return made

    def pack_for_drafts(self, weight: Float[Tensor, "N K"], int8: bool) -> Packed:
        """See :meth:`Backend.pack_for_drafts`; whether rows keep their bits is not asked."""
        return Packed([self._here(weight)])

    def _here(self, part: Tensor | Stored) -> Tensor:
        """A weight on the device."""
        return (part.decode() if isinstance(part, Stored) else part.detach()).to(self.device)

    def body(self, shape: Shape, weights: list[LayerWeights]) -> Body:
        """See :meth:`Backend.body`."""
        return Body(shape, weights, Graphs(self.device))

    # ---- passes ----------------------------------------------------------------------------------

    def batch(self, segments: Sequence[Segment], shape: Shape) -> CudaBatch:
        """See :meth:`Backend.batch`. A long chain alone is a prompt that is read."""
        count = sum(len(segment.tokens) for segment in segments)
        reads = len(segments) == 1 and segments[0].parents is None and count > SIZES[-1]
        recorded = self.records and count <= SIZES[-1]
        origin = self._origin.view(shape.keys)
        step = queries_of(shape.width, shape.keys.itemsize) * shape.kv_heads // shape.heads
        tables = Tables(segments, max(1, step), origin, reads)
        form = tables.form if reads else tables.form.recorded() if recorded else tables.form.whole()
        numbers = to_device(tables.numbers(form), self.device)
        return CudaBatch.over(numbers, form, segments, origin, reads, recorded)

    def layers(
        self,
        body: Body,
        states: Float[Tensor, "n D"],
        cos: Float[Tensor, "*sets n half"],
        sin: Float[Tensor, "*sets n half"],
        batch: CudaBatch,
        keep: bool = True,
        taps: Taps | None = None,
        beside: Float[Tensor, "n D"] | None = None,
    ) -> list[Float[Tensor, "L H m d"]]:
        """See :meth:`Backend.layers`. All segments' rows go through every kernel together.

        Raises:
            ValueError: states or angles are not of all of the batch's rows, those that fill it up
                included.
        """
        rows, angles = len(batch.tokens), cos.shape[-2]
        if not len(states) == angles == sin.shape[-2] == rows:
            raise ValueError(f"{len(states)} states and {angles} angles are of {rows} rows")
        tapped = () if taps is None else taps.layers

        def work(numbers: Tensor, states: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
            over = CudaBatch.over(numbers, batch.form, batch.segments, batch.origin, batch.reads)
            own = Taps(tapped, states.new_empty(len(tapped), *states.shape))
            queries = self._layers(body, over, made := states.clone(), keep, own, *given)
            return made, queries, own.states

        given = (batch.numbers, states, cos, sin, *(() if beside is None else (beside,)))
        if batch.recorded:
            key = (batch.form, keep, tapped, len(given))
            made, queries, features = body.native.run(key, work, *given)
        else:
            made, queries, features = work(*given)
        states.copy_(made)
        if taps is not None:
            taps.states.copy_(features)
        return [queries[:, :, rows] for rows in batch.rows()]

    def _layers(
        self,
        body: Body,
        batch: CudaBatch,
        states: Tensor,
        keep: bool,
        taps: Taps,
        cos: Tensor,
        sin: Tensor,
        beside: Tensor | None = None,
    ) -> Float[Tensor, "L H n d"]:
        """The queries; the states become those behind the layers."""
        shape, ops, attend = body.shape, self.ops, self._read if batch.reads else self.ops.attend
        cos, sin = (part.view(-1, *part.shape[-2:]) for part in (cos, sin))
        linear, kept = partial(self._linear, at_once=batch.reads), list[Tensor]()
        norm = partial(ops.norm, centred=shape.parallel)
        more = behind = None  # what is to be added to the states, and the weight of its norm
        for number, layer in enumerate(body.weights):
            normed = norm(
                states, layer.norm, shape.eps, shape.weights, more, behind, shape.residual
            )
            taps.fill(number, states)
            mixed = linear(normed, layer.qkv, layer.qkv_bias)
            if layer.beside is not None and layer.beside_norm is not None and beside is not None:
                mixed += linear(
                    ops.norm(beside, layer.beside_norm, shape.eps, shape.weights), layer.beside
                )
            if shape.whole_norms:
                parts = mixed.split(
                    [shape.heads * shape.width, *[shape.kv_heads * shape.width] * 2], -1
                )
                pairs = zip(parts, (layer.query_norm, layer.key_norm, None), strict=True)
                mixed = torch.cat(
                    [ops.norm(x.contiguous(), w, shape.eps, x.dtype) for x, w in pairs], -1
                )
            query = ops.append(batch, mixed, cos[layer.rope], sin[layer.rope], number, layer, shape)
            kept = [*kept, query] if keep else [query]
            mixes = attend(batch, query, number, shape, layer.window).flatten(1)
            more = linear(mixes, layer.out, layer.out_bias)
            added = (more, layer.out_norm, shape.residual)
            after = norm(states, layer.mlp_norm, shape.eps, shape.weights, *added)
            both = linear(normed if shape.parallel else after, layer.gate_up, layer.gate_up_bias)
            gates = ops.gated(both, shape.weights, shape.gelu)
            more, behind = linear(gates, layer.down, layer.down_bias), layer.down_norm
        norm(states, None, shape.eps, shape.weights, more, behind, shape.residual)
        taps.fill(len(body.weights), states)
        return torch.stack(kept).transpose(1, 2)

    def _read(
        self, batch: CudaBatch, query: Float[Tensor, "n H d"], layer: int, shape: Shape, window: int
    ) -> Float[Tensor, "n H d"]:
        """Torch's attention of a chain's rows."""
        cache, count = batch.segments[0].cache, len(query)
        before, end = cache.length, cache.length + count
        windowed = cache.ordered and 0 < window < end
        start = max(0, before - window + 1) if windowed else 0
        keys, values = (cache.data[2 * layer + part, None, :, start:end] for part in (0, 1))
        masked, mask = windowed or shape.cap > 0, None
        if masked:
            place = torch.arange(start, end, device=self.device)
            here = place[-count:, None]
            mask = (place <= here) & (place > here - (window if windowed else end))
        groups, queries = shape.heads // shape.kv_heads, query.transpose(0, 1)[None]
        # of torch's kernels, flash alone takes fewer heads of keys; it takes neither masks nor
        # float32
        repeats = groups > 1 and (masked or query.dtype == torch.float32)
        if repeats:
            keys, values = (part.repeat_interleave(groups, 1) for part in (keys, values))
        if shape.cap and mask is not None:
            bias = torch.zeros(mask.shape, device=self.device).masked_fill_(~mask, -torch.inf)
            made = capped(queries, keys, values, bias, shape.scale, shape.cap, None).to(query.dtype)
        else:
            how = {"scale": shape.scale, "enable_gqa": groups > 1 and not repeats}
            seen: Any = causal_lower_right(count, end) if mask is None else mask
            made = scaled_dot_product_attention(queries, keys, values, attn_mask=seen, **how)
        return made[0].transpose(0, 1)

    def linear(
        self,
        states: Float[Tensor, "*m K"],
        weight: Packed,
        bias: Tensor | None = None,
        active: torch.dtype | None = None,
    ) -> Float[Tensor, "*m N"]:
        """See :meth:`Backend.linear`; of floats alone."""
        return self._linear(states.flatten(0, -2), weight, bias).view(*states.shape[:-1], -1)

    def _linear(
        self,
        states: Float[Tensor, "n K"],
        weight: Packed,
        bias: Tensor | None = None,
        at_once: bool = False,
    ) -> Float[Tensor, "n N"]:
        """``at_once``: by one product, whose bits are those of so many rows."""
        rows = states.to(weight.dtype).contiguous()
        sizes = self._sizes.get((weight.rows, weight.columns, weight.dtype)) or SIZES
        made = (
            self._product(rows, weight.data)
            if at_once
            else padded(self._product, rows, weight.data, sizes)
        )
        return made if bias is None else made + bias

    def norm(
        self, states: Float[Tensor, "*m D"], weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Float[Tensor, "*m D"]:
        """See :meth:`Backend.norm`."""
        rows = states.float().flatten(0, -2).contiguous()
        return self.ops.norm(rows, weight, eps, dtype).view(states.shape)


# ---- does it work here? --------------------------------------------------------------------------


def started(device: torch.device) -> CudaBackend | str:
    """The backend of a device; or in one line why it does not work there."""
    try:
        if (found := unfit(device)) is not None:
            return found
        settle()
        backend = CudaBackend(device)
        backend.equal_bits, backend.records = True, False
        found = next(filter(None, (fault(backend, *kind) for kind in kinds())), None)
        if found is None and not backend.equal_bits:
            found = "products do not keep rows' bits"
        if found is not None:
            return found
    except (
        Exception
    ) as error:  # Triton, its compiler, the driver and torch each raise their own here
        return line_of(error)
    if (found := unrecorded(backend)) is not None:
        logger.warning("CUDA graphs do not work here (%s); kernels are started one by one", found)
    backend.records = found is None
    backend.build = f"triton {version('triton')}"
    return backend


def kinds() -> list[tuple[torch.dtype, int]]:
    """Types and widths of heads that are tried."""
    return [*((dtype, WIDTH) for dtype in NEAR), (torch.bfloat16, USUAL)]


def unfit(device: torch.device) -> str | None:
    """Why kernels cannot even be tried on a device, in one line: a compiler that does not know a
    card, or its types, may end the process; None where they can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    return (
        None
        if capability >= CAPABLE
        else f"compute capability is {capability}; valid: {CAPABLE} and newer"
    )


@torch.inference_mode()
def fault(backend: CudaBackend, dtype: torch.dtype, width: int) -> str | None:
    """What is wrong with a backend's kernels; None when they are right."""
    case = Case(backend, dtype, width=width)
    found = case.run(backend, range(TAIL + 1))
    expected = case.run(Backend(backend.device), (0, TAIL))
    far = float((found - expected).norm() / expected.norm())
    if not far <= NEAR[dtype]:
        return f"{case.name} is {far:.1e} of its size from torch"
    return None if keeps_bits([backend], case) else f"rows have other bits than alone, {case.name}"


@torch.inference_mode()
def unrecorded(backend: CudaBackend) -> str | None:
    """Why a backend's passes cannot be recorded; None when replays give the bits of eager
    passes."""
    case = Case(backend, torch.bfloat16)
    expected, rows = case.run(backend, (0, TAIL)), range(TAIL + 1)
    backend.records = True
    try:
        found = [case.run(backend, cuts) for cuts in (rows, rows, (0, TAIL))]
    except RuntimeError as error:  # torch, the driver and Triton's launcher
        return line_of(error)
    finally:
        backend.records = False
    return None if all(torch.equal(one, expected) for one in found) else "replays have other bits"
