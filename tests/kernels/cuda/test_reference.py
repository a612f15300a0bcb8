"""The torch reference of the CUDA kernels against the torch backend, and the plan of a pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.cuda.cases import CPU, random, segment, tree
from tokenswift.kernels.cuda.plan import ALONE, CHUNK, SPAN, plan_of
from tokenswift.kernels.cuda.reference import Reference
from tokenswift.kernels.torch import TorchBackend

CASES: list[tuple[int, int, int | None, int, float | None, bool]] = [
    (0, 1, None, 0, None, False),
    (5, 7, 3, 0, 5.0, True),
    (CHUNK - 6, 12, 2, 0, None, False),
    (CHUNK + 44, 1, None, 30, None, True),
    (SPAN * CHUNK - 3, 41, 9, 300, None, False),
    (100, 300, None, 64, None, False),
    (SPAN * CHUNK + 5, 70, 2, 0, None, False),
]


@pytest.mark.parametrize("before,rows,reach,window,cap,sinks", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_equals_the_torch_path(
    before: int, rows: int, reach: int | None, window: int, cap: Any, sinks: bool, dtype: torch.dtype
) -> None:
    parents = None if reach is None else tree(rows, reach)
    text, query = segment(before, rows, parents, 2, 24, dtype), random(rows, 6, 24, seed=1, dtype=dtype)
    other = segment(17, 3, None, 2, 24, dtype, seed=5)
    queries = torch.cat([random(3, 6, 24, seed=2, dtype=dtype), query])
    more = (window, cap, random(6, seed=9) if sinks else None)
    found = Reference().attend(plan_of([other, text], 6, CPU), queries, 0, 0.2, *more)[3:]
    expected = TorchBackend().attend(query.transpose(0, 1), 0, text.cache, parents, 0.2, *more)
    near = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def test_a_trees_rows_are_units_of_their_own() -> None:
    text = segment(2 * CHUNK - 1, 20, tree(20, 4), 2, 16)
    plan = plan_of([text], 8, CPU)
    assert plan.blocks[:, 3:5].tolist() == [[0, 16], [16, 4]]
    assert plan.units[:, 3:5].tolist() == [[row, 1] for row in range(20)]
    assert plan.paths[19][: int(plan.places[19, 5]) - 2 * CHUNK + 2].tolist()[-1] == 19
    assert (plan.form.spans, plan.form.own) == (1, 2)


def test_a_long_chains_blocks_have_the_rows_before_them_as_context() -> None:
    rows = 4 * ALONE
    plan = plan_of([segment(CHUNK - 40, rows, None, 1, 16)], 1, CPU)
    assert torch.equal(plan.blocks, plan.units)
    assert plan.blocks[:, 2].tolist() == [CHUNK - 40 + 64 * block for block in range(4)]
    assert plan.places[:, 5].tolist() == list(range(CHUNK - 40, CHUNK - 40 + rows))
    assert plan.form.own == 2 and plan.long
    short, branched = segment(9, ALONE, None, 1, 16), segment(9, ALONE + 1, tree(ALONE + 1, 3), 1, 16)
    for text in (short, branched):
        assert not plan_of([segment(CHUNK - 40, rows, None, 1, 16), text], 1, CPU).long


@pytest.mark.parametrize("parents", [[-1, 1, 0], [-1, 0], [-2, 0, 0]])
def test_bad_parents_are_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="parents are"):
        plan_of([segment(4, 3, parents, 1, 16)], 1, CPU)


def test_too_little_room_is_refused() -> None:
    text = segment(4, 3, None, 1, 16)
    text.cache.data = text.cache.data[:, :, :6]
    with pytest.raises(ValueError, match="a pass of 3 rows over 4 keys needs more room than the cache's 6"):
        plan_of([text], 1, CPU)
