"""The compiled CPU kernels: against the torch path, and the rule that a row's bits depend on the
row's own context alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.rows import CHUNK, fuzz
from tokenswift.kernels.attention import AttentionContext
from tokenswift.kernels.base import Backend
from tokenswift.kernels.cpu import library
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.packed import Packed
from tokenswift.kv.cache import FullCache
from tokenswift.kv.entries import Entries
from tokenswift.loader.default_model import cache_dir
from tokenswift.loader.rotary import cos_sin

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _cache(kv_heads: int, width: int, before: int, rows: int, dtype: torch.dtype) -> FullCache:
    cache = FullCache(Entries(1, kv_heads, width, before + rows, dtype, CPU))
    cache.data.copy_(_random(*cache.data.shape, seed=2))
    cache._length = before
    return cache


def _tree(rows: int, reach: int = 6) -> list[int]:
    generator = torch.Generator().manual_seed(rows)
    parents = [-1]
    for row in range(1, rows):
        parent = torch.randint(max(0, row - reach), row, (1,), generator=generator)
        parents.append(int(parent))
    return parents


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows,columns", [(70, 50), (32, 64), (5, 2), (960, 576)])
def test_packing_is_reversible_and_products_equal_linear(
    kernels: CpuBackend, dtype: torch.dtype, rows: int, columns: int
) -> None:
    weight = _random(rows, columns, dtype=dtype)
    bias = _random(rows, seed=3)
    packed = kernels.pack(weight)
    ids = torch.tensor([0, rows - 1, rows // 2, 0])
    assert torch.equal(packed.unpack(), weight)
    assert torch.equal(packed.take(ids), weight[ids])
    for count in (1, 2, 7, 30):
        states = _random(count, columns, seed=4).to(dtype)
        expected = F.linear(states.double(), weight.double(), bias.double())
        products = kernels.linear(states, packed, bias).double()
        torch.testing.assert_close(products, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("width", [8, 48, 576])
def test_norm(kernels: CpuBackend, width: int) -> None:
    states = 3 * _random(19, width)
    weight = _random(width, seed=1)
    expected = Backend().norm(states, weight, 1e-5, torch.float32)
    normed = kernels.norm(states, weight, 1e-5, torch.float32)
    torch.testing.assert_close(normed, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(kernels.norm(states, weight, 1e-5, torch.bfloat16), normed.bfloat16())


#: committed keys, rows, whether a tree, sliding window: before, at and across the ends of chunks
CASES = [
    (0, 1, False, 0),
    (CHUNK - 1, 41, True, 0),
    (CHUNK + 44, 1, False, 0),
    (2 * CHUNK + 1, 41, True, 300),
    (100, 300, False, 0),
    (100, 300, False, 64),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads,kv_heads,width", [(9, 3, 64), (4, 4, 8), (8, 1, 80), (2, 2, 4), (6, 2, 128)]
)
def test_attention_equals_the_torch_path(
    kernels: CpuBackend, dtype: torch.dtype, heads: int, kv_heads: int, width: int
) -> None:
    for before, rows, is_tree, window in CASES:
        query = _random(heads, rows, width, seed=1)
        context = AttentionContext(
            layer=0,
            cache=_cache(kv_heads, width, before, rows, dtype),
            parents=_tree(rows) if is_tree else None,
            scale=width**-0.5,
            window=window,
        )
        attended = kernels.attend(query, context)
        expected = Backend().attend(query, context)
        near = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(attended, expected, rtol=near, atol=near)


def _seen(before: int, parents: list[int], window: int) -> torch.Tensor:
    """Which committed keys and rows each row sees: its path, within the window."""
    rows = len(parents)
    seen = torch.zeros(rows, before + rows, dtype=torch.bool)
    for row in range(rows):
        path = [row]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        keys = torch.cat([torch.arange(before), before + torch.tensor(path[::-1])])
        seen[row, keys[-window:]] = True  # positions rise along the path
    return seen


@pytest.mark.parametrize("before,rows,is_tree,window", CASES)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_torch_path_is_softmax_over_what_a_row_sees(
    before: int, rows: int, is_tree: bool, window: int, softcap: float | None, has_sinks: bool
) -> None:
    """Ancestors and committed keys within the window, with soft caps and sinks."""
    cache = _cache(3, 16, before, rows, torch.float32)
    query = _random(6, rows, 16, seed=1)
    parents = _tree(rows) if is_tree else None
    sinks = _random(6, seed=4) if has_sinks else None
    keys, values = (part.repeat_interleave(2, 0) for part in cache.data)
    scores = query @ keys.mT * 0.25
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = _seen(before, list(range(-1, rows - 1)) if parents is None else parents, window)
    sink_scores = torch.full((6,), -torch.inf) if sinks is None else sinks
    columns = [scores.masked_fill(~seen, -torch.inf), sink_scores.expand(rows, 6).T[..., None]]
    expected = torch.cat(columns, -1).softmax(-1)[..., :-1] @ values
    context = AttentionContext(
        layer=0,
        cache=cache,
        parents=parents,
        scale=0.25,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    attended = Backend().attend(query, context)
    torch.testing.assert_close(attended, expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_rows_have_their_own_bits(kernels: CpuBackend) -> None:
    tally = fuzz(kernels._lib, range(12))
    assert not tally.wrong
    assert tally.rows >= 1000


#: builds whose bits are compared: instruction sets as they are compiled, and with tunings by which
#: GCC splits a multiply-add that it may contract
BUILDS = [
    (name, library.instruction_sets()[name].flags) for name in library.fitting(library.processor())
]
V3 = "-march=x86-64-v3"
V4 = "-march=x86-64-v4"
TUNED = [("avx2", (V3, "-mtune=znver2")), ("avx2", (V3, "-mtune=znver3"))]
TUNED += [
    ("avx512-vnni", (V4, "-mavx512vnni", tuning))
    for tuning in ("-mtune=znver2", "--param=avoid-fma-max-bits=512", "-O2")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags"), BUILDS + [build for build in TUNED if build[0] in dict(BUILDS)]
)
def test_builds_have_the_same_bits(kernels: CpuBackend, name: str, flags: tuple[str, ...]) -> None:
    """In every type and format, but where bfloat16 enters products."""
    build = library.compiled(cache_dir() / "kernels", (flags,))
    if isinstance(build, str):
        pytest.skip("no C compiler here, or none that knows these flags")
    tally = fuzz(build, range(24))
    assert not tally.wrong
    assert tally.bits.digest() == fuzz(kernels._lib, range(24)).bits.digest()


def test_rows_that_know_of_their_pass_are_found(kernels: CpuBackend) -> None:
    class Bent(CpuBackend):
        def attend(self, query: torch.Tensor, context: AttentionContext) -> torch.Tensor:
            out = super().attend(query, context)
            return out if context.parents is None else torch.nextafter(out, torch.zeros_like(out))

        def linear(
            self,
            states: torch.Tensor,
            weight: Packed,
            bias: torch.Tensor | None = None,
            active: torch.dtype | None = None,
        ) -> torch.Tensor:
            out = super().linear(states, weight, bias, active)
            return out if len(out) < 20 else torch.nextafter(out, torch.zeros_like(out))

    tally = fuzz(kernels._lib, range(12), Bent)
    assert {case.split()[0] for case in tally.wrong} == {"attention", "product"}


def test_angles_are_rounded_from_the_true_ones() -> None:
    angles = torch.rand(100_000, generator=torch.Generator().manual_seed(1)) * 200_000
    cos, sin = cos_sin(angles)
    assert torch.equal(cos, angles.double().cos().float())
    assert torch.equal(sin, angles.double().sin().float())


def test_nan_reaches_no_row_that_does_not_see_it(kernels: CpuBackend) -> None:
    """A later row of a chain, and another branch."""
    cache = _cache(1, 16, 40, 20, torch.float32)
    cache.data[:, :, 50] = torch.nan
    chain = AttentionContext(layer=0, cache=cache, parents=None, scale=0.25)
    attended = kernels.attend(_random(2, 20, 16), chain)
    assert not attended[:10].isnan().any()
    assert attended[10:].isnan().all()
    cache = _cache(1, 16, 40, 5, torch.float32)
    tree = AttentionContext(layer=0, cache=cache, parents=(-1, 0, 0, 1, 2), scale=0.25)
    expected = kernels.attend(_random(2, 5, 16), tree)
    cache.data[:, :, 42] = torch.nan
    attended = kernels.attend(_random(2, 5, 16), tree)
    assert torch.equal(attended[[0, 1, 3]], expected[[0, 1, 3]])
    assert attended[[2, 4]].isnan().all()
