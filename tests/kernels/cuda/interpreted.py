"""The Triton kernels in Triton's interpreter, float32: run by `test_interpreter` in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda.bounds import in_bounds as in_bounds
from tests.kernels.cuda.bounds import in_order as in_order
from tests.kernels.cuda.cases import CPU, low, plan, random, segment, tree
from tests.tiny import tiny_model
from tokenswift.interfaces import Pass, Segment
from tokenswift.kernels.cpu import build
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.check import fault
from tokenswift.kernels.cuda.fused_reference import FusedReference
from tokenswift.kernels.cuda.graphs import Graphs
from tokenswift.kernels.cuda.launch import Kernels
from tokenswift.kernels.cuda.launch_fused import FusedKernels
from tokenswift.kernels.cuda.launch_products import Tuning
from tokenswift.kernels.cuda.plan import ALONE, CHUNK, SPAN
from tokenswift.kernels.cuda.reference import Reference, summed
from tokenswift.kernels.cuda.weights import Planes
from tokenswift.kernels.weights import LayerWeights, Shape
from tokenswift.kv.full import FullCache
from tokenswift.loader.find import cache_dir
from tokenswift.loader.rope import rotary_of
from tokenswift.models.decoder import NativeTarget

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # infinite, as on a card
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim"),  # by Triton 3.6 itself
]

Option = tuple[int, int, int | None, int, float | None, bool]
SPANNED = SPAN * CHUNK
#: committed keys, rows, reach of a tree (None: a chain), window, cap of scores, sinks
FAST: list[Option] = [
    (0, 1, None, 0, None, False),
    (5, 7, 3, 0, 5.0, True),
    (CHUNK - 3, 9, 1, 0, None, False),
    (CHUNK + 44, 1, None, 100, None, False),
    (SPANNED + CHUNK + 7, 3, 2, 0, None, True),
    (700, 5, 4, 100, None, False),
    (SPANNED + 300, 2, None, 320, 3.0, False),
]
MANY: list[Option] = [
    (before, rows, reach, window, cap, sinks)
    for before in (0, 1, CHUNK - 1, CHUNK, SPANNED - 2, SPANNED, 2 * SPANNED + 77)
    for rows, reach in ((1, None), (6, None), (17, 2), (12, 12), (ALONE + 1, None))
    for window, cap, sinks in ((0, None, False), (90, 4.0, True), (600, None, False))
]
HEADS = [(6, 2, 16), (4, 4, 80), (8, 1, 64), (14, 2, 96), (2, 1, 128), (3, 3, 256), (70, 1, 8)]


def attended(text: Segment, query: Tensor, option: Option, ops: Kernels | Reference) -> Tensor:
    window, cap, sinks = option[3:]
    scores = random(query.shape[1], seed=9) if sinks else None
    scale = query.shape[-1] ** -0.5
    return ops.attend(plan([text], query.shape[1]), query, 0, scale, window, cap, scores)


def equal_references(option: Option, heads: int, kv_heads: int, width: int) -> None:
    before, rows, reach, window, cap, sinks = option
    parents = None if reach is None else tree(rows, reach)
    text, query = segment(before, rows, parents, kv_heads, width), random(rows, heads, width, seed=1)
    found = attended(text, query, option, Kernels())
    torch.testing.assert_close(found, attended(text, query, option, Reference()), rtol=2e-5, atol=2e-6)
    library = build.library(cache_dir() / "kernels")
    if library is not None:
        sinked = random(heads, seed=9) if sinks else None
        how = (text.cache, parents, width**-0.5, window, cap, sinked)
        expected = CpuBackend(library).attend(query.transpose(0, 1), 0, *how)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("option", FAST)
def test_attention(option: Option) -> None:
    equal_references(option, 6, 2, 16)


@pytest.mark.parametrize("heads,kv_heads,width", HEADS[1:])
def test_heads_of_all_widths(heads: int, kv_heads: int, width: int) -> None:
    equal_references((CHUNK - 2, 3, 1, 0, None, False), heads, kv_heads, width)


@pytest.mark.slow
@pytest.mark.parametrize("option", MANY[::2])
def test_attention_over_the_ends_of_chunks_and_spans(option: Option) -> None:
    equal_references(option, *HEADS[MANY.index(option) % len(HEADS)])


def test_a_partial_caches_entries_have_no_positions() -> None:
    """A window holds where an entry is its position, and nowhere else."""
    query, option = random(3, 4, 16, seed=1), (300, 3, 2, 50, None, False)
    texts = [segment(300, 3, [-1, 0, 0], 2, 16, ordered=ordered) for ordered in (True, False)]
    windowed, whole = (attended(text, query, option, Kernels()) for text in texts)
    assert not torch.allclose(windowed, whole, atol=1e-3)
    torch.testing.assert_close(whole, attended(texts[1], query, option, Reference()), rtol=2e-5, atol=2e-6)


def test_rows_of_several_texts_and_in_trees_have_their_own_bits() -> None:
    """The last positions of a text, over the end of a chunk: one at a time, in one pass, in a tree with wrong
    branches, and beside another text's rows."""
    before, tail, heads, kv_heads, width, window = CHUNK - 3, 6, 2, 1, 16, 150
    whole, query = segment(before, tail, None, kv_heads, width), random(tail, heads, width, seed=1)

    def run(first: int, rows: list[int], parents: list[int] | None, beside: bool = False) -> Tensor:
        """Rows of the tail, -1 for a wrong one, over the keys before the first."""
        text = segment(before + first, len(rows), parents, kv_heads, width, seed=7)
        text.cache.data[:, :, : before + first] = whole.cache.data[:, :, : before + first]
        wrong = random(len(rows), heads, width, seed=3)
        for at, row in enumerate(rows):
            if row >= 0:
                text.cache.data[:, :, before + first + at] = whole.cache.data[:, :, before + row]
                wrong[at] = query[row]
        other = segment(20, 3, None, kv_heads, width, seed=5)
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


