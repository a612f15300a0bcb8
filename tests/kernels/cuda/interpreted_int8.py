"""The kernels of keys and values in int8 in Triton's interpreter, run by `test_interpreter` in a process of
its own: equal in every bit to their torch reference and to the CPU kernels.

The interpreter rounds a fused step twice, so here it is given one that is rounded once, as cards have it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from tests.kernels.cuda.bounds import in_bounds as in_bounds
from tests.kernels.cuda.bounds import in_order as in_order
from tests.kernels.cuda.cases import CPU, int_segment, plan, random, tree
from tests.kernels.cuda.interpreted import Recording
from tests.tiny import tiny_model
from tokenswift.interfaces import Segment
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.check import int8_fault
from tokenswift.kernels.cuda.entries import INVERSE, KEY, LEVEL, IntFullCache, scales_of
from tokenswift.kernels.cuda.int_reference import entries_of, fused
from tokenswift.kernels.cuda.launch import Kernels
from tokenswift.kernels.cuda.plan import ALONE, CHUNK
from tokenswift.kernels.cuda.reference import Reference
from tokenswift.loader.rope import rotary_of
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.target import backend_for

pytestmark = [
    pytest.mark.skipif(not isinstance(backend_for(), CpuBackend), reason="no compiled kernels here"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim"),  # by Triton 3.6 itself
]


@pytest.fixture(autouse=True)
def fused_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
        tensors = (torch.tensor(each.data) for each in (x, y, z))
        return interpreter.TensorHandle(fused(*tensors).numpy(), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)


#: committed keys, rows, reach of a tree (None: a chain), window, heads, KV heads, width
CASES = [
    (0, 1, None, 0, 6, 2, 16),
    (5, 7, 3, 0, 3, 3, 20),
    (CHUNK - 3, 9, 1, 0, 6, 2, 16),
    (CHUNK + 44, 1, None, 100, 2, 1, 4),
    (2 * CHUNK + 7, 3, 2, 0, 4, 2, 8),
    (700, 5, 4, 100, 2, 1, 40),
    (CHUNK + 100, 2, None, 320, 2, 1, 64),
    (CHUNK - 20, ALONE + 1, None, 300, 1, 1, 16),
    (3 * CHUNK + 5, ALONE + 1, None, 0, 1, 1, 4),
]


@pytest.mark.parametrize("case", CASES)
def test_attention_has_the_bits_of_the_reference_and_of_the_cpu_kernels(case: Any) -> None:
    before, rows, reach, window, heads, kv_heads, width = case
    parents = None if reach is None else tree(rows, reach)
    text, pages = int_segment(before, rows, parents, kv_heads, width)
    query = random(rows, heads, width, seed=1)
    given = (plan([text], heads), query, 0, width**-0.5, window)
    found = Kernels().attend(*given)
    assert torch.equal(found, Reference().attend(*given))
    expected = backend_for().attend(query.transpose(0, 1), 0, pages, parents, width**-0.5, window)
    assert torch.equal(found, expected)


def test_rows_of_several_texts_and_in_trees_have_their_own_bits() -> None:
    """The last positions of a text, over the end of a chunk: one at a time, in one pass, in a tree with wrong
    branches, and beside another text's rows."""
    before, tail, heads, kv_heads, width, window = CHUNK - 3, 6, 2, 1, 16, 150
    whole, query = int_segment(before, tail, None, kv_heads, width)[0], random(tail, heads, width, seed=1)

    def run(first: int, rows: list[int], parents: list[int] | None, beside: bool = False) -> Tensor:
        """Rows of the tail, -1 for a wrong one, over the keys before the first."""
        text = int_segment(before + first, len(rows), parents, kv_heads, width, seed=7)[0]
        text.cache.data[:, :, : before + first] = whole.cache.data[:, :, : before + first]
        wrong = random(len(rows), heads, width, seed=3)
        for at, row in enumerate(rows):
            if row >= 0:
                text.cache.data[:, :, before + first + at] = whole.cache.data[:, :, before + row]
                wrong[at] = query[row]
        other = int_segment(20, 3, None, kv_heads, width, seed=5)[0]
        texts = [other, text] if beside else [text]
        queries = torch.cat([random(3, heads, width, seed=4), wrong]) if beside else wrong
        made = Kernels().attend(plan(texts, heads), queries, 0, 0.25, window)
        return made[-len(rows) :]

    alone = torch.cat([run(row, [row], None) for row in range(tail)])
    assert torch.equal(run(0, list(range(tail)), None), alone)
    assert torch.equal(run(0, list(range(tail)), None, beside=True), alone)
    assert torch.equal(run(0, list(range(tail)), list(range(-1, tail - 1))), alone)
    rows, parents, last = [0], [-1], 0
    for step in range(1, tail):  # each right node has a wrong sibling before it
        rows, parents, last = [*rows, -1, step], [*parents, last, last], len(rows) + 1
    right = [at for at, row in enumerate(rows) if row >= 0]
    assert torch.equal(run(0, rows, parents)[right], alone)


@pytest.mark.parametrize("scale", [KEY, LEVEL, INVERSE])
def test_a_scale_that_is_no_number_reaches_the_rows_that_see_it_and_no_others(scale: int) -> None:
    parents, query = [-1, 0, 0, 1, 2], random(5, 2, 16, seed=1)
    text = int_segment(40, 5, parents, 1, 16)[0]
    expected = Kernels().attend(plan([text], 2), query, 0, 0.25)
    scales_of(text.cache.data)[:, :, 42, scale] = torch.nan
    for ops in (Kernels(), Reference()):
        found = ops.attend(plan([text], 2), query, 0, 0.25)
        assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])
        assert found[2].isnan().all() and found[4].isnan().all()
    text = int_segment(CHUNK + 9, 2, None, 1, 16)[0]
    scales_of(text.cache.data)[:, :, :, scale] = torch.nan  # not a number in the whole text
    for ops in (Kernels(), Reference()):
        assert ops.attend(plan([text], 2), query[:2], 0, 0.25).isnan().all()


