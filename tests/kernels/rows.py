"""Rows of random shapes through compiled kernels: alone, in trees and in chunks, compared byte by
byte."""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenswift.kernels.attention import AttentionContext
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.cpu.int8_cache import Pages
from tokenswift.kernels.formats import FORMATS, MXFP4, Format, Stored
from tokenswift.kernels.packed import Packed
from tokenswift.kv.cache import FullCache

CHUNK = 256  # keys of an attention chunk: of cpu_tile.h
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: of keys; int16 is that of keys beside values in int8
KEYS = (*DTYPES, torch.int8, torch.int16)
WIDTHS = (4, 6, 8, 12, 16, 20, 32, 36, 40, 64, 64, 80, 96, 100, 128, 128, 160, 256)
SIZES_OF_PASSES = (1, 2, 3, 4, 7, 11, 12, 13, 20, 41, 64, 65, 90)
WRONG = -1  # in lists of rows: one that is not of the text


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
    bits: hashlib._Hash = field(default_factory=hashlib.sha256)

    def compare(self, case: str, rows: Tensor, expected: Tensor) -> None:
        """Count rows (the first axis) of a pass that have other bytes than the rows alone."""
        assert rows.shape == expected.shape
        assert rows.dtype == expected.dtype
        if "bfloat16" not in case:
            self.bits.update(_bytes(expected).numpy().tobytes())
        differing = (_bytes(rows) != _bytes(expected)).any(1).sum().item()
        self.rows += len(rows)
        if differing:
            self.wrong[case] = self.wrong.get(case, 0) + int(differing)


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(len(rows), -1).view(torch.uint8)


def fuzz(library: ctypes.CDLL, seeds: range, backend: type[CpuBackend] = CpuBackend) -> Tally:
    """Attention and products for each seed, on one thread and on two; the same cases for every
    library."""
    tally = Tally()
    kernels = (backend(library, 1), backend(library, 2))
    with torch.inference_mode():
        for seed in seeds:
            attention(kernels, seed, tally)
            product(kernels, seed, tally)
            low_product(kernels, seed, tally)
    return tally


class AttentionCase:
    """A random text, the queries of its last positions, and what is not to be seen of others."""

    def __init__(self, kernels: Sequence[CpuBackend], seed: int) -> None:
        self.chance = random.Random(seed)
        self.kernels = kernels
        choose = self.chance.choice
        draw = self.chance.randrange
        dtype = KEYS[seed % len(KEYS)]
        in_pages = dtype in (torch.int8, torch.int16)
        width = choose((choose(WIDTHS), draw(4, 257)))
        self.width = width + -width % (4 if in_pages else 2)  # others are left to torch
        kv_heads = choose((1, 1, 2, 3, 4))
        heads = kv_heads * choose((1, 1, 2, 3, 4, 7, 8))
        self.tail = choose(SIZES_OF_PASSES)
        self.before = max(0, draw(4) * CHUNK + choose((0, 0, -1, 1, draw(-70, 30))))
        seen = self.before + self.tail + 20
        self.window = choose((0, 0, draw(1, seen), draw(1, 40)))
        self.softcap = choose((None, None, 8.0))
        self.name = (
            f"attention {seed}: {dtype}, {heads}/{kv_heads} heads × {self.width}, "
            f"{self.before} + {self.tail}, {self.window} seen"
        )
        noise = torch.Generator().manual_seed(seed)
        self.capacity = self.before + self.tail + max(SIZES_OF_PASSES)
        cache_dtype = torch.int8 if in_pages else dtype
        wide = [dtype == torch.int16] if in_pages else []
        self.text, self.other, self.unseen, self.cache = (
            kernels[0].new_cache(1, kv_heads, self.width, self.capacity, cache_dtype, wide)
            for _ in range(4)
        )
        for cache in (self.text, self.other, self.unseen):
            if in_pages:
                random_pages(cache, noise)
            else:
                cache.data.copy_(torch.randn(cache.data.shape, generator=noise))
        self.query = torch.randn(heads, self.tail, self.width, generator=noise)

    def run(self, first: int, rows: list[int], parents: list[int] | None) -> Tensor:
        """Rows of the tail, some of them wrong, over the text up to row ``first``."""
        start = self.before + first
        self.cache.data.copy_(self.unseen.data)  # what a row must not see
        self.cache.entries.copy(self.text.entries, list(range(start)), list(range(start)))
        for place, row in enumerate(rows, start):
            if row == WRONG:
                slot = self.chance.randrange(self.capacity)
                self.cache.entries.copy(self.other.entries, [place], [slot])
            else:
                self.cache.entries.copy(self.text.entries, [place], [self.before + row])
        self.cache._length = start
        context = AttentionContext(
            layer=0,
            cache=self.cache,
            parents=parents,
            scale=self.width**-0.5,
            window=self.window,
            softcap=self.softcap,
        )
        return self.chance.choice(self.kernels).attend(self.query[:, rows], context)