def test_a_long_chains_rows_have_the_bits_of_single_ones() -> None:
    before, rows = 230, ALONE + 2
    whole, query = segment(before, rows, None, 1, 16), random(rows, 2, 16, seed=1)
    together = Kernels().attend(plan([whole], 2), query, 0, 0.25)
    torch.testing.assert_close(together, Reference().attend(plan([whole], 2), query, 0, 0.25))
    for row in (25, 26, 32, rows - 1):
        text = segment(before + row, 1, None, 1, 16)
        text.cache.data.copy_(whole.cache.data[:, :, : before + row + 1])
        alone = Kernels().attend(plan([text], 2), query[row : row + 1], 0, 0.25)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(
    "before,window,cap,sinks",
    [
        (0, 0, None, False),
        (SPANNED - 40, 0, 3.0, True),
        (3 * SPANNED + 10, 3000, None, True),
    ],
)
def test_rows_that_go_over_all_keys_have_the_bits_of_those_that_share_spans(
    before: int, window: int, cap: float | None, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long chains of two texts, over the ends of chunks and spans: one program a block, and one a span. With
    the first, chunks' sums are kept nowhere."""
    texts = [segment(before, ALONE + 9, None, 1, 16), segment(20, ALONE + 1, None, 1, 16, seed=3)]
    query, given = (
        random(2 * ALONE + 10, 2, 16, seed=1),
        (0, 0.25, window, cap, random(2, seed=9) if sinks else None),
    )
    started: list[str] = []

    class Noted(Kernels):
        def run(self, kernel: Any, *rest: Any, **more: Any) -> None:
            started.append(kernel.fn.__name__)
            super().run(kernel, *rest, **more)

    expected = Noted().attend(plan(texts, 2), query, *given)
    monkeypatch.setattr(Kernels, "enough", 1)
    found = Noted().attend(plan(texts, 2), query, *given)
    assert started == ["attend_chunks", "attend_merge", "attend_rows"]
    assert torch.equal(found, expected) and found.isfinite().all()
    torch.testing.assert_close(found, Reference().attend(plan(texts, 2), query, *given), rtol=2e-5, atol=2e-6)
    short = [segment(20, 2, None, 1, 16), texts[1]]
    Noted().attend(plan(short, 2), query[: ALONE + 3], *given)
    assert started[-1] == "attend_merge"  # rows of a short chain are units of their own


def test_nan_in_another_branch_or_in_unused_room_reaches_no_row() -> None:
    parents, query = [-1, 0, 0, 1, 2], random(5, 2, 16, seed=1)
    text = segment(40, 5, parents, 1, 16)
    expected = Kernels().attend(plan([text], 2), query, 0, 0.25)
    text.cache.data[:, :, 42] = torch.nan
    found = Kernels().attend(plan([text], 2), query, 0, 0.25)
    assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])
    assert found[2].isnan().all() and found[4].isnan().all()
    chain = segment(40, 5, None, 1, 16)
    chain.cache.data[:, :, 43] = torch.nan
    found = Kernels().attend(plan([chain], 2), query, 0, 0.25)
    assert not found[:3].isnan().any() and found[3:].isnan().all()


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("width", [16, 80])
def test_queries_are_turned_and_keys_and_values_appended(norms: bool, width: int) -> None:
    heads, kv_heads, layers, layer = 6, 2, 2, 1
    found, expected = (
        [
            segment(9, 2, None, kv_heads, width, layers=layers),
            segment(3, 4, [-1, 0, 0, 1], kv_heads, width, layers=layers, seed=3),
        ]
        for _ in range(2)
    )
    mixed, angles = random(3, 6, (heads + 2 * kv_heads) * width), random(6, width // 2, seed=1)
    given = (mixed, angles.cos(), angles.sin(), layer, heads, 1e-5)
    weights = (random(width, seed=4), random(width, seed=5)) if norms else (None, None)
    query = Kernels().append(plan(found, heads), *given, *weights)
    torch.testing.assert_close(query, Reference().append(plan(expected, heads), *given, *weights))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cache.data, other.cache.data)
        assert torch.equal(one.cache.data[:2], other.cache.data[:2])  # the other layer's


