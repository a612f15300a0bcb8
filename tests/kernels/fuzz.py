"""Random calls of all kernels, valid and invalid: ``python -m tests.kernels.fuzz LIBRARY SEED CALLS``.

Valid calls must give rows the bits that they have alone; invalid ones must be refused. The test under ASan
and UBSan runs this in a process of its own.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import torch
from beartype.roar import BeartypeCallHintViolation

from tokenswift.config import SamplingParams
from tokenswift.interfaces import Segment
from tokenswift.kernels.cpu import structs
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.cpu.int8_cache import IntFullCache
from tokenswift.kernels.formats import FORMATS, Format, Stored
from tokenswift.kernels.weights import LayerWeights, Packed, Shape, active_type
from tokenswift.kv.full import FullCache
from tokenswift.sampling.ranking import LogitRows, Subset

TYPES = (torch.float32, torch.bfloat16, torch.float16)
KEYS = (*TYPES, torch.int8, torch.int8)
FOREIGN = (-1, -(2**31), 2**31 - 1, 1, 2, 31)  # the last three: beyond the end


class Fuzz:
    """Calls of one compiled library.

    Args:
        library: the kernels.
        seed: of all that is drawn.
    """

    def __init__(self, library: ctypes.CDLL, seed: int) -> None:
        self.draw = random.Random(seed)
        self.made = torch.Generator().manual_seed(seed)
        self.kernels = CpuBackend(library, self.draw.choice((1, 2, 3)))

    def run(self, calls: int) -> None:
        """So many calls of kernels in turn."""
        kinds: list[Callable[[], None]] = [
            self.linear,
            self.take,
            self.norm,
            self.attend,
            self.layers,
            self.rank,
        ]
        for call in range(calls):
            kinds[call % len(kinds)]()

    # ---- what calls are made of -------------------------------------------------------------------

    def numbers(self, *shape: int) -> torch.Tensor:
        """Random numbers, now and then with some that are none."""
        made = torch.randn(shape, generator=self.made, dtype=torch.float32)
        if made.numel() and self.draw.random() < 0.1:
            odd = (float("nan"), float("inf"), -float("inf"), 1e-40, 3e38)
            made.view(-1)[self.draw.randrange(made.numel())] = self.draw.choice(odd)
        return made

    def stored(self, form: Format, rows: int, columns: int) -> Stored:
        """A weight of any bytes that have finite scales."""
        if form.encode is not None and self.draw.random() < 0.5:
            return Stored(form, form.encode(torch.randn(rows, columns, generator=self.made)))
        shape = (rows, form.row_bytes(columns))
        return Stored(form, torch.randint(0, 256, shape, generator=self.made, dtype=torch.uint8))

    def weight(self, rows: int, columns: int, low: bool | None = None) -> Packed:
        """A weight of one format, or of several; of products in ``low`` precision or not."""
        return self.kernels.pack(*self.parts(rows, columns, low))

    def parts(self, rows: int, columns: int, low: bool | None = None) -> tuple[list[Any], torch.dtype]:
        """What a weight is packed from, and the type of products with it."""
        fitting = [form for form in FORMATS.values() if columns % form.block == 0]
        if low is None:
            low = bool(fitting) and self.draw.random() < 0.7
        kind = self.draw.choice(TYPES[:2] if low else TYPES)
        if not low:
            return [torch.randn(rows, columns, generator=self.made).to(kind)], kind
        cuts = sorted(
            {0, rows, *(self.draw.randrange(0, rows + 1, 32) for _ in range(self.draw.choice((0, 0, 2))))}
        )
        return [self.stored(self.draw.choice(fitting), b - a, columns) for a, b in pairwise(cuts)], kind

    def rows(self) -> int:
        """Of a pass: few, some, or more than share what is made of a panel."""
        return self.draw.choice((1, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 25, 97))

    def tree(self, rows: int) -> list[int] | None:
        """Parents of rows, or a chain."""
        if self.draw.random() < 0.4:
            return None
        return [-1 if not i or self.draw.random() < 0.1 else self.draw.randrange(i) for i in range(rows)]

    def cache(self, layers: int, kv_heads: int, width: int, rows: int, kind: torch.dtype) -> FullCache:
        """Keys and values, with just the room that the rows need, or a little more."""
        before = self.draw.choice((0, 1, 5, 31, 200, 255, 256, 257, 300, 512, 600))
        room = before + rows + self.draw.choice((0, 0, 0, 1, 40))
        made = self.kernels.new_cache(layers, kv_heads, width, room, kind)
        if kind == torch.int8:
            made.data.copy_(torch.randint(0, 256, made.data.shape, generator=self.made, dtype=torch.uint8))
            assert isinstance(made, IntFullCache)
            scales = torch.rand((2, *made.pages.scales[..., 0, :].shape), generator=self.made) * 0.02
            made.pages.put_scales(*scales)
        else:
            made.data.copy_(torch.randn(made.data.shape, generator=self.made))
        made._length = before
        return made

    @contextmanager
    def refused(self) -> Iterator[None]:
        """The block must end in an error of bad input; where tests check shapes, in theirs."""
        try:
            yield
        except (ValueError, BeartypeCallHintViolation):
            return
        raise AssertionError("a call that cannot be was taken")

    # ---- calls ------------------------------------------------------------------------------------

    def linear(self) -> None:
        """Products, with and without bias, with floats and whole numbers."""
        columns = self.draw.choice((2, 6, 32, 34, 64, 96, 128, 160, 256, 512))
        weight, count = (
            self.weight(self.draw.choice((1, 5, 31, 32, 33, 64, 70, 96, 130)), columns),
            self.rows(),
        )
        bias = self.numbers(weight.rows) if self.draw.random() < 0.5 else None
        active = torch.int8 if weight.stored and self.draw.random() < 0.6 else None
        states = self.numbers(count, columns)
        found = self.kernels.linear(states, weight, bias, active)
        row = self.draw.randrange(count)
        same(found[row], self.kernels.linear(states[row : row + 1], weight, bias, active)[0])
        with self.refused():
            self.kernels.linear(self.numbers(count, columns + 2), weight, bias, active)
        with self.refused():
            self.kernels.linear(states, weight, self.numbers(weight.rows + self.draw.choice((-1, 1))), active)

    def take(self) -> None:
        """Rows of a weight, and ids that have none."""
        columns = self.draw.choice((32, 64, 96, 256, 512))
        parts, kind = self.parts(self.draw.choice((1, 31, 32, 33, 70, 130)), columns)
        weight, values = (
            self.kernels.pack(parts, kind),
            [p.decode() if isinstance(p, Stored) else p for p in parts],
        )
        ids = [self.draw.randrange(weight.rows) for _ in range(self.rows())]
        same(self.kernels.take(weight, torch.tensor(ids)), torch.cat(values).to(kind)[ids])
        wrong = self.draw.choice(FOREIGN)
        ids[self.draw.randrange(len(ids))] = (
            wrong if abs(wrong) > 31 or wrong < 0 else weight.rows - 1 + wrong
        )
        with self.refused():
            self.kernels.take(weight, torch.tensor(ids))

    def norm(self) -> None:
        """RMS norms."""
        width, count = self.draw.choice((1, 2, 7, 15, 16, 17, 48, 576)), self.rows()
        states, weight, kind = self.numbers(count, width), self.numbers(width), self.draw.choice(TYPES[:2])
        found = self.kernels.norm(states, weight, 1e-5, kind)
        same(found[-1], self.kernels.norm(states[-1:], weight, 1e-5, kind)[0])
        with self.refused():
            self.kernels.norm(states, self.numbers(width + 1), 1e-5, kind)

    def attend(self) -> None:
        """Attention over chains and trees; rows that cannot run are refused by C, too."""
        kv_heads, group = self.draw.choice((1, 2, 3)), self.draw.choice((1, 2, 3, 8, 100))
        width, count = self.draw.choice((2, 4, 8, 16, 24, 40, 64, 80)), self.rows()
        kinds = KEYS if self.kernels.has_int8_keys(width) else TYPES
        cache = self.cache(1, kv_heads, width, count, self.draw.choice(kinds))
        query, parents = self.numbers(kv_heads * group, count, width), self.tree(count)
        window = self.draw.choice((0, 0, 1, 7, 255, 300))
        self.kernels.attend(query, 0, cache, parents, 0.3, window)
        parents = parents or list(range(-1, count - 1))
        row = self.draw.randrange(count)
        parents[row] = self.draw.choice((row, row + 1, count, -2, 2**31 - 1, -(2**31)))
        with unchecked(), self.refused():
            self.kernels.attend(query, 0, cache, parents, 0.3, window)
        more = self.numbers(kv_heads * group, cache.capacity - cache.length + 1, width)
        with unchecked(), self.refused():
            self.kernels.attend(more, 0, cache, None, 0.3, window)

    def layers(self) -> None:
        """Passes of one or several texts through all layers; each text is what it is alone."""
        low, (count, hidden, inner) = self.draw.random() < 0.6, (1 + self.draw.randrange(2), 64, 96)
        kv_heads, group, width = self.draw.choice(
            ((1, 2, 16), (2, 4, 8), (1, 1, 32), (2, 2, 40 if not low else 24))
        )
        hidden, inner = self.draw.choice(((64, 96), (256, 512))) if low else (hidden, inner)
        heads = kv_heads * group
        if low and (heads * width) % 32:
            heads, group, width = 4 * kv_heads, 4, 16
        own, products = heads * width, self.draw.choice(TYPES[:2] if low else TYPES)

        def weight(rows: int, columns: int) -> Packed:
            if not low:
                return self.kernels.pack(torch.randn(rows, columns, generator=self.made).to(products) * 0.1)
            fitting = [form for form in FORMATS.values() if columns % form.block == 0 and form.encode]
            form = self.draw.choice(fitting)
            blocks = cast(Any, form.encode)(0.1 * torch.randn(rows, columns, generator=self.made))
            return self.kernels.pack(Stored(form, blocks), products)

        def vector(size: int, share: float = 0.5) -> torch.Tensor | None:
            return torch.randn(size, generator=self.made) if self.draw.random() < share else None

        both = own + 2 * kv_heads * width
        weights = [
            LayerWeights(
                weight(both, hidden),
                weight(hidden, own),
                weight(2 * inner, hidden),
                weight(hidden, inner),
                cast(torch.Tensor, vector(hidden, 1)),
                cast(torch.Tensor, vector(hidden, 1)),
                vector(both),
                vector(hidden),
                vector(2 * inner),
                vector(hidden),
                vector(width),
                vector(width),
                self.draw.choice((0, 0, 3, 260)),
            )
            for _ in range(count)
        ]
        keys = self.draw.choice(KEYS)
        active = torch.int8 if low and self.draw.random() < 0.6 else active_type(products)
        shape = Shape(count, hidden, inner, heads, kv_heads, width, products, keys, active, 1e-5, 0.3)
        body = self.kernels.body(shape, weights)
        texts = [self.rows() for _ in range(self.draw.choice((1, 1, 2, 4)))]
        segments = []
        for rows in texts:
            at = torch.arange(rows)
            segments.append(Segment(at, at, self.cache(count, kv_heads, width, rows, keys), self.tree(rows)))
        states, angles = self.numbers(sum(texts), hidden), self.numbers(sum(texts), width // 2)
        cos, sin, keep = angles.cos(), angles.sin(), self.draw.random() < 0.5
        whole = states.clone()
        batch = self.kernels.batch(segments, shape)
        self.kernels.layers(body, whole, cos, sin, batch, keep)
        alone = states[: texts[0]].clone()
        own = (cos[: texts[0]].clone(), sin[: texts[0]].clone())
        self.kernels.layers(body, alone, *own, self.kernels.batch(segments[:1], shape), keep)
        same(whole[: texts[0]], alone)
        last = segments[-1]
        parents = [-1] * texts[-1]
        parents[-1] = self.draw.choice((texts[-1] - 1, texts[-1], -2, 2**31 - 1))
        with unchecked(), self.refused():
            wrong = [*segments[:-1], replace(last, parents=parents)]
            self.kernels.layers(body, states.clone(), cos, sin, self.kernels.batch(wrong, shape), keep)
        with self.refused():
            self.kernels.layers(body, states[1:].clone(), cos, sin, batch, keep)

    def rank(self) -> None:
        """The choice rule, of all logits and of some; tokens that have no place are refused."""
        size, pick = self.draw.choice((1, 2, 31, 32, 33, 100, 1000)), self.draw.choice
        params = SamplingParams(
            temperature=pick((0.3, 1.0, 2.0)),
            top_k=pick((0, 1, 5, 40)),
            top_p=pick((1.0, 0.9, 1e-6)),
            min_p=pick((0.0, 0.05)),
            eta_cutoff=pick((0.0, 3e-4)),
            repetition_penalty=pick((1.3, 2.0)),
            penalty_window=pick((1, 4, 1024)),
            greedy=pick((False, False, True)),
            seed=self.draw.randrange(99),
        )
        subset, columns = None, size
        if self.draw.random() < 0.4:
            columns = 1 + self.draw.randrange(size)
            subset = Subset(torch.tensor(self.draw.sample(range(size), columns)), size)
        count = self.rows()
        history = [self.draw.randrange(size) for _ in range(pick((0, 1, 3, 1500)))]
        paths = [[self.draw.randrange(size) for _ in range(pick((0, 0, 1, 9)))] for _ in range(count)]
        places = [len(history) + len(path) + pick((0, 0, 1, 5, 2000)) for path in paths]
        widths = [pick((1, 2, 5, 1000)) for _ in paths]
        coupled, shares = self.draw.random() < 0.7, self.draw.random() < 0.5
        rows = LogitRows(
            self.numbers(count, columns), history, paths, places, widths, coupled, subset, shares
        )
        if self.draw.random() < 0.3:
            bits = torch.randint(
                -(2**31), 2**31, (count, -(-size // 32)), generator=self.made, dtype=torch.int32
            )
            rows = replace(rows, masks=[pick((None, mask)) for mask in bits])
        ranker = self.kernels.ranker(params)
        found = ranker.rank(rows)
        if not isinstance(found, int):
            assert ranker.rank(rows.one(count - 1)) == found[-1:]
        wrong = pick((-1, -(2**31), 2**31 - 1, size, size + 1))
        with self.refused():
            ranker.rank(
                replace(
                    rows, history=[*history, wrong], positions=[len(history) + 1] * count, paths=[[]] * count
                )
            )
        again = ranker.rank(rows)
        assert again == found or isinstance(found, list)  # NaN is unequal to itself
        if isinstance(again, list) and isinstance(found, list):
            assert [one.tokens for one in again] == [one.tokens for one in found]


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in every bit, where NaN is NaN."""
    assert found.dtype == expected.dtype
    assert torch.equal(found.nan_to_num(1.5), expected.nan_to_num(1.5)), (found, expected)


@contextmanager
def unchecked() -> Iterator[None]:
    """Python's check of rows is left out: C has its own."""
    usual = structs.check_rows
    structs.check_rows = lambda *args: None  # type: ignore[assignment]
    try:
        yield
    finally:
        structs.check_rows = usual


if __name__ == "__main__":
    path, first, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    loaded = ctypes.CDLL(path)
    for seed in range(first, first + max(1, calls // 60)):
        print("seed", seed, flush=True)
        with torch.inference_mode():
            Fuzz(loaded, seed).run(60)
    print("done")
