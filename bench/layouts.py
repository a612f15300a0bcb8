"""One teacher-forced text in one sweep through the layers, bit for bit as many small passes compute it.

A pass of plain decoding has one row, a tree pass has some forty. What matters for rounding is how many rows
a matrix product has, and how keys and queries are laid out in attention. Here both are free to choose, for
instance products as in tree passes with attention as in plain decoding, so that one source of difference
is seen alone. ``real_rows`` runs the library's own passes; the bench compares both bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

import tokenswift.models.target as target_module
from tokenswift import LLM
from tokenswift.audit.passes import forced_passes
from tokenswift.models.attention import PassContext, attention
from tokenswift.models.numerics import Numerics
from tokenswift.models.target import HFTarget
from tokenswift.tree import TreeBuilder, ancestor_mask, tree_nodes

NAME = "tokenswift_layout"
CHUNK = target_module.PREFILL_CHUNK


@dataclass(frozen=True, slots=True)
class Pass:
    """Rows ``first``, first + 1, … of the text, computed as the rows ``places`` of a pass with this mask."""

    first: int
    places: tuple[int, ...]
    mask: Tensor

    @property
    def end(self) -> int:
        """The first row after the pass."""
        return self.first + len(self.places)

    def spread(self, rows: Tensor, dim: int) -> Tensor:
        """The pass's own rows with idle ones (zeros) between them, as many as the pass has."""
        count = len(self.mask)
        if count == len(self.places):
            return rows
        shape = list(rows.shape)
        shape[dim] = count
        index = torch.tensor(self.places, device=rows.device)
        return rows.new_zeros(shape).index_copy_(dim, index, rows)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a text is computed.

    Attributes:
        products, attention: widths of the tree passes that matrix products and attention are laid out by,
            () for passes of one row.
        numerics: the measures against near-ties.
        chunk: rows of a prefill pass.
        whole: products over many rows at once instead, where rows do not depend on each other
            (``flips.py rows`` tells; the comparison with real passes would fail otherwise).
    """

    products: tuple[int, ...] = ()
    attention: tuple[int, ...] = ()
    numerics: Numerics = Numerics()
    chunk: int = CHUNK
    whole: bool = False


def tree_place(widths: tuple[int, ...]) -> tuple[list[int], Tensor]:
    """Where the true tokens stand in the tree of `audit.passes.forced_passes`, and the tree's mask."""
    builder = TreeBuilder(0)
    builder.add_levels([[*range(1, width), 0] for width in widths])
    walk = [0]
    for _ in widths:
        walk.append(builder.child(walk[-1], 0))
    return walk[:-1], ancestor_mask(builder.build(len(widths)).parents)


def chunked(length: int, chunk: int = CHUNK) -> list[Pass]:
    """Passes of up to ``chunk`` rows, each row seeing those before it."""
    found = []
    for first in range(0, length, chunk):
        rows = min(chunk, length - first)
        found.append(Pass(first, tuple(range(rows)), torch.ones(rows, rows, dtype=torch.bool).tril_()))
    return found


def passes_of(length: int, start: int, widths: tuple[int, ...], chunk: int) -> list[Pass]:
    """The passes over rows 0 to length - 1, of which those before ``start`` are prefill."""
    found = chunked(start, chunk)
    places, mask = tree_place(widths) if widths else ([0], torch.ones(1, 1, dtype=torch.bool))
    for first in range(start, length, len(places)):
        found.append(Pass(first, tuple(places[: length - first]), mask))
    return found


