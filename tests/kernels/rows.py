"""Rows of random shapes through compiled kernels: alone, in trees and in chunks, compared byte by
byte."""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.cpu.int8_cache import Pages
from tokenswift.kernels.formats import FORMATS, Format, Stored
from tokenswift.kernels.weights import Packed
from tokenswift.kv.cache import FullCache

CHUNK = 256  # keys of an attention chunk: of cpu_tile.h
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: of keys; int16 is that of keys beside values in int8
KEYS = (*DTYPES, torch.int8, torch.int16)
WIDTHS = (4, 6, 8, 12, 16, 20, 32, 36, 40, 64, 64, 80, 96, 100, 128, 128, 160, 256)
SIZES_OF_PASSES = (1, 2, 3, 4, 7, 11, 12, 13, 20, 41, 64, 65, 90)


@dataclass
class Tally:
    """What a library's rows came to.

    Attributes:
        rows: compared with the same row alone.
        wrong: how many of a case's rows differ, by what the case is.
        bits: hash of all rows alone, but where bfloat16 enters products, of which some processors
            have their own.
    """

    rows: int = 0
    wrong: dict[str, int] = field(default_factory=dict)
    bits: Any = field(default_factory=hashlib.sha256)

    def compare(self, case: str, found: Tensor, expected: Tensor) -> None:
        """Count rows (the first axis) of a pass that have other bytes than the rows alone."""
        assert found.shape == expected.shape and found.dtype == expected.dtype
        if "bfloat16" not in case:
            self.bits.update(_bytes(expected).numpy().tobytes())
        differing = (_bytes(found) != _bytes(expected)).any(1).sum().item()
        self.rows += len(found)
        if differing:
            self.wrong[case] = self.wrong.get(case, 0) + int(differing)


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(len(rows), -1).view(torch.uint8)


def fuzz(library: ctypes.CDLL, seeds: range, kind: type[CpuBackend] = CpuBackend) -> Tally:
    """Attention and products for each seed, on one thread and on two; the same cases for every
    library."""
    tally, both = Tally(), (kind(library, 1), kind(library, 2))
    with torch.inference_mode():
        for seed in seeds:
            attention(both, seed, tally)
            product(both, seed, tally)
            low_product(both, seed, tally)
    return tally


def attention(kernels: Sequence[CpuBackend], seed: int, tally: Tally) -> None:
    """The last positions of a text: one at a time, in chunks, in trees with wrong branches."""
    made = random.Random(seed)
    dtype = KEYS[seed % len(KEYS)]
    in_pages = dtype in (torch.int8, torch.int16)
    wide = [dtype == torch.int16] if in_pages else []
    width = made.choice((made.choice(WIDTHS), made.randrange(4, 257)))
    width += -width % (4 if in_pages else 2)  # others are left to torch
    kv_heads, group = made.choice((1, 1, 2, 3, 4)), made.choice((1, 1, 2, 3, 4, 7, 8))
    heads, tail = kv_heads * group, made.choice(SIZES_OF_PASSES)
    before = max(0, made.randrange(4) * CHUNK + made.choice((0, 0, -1, 1, made.randrange(-70, 30))))
    window = made.choice((0, 0, made.randrange(1, before + tail + 20), made.randrange(1, 40)))
    softcap = made.choice((None, None, 8.0))
    case = (
        f"attention {seed}: {dtype}, {heads}/{kv_heads} heads × {width}, {before} + {tail}, "
        f"{window} seen"
    )
    noise = torch.Generator().manual_seed(seed)
    capacity = before + tail + max(SIZES_OF_PASSES)
    kept = torch.int8 if in_pages else dtype
    text, other, unseen, cache = (
        kernels[0].new_cache(1, kv_heads, width, capacity, kept, wide) for _ in range(4)
    )
    for filled in (text, other, unseen):
        if isinstance(filled.entries, Pages):
            random_pages(filled, noise)
        else:
            filled.data.copy_(torch.randn(filled.data.shape, generator=noise))
    query = torch.randn(heads, tail, width, generator=noise)

    def run(first: int, rows: list[int], parents: list[int] | None) -> Tensor:
        """Rows of the tail (-1: a wrong one) over the text up to row ``first``."""
        start = before + first
        cache.data.copy_(unseen.data)  # what a row must not see
        cache.entries.copy(text.entries, list(range(start)), list(range(start)))
        for row, at in zip(rows, range(start, start + len(rows)), strict=True):
            of, slot = (text, before + row) if row >= 0 else (other, made.randrange(capacity))
            cache.entries.copy(of.entries, [at], [slot])
        cache._length = start
        return made.choice(kernels).attend(
            query[:, rows], 0, cache, parents, width**-0.5, window, softcap
        )

    alone = torch.cat([run(row, [row], None) for row in range(tail)])
    assert alone.isfinite().all(), case
    tally.compare(f"{case}, as a whole", run(0, list(range(tail)), None), alone)
    for row in {0, tail - 1, made.randrange(tail)}:
        tally.compare(f"{case}, as a root", run(row, [row], [-1]), alone[row : row + 1])
    for _ in range(2):
        first = made.randrange(tail)
        count = min(made.choice(SIZES_OF_PASSES), tail - first)
        rows = list(range(first, first + count))
        tally.compare(f"{case}, as a chunk", run(first, rows, None), alone[rows])
        tally.compare(
            f"{case}, as a path", run(first, rows, list(range(-1, count - 1))), alone[rows]
        )
    for _ in range(3):
        first = made.randrange(tail)
        rows, parents = tree(made, first, tail, made.choice(SIZES_OF_PASSES))
        right = [at for at, row in enumerate(rows) if row >= 0]
        found = run(first, rows, parents)[right]
        tally.compare(f"{case}, in a tree of {len(rows)}", found, alone[[rows[at] for at in right]])


