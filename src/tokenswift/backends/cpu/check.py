"""Do the compiled kernels keep the rule that a row's bits are its own affair? Asked at first use.

The tests ask it of many shapes and compilers; this asks it, in milliseconds, of the library at hand on the
machine at hand: a small random model of two layers, whose last positions run alone, all at once, in trees
with wrong branches and beside another text's, on one thread and on two, in every type and with weights of few
bits, compared byte by byte.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from tokenswift.backends.cpu.backend import TYPES, CpuBackend
from tokenswift.backends.weights import LayerWeights, Packed, Shape, active_type
from tokenswift.interfaces import KVCache, Segment
from tokenswift.weights.format import Format, Stored
from tokenswift.weights.q4_1 import Q4_1
from tokenswift.weights.q8_0 import Q8_0

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, WIDTH = 2, 64, 96, 8, 2, 40  # a width that fills no tile
BEFORE, TAIL = 501, 19  # committed keys; positions that are compared, across the end of a chunk
WINDOW = 300  # of the second layer
#: weights of few bits: the type of their values, their format, what is multiplied with them
LOW = ((torch.float32, Q4_1, None), (torch.bfloat16, Q8_0, None), (torch.float32, Q8_0, torch.int8))


@dataclass
class _Keys:
    """What the kernels need of a cache."""

    data: Tensor
    length: int = BEFORE
    ordered: bool = True
    work: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.uint8))


@torch.inference_mode()
def fault(library: ctypes.CDLL) -> str | None:
    """What is wrong with a compiled library: the first case in which rows differ; None when all are equal."""
    for case in (*(_Case(dtype) for dtype in TYPES), *(_Case(*low) for low in LOW)):
        kernels = [CpuBackend(library, threads) for threads in (1, 2)]
        alone = case.run(kernels[0], [[row] for row in range(TAIL)])
        for threads, each in enumerate(kernels, 1):
            for cuts in (range(TAIL + 1), (0, TAIL), (0, 7, TAIL)):
                passes = [list(range(*ends)) for ends in pairwise(cuts)]
                if not torch.equal(case.run(each, passes), alone):
                    return f"rows in {len(passes)} passes, {case.name}, {threads} threads"
            for steps in (3, TAIL):
                tree, text = case.tree(each, steps)
                if not torch.equal(tree, alone[:steps]):
                    return f"a tree of {2 * steps - 1} rows, {case.name}, {threads} threads"
                if not torch.equal(text, alone[:steps]):
                    return f"{steps} rows beside another text's, {case.name}, {threads} threads"
            rows = torch.cat([each.linear(row[None], case.head, active=case.active) for row in alone])
            if not torch.equal(each.linear(alone, case.head, active=case.active), rows):
                return f"a product, {case.name}, {threads} threads"
    return None


class _Case:
    """The random model and text, of a type; or with weights of few bits, and activations of a type."""

    def __init__(
        self, dtype: torch.dtype, form: Format | None = None, active: torch.dtype | None = None
    ) -> None:
        self.name = f"{form.name if form else ''} {active or dtype}".strip()
        self.active = active
        made = torch.Generator().manual_seed(1)

        def random(*shape: int, size: float = 2.0) -> Tensor:
            return size * (torch.rand(shape, generator=made) - 0.5)

        def weight(rows: int, columns: int) -> Packed:
            values = random(rows, columns, size=columns**-0.5)
            if form is None or form.encode is None:
                return Packed(values.to(dtype), panels=True)
            return Packed(Stored(form, form.encode(values)), True, dtype)

        types = (dtype, dtype, active or active_type(dtype))
        self.shape = Shape(LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, *types, 1e-5, WIDTH**-0.5)
        self.weights = [
            LayerWeights(
                qkv=weight((HEADS + 2 * KV_HEADS) * WIDTH, HIDDEN),
                out=weight(HIDDEN, HEADS * WIDTH),
                gate_up=weight(2 * INNER, HIDDEN),
                down=weight(HIDDEN, INNER),
                norm=1 + random(HIDDEN, size=0.1),
                mlp_norm=1 + random(HIDDEN, size=0.1),
                qkv_bias=random((HEADS + 2 * KV_HEADS) * WIDTH),
                window=layer * WINDOW,
            )
            for layer in range(LAYERS)
        ]
        self.head = weight(70, HIDDEN)
        self.keys = _Keys(random(2 * LAYERS, KV_HEADS, BEFORE + 2 * TAIL, WIDTH).to(dtype))
        self.states, self.wrong = random(TAIL, HIDDEN), random(TAIL, HIDDEN)
        angles = random(TAIL, WIDTH // 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def run(self, kernels: CpuBackend, passes: Sequence[list[int]]) -> Tensor:
        """States of all positions, (TAIL, D), by passes of consecutive ones."""
        self.keys.length, found = BEFORE, []
        for rows in passes:
            at = slice(rows[0], rows[-1] + 1)
            segments = [_segment(len(rows), self.keys)]
            found.append(self._layers(kernels, self.states[at], self.cos[at], self.sin[at], segments))
            self.keys.length += len(rows)
        return torch.cat(found)

    def tree(self, kernels: CpuBackend, steps: int) -> tuple[Tensor, Tensor]:
        """States of the first positions, (steps, D), by one pass: as nodes of a tree, each with a wrong
        sibling before it, and as a chain of a second text beside the tree."""
        parents, states, places, last = [-1], [self.states[0]], [0], 0
        for step in range(1, steps):
            parents += [last, last]
            states += [self.wrong[step], self.states[step]]
            places += [step, step]
            last = len(parents) - 1
        self.keys.length = BEFORE
        other = _Keys(self.keys.data.clone())
        at, count = torch.tensor([*places, *range(steps)]), len(parents)
        made = self._layers(
            kernels,
            torch.stack([*states, *self.states[:steps]]),
            self.cos[at],
            self.sin[at],
            [_segment(count, self.keys, parents), _segment(steps, other)],
        )
        return made[:count:2], made[count:]

    def _layers(
        self, kernels: CpuBackend, states: Tensor, cos: Tensor, sin: Tensor, segments: Sequence[Segment]
    ) -> Tensor:
        states = states.clone()
        kernels.layers(kernels.body(self.shape, self.weights), states, cos, sin, segments, keep=False)
        return states


def _segment(rows: int, keys: _Keys, parents: Sequence[int] | None = None) -> Segment:
    """Rows of a text; the kernels do not look at tokens and positions."""
    numbers = torch.arange(rows)
    return Segment(numbers, numbers, cast(KVCache, keys), parents)
