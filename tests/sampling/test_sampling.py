"""Logit processors against transformers, the sliding window, and the choice rule."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tokenswift.config.sampling import SamplingParams
from tokenswift.sampling import sampler as sampler_module
from tokenswift.sampling.filters import eta, min_p, processed, repetition_penalty, top_k, top_p
from tokenswift.sampling.sampler import Sampler

IDS = torch.zeros(1, 0, dtype=torch.long)  # transformers' filters ignore the ids


def logits_of(seed: int, rows: int, width: int, spread: float) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * spread


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert torch.equal(ours == -math.inf, theirs == -math.inf)


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("width", [5, 300, 9000])
@pytest.mark.parametrize("seed", range(4))
def test_processors_equal_transformers(seed: int, width: int, spread: float) -> None:
    """top-p needs one look (256), two (4,096) or the whole row, depending on spread and p.

    The reference of filters that sum probabilities runs in float64: its float32 sums round a token
    at the cut to either side, by the kind of processor.
    """
    rows = logits_of(seed, 3, width, spread)
    exact = rows.double()
    ids = torch.randint(0, width, (3, 40), generator=torch.Generator().manual_seed(seed))
    for theta in (1.2, 3.0):
        theirs = RepetitionPenaltyLogitsProcessor(theta)(ids, rows)  # type: ignore[arg-type]
        same(repetition_penalty(rows, ids, theta), theirs)
    for k in (1, 4, 50, 10_000):
        same(top_k(rows, k), TopKLogitsWarper(k)(IDS, rows))  # type: ignore[arg-type]
    for p in (0.01, 0.5, 0.9, 0.999):
        same(top_p(rows, p), TopPLogitsWarper(p)(IDS, exact).float())  # type: ignore[arg-type]
    for p in (0.01, 0.1, 0.9):
        same(min_p(rows, p), MinPLogitsWarper(p)(IDS, rows))  # type: ignore[arg-type]
    for epsilon in (2e-4, 2e-3, 0.1, 0.9):
        same(eta(rows, epsilon), EtaLogitsWarper(epsilon)(IDS, exact).float())  # type: ignore[arg-type]


def test_processors_in_sequence_equal_transformers() -> None:
    """Filters after filters (rows already hold -inf), in transformers' order."""
    used: dict[str, Any] = {
        "temperature": 1.5,
        "top_k": 60,
        "top_p": 0.95,
        "min_p": 0.08,
        "eta_cutoff": 0.06,
    }
    params = SamplingParams(**used, repetition_penalty=1.3)
    off = dict.fromkeys(used, 0)
    off |= {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(1.5),
            TopKLogitsWarper(60),
            TopPLogitsWarper(0.95),
            MinPLogitsWarper(0.08),
            EtaLogitsWarper(0.06),
        ]
    )
    matters = set()
    for seed in range(30):
        rows = logits_of(seed, 1, 500, 1.0 + seed % 5)
        history = torch.randint(0, 500, (60,), generator=torch.Generator().manual_seed(seed))
        ours = Sampler(params, 500).scores(rows, history.tolist(), [[]])
        same(ours, chain(history[None], rows))  # type: ignore[arg-type]
        for name, value in off.items():
            sampler = Sampler(replace(params, **{name: value}), 500)
            without = sampler.scores(rows, history.tolist(), [[]])
            if not torch.equal(without, ours):
                matters.add(name)
    assert matters == set(off)  # each processor changed some row


def naive_window(history: list[int], path: list[int], gap: int, window: int) -> set[int]:
    """Place by place: the last ``window`` places before the position, unknown ones skipped."""
    places: list[int | None] = [*history, *path, *[None] * gap]
    return {token for token in places[-window:] if token is not None}


@given(
    st.lists(st.integers(0, 9), max_size=12),
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 5)),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 14),
)
@settings(max_examples=400, deadline=None)
def test_windows_slide_along_each_path(history, rows, window) -> None:
    params = SamplingParams(repetition_penalty=2.0, penalty_window=window, greedy=True)
    paths = [path for path, _ in rows]
    positions = [len(history) + len(path) + gap for path, gap in rows]
    scores = Sampler(params, 10).scores(torch.ones(len(rows), 10), history, paths, positions)
    for row, (path, gap) in zip(scores, rows, strict=True):
        penalised = set(row.lt(1).nonzero().squeeze(1).tolist())
        assert penalised == naive_window(history, path, gap, window)


@given(st.integers(0, 1000), st.integers(1, 9), st.booleans())
@settings(max_examples=60, deadline=None)
def test_many_rows_equal_one_row_at_a_time(seed: int, window: int, filtered: bool) -> None:
    """A row's choice does not depend on the rows around it: tree and autoregressive rows agree.

    On an accelerator the same number of rows is processed whatever was asked for, so that sums are
    the same.
    """
    params = SamplingParams(
        seed=seed, penalty_window=window, min_p=0.05 if filtered else 0.0, top_p=0.98
    )
    sampler = Sampler(params, 64, row_by_row=False)
    generator = torch.Generator().manual_seed(seed)
    history = torch.randint(0, 64, (6,), generator=generator).tolist()
    paths = [
        torch.randint(0, 64, (n % (1 + seed % 4),), generator=generator).tolist() for n in range(20)
    ]
    rows = (torch.randn(20, 64, generator=generator) * 2).bfloat16()  # nothing is computed in it
    with mock.patch.object(sampler_module, "processed", wraps=processed) as seen:
        together = sampler.choose(rows, history, paths)
    assert [len(call.args[0]) for call in seen.mock_calls] == [16, 16]
    assert sampler.perturbed(rows, history, paths).argmax(-1).tolist() == together
    for i, path in enumerate(paths):
        fresh = Sampler(params, 64)
        assert fresh.choose(rows[i : i + 1].float(), [*history, *path], [[]]) == [together[i]]
