"""Starts the Triton kernels, each always in one shape, whatever the number of rows.

With ``TRITON_INTERPRET=1`` in the environment before this is imported, Triton's interpreter runs them on the
CPU: in float32 alone, as its products of other types are wrong.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from jaxtyping import Float, Num
from torch import Tensor

from tokenswift.kernels.cuda import attention_kernels, int_kernels, row_kernels
from tokenswift.kernels.cuda.entries import width_of
from tokenswift.kernels.cuda.int_reference import factor_of
from tokenswift.kernels.cuda.launch_fused import FusedKernels
from tokenswift.kernels.cuda.plan import ALONE, CHUNK, SPAN, TILE, Plan, queries_of
from tokenswift.kernels.cuda.reference import check_plain
from tokenswift.kv.pages import to_device


class Kernels(FusedKernels):
    """The kernels on a device; `reference.Reference` says what they do.

    Attributes:
        enough: programs that fill a card: of so many each goes over all keys, of fewer over a span of them.
    """

    enough = 128

    def attend(
        self,
        plan: Plan,
        query: Float[Tensor, "n H d"],
        layer: int,
        scale: float,
        window: int = 0,
        softcap: float | None = None,
        sinks: Float[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "n H d"]:
        """See :meth:`reference.Reference.attend`."""
        if plan.whole:
            check_plain(softcap, sinks)
            return self._attend_whole(plan, query, layer, scale, window)
        rows, heads, width = query.shape
        kv_heads, padded = plan.segments[0].cache.data.shape[1], int(triton.next_power_of_2(width))
        queries, out = queries_of(width, query.element_size()), torch.empty_like(query)
        more = kv_heads, -(-heads // kv_heads // queries)
        how = self.warps(padded, query.element_size()), self.stages(padded, query.element_size())
        sizes = {"H": heads, "D": width, "DP": padded, "CHUNK": CHUNK, "SPAN": SPAN}
        given = {"query": query, "data": plan.origin, "blocks": plan.blocks, "places": plan.places}
        given |= {"layer": layer, "window": window, "scale": scale, "softcap": softcap or 1.0}
        given |= {"KV": kv_heads, "M": queries, "TILE": TILE, "CAP": softcap is not None}
        scores = out if sinks is None else sinks.float().contiguous()
        if plan.long and len(plan.blocks) * more[0] * more[1] >= self.enough:
            programs = len(plan.blocks) * more[0] * more[1]
            values = query.new_empty(programs, queries, padded, dtype=torch.float32)
            given |= {"values": values, "out": out, "sinks": scores, "SINKS": sinks is not None}
            self.run(attention_kernels.attend_rows, (len(plan.blocks), *more), *how, **given, **sizes)
            return out
        cells = plan.form.spans + plan.form.own
        values = query.new_empty(cells, rows, heads, width, dtype=torch.float32)
        stats = query.new_empty(cells, rows, heads, 2, dtype=torch.float32)
        programs = len(plan.blocks) * plan.form.spans + len(plan.units) * plan.form.own
        self.run(
            attention_kernels.attend_chunks,
            (programs, *more),
            *how,
            values=values,
            stats=stats,
            units=plan.units,
            paths=plan.paths,
            blocks_count=len(plan.blocks),
            spans=plan.form.spans,
            own=plan.form.own,
            rows=rows,
            deepest=plan.form.deepest,
            **given,
            **sizes,
        )
        self.run(
            attention_kernels.attend_merge,
            (rows, heads),
            1,
            1,
            values=values,
            stats=stats,
            places=plan.places,
            sinks=scores,
            out=out,
            spans=plan.form.spans,
            rows=rows,
            window=window,
            SINKS=sinks is not None,
            **sizes,
        )
        return out

    def _attend_whole(
        self, plan: Plan, query: Float[Tensor, "n H d"], layer: int, scale: float, window: int
    ) -> Float[Tensor, "n H d"]:
        """Attention over keys and values in int8. Chunks are merged one after the other: those of few rows by
        the second kernel, those of many by the program that goes over all of them. Both give the same bits.
        """
        rows, heads, width = query.shape
        kv_heads, padded = plan.segments[0].cache.data.shape[1], max(32, triton.next_power_of_2(width))
        numbers = torch.empty_like(query, dtype=torch.int8)
        scales = query.new_empty(rows, heads)
        self.run(
            int_kernels.whole_queries,
            (rows * heads,),
            1,
            1,
            query=query,
            numbers=numbers,
            scales=scales,
            factor=factor_of(scale),
            D=width,
            DP=padded,
        )
        chunks, few = plan.form.spans * SPAN, rows <= ALONE
        cells, span, own = (chunks, 1, plan.form.own) if few else (1, chunks, plan.form.own)
        values = query.new_empty(cells + own, rows, heads, width)
        stats = query.new_empty(cells + own, rows, heads, 2)
        out = torch.empty_like(query)
        sizes = {"H": heads, "D": width, "DP": padded, "CHUNK": CHUNK}
        queries = queries_of(width, 1)
        self.run(
            int_kernels.attend_whole_chunks,
            (len(plan.blocks) * cells + len(plan.units) * own, kv_heads, -(-heads // kv_heads // queries)),
            8,
            1,
            query=numbers,
            scales=scales,
            data=plan.origin,
            levels=plan.origin.view(torch.float32),
            values=values,
            stats=stats,
            blocks=plan.blocks,
            units=plan.units,
            places=plan.places,
            paths=plan.paths,
            blocks_count=len(plan.blocks),
            cells=cells,
            span=span,
            own=own,
            rows=rows,
            deepest=plan.form.deepest,
            layer=layer,
            window=window,
            KV=kv_heads,
            M=queries,
            TILE=TILE,
            **sizes,
        )
        self.run(
            int_kernels.merge_whole_chunks,
            (rows, heads),
            1,
            1,
            values=values,
            stats=stats,
            places=plan.places,
            out=out,
            cells=cells,
            span=span,
            rows=rows,
            window=window,
            **sizes,
        )
        return out

    def append(
        self,
        plan: Plan,
        mixed: Float[Tensor, "p n E"],
        cos: Float[Tensor, "n half"],
        sin: Float[Tensor, "n half"],
        layer: int,
        heads: int,
        eps: float = 0.0,
        query_norm: Float[Tensor, " d"] | None = None,
        key_norm: Float[Tensor, " d"] | None = None,
    ) -> Float[Tensor, "n H d"]:
        """See :meth:`reference.Reference.append`."""
        cache = plan.segments[0].cache.data
        kv_heads, width = cache.shape[1], width_of(cache)
        parts, rows = mixed.shape[:2]
        query = cache.new_empty(rows, heads, width, dtype=torch.float32 if plan.whole else None)
        levels = {"levels": plan.origin.view(torch.float32)} if plan.whole else {}
        self.run(
            int_kernels.turn_append_whole if plan.whole else row_kernels.turn_append,
            (rows, heads + 2 * kv_heads),
            1,
            1,
            mixed=mixed,
            cos=cos,
            sin=sin,
            query_norm=cos if query_norm is None else query_norm,
            key_norm=cos if key_norm is None else key_norm,
            places=plan.places,
            data=plan.origin,
            query=query,
            layer=layer,
            eps=eps,
            H=heads,
            KV=kv_heads,
            D=width,
            HALF=triton.next_power_of_2(width // 2),
            NORMS=query_norm is not None,
            PARTS=parts,
            **levels,
        )
        return query

    def move(self, data: Num[Tensor, "P K c e"], start: int, nodes: Sequence[int]) -> None:
        """See :meth:`reference.Reference.move`."""
        planes, kv_heads, capacity, width = data.shape
        self.run(
            row_kernels.move_rows,
            (planes * kv_heads,),
            4,
            1,
            data=data,
            nodes=to_device(nodes, data.device),
            capacity=capacity,
            start=start,
            count=len(nodes),
            D=width,
            DP=triton.next_power_of_2(width),
            ROWS=max(ALONE, triton.next_power_of_2(len(nodes))),  # of one form, however many are moved
        )

    def norm(
        self,
        states: Float[Tensor, "*m D"],
        weight: Float[Tensor, " D"],
        eps: float,
        dtype: torch.dtype,
        more: Float[Tensor, "p *m D"] | None = None,
    ) -> Float[Tensor, "*m D"]:
        """See :meth:`reference.Reference.norm`; the states are contiguous."""
        out, width = torch.empty_like(states, dtype=dtype), states.shape[-1]
        self.run(
            row_kernels.add_norm,
            (states.numel() // width,),
            4,
            1,
            states=states,
            more=states if more is None else more,
            weight=weight,
            out=out,
            eps=eps,
            D=width,
            DP=triton.next_power_of_2(width),
            PARTS=0 if more is None else len(more),
        )
        return out

    def gated(
        self, both: Float[Tensor, "p n I2"], dtype: torch.dtype, gelu: bool = False
    ) -> Float[Tensor, "n I"]:
        """See :meth:`reference.Reference.gated`."""
        parts, rows, inner, block = *both.shape[:2], both.shape[2] // 2, 1024
        out = both.new_empty(rows, inner, dtype=dtype)
        grid = (rows, -(-inner // block))
        more: dict[str, Any] = {"inner": inner, "BLOCK": block, "GELU": gelu, "PARTS": parts}
        self.run(row_kernels.gated, grid, 4, 1, both=both, out=out, **more)
        return out
