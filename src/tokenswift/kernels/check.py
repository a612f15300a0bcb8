"""Whether kernels keep the rule that a row's bits depend on the row's own context alone: tried at
first use on the machine at hand.

The tests try many shapes and compilers; this takes milliseconds, with a small random model of two
layers, whose last positions run alone, all at once, in trees with wrong branches and beside another
sequence's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokenswift.kernels.base import Backend
from tokenswift.kernels.batch import Body, LayerPass
from tokenswift.kernels.formats import Format, Stored
from tokenswift.kernels.packed import Packed
from tokenswift.kernels.weights import (
    ExpertWeights,
    LayerWeights,
    Mixture,
    RecurrentWeights,
    Shape,
    active_type,
)
from tokenswift.kv.cache import FullCache
from tokenswift.kv.passes import Segment
from tokenswift.kv.states import Recurrence, States

LAYERS = 2
HIDDEN = 64
INNER = 96
HEADS = 8
KV_HEADS = 2
WIDTH = 40  # of heads; it fills no tile
BEFORE = 501  # committed keys
TAIL = 19  # positions that are compared, across the end of a chunk
WINDOW = 300  # of the second layer
SHORT = Recurrence(taps=3, channels=HIDDEN)
DELTA = Recurrence(
    taps=4, channels=2 * 2 * 12 + 4 * 16, key_heads=2, value_heads=4, key_width=12, value_width=16
)
MIXTURE = Mixture(experts=7, used=2, inner=64, shared=96, shared_gate=True)
BIASED = replace(MIXTURE, biased=True)
GATE_LIMIT = 0.5  # of a mixture whose experts have biases
GATE_SLOPE = 1.702
OUTLIER = 3  # channel of a key that is larger than the others


class Case:
    """The random model and sequence, of a type; or with quantized weights, and activations of a
    type.

    Args:
        backend: what packs the weights, and whose device all is on.
        form: quantized format of the weights.
        active: type of what enters products, if it is another than the weights' usual one.
        width: of heads.
        keys: type of keys and values, if it is another; in int8, the second layer's keys have 16
            bits.
        mixture: of the second layer; None: it has one MLP. Where its experts have biases, the layer
            has sinks, too, and gates have a limit.
        recurrence: of the first layer; None: it attends.
    """

    def __init__(
        self,
        backend: Backend,
        dtype: torch.dtype,
        form: Format | None = None,
        active: torch.dtype | None = None,
        width: int = WIDTH,
        keys: torch.dtype | None = None,
        mixture: Mixture | None = None,
        recurrence: Recurrence | None = None,
    ) -> None:
        name = f"{form.name if form else ''} {active or dtype}, heads of {width}"
        more = "" if mixture is None else ", with experts"
        if recurrence is not None:
            more += ", with states"
        self.name = f"{name}, keys of {keys or dtype}{more}".strip()
        self._bodies: dict[Backend, Body] = {}
        shape = _shape(dtype, keys or dtype, active or active_type(dtype), width)
        limit = GATE_LIMIT if mixture is not None and mixture.biased else 0.0
        self.shape = replace(
            shape,
            mixture=mixture,
            recurrence=recurrence,
            gate_limit=limit,
            gate_slope=GATE_SLOPE,
        )
        random = _Random(backend, form)
        bias = random.tensor((HEADS + 2 * KV_HEADS) * width)
        bias[HEADS * width + OUTLIER] *= 100  # of keys, as some models have it
        self.weights = [random.layer(self.shape, number, bias) for number in range(LAYERS)]
        attending = [layer for layer in self.weights if layer.recurrent is None]
        self.keys = backend.new_cache(
            layers=len(attending),
            kv_heads=KV_HEADS,
            width=width,
            capacity=BEFORE + 2 * TAIL,
            dtype=keys or dtype,
            wide_keys=[layer.wide_keys for layer in attending],
        )
        self.keys.entries.put_random(random.generator)
        self.keys.commit(tuple(range(BEFORE)))
        if recurrence is not None:
            self.keys.states = random.states(recurrence, LAYERS - len(attending))
        self.states = random.tensor(TAIL, HIDDEN)
        self.wrong = random.tensor(TAIL, HIDDEN)
        angles = random.tensor(TAIL, width // 2)
        self.cos = angles.cos()
        self.sin = angles.sin()

    def run(self, backend: Backend, cuts: Sequence[int]) -> Tensor:
        """States of positions, (n, D), by passes of those between two cuts."""
        states: list[Tensor] = []
        self.keys.rewind(BEFORE)
        for first, end in pairwise(cuts):
            rows = list(range(first, end))
            segments = [_segment(len(rows), self.keys)]
            states.append(self._layers(backend, self.states[rows], rows, segments))
            self.keys.commit(tuple(range(len(rows))))
        return torch.cat(states)

    def tree(self, backend: Backend, steps: int) -> list[Tensor]:
        """States of the first positions, (steps, D), by one pass: as nodes of a tree, each with a
        wrong sibling before it, and as a chain of a second sequence beside the tree."""
        parents = [-1, *(2 * (step // 2) for step in range(2 * steps - 2))]
        count = len(parents)
        positions = [(node + 1) // 2 for node in range(count)]
        nodes = self.states[positions]
        nodes[1::2] = self.wrong[positions[1::2]]
        self.keys.rewind(BEFORE)
        segments = [
            _segment(count, self.keys, parents),
            _segment(steps, self.keys.fork(self.keys.capacity)),
        ]
        states = torch.cat([nodes, self.states[:steps]])
        states = self._layers(backend, states, [*positions, *range(steps)], segments)
        return [states[:count:2], states[count:]]

    def _layers(
        self,
        backend: Backend,
        states: Tensor,
        positions: list[int],
        segments: Sequence[Segment],
    ) -> Tensor:
        """Rows at positions of the tail, behind the layers."""
        batch = backend.batch(segments, self.shape)
        count = len(states)
        padding = (0, 0, 0, len(batch.tokens) - count)  # rows that fill up a pass
        states = pad(states.clone(), padding)
        if backend not in self._bodies:
            self._bodies[backend] = backend.body(self.shape, self.weights)
        layer_pass = LayerPass(
            batch=batch,
            states=states,
            cos=pad(self.cos[positions], padding),
            sin=pad(self.sin[positions], padding),
            keep_queries=False,
        )
        backend.layers(self._bodies[backend], layer_pass)
        return states[:count]


def _shape(weights: torch.dtype, keys: torch.dtype, active: torch.dtype, width: int) -> Shape:
    return Shape(
        layers=LAYERS,
        hidden=HIDDEN,
        inner=INNER,
        heads=HEADS,
        kv_heads=KV_HEADS,
        width=width,
        weights=weights,
        keys=keys,
        active=active,
        eps=1e-5,
        scale=width**-0.5,
    )


class _Random:
    """Random numbers on a backend's device, the same each time, and weights packed by it."""

    def __init__(self, backend: Backend, form: Format | None) -> None:
        self.backend = backend
        self.form = form
        self.generator = torch.Generator().manual_seed(1)

    def tensor(self, *shape: int, size: float = 2.0) -> Tensor:
        """Numbers within half of ``size`` around 0."""
        values = torch.rand(shape, generator=self.generator, dtype=torch.float32) - 0.5
        return (size * values).to(self.backend.device)

    def weight(self, rows: int, columns: int, dtype: torch.dtype) -> Packed:
        values = self.tensor(rows, columns, size=columns**-0.5)
        if self.form is None or not self.form.written:
            return self.backend.pack(values.to(dtype))
        return self.backend.pack(Stored(self.form, self.form.encode(values)), dtype)

    def layer(self, shape: Shape, number: int, bias: Tensor) -> LayerWeights:
        """A layer; those after the first have a window, and keys of 16 bits in int8."""
        query_rows = HEADS * shape.width
        mixture = shape.mixture if number else None
        recurrence = None if number else shape.recurrence
        qkv_rows = len(bias)
        if recurrence is not None:
            qkv_rows = recurrence.projected
            query_rows = recurrence.outputs
        return LayerWeights(
            qkv=self.weight(qkv_rows, HIDDEN, shape.weights),
            out=self.weight(HIDDEN, query_rows, shape.weights),
            recurrent=None if recurrence is None else self.recurrent(recurrence),
            gate_up=self.weight(2 * INNER, HIDDEN, shape.weights),
            down=self.weight(HIDDEN, INNER, shape.weights),
            experts=None if mixture is None else self.experts(mixture, shape.weights),
            norm=1 + self.tensor(HIDDEN, size=0.1),
            mlp_norm=1 + self.tensor(HIDDEN, size=0.1),
            qkv_bias=bias if recurrence is None else None,
            window=number * WINDOW,
            wide_keys=number > 0,
            sinks=None if mixture is None or not mixture.biased else self.tensor(HEADS, size=8),
        )

    def recurrent(self, recurrence: Recurrence) -> RecurrentWeights:
        """What a recurrent layer has besides its projections."""
        taps = self.tensor(recurrence.taps, recurrence.channels)
        heads = recurrence.value_heads
        if not heads:
            return RecurrentWeights(taps)
        gates = self.tensor(2 * heads, HIDDEN, size=HIDDEN**-0.5)
        return RecurrentWeights(
            taps=taps,
            gates=self.backend.pack(gates, torch.float32),
            rate=self.tensor(heads, size=0.1) - 0.1,
            shift=self.tensor(heads),
            norm=1 + self.tensor(recurrence.value_width, size=0.1),
        )

    def states(self, recurrence: Recurrence, layers: int) -> States:
        """States of a text of :data:`BEFORE` tokens."""
        states = self.backend.new_states(recurrence, layers)
        states.now.copy_(self.tensor(layers, recurrence.state))
        states.length = BEFORE
        states.mark()
        return states

    def experts(self, mixture: Mixture, dtype: torch.dtype) -> ExpertWeights:
        """A mixture's experts and their router."""
        count = mixture.experts
        router = self.tensor(mixture.router_rows, HIDDEN)
        experts = ExpertWeights(
            router=self.backend.pack(router, torch.float32),
            gate_up=[self.weight(2 * mixture.inner, HIDDEN, dtype) for _ in range(count)],
            down=[self.weight(HIDDEN, mixture.inner, dtype) for _ in range(count)],
        )
        if mixture.biased:
            experts.router_bias = self.tensor(mixture.router_rows)
            experts.gate_up_bias = self.tensor(count, 2 * mixture.inner)
            experts.down_bias = self.tensor(count, HIDDEN)
        return experts


def _segment(rows: int, keys: FullCache, parents: Sequence[int] | None = None) -> Segment:
    """Rows of a sequence; the kernels do not look at tokens and positions."""
    numbers = torch.arange(rows)
    return Segment(numbers, numbers, keys, parents)


@torch.inference_mode()
def keeps_bits(backends: Sequence[Backend], case: Case) -> bool:
    """Whether rows have the bits that they have alone by the first of the backends, in all passes
    of all."""
    alone = case.run(backends[0], range(TAIL + 1))
    for backend in backends:
        passes = [case.run(backend, cuts) for cuts in (range(TAIL + 1), (0, TAIL), (0, 7, TAIL))]
        passes += case.tree(backend, 3)
        passes += case.tree(backend, TAIL)
        if not all(torch.equal(states, alone[: len(states)]) for states in passes):
            return False
    return True