def test_an_accepted_path_is_moved() -> None:
    data = random(4, 2, 30, 24)
    for start, nodes in ((5, [1, 2, 3]), (0, [0, 4, 9, 20]), (28, [1])):
        found, expected = data.clone(), data.clone()
        Kernels().move(found, start, nodes)
        Reference().move(expected, start, nodes)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("width", [8, 48, 576])
def test_norm_adds_what_a_block_gave(width: int) -> None:
    states, more, weight = 3 * random(5, width), random(2, 5, width, seed=1), random(width, seed=2)
    for given in (None, more):
        one, other = states.clone(), states.clone()
        found = Kernels().norm(one, weight, 1e-5, torch.float32, given)
        torch.testing.assert_close(found, Reference().norm(other, weight, 1e-5, torch.float32, given))
        assert torch.equal(one, other)


@pytest.mark.parametrize("gelu", [False, True])
def test_gated(gelu: bool) -> None:
    both = 4 * random(2, 3, 2 * 1030)
    expected = Reference().gated(both, torch.float32, gelu)
    torch.testing.assert_close(Kernels().gated(both, torch.float32, gelu), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("outputs,inner", [(70, 130), (33, 64)])
def test_products(rows: int, outputs: int, inner: int) -> None:
    states, weight, bias = random(rows, inner), random(outputs, inner, seed=1), random(outputs, seed=2)
    for given in (None, bias):
        found = Kernels().product(states, weight, given)
        torch.testing.assert_close(found, Reference().product(states, weight, given), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", [None, "q8_0", "q4_1"])
def test_parts_of_a_product_are_the_same_sums_for_every_number_of_rows(form: str | None) -> None:
    """The inner dimension in parts, added up by the product or by who reads them, in blocks of all sizes."""
    rows, outputs, inner = 70, 33, 224
    states, bias, kernels = random(rows, inner), random(outputs, seed=2), Kernels(None, Tuning(split=64))
    weight = random(outputs, inner, seed=1)

    def product(given: Tensor, fold: bool) -> Tensor:
        if form is None:
            return kernels.product(given, weight, bias, fold)
        return kernels.low_product(given, Planes.of(low(form, outputs, inner), CPU), bias, False, fold)

    whole = product(states, False)
    assert len(whole) == 1
    for count in (1, 9):
        parts, folded = product(states[:count], False), product(states[:count], True)
        assert len(parts) == 4 and torch.equal(summed(parts), folded[0])
        assert torch.equal(folded[0], whole[0, :count])


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("rows,outputs,inner", [(1, 70, 96), (18, 33, 128)])
def test_products_with_weights_of_few_bits(form: str, rows: int, outputs: int, inner: int) -> None:
    """Unpacked in the kernel as the checkpoint is, and with activations as whole numbers."""
    stored = low(form, outputs, inner)
    planes, bias = Planes.of(stored, CPU), random(outputs, seed=2)
    states = random(rows, inner) * 10 ** random(rows, 1, seed=3)
    states[0, :32] = 0
    for whole in (False, True):
        found = Kernels().low_product(states, planes, bias, whole)[0]
        expected = Reference().low_product(states, planes, bias, whole)[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
        for row in (0, rows - 1):
            alone = Kernels().low_product(states[row : row + 1], planes, bias, whole)[0]
            assert torch.equal(alone[0], found[row])
    dense = Kernels().low_product(torch.eye(inner)[: inner // 2], planes, None, False)[0]
    assert torch.equal(dense.T, stored.decode()[:, : inner // 2])


@pytest.mark.slow
def test_a_pass_through_all_kernels_passes_the_check_at_loading() -> None:
    assert fault(CudaBackend("cpu", Kernels()), [(torch.float32, None, None)], steps=[3]) is None


class Replayed(Graphs):
    """As on a card: what is repeated is the work of the first call, on buffers that hold the new numbers."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.recorded: dict[Hashable, Callable[..., Any]] = {}

    def run(self, key: Hashable, work: Callable[..., Any], *given: Tensor) -> Any:
        shapes = tuple(each.shape for each in given)
        return super().run(key, self.recorded.setdefault((key, shapes), work), *given)


class Recording(CudaBackend):
    """A backend whose passes are replayed."""

    def replays(self) -> Replayed:
        return Replayed()


def test_recorded_passes_serve_a_growing_text_and_others() -> None:
    """Over the end of a chunk, from the first token on, in trees, with a cache of another place and beside
    another text: states, queries, keys and values are those of eager passes."""
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
    }
    model = tiny_model("qwen3", head_dim=8, num_hidden_layers=1, vocab_size=40, **sizes)
    replayed, eager = Recording("cpu", Kernels()), CudaBackend("cpu", Kernels())
    eager.graphs = False
    targets = [NativeTarget(model, backend, rotary_of(model)) for backend in (replayed, eager)]
    parents = [-1, 0, 0, 1, 3]

    def run(target: NativeTarget, texts: list[tuple[FullCache, list[int] | None]]) -> list[Pass]:
        segments: list[Segment] = []
        for cache, paths in texts:
            depths = torch.tensor([0, 1, 1, 2, 3] if paths else [0])
            segments.append(Segment(torch.arange(3, 3 + len(depths)), depths + cache.length, cache, paths))
        return target.forward_all(segments)

    made: list[list[Tensor]] = []
    for target in targets:
        found: list[Tensor] = []
        long, short = target.new_cache(CHUNK + 30), target.new_cache(40)
        for cache, length in ((long, CHUNK - 4), (short, 0)):
            cache.data.copy_(random(*cache.data.shape, seed=length))
            cache.commit(tuple(range(length)))
        for texts in ([long], [long], [short], [long, short]):
            tree_of = None if len(texts) == 1 and texts[0].length % 2 else parents
            for one, cache in zip(run(target, [(c, tree_of) for c in texts]), texts, strict=True):
                found += [one.hidden, torch.as_tensor(one.queries), target.logits(one.hidden)]
                cache.commit((0, 1, 3) if tree_of else (0,))
                found.append(cache.data[:, :, : cache.length].clone())
        made.append(found)
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    replays = targets[0].replays
    assert isinstance(replays, Replayed) and len(replays.recorded) == 3  # a row, a tree, both


def layer_of(heads: int, kv_heads: int, width: int, hidden: int, inner: int, rich: bool) -> LayerWeights:
    """A random layer; ``rich``: with biases, and norms of heads."""
    backend, sizes = CudaBackend("cpu"), ((heads + 2 * kv_heads) * width, hidden, 2 * inner, hidden)
    pairs = zip(sizes, (hidden, heads * width, hidden, inner), strict=True)
    packed = [backend.pack(random(n, k, seed=n) / k**0.5) for n, k in pairs]
    biases = [random(size, seed=7) if rich else None for size in sizes]
    norms = [random(width, seed=n) if rich else None for n in (8, 9)]
    given: Any = (*packed, random(hidden, seed=5), random(hidden, seed=6), *biases, *norms)
    return LayerWeights(*given)


@pytest.mark.parametrize("rich,split", [(True, 64), (False, 1 << 20)])
def test_a_layer_in_few_launches_has_the_bits_of_one_in_many(rich: bool, split: int) -> None:
    """With sums in several parts and in one, in a tree and beside another text; and the references'."""
    heads, kv_heads, width, hidden, inner = 3, 1, 16, 130, 100
    layer = layer_of(heads, kv_heads, width, hidden, inner, rich)
    floats = torch.float32, torch.float32, torch.float32
    shape = Shape(1, hidden, inner, heads, kv_heads, width, *floats, 1e-5, 0.25)
    kernels, angles = Kernels(None, Tuning(split=split)), random(7, width // 2, seed=1)
    turns, states = (angles.cos(), angles.sin()), 3 * random(7, hidden, seed=4)
    assert kernels.fuses(shape, 7) and not kernels.fuses(shape, ALONE + 1)

    def run(ops: Any, kind: Any) -> list[Tensor]:
        """By the kernels in few launches, or by those apart."""
        made, given = layer.gate_up.data, states.clone()
        texts = [
            segment(9, 3, None, kv_heads, width),
            segment(3, 4, [-1, 0, 0, 1], kv_heads, width, seed=3),
        ]
        squares = kind.squares(ops, given)
        query = kind.turn_product(ops, plan(texts, heads), given, squares, layer, *turns, 0, shape)
        kind.add_product(ops, given, squares, query.flatten(1), layer.out.data, layer.out_bias)
        gated = kind.gate_product(ops, given, squares, layer.mlp_norm, 1e-5, made, layer.gate_up_bias)
        kind.add_product(ops, given, squares, gated, layer.down.data, layer.down_bias)
        return [query, gated, given, squares, *(text.cache.data for text in texts)]

    fused, apart = run(kernels, FusedKernels), run(kernels, FusedReference)
    expected = run(Reference(), FusedReference)
    assert kernels._counts is not None and not kernels._counts.any()
    for one, other, reference in zip(fused, apart, expected, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, reference, rtol=1e-4, atol=1e-4)