def random_pages(cache: FullCache, noise: torch.Generator) -> None:
    """Keys and values in int8, with scales."""
    assert isinstance(cache.entries, Pages)
    cache.entries.put_random(noise)


def tree(made: random.Random, first: int, tail: int, nodes: int) -> tuple[list[int], list[int]]:
    """A random tree: each node's row of the tail (-1: a wrong one), and its parent."""
    rows, parents, last, at = [first], [-1], 0, first
    while len(rows) < nodes:
        if at + 1 < tail and made.random() < 0.5:
            at += 1
            parents.append(last)
            last = len(rows)
            rows.append(at)
        else:
            parents.append(made.choice((last, made.randrange(max(0, len(rows) - 9), len(rows)))))
            rows.append(-1)
    return rows, parents


def product(kernels: Sequence[CpuBackend], seed: int, tally: Tally) -> None:
    """Rows of a product with a packed weight: one at a time and together."""
    made = random.Random(seed)
    dtype = DTYPES[seed % len(DTYPES)]
    outputs, inner = (
        made.choice((made.randrange(1, 100), 320)),
        2 * made.choice((made.randrange(1, 330), 288)),
    )
    count, biased = made.choice(SIZES_OF_PASSES), made.random() < 0.5
    case = (
        f"product {seed}: {dtype}, {count} rows, {inner} to {outputs}{', bias' if biased else ''}"
    )
    noise = torch.Generator().manual_seed(seed)
    weight = kernels[0].pack(torch.randn(outputs, inner, generator=noise).to(dtype))
    bias = torch.randn(outputs, generator=noise) if biased else None
    states = torch.randn(count, inner, generator=noise).to(dtype)

    def run(rows: slice) -> Tensor:
        return made.choice(kernels).linear(states[rows], weight, bias)

    parts(made, count, case, run, tally)


def parts(
    made: random.Random, count: int, case: str, run: Callable[[slice], Tensor], tally: Tally
) -> Tensor:
    """Some of the rows together against the rows one at a time; these."""
    alone = torch.cat([run(slice(row, row + 1)) for row in range(count)])
    assert alone.isfinite().all(), case
    for first in (0, made.randrange(count), made.randrange(count)):
        end = count if first == 0 else made.randrange(first, count) + 1
        tally.compare(f"{case}, {first} to {end}", run(slice(first, end)), alone[first:end])
    return alone


def low_product(kernels: Sequence[CpuBackend], seed: int, tally: Tally) -> None:
    """Rows of products with a low-bit weight, one at a time and together, for each kind of
    activation.

    Those of float32 and bfloat16 are those of the same values packed dense, too.
    """
    made = random.Random(seed)
    form = list(FORMATS.values())[seed % len(FORMATS)]
    outputs = made.choice((made.randrange(1, 100), 160))
    inner = form.block * made.randrange(1, 1 + 1024 // form.block)
    count = made.choice(SIZES_OF_PASSES)
    stored = random_weight(form, outputs, inner, seed)
    noise = torch.Generator().manual_seed(seed)
    states = torch.randn(count, inner, generator=noise) * 10 ** torch.randn(
        count, 1, generator=noise
    )
    states[made.randrange(count), : inner // 2] = 0.0
    bias = torch.randn(outputs, generator=noise) if made.random() < 0.5 else None
    for active in (torch.float32, torch.bfloat16, torch.int8):
        dtype = torch.bfloat16 if active == torch.bfloat16 else torch.float32
        case = f"product {seed}: {form.name}, {active}, {count} rows, {inner} to {outputs}"
        weight = kernels[0].pack(stored, dtype)

        def run(rows: slice, packed: Packed = weight, active: torch.dtype = active) -> Tensor:
            return made.choice(kernels).linear(states[rows], packed, bias, active)

        alone = parts(made, count, case, run, tally)
        ids = torch.tensor([made.randrange(outputs) for _ in range(5)])
        values = stored.decode().to(dtype)
        taken = (
            made.choice(kernels).take(weight, ids) + 0.0
        )  # which has no -0.0, as what gguf unpacks
        tally.compare(f"{case}, rows of the weight", taken, values[ids])
        if active != torch.int8:
            tally.compare(f"{case}, dense", run(slice(0, count), kernels[0].pack(values)), alone)


def random_weight(form: Format, rows: int, columns: int, seed: int) -> Stored:
    """Blocks of random numbers with finite scales, some of them large, some 0."""
    noise = torch.Generator().manual_seed(seed)
    blocks = torch.randint(
        0, 256, (rows, form.row_bytes(columns)), generator=noise, dtype=torch.uint8
    )
    scales = (torch.randn(2, rows, columns // form.block, generator=noise) * 2e-3).to(torch.float16)
    scales[:, 0] = 0.0
    each = blocks.unflatten(1, (-1, form.nbytes))
    last = {"q6_k": [208], "q3_k": [108], "q2_k": [80, 82]}
    places = last.get(form.name, [0] if form.offset else [0, 2])
    for scale, place in zip(scales, places, strict=False):
        each[..., place : place + 2] = scale[..., None].view(torch.uint8)
    return Stored(form, blocks)
