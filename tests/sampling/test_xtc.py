"""XTC: which tokens it leaves out, and at which positions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tokenswift.config.sampling import SamplingParams, settings_of
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.sampling.sampler import Sampler
from tokenswift.sampling.xtc import exclude_top, excludes
from tokenswift.types import InputError

OFF: dict[str, Any] = {"min_p": 0.0, "repetition_penalty": 1.0}
LEFT_OUT = -math.inf


@pytest.mark.parametrize(
    ("probabilities", "kept"),
    [
        ((0.4, 0.3, 0.2, 0.06, 0.04), (2, 3, 4)),  # three are likely: the least of them stays
        ((0.2, 0.4, 0.3, 0.06, 0.04), (0, 3, 4)),  # in any order
        ((0.7, 0.09, 0.08, 0.07, 0.06), (0, 1, 2, 3, 4)),  # one alone is likely
        ((0.3, 0.3, 0.3, 0.05, 0.05), (0, 1, 2, 3, 4)),  # all that tie with the least stay
        ((0.4, 0.2, 0.2, 0.1999, 0.0001), (3, 4)),
    ],
)
def test_of_the_likely_tokens_the_least_likely_stays(
    probabilities: tuple[float, ...], kept: tuple[int, ...]
) -> None:
    scores = torch.tensor([probabilities]).log() + 3.0
    left = exclude_top(scores, 0.1)[0]
    assert [token for token, score in enumerate(left.tolist()) if score > LEFT_OUT] == list(kept)
    assert torch.equal(left[list(kept)], scores[0, list(kept)])


def test_nothing_changes_where_no_token_is_likely() -> None:
    scores = torch.zeros(1, 50)  # each has a probability of 0.02
    assert torch.equal(exclude_top(scores, 0.1), scores)


def test_it_goes_by_what_the_filters_left(kernels: CpuBackend) -> None:
    """Of 0.5, 0.3, 0.09, 0.11 min-p leaves the first two: 0.625 and 0.375."""
    logits = torch.tensor([[0.5, 0.3, 0.09, 0.11]]).log()
    params = SamplingParams(min_p=0.5, repetition_penalty=1.0, xtc_probability=1.0)
    scores = Sampler(params, 4).scores(logits, [1], [[]])
    assert scores.softmax(-1).tolist() == [[0.0, 1.0, 0.0, 0.0]]
    for ranker in (None, kernels.ranker(params)):
        assert Sampler(params, 4, ranker=ranker).choose(logits, [1], [[]]) == [1]


def test_a_share_of_the_positions_is_affected() -> None:
    for share in (0.0, 0.3, 1.0):
        params = SamplingParams(xtc_probability=share, seed=5)
        affected = sum(excludes(params, position) for position in range(4000)) / 4000
        assert affected == pytest.approx(share, abs=0.03)
    greedy = SamplingParams(greedy=True, xtc_probability=1.0)
    assert not any(excludes(greedy, position) for position in range(100))


def test_positions_are_decided_by_the_seed() -> None:
    first, same, other = (
        [excludes(SamplingParams(xtc_probability=0.5, seed=seed), place) for place in range(64)]
        for seed in (1, 1, 2)
    )
    assert first == same
    assert first != other


def test_a_row_is_affected_by_the_position_that_it_predicts() -> None:
    """Behind the text and a path of drafted tokens."""
    params = SamplingParams(**OFF, xtc_probability=0.5)
    logits = torch.zeros(21, 40)
    logits[:, :2] = torch.tensor([9.0, 8.0])  # both are likely, so the first is left out
    paths = [[1] * length for length in range(21)]
    left = Sampler(params, 40).scores(logits, [7, 7, 7], paths)
    affected = (left[:, 0] == LEFT_OUT).tolist()
    assert affected == [excludes(params, 3 + len(path)) for path in paths]
    assert set(affected) == {True, False}


def test_the_number_of_rows_changes_nothing_on_a_device() -> None:
    """Rows are filtered in batches of one size there (`Sampler.row_by_row`)."""
    params = SamplingParams(**OFF, xtc_probability=0.5)
    logits = torch.randn(21, 40, generator=torch.Generator().manual_seed(2)) * 3
    paths = [[1] * length for length in range(21)]
    together = Sampler(params, 40, row_by_row=False).scores(logits, [7], paths)
    assert torch.equal(together, Sampler(params, 40).scores(logits, [7], paths))


@pytest.mark.parametrize(
    ("name", "wrong", "valid"),
    [
        ("xtc_probability", 1.5, "from 0 (off) to 1"),
        ("xtc_threshold", 0.0, "in (0, 1]"),
        ("xtc_threshold", 1.1, "in (0, 1]"),
    ],
)
def test_values_out_of_range_are_named(name: str, wrong: float, valid: str) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**{name: wrong})  # type: ignore[arg-type]
    assert str(caught.value) == f"{name} is {wrong}; valid: {valid}"


def test_records_name_it_only_where_it_is_on() -> None:
    assert "xtc_probability" not in settings_of(SamplingParams())
    assert settings_of(SamplingParams(xtc_probability=0.5))["xtc_probability"] == 0.5
