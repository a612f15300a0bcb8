"""What starts the Triton kernels: in one shape, whatever the number of rows."""

# pyright: reportPrivateImportUsage=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.kernels.cuda.kernels import add_norm, attend, gated, merge, turn_append
from tokenswift.kernels.cuda.plan import CudaBatch, power, queries_of
from tokenswift.kernels.weights import LayerWeights, Shape

LEAST_ROOM = 99 << 10  # bytes of shared memory that a program may have on the cards that have least


class Kernels:
    """The kernels on a device. Tensors are contiguous."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generation, self._room = 9, LEAST_ROOM
        if device.type == "cuda":
            about = torch.cuda.get_device_properties(device)
            self._generation = about.major
            self._room = getattr(about, "shared_memory_per_block_optin", LEAST_ROOM)

    def run(
        self, kernel: Any, grid: tuple[int, ...], warps: int, stages: int, **given: Any
    ) -> None:
        """Start a kernel."""
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            kernel[grid](**given, num_warps=warps, num_stages=stages)

    def norm(
        self,
        states: Float[Tensor, "n D"],
        weight: Float[Tensor, " D"] | None,
        eps: float,
        dtype: torch.dtype,
        more: Float[Tensor, "n D"] | None = None,
        behind: Float[Tensor, " D"] | None = None,
        factor: float = 1.0,
        centred: bool = False,
    ) -> Float[Tensor, "n D"]:
        """RMS norm of float32 rows (without a weight they as they are), to which ``more`` is added
        first, in place: times a factor, and itself normed where there is a weight ``behind``.
        ``centred``: without the rows' means, in place, too."""
        out, (rows, width) = torch.empty_like(states, dtype=dtype), states.shape
        tensors = {"more": more, "behind": behind, "weight": weight}
        given: dict[str, Any] = {
            name: states if one is None else one for name, one in tensors.items()
        }
        given |= {
            "states": states,
            "out": out,
            "eps": eps,
            "factor": factor,
            "D": width,
            "DP": power(width),
        }
        kinds = {"ADD": more is not None, "BEHIND": behind is not None, "NORM": weight is not None}
        self.run(add_norm, (rows,), 8, 1, **given, **kinds, CENTRED=centred)
        return out

    def gated(
        self, both: Float[Tensor, "n I2"], dtype: torch.dtype, gelu: bool = False
    ) -> Float[Tensor, "n I"]:
        """``silu(gate) * up`` of float32 rows, or with GeLU."""
        rows, inner = len(both), both.shape[1] // 2
        out, grid = both.new_empty(rows, inner, dtype=dtype), (rows, -(-inner // 1024))
        self.run(gated, grid, 4, 1, both=both, out=out, inner=inner, SIZE=1024, GELU=gelu)
        return out

    def append(
        self,
        batch: CudaBatch,
        mixed: Float[Tensor, "n E"],
        cos: Float[Tensor, "n half"],
        sin: Float[Tensor, "n half"],
        number: int,
        layer: LayerWeights,
        shape: Shape,
    ) -> Float[Tensor, "n H d"]:
        """Queries of float32 rows, normed and turned; keys and values go behind those of the rows'
        caches."""
        rows, heads = len(mixed), shape.heads + 2 * shape.kv_heads
        query = mixed.new_empty(rows, shape.heads, shape.width, dtype=shape.keys)
        norms = layer.query_norm is not None and not shape.whole_norms
        self.run(
            turn_append,
            (rows, heads),
            1,
            1,
            mixed=mixed,
            cos=cos,
            sin=sin,
            query_norm=layer.query_norm if norms else cos,
            key_norm=layer.key_norm if norms else cos,
            rows=batch.rows_at,
            data=batch.origin,
            query=query,
            layer=number,
            eps=shape.eps,
            H=shape.heads,
            KV=shape.kv_heads,
            D=shape.width,
            HALF=power(shape.width // 2),
            NORMS=norms,
            TURNS=layer.rope >= 0,
        )
        return query

    def attend(
        self, batch: CudaBatch, query: Float[Tensor, "n H d"], layer: int, shape: Shape, window: int
    ) -> Float[Tensor, "n H d"]:
        """Attention of a layer, whose keys and values of the pass stand in the caches already."""
        (rows, heads, width), form, out = query.shape, batch.form, torch.empty_like(query)
        padded, size = power(width), query.element_size()
        queries, cells = queries_of(width, size), form.pieces + form.own
        values = query.new_empty(cells, rows, heads, width, dtype=torch.float32)
        stats = query.new_empty(cells, rows, heads, 2, dtype=torch.float32)
        given = {
            "values": values,
            "stats": stats,
            "rows": batch.rows_at,
            "n": rows,
            "pieces": form.pieces,
        }
        given |= {"window": window, "H": heads, "D": width, "DP": padded}
        programs = form.blocks * form.pieces + rows * form.own
        grid = programs, shape.kv_heads, -(-heads // shape.kv_heads // queries)
        # four warps leave room for a second program on Hopper; elsewhere wide heads would spill
        warps = 4 if padded <= 64 or (self._generation == 9 and size == 2) else 8
        tile = 2 * 64 * padded * size
        stages = max(
            1, min(3, (self._room - tile // 2) // tile)
        )  # tiles on their way, as there is room
        self.run(
            attend,
            grid,
            warps,
            stages,
            query=query,
            data=batch.origin,
            blocks=batch.blocks,
            paths=batch.paths,
            count=form.blocks,
            own=form.own,
            deepest=form.deepest,
            layer=layer,
            scale=shape.scale * math.log2(math.e),
            cap=float(shape.cap),
            KV=shape.kv_heads,
            M=queries,
            CAPPED=shape.cap > 0,
            **given,
        )
        self.run(merge, (rows, heads), 4, 1, out=out, **given)
        return out
