"""Logit processors against transformers, the sliding window, and the choice rule."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
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
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.sampling import sampler as sampler_module
from tokenswift.sampling.filters import eta, min_p, processed, repetition_penalty, top_k, top_p
from tokenswift.sampling.sampler import RefusedRow, Sampler

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


@pytest.mark.parametrize(
    ("filter_of", "value"), [(top_k, 2), (top_p, 0.4), (min_p, 1 - 1e-7), (eta, 0.9)]
)
def test_ties_at_the_cut_are_all_kept(
    filter_of: Callable[[Tensor, object], Tensor], value: float
) -> None:
    scores = torch.tensor([[1.0, 5.0, 5.0, 0.0, 5.0, 5.0, -2.0]])
    is_left = filter_of(scores, value)[0] > -math.inf
    assert is_left.nonzero().squeeze(1).tolist() == [1, 2, 4, 5]


def test_a_repeated_id_is_penalised_once() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    ids = torch.tensor([[0, 1, 0, 1, 1]])
    assert repetition_penalty(logits, ids, 2.0).tolist() == [[1.0, -4.0, 1.0]]
    assert logits.tolist() == [[2.0, -2.0, 1.0]]


@pytest.mark.parametrize(
    ("history", "path", "token"),
    [
        ([0, 1, 2, 3], [], 0),  # token 0 has left the window
        ([0, 1, 2], [], 0),
        ([0, 2], [], 1),
        ([0, 2], [3], 1),
        ([0, 2], [3, 3], 0),  # tokens of a path push it out, too
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_only_the_newest_tokens_are_penalised(
    kernels: CpuBackend, history: list[int], path: list[int], token: int, compiled: bool
) -> None:
    params = SamplingParams(penalty_window=3, repetition_penalty=2.0, greedy=True)
    ranker = kernels.ranker(params) if compiled else None
    sampler = Sampler(params, 5, "cpu", ranker)
    logits = torch.tensor([[5.0, 4.0, 3.0, 0.0, 0.0]])
    assert sampler.choose(logits, history, [path]) == [token]


def test_a_refused_row_is_the_same_in_another_process() -> None:
    error = RefusedRow(17, "NaN")
    copied = pickle.loads(pickle.dumps(error))
    assert (copied.position, copied.fault) == (17, "NaN")
    assert str(copied) == str(error)


def test_greedy_ignores_temperature_filters_and_noise() -> None:
    params = SamplingParams(greedy=True, temperature=9.0, top_k=1, min_p=0.5, seed=3)
    sampler = Sampler(params, 100)
    logits = logits_of(0, 1, 100, 3.0)
    history = [int(logits.argmax())] * 5
    expected = repetition_penalty(logits, torch.tensor([history]), params.repetition_penalty)
    assert torch.equal(sampler.scores(logits, history, [[]]), expected)
    assert torch.equal(sampler.perturbed(logits, history, [[]]), expected)
    assert sampler.choose(logits, history, [[]]) == [int(expected.argmax())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_low_precision_logits_are_chosen_in_float32(
    kernels: CpuBackend, dtype: torch.dtype, compiled: bool
) -> None:
    params = SamplingParams(seed=4, temperature=0.7)
    sampler = Sampler(params, 200, "cpu", kernels.ranker(params) if compiled else None)
    rows = logits_of(3, 20, 200, 2.0).to(dtype)
    paths = [[token] for token in range(20)]
    assert sampler.scores(rows, [1], paths).dtype == torch.float32
    assert sampler.choose(rows, [1], paths) == sampler.choose(rows.float(), [1], paths)


@pytest.mark.parametrize("seed", [0, 5])
def test_the_choice_among_equal_scores_is_the_noises(seed: int) -> None:
    """Seed and position decide by the noise alone, whatever the text is."""
    params = SamplingParams(min_p=0.0, repetition_penalty=1.0, seed=seed)
    sampler = Sampler(params, 30)
    best = [int(sampler.noise.at(length).argmax()) for length in range(1, 12)]
    assert len(set(best)) > 5
    for token in (0, 7):
        texts = [[token] * length for length in range(1, 12)]
        assert [sampler.choose(torch.zeros(1, 30), text, [[]])[0] for text in texts] == best


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
