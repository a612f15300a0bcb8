"""What starts the Triton kernels: in one shape, whatever the number of rows."""

# pyright: reportPrivateImportUsage=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.kernels.cuda.kernels import add_norm, attend, gated, merge, rotate_append
from tokenswift.kernels.cuda.ops import Addend
from tokenswift.kernels.cuda.plan import CudaBatch, next_power, queries_per_program
from tokenswift.kernels.weights import LayerWeights, Shape

#: bytes of shared memory that a program may have on the cards that have least
LEAST_SHARED_MEMORY = 99 << 10
GATED_SIZE = 1024  # numbers of a program of `gated`
LEAST_DOT_WIDTH = 16  # columns of a matrix that Triton multiplies, at least


class TritonKernel(Protocol):
    """A function of Triton, which is started on a grid of programs."""

    __name__: str

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        """What starts it on a grid."""
        ...


class Kernels:
    """The kernels on a device; see `ops.KernelOps`. Tensors are contiguous."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generation = 9
        self._shared_memory = LEAST_SHARED_MEMORY
        if device.type == "cuda":
            card = torch.cuda.get_device_properties(device)
            self._generation = card.major
            self._shared_memory = getattr(
                card, "shared_memory_per_block_optin", LEAST_SHARED_MEMORY
            )

    def run(
        self,
        kernel: TritonKernel,
        grid: tuple[int, ...],
        warps: int,
        stages: int,
        **arguments: object,
    ) -> None:
        """Start a kernel."""
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            kernel[grid](**arguments, num_warps=warps, num_stages=stages)

    def norm(
        self,
        states: Float[Tensor, "n D"],
        weight: Float[Tensor, " D"] | None,
        eps: float,
        dtype: torch.dtype,
        addend: Addend | None = None,
        centred: bool = False,
    ) -> Float[Tensor, "n D"]:
        """See :meth:`ops.KernelOps.norm`."""
        rows, width = states.shape
        out = torch.empty_like(states, dtype=dtype)
        addend_norm = None if addend is None else addend.norm
        self.run(
            add_norm,
            grid=(rows,),
            warps=8,
            stages=1,
            states=states,
            # a kernel needs a tensor also where it reads none
            addend=states if addend is None else addend.values,
            addend_norm=states if addend_norm is None else addend_norm,
            weight=states if weight is None else weight,
            out=out,
            eps=eps,
            factor=1.0 if addend is None else addend.factor,
            D=width,
            DP=next_power(width),
            ADD=addend is not None,
            NORM_ADDEND=addend_norm is not None,
            NORM=weight is not None,
            CENTRED=centred,
        )
        return out

    def gated(
        self, gate_up: Float[Tensor, "n I2"], dtype: torch.dtype, gelu: bool = False
    ) -> Float[Tensor, "n I"]:
        """See :meth:`ops.KernelOps.gated`."""
        rows = len(gate_up)
        inner = gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, inner, dtype=dtype)
        self.run(
            gated,
            grid=(rows, -(-inner // GATED_SIZE)),
            warps=4,
            stages=1,
            gate_up=gate_up,
            out=out,
            inner=inner,
            SIZE=GATED_SIZE,
            GELU=gelu,
        )
        return out

    def append(
        self,
        batch: CudaBatch,
        qkv: Float[Tensor, "n E"],
        cos: Float[Tensor, "n half"],
        sin: Float[Tensor, "n half"],
        number: int,
        layer: LayerWeights,
        shape: Shape,
    ) -> Float[Tensor, "n H d"]:
        """See :meth:`ops.KernelOps.append`."""
        rows = len(qkv)
        query = qkv.new_empty(rows, shape.heads, shape.width, dtype=shape.keys)
        norms = layer.query_norm is not None and not shape.norm_all_heads
        self.run(
            rotate_append,
            grid=(rows, shape.heads + 2 * shape.kv_heads),
            warps=1,
            stages=1,
            qkv=qkv,
            cos=cos,
            sin=sin,
            query_norm=layer.query_norm if norms else cos,
            key_norm=layer.key_norm if norms else cos,
            rows=batch.row_table,
            data=batch.origin,
            query=query,
            layer=number,
            eps=shape.eps,
            H=shape.heads,
            KV=shape.kv_heads,
            D=shape.width,
            HALF=next_power(shape.width // 2),
            NORMS=norms,
            ROTATES=layer.rope >= 0,
        )
        return query

    def attend(
        self, batch: CudaBatch, query: Float[Tensor, "n H d"], layer: int, shape: Shape, window: int
    ) -> Float[Tensor, "n H d"]:
        """See :meth:`ops.KernelOps.attend`."""
        rows, heads, width = query.shape
        out = torch.empty_like(query)
        sizes = batch.sizes
        cells = sizes.prefix_chunks + sizes.tree_chunks
        shared: dict[str, object] = {
            "values": query.new_empty(cells, rows, heads, width, dtype=torch.float32),
            "stats": query.new_empty(cells, rows, heads, 2, dtype=torch.float32),
            "rows": batch.row_table,
            "n": rows,
            "prefix_chunks": sizes.prefix_chunks,
            "window": window,
            "H": heads,
            "D": width,
            "DP": max(LEAST_DOT_WIDTH, next_power(width)),
        }
        self._attend_chunks(batch, query, layer, shape, shared)
        self.run(merge, grid=(rows, heads), warps=4, stages=1, out=out, **shared)
        return out

    def _attend_chunks(
        self,
        batch: CudaBatch,
        query: Float[Tensor, "n H d"],
        layer: int,
        shape: Shape,
        shared: Mapping[str, object],
    ) -> None:
        """Attention over each chunk; ``shared``: the arguments that `merge` takes as well."""
        rows, heads, width = query.shape
        sizes = batch.sizes
        itemsize = query.element_size()
        queries = queries_per_program(width, itemsize)
        programs = sizes.blocks * sizes.prefix_chunks + rows * sizes.tree_chunks
        self.run(
            attend,
            grid=(programs, shape.kv_heads, -(-heads // shape.kv_heads // queries)),
            warps=self._attention_warps(width, itemsize),
            stages=self._attention_stages(width, itemsize),
            query=query,
            data=batch.origin,
            blocks=batch.blocks,
            paths=batch.paths,
            count=sizes.blocks,
            tree_chunks=sizes.tree_chunks,
            deepest=sizes.deepest,
            layer=layer,
            scale=shape.scale * math.log2(math.e),
            cap=float(shape.cap),
            KV=shape.kv_heads,
            M=queries,
            CAPPED=shape.cap > 0,
            **shared,
        )

    def _attention_warps(self, width: int, itemsize: int) -> int:
        """Four leave room for a second program on Hopper; elsewhere wide heads would spill."""
        few = next_power(width) <= 64 or (self._generation == 9 and itemsize == 2)
        return 4 if few else 8

    def _attention_stages(self, width: int, itemsize: int) -> int:
        """Tiles of keys and values on their way at once, as there is room."""
        tile_bytes = 2 * 64 * next_power(width) * itemsize
        return max(1, min(3, (self._shared_memory - tile_bytes // 2) // tile_bytes))