def test_a_partial_caches_entries_have_no_positions() -> None:
    query, found = random(3, 4, 16, seed=1), []
    for ordered in (True, False):
        text, _ = int_segment(300, 3, [-1, 0, 0], 2, 16)
        text.cache.ordered = ordered  # type: ignore[misc]
        found.append(Kernels().attend(plan([text], 4), query, 0, 0.25, 50))
        assert torch.equal(found[-1], Reference().attend(plan([text], 4), query, 0, 0.25, 50))
    assert not torch.allclose(*found, atol=1e-3)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("width", [16, 20])
def test_queries_are_turned_and_keys_and_values_appended(norms: bool, width: int) -> None:
    """As the reference writes them; without norms the CPU kernels' own bits are those of `test_int8`."""
    heads, kv_heads, layers, layer = 6, 2, 2, 1
    texts: list[list[Segment]] = [[], []]
    for found in texts:
        for before, rows, parents in ((9, 2, None), (3, 4, [-1, 0, 0, 1])):
            cache, numbers = IntFullCache(layers, kv_heads, width, 20, CPU), torch.arange(rows)
            cache.clear()
            cache.commit(tuple(range(before)))
            found.append(Segment(numbers, numbers, cache, parents))
    mixed, angles = random(2, 6, (heads + 2 * kv_heads) * width), random(6, width // 2, seed=1)
    mixed *= 10 ** random(6, 1, seed=3)
    mixed[:, 1, (heads + kv_heads) * width :] = 0  # values of nothing but zeros
    mixed[:, 2, heads * width] = mixed[0, 3, (heads + kv_heads) * width] = torch.nan
    given = (mixed, angles.cos(), angles.sin(), layer, heads, 1e-5)
    weights = (random(width, seed=4), random(width, seed=5)) if norms else (None, None)
    query = Kernels().append(plan(texts[0], heads), *given, *weights)
    expected = Reference().append(plan(texts[1], heads), *given, *weights)
    torch.testing.assert_close(query, expected, equal_nan=True)
    for one, other in zip(*texts, strict=True):
        if norms:  # torch sums squares in another order
            near = one.cache.data[..., : 2 * width].int() - other.cache.data[..., : 2 * width].int()
            assert near.abs().max() <= 1
            scales = (scales_of(each.cache.data) for each in (one, other))
            torch.testing.assert_close(*scales, equal_nan=True)
        else:
            assert torch.equal(one.cache.data, other.cache.data)
        assert not one.cache.data[0].any()  # the other layer's
    scales = scales_of(texts[0][1].cache.data)[1, 0]
    assert scales[4, KEY] != 0 and scales[3, KEY].isnan() and scales[4, 1:3].isnan().all()
    assert scales_of(texts[0][0].cache.data)[1, 0, 10, 1:3].tolist() == [-64.0, 2.0**64]


def test_an_accepted_path_is_moved() -> None:
    data = int_segment(30, 4, None, 2, 12)[0].cache.data
    for start, nodes in ((5, [1, 2, 3]), (0, [0, 4, 9, 20]), (28, [1])):
        found, expected = data.clone(), data.clone()
        Kernels().move(found, start, nodes)
        Reference().move(expected, start, nodes)
        assert torch.equal(found, expected)


@pytest.mark.slow
def test_a_pass_through_all_kernels_passes_the_check_at_loading() -> None:
    assert int8_fault(CudaBackend("cpu", Kernels()), (torch.float32, None, None), [3]) is None


def test_recorded_passes_serve_a_growing_text_and_others() -> None:
    """As with keys in floats: the work of the first call serves the others."""
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_model("llama", head_dim=8, num_hidden_layers=1, vocab_size=40, intermediate_size=32, **sizes)
    replayed, eager = Recording("cpu", Kernels()), CudaBackend("cpu", Kernels())
    eager.graphs = False
    made: list[list[Tensor]] = []
    for backend in (replayed, eager):
        target = NativeTarget(model, backend, rotary_of(model))
        target.take_keys(torch.int8, "kv_cache_dtype")
        found: list[Tensor] = []
        long, short = target.new_cache(CHUNK + 30), target.new_cache(40)
        for cache, length in ((long, CHUNK - 4), (short, 3)):
            assert isinstance(cache, IntFullCache)
            cache.data[:, :, :length] = entries_of(random(2, 1, length, 8, seed=length))
            cache.commit(tuple(range(length)))
        for texts, parents in (
            ([long], [-1, 0, 0, 1, 3]),
            ([short], [-1, 0, 0, 1, 3]),
            ([long, short], None),
        ):
            segments: list[Segment] = []
            for cache in texts:
                depths = torch.tensor([0, 1, 1, 2, 3] if parents else [0])
                segments.append(
                    Segment(torch.arange(3, 3 + len(depths)), depths + cache.length, cache, parents)
                )
            for one, cache in zip(target.forward_all(segments), texts, strict=True):
                found += [one.hidden, torch.as_tensor(one.queries)]
                cache.commit((0, 1, 3) if parents else (0,))
                values = cache.data[0, :, : cache.length, 8:16].float()
                found += [cache.keys(0), values / scales_of(cache.data)[0, :, : cache.length, INVERSE, None]]
        made.append(found)
    for one, other in zip(
        *made, strict=True
    ):  # products of other row counts may round a number the other way
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
