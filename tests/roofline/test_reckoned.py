"""What passes are reckoned to take: by the counts of what the CUDA backend starts, and by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.roofline.test_passes import DENSE
from tokenswift.roofline import reckoned as counts
from tokenswift.roofline.cards import CARDS, Card
from tokenswift.roofline.passes import Sizes, floor
from tokenswift.roofline.reckoned import Kernel, kernels, low_bits, measured, reckoned
from tokenswift.types import InputError

H100 = CARDS["h100"]
#: 8B weights in the shape of Llama 3
LLAMA = Sizes(
    4096, 32, 8, 128, (0,) * 32, {"bfloat16": 7_504_658_432}, "bfloat16", limit=131_072, inner=14_336
)


@pytest.mark.parametrize(
    "rows,context,keys", [(1, 4096, ""), (9, 33_000, ""), (64, 700, ""), (16, 5000, "int8")]
)
def test_kernels_and_programs_are_those_that_the_backend_starts(rows: int, context: int, keys: str) -> None:
    """A device without memory stands for the card, with two layers of the size of an 8B model."""
    pytest.importorskip("triton")
    from tests.kernels.cuda.test_backend import Unstarted
    from tests.tiny import tiny_model
    from tokenswift.interfaces import Segment
    from tokenswift.kernels.cuda.backend import CudaBackend
    from tokenswift.loader.rope import rotary_of
    from tokenswift.models.decoder import NativeTarget
    from tokenswift.roofline.sizes import sizes_of_target

    class Counted(Unstarted):
        grids: list[tuple[str, int]] = []

        def run(self, kernel: Any, grid: tuple[int, ...], warps: int, stages: int, **given: Any) -> None:
            super().run(kernel, grid, warps, stages, **given)
            self.grids.append((kernel.__name__, prod(grid)))

    meta, ops = torch.device("meta"), Counted()
    ops.grids = []
    shape: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "head_dim": 128,
        "num_hidden_layers": 2,
    }
    with meta:
        model = tiny_model("llama", **shape, num_attention_heads=32, num_key_value_heads=8)
    target = NativeTarget(model.to(torch.bfloat16), CudaBackend(meta, ops), rotary_of(model))
    if keys:
        target.take_keys(torch.int8, "kv_cache_dtype")
    cache, numbers = target.new_cache(context + rows), torch.arange(rows)
    cache.commit(tuple(range(context)))
    parents = None if rows == 1 else list(range(-1, rows - 1))
    (made,) = target.run([Segment(numbers, numbers + context, cache, parents)], False, target.body)
    target.logits(made.hidden)
    found = [
        (kernel.name, kernel.programs) for kernel in kernels(sizes_of_target(target), H100, rows, context)
    ]
    assert found == ops.grids


def test_products_with_weights_of_few_bits_are_those_that_are_started() -> None:
    pytest.importorskip("triton")
    from tokenswift.kernels.cuda.launch import Kernels
    from tokenswift.kernels.cuda.launch_products import FEW, FULL, INNER, ROWS, Tuning
    from tokenswift.kernels.cuda.plan import CHUNK, EARLY, RECORDED, SPAN, TILE
    from tokenswift.kernels.cuda.weights import Planes
    from tokenswift.kernels.formats.registry import FORMATS

    class Seen(Kernels):
        programs = 0

        def run(self, kernel: Any, grid: tuple[int, ...], warps: int, stages: int, **given: Any) -> None:
            self.programs = prod(grid)

    usual = Tuning()
    assert (usual.columns, usual.low_columns, usual.stages, usual.low_stages) == (64, 64, counts.STAGES, 3)
    assert (ROWS, INNER, FEW, FULL) == (64, counts.INNER, counts.FEW, counts.FULL) and counts.COLUMNS == 64
    assert (usual.split, usual.low_step, usual.attend_stages) == (counts.SPLIT, counts.STEP, counts.STAGES)
    plan = (counts.CHUNK, counts.TILE, counts.SPAN, counts.EARLY, counts.RECORDED)
    assert plan == (CHUNK, TILE, SPAN, EARLY, RECORDED)
    sizes, ops = replace(LLAMA, weights={"q8_0": 1000}), Seen()
    for rows, columns, inner, fold in (
        (16, 96, 14_336, False),
        (64, 28_672, 4096, False),
        (16, 512, 4096, True),
    ):
        numbers = torch.empty(columns, inner, dtype=torch.int8, device="meta")
        scales = torch.empty(columns, inner // 32, dtype=torch.float16, device="meta")
        states = torch.empty(rows, inner, dtype=torch.bfloat16, device="meta")
        out = ops.low_product(
            states, Planes(FORMATS["q8_0"], inner, numbers, scales, None), None, False, fold
        )
        kernel, parts = counts._product(sizes, rows, columns, inner, fold)
        assert (kernel.name, kernel.programs, parts) == ("low_product", ops.programs, len(out))


def test_a_kernel_by_hand() -> None:
    """Ten programs of 100 bytes on a card of two processors with three programs each: a wave of six and one
    of four; each has 12 bytes on their way, which take .3 microseconds to come."""
    card = Card("slow", "made up", 1e12, {"float32": 2e9}, processors=2, generation=9)
    kernel = Kernel("some", 10, 1000, 12, held=3)
    assert kernel.in_flight(card) == 72
    assert kernel.work(card, "float32") == pytest.approx(600 / (72 / 0.3e-6) + 400 / (48 / 0.3e-6))
    computed = replace(kernel, operations=10**6, instructions=10**6)
    each = 1 / (counts.USED * 2e9) + 1 / 1e9
    assert computed.work(card, "float32") == pytest.approx(10**6 * each)
    alone = replace(computed, programs=1)
    assert alone.work(card, "float32") == pytest.approx(2 * 10**6 * each)


def test_an_8b_model() -> None:
    """No pass is below its floor; more keys, rows and bits take longer."""
    for sizes in low_bits(LLAMA).values():
        found = {
            (context, rows): reckoned(sizes, H100, rows, context)
            for context in counts.CONTEXTS
            for rows in counts.ROWS
        }
        for (context, rows), one in found.items():
            assert one is not None
            assert one.launches == len(list(kernels(sizes, H100, rows, context))) + counts.OTHERS
            assert one.seconds > floor(sizes, H100, rows, context).seconds
            assert one.seconds > one.starts + one.products + one.attention
        seconds = [one.seconds for one in found.values() if one is not None]
        by_context = [seconds[at : at + len(counts.ROWS)] for at in range(0, len(seconds), len(counts.ROWS))]
        assert all(by_rows == sorted(by_rows) for by_rows in by_context)
        assert all(list(column) == sorted(column) for column in zip(*by_context, strict=True))
    plain, few = (
        reckoned(sizes, H100, 1, 4096) for sizes in low_bits(LLAMA).values() if "q8_0" not in sizes.weights
    )
    assert plain is not None and few is not None and few.products < plain.products
    assert list(low_bits(LLAMA)) == ["bfloat16", "q8_0", "q4_0"] and list(low_bits(few_sizes())) == ["q4_1"]


def few_sizes() -> Sizes:
    return replace(LLAMA, weights={"q4_1": 1000})


def test_what_is_not_reckoned() -> None:
    assert reckoned(DENSE, H100, 1, 100) is None  # another forward
    assert reckoned(LLAMA, replace(H100, processors=0), 1, 100) is None
    assert reckoned(LLAMA, H100, 65, 100) is None  # it is not recorded


def test_measurements_are_found(tmp_path: Path) -> None:
    """Recorded passes with our products, by bytes of weights and keys; what is no row is said."""
    assert measured(tmp_path) == {}
    row = {
        "what": "pass",
        "graphs": True,
        "context": 9,
        "rows": 2,
        "ms": 7.5,
        "weight_bytes": 8,
        "token_bytes": 4,
    }
    others = [
        {"part": "start", "ended": 0},
        {**row, "graphs": False, "rows": 3},
        {**row, "product": "library", "rows": 4},
        {**row, "dtype": "int8", "rows": 5},
        {"what": "pass", "graphs": True, "error": "no room"},
        {**row, "product": "ours", "rows": 6},
    ]
    file = tmp_path / "card.jsonl"
    file.write_text("\n".join(json.dumps(one) for one in (row, *others)))
    assert measured(tmp_path) == {(8, 4, 9, 2): 0.0075, (8, 4, 9, 6): 0.0075}
    for wrong in ("{", "[1]", '{"what": "pass", "graphs": 1, "ms": []}', json.dumps({**row, "rows": None})):
        file.write_text(json.dumps(row) + "\n" + wrong)
        with pytest.raises(InputError, match="card.jsonl, line 2 is no row"):
            measured(tmp_path)