class _Products(TorchFunctionMode):
    """Runs every ``F.linear`` in the row groups of a list of passes."""

    def __init__(self, passes: Sequence[Pass], block: int) -> None:
        super().__init__()
        self.passes, self.block = passes, block

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        rows: Tensor = args[0].reshape(-1, args[0].shape[-1])
        made = [self._one(p, rows[p.first : p.end], *args[1:], **(kwargs or {})) for p in self.passes]
        return torch.cat(made).reshape(*args[0].shape[:-1], -1)

    def _one(self, p: Pass, rows: Tensor, *weights: Any, **named: Any) -> Tensor:
        rows = p.spread(rows, 0)
        if self.block:  # as `Numerics.block` does it; blocks without a row of the text need not run
            rows = F.pad(rows, (0, 0, 0, -len(rows) % self.block))
            rows = rows[: -(-(p.places[-1] + 1) // self.block) * self.block]
            made = torch.cat([F.linear(part, *weights, **named) for part in rows.split(self.block)])
        else:
            made = F.linear(rows, *weights, **named)
        return made if len(made) == len(p.places) else made[list(p.places)]


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    layout_passes: Sequence[Pass] = (),
    layout_dtype: torch.dtype | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The library's own attention function, pass by pass."""
    made = []
    for p in layout_passes:
        positions = torch.zeros(len(p.mask), dtype=torch.long)
        positions[list(p.places)] = torch.arange(p.first, p.end)
        context = PassContext(p.mask, positions, p.first, True, layout_dtype)
        keys, values = (
            torch.cat([x[:, :, : p.first], p.spread(x[:, :, p.first : p.end], 2)], dim=2)
            for x in (key, value)
        )
        out, _ = attention(
            module,
            p.spread(query[:, :, p.first : p.end], 2),
            keys,
            values,
            None,
            scaling,
            sliding_window=sliding_window,
            tokenswift_pass=context,
        )
        made.append(out[:, list(p.places)] if out.shape[1] != len(p.places) else out)
    return torch.cat(made, dim=1), None


AttentionInterface.register(NAME, _attend)


@torch.inference_mode()
def laid_out_rows(llm: LLM, text: list[int], start: int, layout: Layout) -> Tensor:
    """Logits (n, V), in the model's dtype, that choose ``text[start:]``."""
    length, prefill = len(text) - 1, start - 1
    products = passes_of(length, prefill, layout.products, layout.chunk)
    if layout.whole:
        products = [*chunked(prefill)]
        products += [Pass(p.first + prefill, p.places, p.mask) for p in chunked(length - prefill)]
    passes = passes_of(length, prefill, layout.attention, layout.chunk)
    model, block = llm.model, 0 if layout.whole else layout.numerics.block
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        with _Products(products, block):
            hidden = model.model(
                input_ids=torch.tensor([text[:-1]]),
                position_ids=torch.arange(length)[None],
                use_cache=False,
                layout_passes=passes,
                layout_dtype=layout.numerics.attention,
            ).last_hidden_state[0, prefill:]
    finally:
        model.config._attn_implementation = before
    decoding = [Pass(p.first - prefill, p.places, p.mask) for p in products if p.first >= prefill]
    with _Products(decoding, block):
        return model.lm_head(hidden)


@torch.inference_mode()
def real_rows(llm: LLM, text: list[int], start: int, layout: Layout) -> Tensor:
    """The same by the library's own passes, one after the other."""
    if layout.products != layout.attention:
        raise ValueError("real passes have one shape")
    target, usual = HFTarget(llm.model, layout.numerics), llm.target
    target_module.PREFILL_CHUNK, llm.target = layout.chunk, target
    try:
        if layout.products:
            found = {}
            for i, row in forced_passes(llm, text[:start], text[start:], layout.products):
                found[i] = row.clone()  # a leaf's row comes again, as the next pass's root
            rows = list(found.values())
        else:
            rows = _one_by_one(target, text, start)
    finally:
        target_module.PREFILL_CHUNK, llm.target = CHUNK, usual
        target.close()
    return torch.stack(rows)


def _one_by_one(target: HFTarget, text: list[int], start: int) -> list[Tensor]:
    cache = target.new_cache(len(text) + 1)
    if start > 1:
        target.prefill(text[: start - 1], cache)
    rows = []
    for place in range(start - 1, len(text) - 1):
        token, position = (torch.tensor([x]) for x in (text[place], place))
        found = target.forward(token, position, cache, torch.ones(1, 1, dtype=torch.bool))
        rows.append(target.logits(found.hidden)[0])
        cache.commit((0,))
    return rows


def row_count(widths: tuple[int, ...]) -> int:
    """Rows of a pass of this shape."""
    return tree_nodes(widths) if widths else 1
