"""What crosses the boundary to C is what C takes it for, whatever torch's default type."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tokenswift.config.sampling import SamplingParams
from tokenswift.kernels.base import Backend
from tokenswift.kernels.batch import check_rows
from tokenswift.kernels.check import Case
from tokenswift.kernels.cpu import structs
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.cpu.structs import address
from tokenswift.kernels.formats import Q8_0, Stored
from tokenswift.kernels.weights import Packed
from tokenswift.kv.cache import Entries, FullCache
from tokenswift.sampling.rows import LogitRows
from tokenswift.sampling.sampler import Sampler

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def stored(kernels: CpuBackend, rows: int, columns: int, form: Any = Q8_0) -> Packed:
    return kernels.pack(Stored(form, form.encode(random(rows, columns))))


def cache(dtype: torch.dtype = torch.float32, length: int = 30) -> FullCache:
    made = FullCache(Entries(1, 2, 8, 40, dtype, CPU))
    made.data.copy_(random(*made.data.shape))
    made._length = length
    return made


def everything(kernels: CpuBackend) -> list[torch.Tensor]:
    """What kernels, the torch path and the choice rule make of the same numbers."""
    made: list[torch.Tensor] = []
    states = random(5, 64)
    for weight in (kernels.pack(random(70, 64)), stored(kernels, 70, 64)):
        made += [
            kernels.linear(states, weight, random(70)),
            kernels.take(weight, torch.tensor([69, 0, 3])),
        ]
    for backend in (kernels, Backend()):
        made.append(backend.norm(states, random(64), 1e-5, torch.bfloat16))
        for kind in (torch.float32, torch.bfloat16, torch.float16):
            made.append(backend.attend(random(4, 3, 8), 0, cache(kind), [-1, 0, 0], 0.3, window=9))
    for form, active in ((None, None), (Q8_0, torch.int8)):
        case = Case(kernels, torch.float32, form, active)
        made += [case.run(kernels, (0, 5)), *case.tree(kernels, 3)]
    params = SamplingParams(top_k=20, top_p=0.9, min_p=0.01, temperature=0.7, seed=3)
    for ranker in (kernels.ranker(params), None):
        rows = LogitRows(random(2, 90), [5, 6], [[], [7]], [2, 3], [4, 4], True)
        for ranked in Sampler(params, 90, CPU, ranker).candidates(rows):
            made.append(
                torch.tensor([ranked.tokens, ranked.values, ranked.probs], dtype=torch.float64)
            )
    return made


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_type_changes_nothing(kernels: CpuBackend, default: torch.dtype) -> None:
    expected = everything(kernels)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = everything(kernels)
    finally:
        torch.set_default_dtype(usual)
    assert all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


# ---- what is refused -----------------------------------------------------------------------------


def test_address() -> None:
    good = torch.zeros(4, 6, dtype=torch.float32)
    assert address("it", good, torch.float32, 4, 6) == good.data_ptr()
    line = r"^it is torch.float32 of shape \(4, 6\) on cpu; valid: torch.bfloat16"
    with pytest.raises(ValueError, match=line):
        address("it", good, torch.bfloat16, 4, 6)
    for wrong in (
        good[:3],
        good[:, :5],
        good.T,
        good.double(),
        good.to("meta"),
        good[None],
        good[::2],
    ):
        with pytest.raises(ValueError, match="^it is torch.*; valid: torch.float32 of shape"):
            address("it", wrong, torch.float32, 4, 6)


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
    "heads that do not divide": lambda k: k.attend(random(3, 1, 8), 0, cache(), None, 1.0),
    "queries of another width": lambda k: k.attend(random(4, 1, 10), 0, cache(), None, 1.0),
    "rows beyond the cache": lambda k: k.attend(random(4, 11, 8), 0, cache(), None, 1.0),
    "a parent after its row": lambda k: k.attend(random(4, 2, 8), 0, cache(), [1, -1], 1.0),
    "a parent below -1": lambda k: k.attend(random(4, 2, 8), 0, cache(), [-2, 0], 1.0),
    "too few parents": lambda k: k.attend(random(4, 3, 8), 0, cache(), [-1, 0], 1.0),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_buffers_are_refused(kernels: CpuBackend, name: str) -> None:
    with pytest.raises(ValueError, match="valid: |needs more room|parents are"):
        WRONG[name](kernels)


def test_rows_that_cannot_run_are_refused_in_c(
    kernels: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own check left out."""
    monkeypatch.setattr(structs, "check_rows", lambda *args: None)
    assert check_rows is not structs.check_rows
    message = re.escape(
        "the kernels refuse rows; valid: rows that fit, each parent -1 or an earlier row"
    )
    wrong = ([0], [-2], [-1, 1], [-1, 7], [1, -1], [-1, -(2**31)], [2**31 - 1, 0])
    for rows, parents in (*((len(each), each) for each in wrong), (3, None), (0, None)):
        with pytest.raises(ValueError, match=message):
            kernels.attend(random(4, rows, 8), 0, cache(length=38), parents, 1.0)


def test_wrong_layers_are_refused(kernels: CpuBackend) -> None:
    case = Case(kernels, torch.float32)
    shape, weights = case.shape, case.weights
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


def test_wrong_passes_are_refused(kernels: CpuBackend) -> None:
    case = Case(kernels, torch.float32)
    case.run(kernels, (0, 2))
    right = case.states, case.cos, case.sin, case.keys.entries.data
    for name, wrong in (
        ("states", right[0][:, :-2]),
        ("states", right[0].double()),
        ("cos", right[1].bfloat16()),
        ("sin", right[2].double()),
        ("keys", right[3].bfloat16()),
        ("keys", right[3][:, :1].contiguous()),
        ("keys", right[3].transpose(1, 2).contiguous().transpose(1, 2)),
    ):
        case.states, case.cos, case.sin, case.keys.entries.data = right
        if name == "keys":
            case.keys.entries.data = wrong
        else:
            setattr(case, name, wrong)
        with pytest.raises(
            ValueError, match=f"^{name}.* is torch.*; valid: torch.float32 of shape"
        ):
            case.run(kernels, (0, 2))
