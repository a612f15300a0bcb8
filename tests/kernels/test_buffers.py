"""What crosses the boundary to C is what C takes it for, whatever torch's default type."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from tokenswift.config.sampling import SamplingParams
from tokenswift.kernels.attention import AttentionContext
from tokenswift.kernels.base import Backend
from tokenswift.kernels.batch import check_rows
from tokenswift.kernels.check import Case
from tokenswift.kernels.cpu import structs
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.cpu.structs import address
from tokenswift.kernels.formats import Q8_0, Stored
from tokenswift.kernels.packed import Packed
from tokenswift.kv.cache import FullCache
from tokenswift.kv.entries import Entries
from tokenswift.sampling.rows import LogitRows
from tokenswift.sampling.sampler import Sampler

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def stored(kernels: CpuBackend, rows: int, columns: int) -> Packed:
    return kernels.pack(Stored(Q8_0, Q8_0.encode(random(rows, columns))))


def cache(dtype: torch.dtype = torch.float32, length: int = 30) -> FullCache:
    full = FullCache(Entries(1, 2, 8, 40, dtype, CPU))
    full.data.copy_(random(*full.data.shape))
    full._length = length
    return full


def attend(
    kernels: Backend,
    rows: int,
    parents: Sequence[int] | None = None,
    heads: int = 4,
    width: int = 8,
    over: FullCache | None = None,
    window: int = 0,
) -> torch.Tensor:
    """Attention of random queries over a cache."""
    over = cache() if over is None else over
    context = AttentionContext(layer=0, cache=over, parents=parents, scale=0.3, window=window)
    return kernels.attend(random(heads, rows, width), context)


def everything(kernels: CpuBackend) -> list[torch.Tensor]:
    """What kernels, the torch path and the choice rule compute from the same numbers."""
    results: list[torch.Tensor] = []
    states = random(5, 64)
    for weight in (kernels.pack(random(70, 64)), stored(kernels, 70, 64)):
        results.append(kernels.linear(states, weight, random(70)))
        results.append(kernels.take(weight, torch.tensor([69, 0, 3])))
    for backend in (kernels, Backend()):
        results.append(backend.norm(states, random(64), 1e-5, torch.bfloat16))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            results.append(attend(backend, 3, [-1, 0, 0], over=cache(dtype), window=9))
    for form, active in ((None, None), (Q8_0, torch.int8)):
        case = Case(kernels, torch.float32, form, active)
        results.append(case.run(kernels, (0, 5)))
        results += case.tree(kernels, 3)
    params = SamplingParams(top_k=20, top_p=0.9, min_p=0.01, temperature=0.7, seed=3)
    for ranker in (kernels.ranker(params), None):
        rows = LogitRows(random(2, 90), [5, 6], [[], [7]], [2, 3], [4, 4], True)
        for ranked in Sampler(params, 90, CPU, ranker).candidates(rows):
            numbers = [ranked.tokens, ranked.values, ranked.probs]
            results.append(torch.tensor(numbers, dtype=torch.float64))
    return results


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_type_changes_nothing(kernels: CpuBackend, default: torch.dtype) -> None:
    expected = everything(kernels)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        results = everything(kernels)
    finally:
        torch.set_default_dtype(before)
    for result, value in zip(results, expected, strict=True):
        assert result.dtype == value.dtype
        assert torch.equal(result, value)


# ---- what is refused -----------------------------------------------------------------------------


RIGHT = torch.zeros(4, 6, dtype=torch.float32)


def test_the_address_of_a_tensor_of_the_right_type_and_shape() -> None:
    assert address("bias", RIGHT, torch.float32, 4, 6) == RIGHT.data_ptr()


def test_a_tensor_of_another_type_is_refused_by_name() -> None:
    line = r"^bias is torch.float32 of shape \(4, 6\) on cpu; valid: torch.bfloat16"
    with pytest.raises(ValueError, match=line):
        address("bias", RIGHT, torch.bfloat16, 4, 6)


@pytest.mark.parametrize(
    "wrong",
    [
        RIGHT[:3],
        RIGHT[:, :5],
        RIGHT.T,
        RIGHT.double(),
        RIGHT.to("meta"),
        RIGHT[None],
        RIGHT[::2],
    ],
    ids=["rows", "columns", "transposed", "double", "meta", "dimensions", "strides"],
)
def test_a_tensor_that_c_would_misread_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="^bias is torch.*; valid: torch.float32 of shape"):
        address("bias", wrong, torch.float32, 4, 6)


WRONG: dict[str, Callable[[CpuBackend], object]] = {
    "states too short": lambda k: k.linear(random(2, 62), k.pack(random(40, 64))),
    "states too long": lambda k: k.linear(random(2, 66), stored(k, 40, 64)),
    "a bias too short": lambda k: k.linear(random(2, 64), stored(k, 40, 64), random(39)),
    "whole numbers and floats": lambda k: k.linear(
        random(2, 64), k.pack(random(40, 64)), None, torch.int8
    ),
    "no panels": lambda k: k.linear(random(2, 64), Packed(random(40, 64))),
    "weights of float64": lambda k: k.linear(random(2, 64), k.pack(random(40, 64).double())),
    "a norm too short": lambda k: k.norm(random(2, 64), random(63), 1e-5, torch.float32),
    "heads that do not divide": lambda k: attend(k, 1, heads=3),
    "queries of another width": lambda k: attend(k, 1, width=10),
    "rows beyond the cache": lambda k: attend(k, 11),
    "a parent after its row": lambda k: attend(k, 2, [1, -1]),
    "a parent below -1": lambda k: attend(k, 2, [-2, 0]),
    "too few parents": lambda k: attend(k, 3, [-1, 0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_buffers_are_refused(kernels: CpuBackend, name: str) -> None:
    with pytest.raises(ValueError, match="valid: |needs more room|parents are"):
        WRONG[name](kernels)


@pytest.mark.parametrize(
    "rows,parents",
    [
        (1, [0]),
        (1, [-2]),
        (2, [-1, 1]),
        (2, [-1, 7]),
        (2, [1, -1]),
        (2, [-1, -(2**31)]),
        (2, [2**31 - 1, 0]),
        (3, None),
        (0, None),
    ],
)
def test_rows_that_cannot_run_are_refused_in_c(
    kernels: CpuBackend,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    parents: list[int] | None,
) -> None:
    """Python's own check left out."""
    monkeypatch.setattr(structs, "check_rows", lambda *args: None)
    assert check_rows is not structs.check_rows
    line = "the kernels refuse rows; valid: rows that fit, each parent -1 or an earlier row"
    with pytest.raises(ValueError, match=re.escape(line)):
        attend(kernels, rows, parents, over=cache(length=38))


