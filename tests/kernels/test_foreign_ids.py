"""Ids for which a matrix has no row, and rows that cannot run: refused in one line, never looked up."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tiny import VOCAB, tiny_model
from tokenswift.config import SamplingParams
from tokenswift.kernels import base
from tokenswift.kernels.base import Backend
from tokenswift.kernels.cpu import structs
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.formats import Q4_1, Q8_0, Stored
from tokenswift.kernels.torch import TorchBackend
from tokenswift.kernels.weights import Packed
from tokenswift.kv.full import Entries, FullCache
from tokenswift.models.target import make_target
from tokenswift.sampling.choice import Sampler
from tokenswift.sampling.ranking import LogitRows, Subset
from tokenswift.types import InputError

CPU = torch.device("cpu")
ROWS = 70
#: ids without a row: the next ones, in the last panel's padding, far off, negative, beyond 32 bits
FOREIGN = (70, 71, 95, 96, 10**6, -1, -70, 2**31, -(2**31), 2**62, -(2**63))


def refused(token: int, count: int = ROWS) -> Any:
    return pytest.raises(InputError, match=rf"^token id is {token}; valid: 0 to {count - 1}, the model's voc")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)


def weights(backend: Backend) -> dict[str, Packed]:
    few = [Stored(form, form.encode(random(rows, 64))) for form, rows in ((Q8_0, 32), (Q4_1, 38))]  # type: ignore[misc]
    made: dict[str, Any] = {str(kind): random(ROWS, 64).to(kind) for kind in (torch.float32, torch.bfloat16)}
    made |= {"low": Stored(Q8_0, Q8_0.encode(random(ROWS, 64))), "two formats": few}  # type: ignore[misc]
    return {name: backend.pack(each) for name, each in made.items()}


@pytest.mark.parametrize("panels", [True, False])
@pytest.mark.parametrize("foreign", FOREIGN)
def test_rows_of_a_weight(kernels: CpuBackend, panels: bool, foreign: int) -> None:
    backend: Backend = kernels if panels else TorchBackend()
    for weight in weights(backend).values():
        assert len(backend.take(weight, torch.tensor([0, ROWS - 1, 5]))) == 3
        for ids in ([foreign], [0, foreign, 1], [0, 1, foreign]):
            with refused(foreign):
                backend.take(weight, torch.tensor(ids))


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("native", [True, False])
def test_tokens_of_a_text(kernels: CpuBackend, native: bool, limited: bool) -> None:
    params = SamplingParams(repetition_penalty=1.3, penalty_window=4)
    sampler = Sampler(params, ROWS, CPU, kernels.ranker(params) if native else None)
    subset = Subset(torch.arange(1, ROWS, 2), ROWS) if limited else None
    columns = ROWS if subset is None else len(subset.ids)
    rows = LogitRows(random(2, columns), [5, 6], [[], [7]], [2, 3], [3, 3], True, subset)
    expected = sampler.candidates(rows)
    for foreign in (70, 71, 10**6, 2**31 - 1, -1, -(2**31)):
        for wrong in ({"history": [5, foreign]}, {"paths": [[], [foreign]]}, {"history": [foreign] * 9}):
            with refused(foreign):
                sampler.candidates(replace(rows, **wrong))
    # what lies before the window is not looked at; the work space is as it was
    old = replace(rows, history=[10**6, 5, 6, 5, 6], positions=[5, 6])
    assert len(sampler.candidates(old)) == 2
    assert sampler.candidates(rows) == expected


def test_tokens_of_a_pass() -> None:
    """The native decoder, its embedding apart or tied."""
    for tied in (False, True):
        target = make_target(tiny_model("llama", tie_word_embeddings=tied))
        for foreign in (VOCAB, VOCAB + 31, -1, 10**6):
            cache, at = target.new_cache(8), torch.arange(2)
            with refused(foreign, VOCAB):
                target.forward(torch.tensor([1, foreign]), at, cache)
            with refused(foreign, VOCAB):
                target.prefill([1, foreign, 2], cache)
            with refused(foreign, VOCAB):
                target.embed(torch.tensor([foreign]))


def test_rows_that_cannot_run_are_refused_in_c(kernels: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own check left out."""
    monkeypatch.setattr(structs, "check_rows", lambda *args: None)
    assert base.check_rows is not structs.check_rows
    cache = FullCache(Entries(1, 2, 8, 40, torch.float32, CPU))
    cache.data.zero_()
    cache._length = 38
    message = re.escape("the kernels refuse rows; valid: rows that fit, each parent -1 or an earlier row")
    for parents in ([0], [-2], [-1, 1], [-1, 7], [1, -1], [-1, -(2**31)], [2**31 - 1, 0]):
        with pytest.raises(ValueError, match=message):
            kernels.attend(random(4, len(parents), 8), 0, cache, parents, 1.0)
    with pytest.raises(ValueError, match=message):
        kernels.attend(random(4, 3, 8), 0, cache, None, 1.0)
    with pytest.raises(ValueError, match=message):
        kernels.attend(random(4, 0, 8), 0, cache, None, 1.0)
