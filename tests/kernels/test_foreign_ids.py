"""Ids for which a matrix has no row: refused in one line, never looked up."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch

from tests.tiny import VOCAB, tiny_model
from tokenswift.config.sampling import SamplingParams
from tokenswift.kernels.base import Backend
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.formats import Q4_1, Q8_0, Format, Stored
from tokenswift.models.target import make_target
from tokenswift.sampling.rows import LogitRows, Subset
from tokenswift.sampling.sampler import Sampler
from tokenswift.types import InputError

ROWS = 70
#: ids without a row: the next one, in the last panel's padding, beyond it, negative, beyond 32 bits
FOREIGN = (70, 95, 96, -1, -70, 2**31, -(2**31), 2**62, -(2**63))


def refused(token: int, count: int = ROWS) -> AbstractContextManager[object]:
    """Expects the one line that refuses a token's id."""
    line = rf"^token id is {token}; valid: 0 to {count - 1}, the model's voc"
    return pytest.raises(InputError, match=line)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)


def stored(form: Format, rows: int) -> Stored:
    return Stored(form, form.encode(random(rows, 64)))


@pytest.mark.parametrize("panels", [True, False])
def test_rows_of_a_weight(kernels: CpuBackend, panels: bool) -> None:
    backend: Backend = kernels if panels else Backend()
    dense = random(ROWS, 64)
    in_parts = [stored(Q8_0, 32), stored(Q4_1, 38)]
    for source in (dense, dense.bfloat16(), stored(Q8_0, ROWS), in_parts):
        weight = backend.pack(source)
        assert len(backend.take(weight, torch.tensor([0, ROWS - 1, 5]))) == 3
        for foreign in FOREIGN:
            for ids in ([foreign], [0, foreign, 1]):
                with refused(foreign):
                    backend.take(weight, torch.tensor(ids))


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("native", [True, False])
def test_tokens_of_a_text(kernels: CpuBackend, native: bool, limited: bool) -> None:
    params = SamplingParams(repetition_penalty=1.3, penalty_window=4)
    sampler = Sampler(params, ROWS, torch.device("cpu"), kernels.ranker(params) if native else None)
    subset = Subset(torch.arange(1, ROWS, 2), ROWS) if limited else None
    columns = ROWS if subset is None else len(subset.ids)
    rows = LogitRows(random(2, columns), [5, 6], [[], [7]], [2, 3], [3, 3], True, subset)
    expected = sampler.candidates(rows)
    for foreign in (70, 10**6, 2**31 - 1, -1, -(2**31)):
        for wrong in (
            {"history": [5, foreign]},
            {"paths": [[], [foreign]]},
            {"history": [foreign] * 9},
        ):
            with refused(foreign):
                sampler.candidates(replace(rows, **wrong))
    assert sampler.candidates(rows) == expected


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_of_a_pass(tied: bool) -> None:
    target = make_target(tiny_model("llama", tie_word_embeddings=tied))
    for foreign in (VOCAB, VOCAB + 31, -1):
        cache = target.new_cache(8)
        with refused(foreign, VOCAB):
            target.forward(torch.tensor([1, foreign]), torch.arange(2), cache)
        with refused(foreign, VOCAB):
            target.prefill([1, foreign, 2], cache)
        with refused(foreign, VOCAB):
            target.embed(torch.tensor([foreign]))