def test_wrong_layers_are_refused(kernels: CpuBackend) -> None:
    case = Case(kernels, torch.float32)
    shape = case.shape
    weights = case.weights
    sizes = {
        "hidden": shape.hidden + 2,
        "inner": shape.inner // 2,
        "heads": 7,
        "kv_heads": 0,
        "layers": 3,
    }
    for name, size in (*sizes.items(), ("width", shape.width + 1), ("width", 1 << 19)):
        with pytest.raises(ValueError):
            kernels.body(replace(shape, **{name: size}), weights)
    for name in ("norm", "mlp_norm", "query_norm", "key_norm", "qkv_bias", "out_bias", "down_bias"):
        for vector in (random(5), random(shape.hidden).bfloat16()):
            with pytest.raises(ValueError, match="valid: torch.float32 of shape"):
                kernels.body(shape, [weights[0], replace(weights[1], **{name: vector})])


def test_wrong_passes_are_refused(kernels: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(kernels, torch.float32)
    case.run(kernels, (0, 2))
    data = case.keys.entries.data
    for name, owner, attribute, wrong in (
        ("states", case, "states", case.states[:, :-2]),
        ("states", case, "states", case.states.double()),
        ("cos", case, "cos", case.cos.bfloat16()),
        ("sin", case, "sin", case.sin.double()),
        ("keys", case.keys.entries, "data", data.bfloat16()),
        ("keys", case.keys.entries, "data", data[:, :1].contiguous()),
        ("keys", case.keys.entries, "data", data.transpose(1, 2).contiguous().transpose(1, 2)),
    ):
        line = f"^{name}.* is torch.*; valid: torch.float32 of shape"
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, wrong)
            with pytest.raises(ValueError, match=line):
                case.run(kernels, (0, 2))