def attention(kernels: Sequence[CpuBackend], seed: int, tally: Tally) -> None:
    """The last positions of a text: one at a time, in chunks, in trees with wrong branches."""
    case = AttentionCase(kernels, seed)
    tail = case.tail
    chance = case.chance
    alone = torch.cat([case.run(row, [row], None) for row in range(tail)])
    assert alone.isfinite().all(), case.name
    tally.compare(f"{case.name}, as a whole", case.run(0, list(range(tail)), None), alone)
    for row in {0, tail - 1, chance.randrange(tail)}:
        root = case.run(row, [row], [-1])
        tally.compare(f"{case.name}, as a root", root, alone[row : row + 1])
    for _ in range(2):
        first = chance.randrange(tail)
        count = min(chance.choice(SIZES_OF_PASSES), tail - first)
        rows = list(range(first, first + count))
        tally.compare(f"{case.name}, as a chunk", case.run(first, rows, None), alone[rows])
        path = list(range(-1, count - 1))
        tally.compare(f"{case.name}, as a path", case.run(first, rows, path), alone[rows])
    for _ in range(3):
        first = chance.randrange(tail)
        rows, parents = tree(chance, first, tail, chance.choice(SIZES_OF_PASSES))
        right = [node for node, row in enumerate(rows) if row != WRONG]
        nodes = case.run(first, rows, parents)[right]
        expected = alone[[rows[node] for node in right]]
        tally.compare(f"{case.name}, in a tree of {len(rows)}", nodes, expected)


def random_pages(cache: FullCache, noise: torch.Generator) -> None:
    """Keys and values in int8, with scales."""
    assert isinstance(cache.entries, Pages)
    cache.entries.put_random(noise)


def tree(chance: random.Random, first: int, tail: int, nodes: int) -> tuple[list[int], list[int]]:
    """A random tree: each node's row of the tail, some of them wrong, and its parent."""
    rows = [first]
    parents = [-1]
    last_right = 0
    row = first
    while len(rows) < nodes:
        if row + 1 < tail and chance.random() < 0.5:
            row += 1
            parents.append(last_right)
            last_right = len(rows)
            rows.append(row)
        else:
            near = chance.randrange(max(0, len(rows) - 9), len(rows))
            parents.append(chance.choice((last_right, near)))
            rows.append(WRONG)
    return rows, parents


def product(kernels: Sequence[CpuBackend], seed: int, tally: Tally) -> None:
    """Rows of a product with a packed weight: one at a time and together."""
    chance = random.Random(seed)
    dtype = DTYPES[seed % len(DTYPES)]
    outputs = chance.choice((chance.randrange(1, 100), 320))
    inner = 2 * chance.choice((chance.randrange(1, 330), 288))
    count = chance.choice(SIZES_OF_PASSES)
    biased = chance.random() < 0.5
    case = (
        f"product {seed}: {dtype}, {count} rows, {inner} to {outputs}{', bias' if biased else ''}"
    )
    noise = torch.Generator().manual_seed(seed)
    weight = kernels[0].pack(torch.randn(outputs, inner, generator=noise).to(dtype))
    bias = torch.randn(outputs, generator=noise) if biased else None
    states = torch.randn(count, inner, generator=noise).to(dtype)

    def run(rows: slice) -> Tensor:
        return chance.choice(kernels).linear(states[rows], weight, bias)

    compare_parts(chance, count, case, run, tally)


