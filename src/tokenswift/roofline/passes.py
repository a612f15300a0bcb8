"""Bytes and operations of passes, from a model's sizes alone, and the least time that they take on a machine.

A pass of n rows over L cached tokens has two parts. *Products* multiply n states with every weight of the
layers and the LM head: two operations a weight and row, each weight read once. *Attention* multiplies n
queries a head with the keys that they see and weighs as many values: four operations a row, head, key and
dimension, all keys and values read once. A part takes at least its bytes by the machine's bandwidth, or its
operations by the machine's arithmetic, whichever is more; the floor of a pass is the sum of its parts.

What is left out is small beside them: embeddings, norms, positions, activations, the pass's own keys, and the
choice of tokens. Method: Williams, Waterman and Patterson, "Roofline" (CACM 2009); table 2 of the TokenSwift
paper reckons so for one token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tokenswift.kernels.formats.registry import FORMATS

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
READ = {"cpu": 512, "cuda": 2048}  # rows of a pass that reads a prompt, by device


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of a model decides what its passes read and compute.

    Attributes:
        hidden, heads, kv_heads, width: D, H, K and d.
        windows: newest keys that a token sees, by layer; 0 is all.
        weights: how many weights a row is multiplied with, by what they are stored as: a type of
            :data:`ITEM` or a format of `kernels.formats.registry.FORMATS`.
        dtype: of what is not in int8: one of :data:`ITEM`.
        whole: whether products take activations in int8.
        keys: of keys and values: one of :data:`ITEM`, or "int8"; "" is as ``dtype``.
        inner: I, of the native decoder's gated block; 0: the model runs through another forward.
        limit: positions that may be used; None: no limit.
    """

    hidden: int
    heads: int
    kv_heads: int
    width: int
    windows: tuple[int, ...]
    weights: Mapping[str, int]
    dtype: str
    whole: bool = False
    limit: int | None = None
    keys: str = ""
    inner: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass reads."""
        return sum(stored_bytes(kind, count) for kind, count in self.weights.items())

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token, of all layers."""
        return len(self.windows) * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of keys and values of one token in one layer."""
        if self.keys == "int8":  # each with a scale, and values filled up to 16
            return self.kv_heads * (8 + self.width + -(-self.width // 16) * 16)
        return 2 * self.kv_heads * self.width * ITEM[self.keys or self.dtype]

    def seen(self, context: int) -> int:
        """Keys that a token behind ``context`` others sees, of all layers."""
        return sum(min(context, window or context) for window in self.windows)

    def in_few_bits(self, form: str) -> Sizes:
        """The sizes of a copy that the model drafts for itself with (`models.low_bit`): weights that are not
        stored quantized become ``form``, and products take int8."""
        weights: dict[str, int] = {}
        for kind, count in self.weights.items():
            name = kind if kind in FORMATS else form
            weights[name] = weights.get(name, 0) + count
        return replace(self, weights=weights, whole=True)


class Machine(Protocol):
    """What passes run on.

    Attributes:
        name: of the processor or card.
        source: where its figures come from, in words.
        bandwidth: bytes of memory that it reads in a second.
        device: "cpu" or "cuda".
    """

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def bandwidth(self) -> float: ...
    @property
    def device(self) -> str: ...

    def keeps(self, kind: str, dtype: str) -> bool:
        """Whether products in ``dtype`` read weights as they are stored; otherwise they are turned into that
        type when they are loaded."""
        ...

    def products(self, sizes: Sizes, stored: str, rows: int) -> float:
        """Operations in a second of products of ``rows`` rows with weights stored as ``stored``."""
        ...

    def attention(self, sizes: Sizes, rows: int) -> float:
        """Operations in a second of attention of ``rows`` rows."""
        ...


@dataclass(frozen=True, slots=True)
class Floor:
    """The least that a pass takes.

    Attributes:
        nbytes: that are read.
        operations: multiplications and additions.
        products, attention: seconds of either part.
    """

    nbytes: int
    operations: int
    products: float
    attention: float

    @property
    def seconds(self) -> float:
        """Of both parts."""
        return self.products + self.attention


def stored_bytes(kind: str, count: int) -> int:
    """Bytes of ``count`` numbers stored as ``kind``."""
    if kind in ITEM:
        return count * ITEM[kind]
    return count * FORMATS[kind].nbytes // FORMATS[kind].block


def floor(sizes: Sizes, machine: Machine, rows: int, context: int) -> Floor:
    """The floor of a pass of ``rows`` rows of one text over ``context`` cached tokens."""
    nbytes = operations = 0
    seconds = 0.0
    for kind, count in sizes.weights.items():
        read, worked = stored_bytes(kind, count), 2 * count * rows
        seconds += max(read / machine.bandwidth, worked / machine.products(sizes, kind, rows))
        nbytes, operations = nbytes + read, operations + worked
    keys = sizes.seen(context)
    read = keys * sizes.layer_bytes
    worked = 4 * keys * sizes.heads * sizes.width * rows
    attended = max(read / machine.bandwidth, worked / machine.attention(sizes, rows)) if keys else 0.0
    return Floor(nbytes + read, operations + worked, seconds, attended)


def read_seconds(sizes: Sizes, machine: Machine, prompt: int) -> float:
    """The floor of the prefill of some tokens, in passes of at most :data:`READ` rows."""
    rows = min(prompt, READ[machine.device])
    return prompt / rows * floor(sizes, machine, rows, prompt // 2).seconds


@dataclass(frozen=True, slots=True)
class Steps:
    """What steps take behind a text of a length.

    Attributes:
        context: tokens of the text.
        plain: a pass of one row: a step of plain decoding.
        verify: a pass of the rows that a step checks.
        draft: a pass of one row that drafts.
        speedups: by tokens that a step yields on average, how many times as fast as plain decoding steps
            are whose drafts are passes (one a row beyond the root), and steps whose drafts cost nothing.
    """

    context: int
    plain: Floor
    verify: Floor
    draft: Floor
    speedups: Mapping[float, tuple[float, float]]


def steps(
    sizes: Sizes,
    drafts: Sizes,
    machine: Machine,
    context: int,
    rows: int,
    budget: int,
    accepted: Sequence[float],
    first: Sizes | None = None,
) -> Steps:
    """Floors of steps, and the speed-ups to expect.

    Args:
        drafts: sizes of the model as it drafts.
        rows: that a step checks, the root included.
        budget: tokens of the partial cache that is drafted over.
        accepted: tokens that a step yields, its own included.
        first: sizes of the first pass of a step that drafts, where it is not like the others.
    """
    plain, verify = floor(sizes, machine, 1, context), floor(sizes, machine, rows, context)
    draft = floor(drafts, machine, 1, min(context, budget))
    whole = verify.seconds + (rows - 1) * draft.seconds
    if first is not None and rows > 1:
        whole += floor(first, machine, 1, min(context, budget)).seconds - draft.seconds
    found = {a: (a * plain.seconds / whole, a * plain.seconds / verify.seconds) for a in accepted}
    return Steps(context, plain, verify, draft, found)
