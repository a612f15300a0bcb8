"""Do kernels keep the rule that a row's bits are its own affair? Asked of those at hand, at first
use.

The tests ask it of many shapes and compilers; this asks it in milliseconds, of a small random model
of two layers, whose last positions run alone, all at once, in trees with wrong branches and beside
another text's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokenswift.kernels.base import Backend
from tokenswift.kernels.formats import Format, Stored
from tokenswift.kernels.weights import LayerWeights, Packed, Shape, active_type
from tokenswift.kv.cache import FullCache
from tokenswift.kv.passes import Segment

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, WIDTH = 2, 64, 96, 8, 2, 40  # a width that fills no tile
BEFORE, TAIL = 501, 19  # committed keys; positions that are compared, across the end of a chunk
WINDOW = 300  # of the second layer
OUTLIER = 3  # channel of a key that is larger than the others


class Case:
    """The random model and text, of a type; or with quantized weights, and activations of a type.

    Args:
        backend: what packs the weights, and whose device all is on.
        width: of heads.
        keys: type of keys and values, if it is another; in int8, the second layer's keys have 16
            bits.
    """

    def __init__(
        self,
        backend: Backend,
        dtype: torch.dtype,
        form: Format | None = None,
        active: torch.dtype | None = None,
        width: int = WIDTH,
        keys: torch.dtype | None = None,
    ) -> None:
        name = f"{form.name if form else ''} {active or dtype}, heads of {width}"
        self.name = f"{name}, keys of {keys or dtype}".strip()
        self._bodies: dict[Backend, Any] = {}
        made = torch.Generator().manual_seed(1)

        def random(*shape: int, size: float = 2.0) -> Tensor:
            return (size * (torch.rand(shape, generator=made, dtype=torch.float32) - 0.5)).to(
                backend.device
            )

        def weight(rows: int, columns: int) -> Packed:
            values = random(rows, columns, size=columns**-0.5)
            if form is None or not form.written:
                return backend.pack(values.to(dtype))
            return backend.pack(Stored(form, form.encode(values)), dtype)

        self.shape = Shape(
            layers=LAYERS,
            hidden=HIDDEN,
            inner=INNER,
            heads=HEADS,
            kv_heads=KV_HEADS,
            width=width,
            weights=dtype,
            keys=keys or dtype,
            active=active or active_type(dtype),
            eps=1e-5,
            scale=width**-0.5,
        )
        bias = random((HEADS + 2 * KV_HEADS) * width)
        bias[HEADS * width + OUTLIER] *= 100  # of keys, as some models have it
        self.weights = [
            LayerWeights(
                qkv=weight((HEADS + 2 * KV_HEADS) * width, HIDDEN),
                out=weight(HIDDEN, HEADS * width),
                gate_up=weight(2 * INNER, HIDDEN),
                down=weight(HIDDEN, INNER),
                norm=1 + random(HIDDEN, size=0.1),
                mlp_norm=1 + random(HIDDEN, size=0.1),
                qkv_bias=bias,
                window=layer * WINDOW,
                wide_keys=layer > 0,
            )
            for layer in range(LAYERS)
        ]
        wide = [layer.wide_keys for layer in self.weights]
        sizes = (LAYERS, KV_HEADS, width, BEFORE + 2 * TAIL)
        self.keys = backend.new_cache(*sizes, keys or dtype, wide)
        self.keys.entries.put_random(made)
        self.keys.commit(tuple(range(BEFORE)))
        self.states, self.wrong = random(TAIL, HIDDEN), random(TAIL, HIDDEN)
        angles = random(TAIL, width // 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def run(self, backend: Backend, cuts: Sequence[int]) -> Tensor:
        """States of positions, (n, D), by passes of those between two cuts."""
        found = []
        self.keys.rewind(BEFORE)
        for first, end in pairwise(cuts):
            rows = list(range(first, end))
            found.append(
                self._layers(backend, self.states[rows], rows, [_segment(len(rows), self.keys)])
            )
            self.keys.commit(tuple(range(len(rows))))
        return torch.cat(found)

    def tree(self, backend: Backend, steps: int) -> list[Tensor]:
        """States of the first positions, (steps, D), by one pass: as nodes of a tree, each with a
        wrong sibling before it, and as a chain of a second text beside the tree."""
        parents = [-1, *(2 * (step // 2) for step in range(2 * steps - 2))]
        places = [(node + 1) // 2 for node in range(len(parents))]
        states = self.states[places]
        states[1::2] = self.wrong[places[1::2]]
        self.keys.rewind(BEFORE)
        texts = [
            _segment(len(parents), self.keys, parents),
            _segment(steps, self.keys.fork(self.keys.capacity)),
        ]
        made = self._layers(
            backend, torch.cat([states, self.states[:steps]]), [*places, *range(steps)], texts
        )
        return [made[: len(parents) : 2], made[len(parents) :]]

    def _layers(
        self, backend: Backend, states: Tensor, at: list[int], segments: Sequence[Segment]
    ) -> Tensor:
        """Rows at positions of the text behind the layers."""
        batch, count = backend.batch(segments, self.shape), len(states)
        more = (0, 0, 0, len(batch.tokens) - count)  # rows that fill up a pass
        states, cos, sin = (
            pad(each, more) for each in (states.clone(), self.cos[at], self.sin[at])
        )
        if backend not in self._bodies:
            self._bodies[backend] = backend.body(self.shape, self.weights)
        backend.layers(self._bodies[backend], states, cos, sin, batch, keep=False)
        return states[:count]


def _segment(rows: int, keys: FullCache, parents: Sequence[int] | None = None) -> Segment:
    """Rows of a text; the kernels do not look at tokens and positions."""
    numbers = torch.arange(rows)
    return Segment(numbers, numbers, keys, parents)


@torch.inference_mode()
def keeps_bits(backends: Sequence[Backend], case: Case) -> bool:
    """Whether rows have the bits that they have alone by the first of the backends, in all passes
    of all."""
    alone = case.run(backends[0], range(TAIL + 1))
    for each in backends:
        found = [case.run(each, cuts) for cuts in (range(TAIL + 1), (0, TAIL), (0, 7, TAIL))]
        found += [*case.tree(each, 3), *case.tree(each, TAIL)]
        if not all(torch.equal(part, alone[: len(part)]) for part in found):
            return False
    return True