def compare_parts(
    chance: random.Random, count: int, case: str, run: Callable[[slice], Tensor], tally: Tally
) -> Tensor:
    """Some of the rows together against the rows one at a time; these."""
    alone = torch.cat([run(slice(row, row + 1)) for row in range(count)])
    assert alone.isfinite().all(), case
    for first in (0, chance.randrange(count), chance.randrange(count)):
        end = count if first == 0 else chance.randrange(first, count) + 1
        tally.compare(f"{case}, {first} to {end}", run(slice(first, end)), alone[first:end])
    return alone


def low_product(kernels: Sequence[CpuBackend], seed: int, tally: Tally) -> None:
    """Rows of products with a low-bit weight, one at a time and together, for each kind of
    activation.

    Those of float32 and bfloat16 are those of the same values packed dense, too.
    """
    chance = random.Random(seed)
    form = list(FORMATS.values())[seed % len(FORMATS)]
    outputs = chance.choice((chance.randrange(1, 100), 160))
    inner = form.block * chance.randrange(1, 1 + 1024 // form.block)
    count = chance.choice(SIZES_OF_PASSES)
    stored = random_weight(form, outputs, inner, seed)
    noise = torch.Generator().manual_seed(seed)
    values = torch.randn(count, inner, generator=noise)
    states = values * 10 ** torch.randn(count, 1, generator=noise)
    states[chance.randrange(count), : inner // 2] = 0.0
    bias = torch.randn(outputs, generator=noise) if chance.random() < 0.5 else None
    for active in (torch.float32, torch.bfloat16, torch.int8):
        dtype = torch.bfloat16 if active == torch.bfloat16 else torch.float32
        case = f"product {seed}: {form.name}, {active}, {count} rows, {inner} to {outputs}"
        weight = kernels[0].pack(stored, dtype)

        def run(rows: slice, packed: Packed = weight, active: torch.dtype = active) -> Tensor:
            return chance.choice(kernels).linear(states[rows], packed, bias, active)

        alone = compare_parts(chance, count, case, run, tally)
        ids = torch.tensor([chance.randrange(outputs) for _ in range(5)])
        dense = stored.decode().to(dtype)
        # without -0.0, like what gguf unpacks
        taken = chance.choice(kernels).take(weight, ids) + 0.0
        tally.compare(f"{case}, rows of the weight", taken, dense[ids])
        if active != torch.int8:
            products = run(slice(0, count), kernels[0].pack(dense))
            tally.compare(f"{case}, dense", products, alone)


def random_weight(form: Format, rows: int, columns: int, seed: int) -> Stored:
    """Blocks of random numbers with finite scales, some of them large, some 0."""
    noise = torch.Generator().manual_seed(seed)
    size = (rows, form.row_bytes(columns))
    blocks = torch.randint(0, 256, size, generator=noise, dtype=torch.uint8)
    scales = torch.randn(2, rows, columns // form.block, generator=noise) * 2e-3
    scales = scales.to(torch.float16)
    scales[:, 0] = 0.0
    by_block = blocks.unflatten(1, (-1, form.nbytes))
    if form is MXFP4:  # exponents alone
        by_block[..., 0] = torch.randint(100, 125, by_block.shape[:2], generator=noise)
        by_block[0, :, 0] = 0
        return Stored(form, blocks)
    at_the_end = {"q6_k": [208], "q3_k": [108], "q2_k": [80, 82]}
    places = at_the_end.get(form.name, [0] if form.offset else [0, 2])
    for scale, place in zip(scales, places, strict=False):
        by_block[..., place : place + 2] = scale[..., None].view(torch.uint8)
    return Stored(form, blocks)
