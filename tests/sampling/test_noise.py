"""The keyed noise: pinned integers, the distribution of the values, and the distribution of the
winner."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import gumbel_r, kstest

from tests.stats import chi_square
from tokenswift.sampling.noise import (
    Noise,
    gumbel,
    gumbels_,
    gumbels_of,
    mix64,
    noise_bits,
    position_key,
    uniform,
)

BIG = 150_000
KNOWN = {  # of the tokens 0, 1 and 149,999
    (0, 0): [3746585686858627171, 6235967106033911276, -8589257098032599092],
    (7, 1_000): [-218566924334300911, 7731812125505219482, -1316917699418378185],
    (2**63 - 1, 2**31): [-8096242942471265679, 8998297849457053402, 7165444518892265767],
}
SEEDS = st.integers(0, 2**63 - 1)


def test_known_answers() -> None:
    for (seed, position), words in KNOWN.items():
        assert noise_bits(seed, position, torch.tensor([0, 1, 149_999])).tolist() == words


@given(SEEDS, st.integers(0, 2**40), st.lists(st.integers(0, 2**31), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_bits_are_splitmix64_in_exact_arithmetic(seed: int, position: int, ids: list[int]) -> None:
    """The tensor arithmetic (signed, wrapping, arithmetic shifts) equals unsigned big integers."""
    key = position_key(seed, position)
    exact = [mix64(key + token * 0x9E3779B97F4A7C15) for token in ids]
    words = noise_bits(seed, position, torch.tensor(ids)).tolist()
    assert [word % 2**64 for word in words] == exact


def test_a_position_has_a_number_beside_the_noise_of_its_tokens() -> None:
    numbers = [uniform(seed, position) for seed in range(50) for position in range(200)]
    assert kstest(numbers, "uniform").pvalue > 1e-3
    assert len(set(numbers)) == len(numbers)
    for position in range(100):  # half of them have fewer than 53 bits: there the half counts
        word = mix64(position_key(7, position) - 0x9E3779B97F4A7C15)
        assert uniform(7, position) == ((word >> 11) + 0.5) / 2**53


def test_a_few_tokens_have_the_noise_of_all() -> None:
    ids = [499, 3]
    noise = Noise(7, 500).at(11)[ids]
    key = position_key(7, 11)
    assert torch.equal(gumbels_of(7, 11, torch.tensor(ids)), noise)
    assert [gumbel(key, token) for token in ids] == pytest.approx(noise.tolist())


def test_the_largest_noise_has_no_bit_set() -> None:
    largest = pytest.approx(54 * math.log(2))
    assert gumbel(0, 0) == largest
    assert gumbels_(torch.zeros(1, dtype=torch.int64)).item() == largest


def test_noise_of_which_all_bits_are_set_never_wins() -> None:
    assert gumbel(0xCF9A04AFFA6BADC0, 0) == -math.inf
    assert gumbels_(torch.tensor([-1])).item() == -math.inf


def test_distribution_of_the_values() -> None:
    values = torch.stack([Noise(11, 20_000).at(position) for position in range(20)]).double()
    assert kstest(values.flatten().numpy(), gumbel_r.cdf).pvalue > 1e-3


def test_mix64_is_the_published_splitmix64() -> None:
    """First outputs of splitmix64 from the state 1234567."""
    words = [mix64(1234567 + i * 0x9E3779B97F4A7C15) for i in (1, 2, 3)]
    assert words == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_seed_and_position_cannot_be_exchanged() -> None:
    tokens = torch.arange(50)
    rows = {
        tuple(noise_bits(seed, position, tokens).tolist())
        for seed in range(20)
        for position in range(20)
    }
    assert len(rows) == 400


@pytest.mark.parametrize("bits", [0, 1, 2**63 - 1, -(2**63), -(2**12)])
def test_noise_of_extreme_bits_is_finite(bits: int) -> None:
    assert abs(gumbels_(torch.tensor([bits])).item()) < 38


def test_noise_that_is_made_again_is_the_same() -> None:
    noise = Noise(5, 100)
    first = noise.at(0).clone()
    assert noise.at(0) is noise.at(0)
    for position in range(500):
        noise.at(position)
    assert torch.equal(noise.at(0), first)


@cache
def best_two(positions: int) -> torch.Tensor:
    """The largest two noises of a large vocabulary at each position."""
    tokens = torch.arange(BIG)
    rows = [gumbels_of(9, position, tokens).topk(2).values for position in range(positions)]
    return torch.stack(rows)


def test_the_largest_noise_of_a_large_vocabulary() -> None:
    """It is a Gumbel value shifted by log V, and the leaders do not collide, as they would if the
    uniforms were coarse."""
    best = best_two(200)
    assert (best[:, 0] == best[:, 1]).sum() <= 2  # float32 itself makes one in about 1,000
    assert len(set(best[:, 0].tolist())) == 200
    shifted = best[:, 0].double() - math.log(BIG)
    assert kstest(shifted.numpy(), gumbel_r.cdf).pvalue > 1e-3


def test_rare_tokens_win_as_often_as_they_should() -> None:
    """A large vocabulary shares 30% of the probability, one token more has the others."""
    best = best_two(200)[:, 0]
    score = math.log(0.7 / (0.3 / BIG))
    others = torch.stack([gumbels_of(10, position, torch.tensor([0])) for position in range(200)])
    wins = int((best > score + others[:, 0]).sum())
    assert abs(wins - 200 * 0.3) < 4 * math.sqrt(200 * 0.3 * 0.7)


@pytest.mark.parametrize("axis", ["position", "seed", "token"])
def test_neighbours_are_independent(axis: str) -> None:
    """Rank correlation at lags 1 to 4 along each axis of the key, and of the squares (spread)."""
    if axis == "seed":
        table = torch.stack([Noise(seed, 2000).at(17) for seed in range(100)])
    else:
        table = torch.stack([Noise(3, 2000).at(position) for position in range(100)])
    if axis == "token":
        table = table.T.contiguous()
    uniform = torch.exp(-torch.exp(-table.double())) - 0.5
    for values in (uniform, uniform**2 - 1 / 12):
        for lag in (1, 2, 3, 4):
            a = values[:-lag].flatten()
            b = values[lag:].flatten()
            correlation = float((a * b).mean() / values.var())
            assert abs(correlation) < 4.5 / math.sqrt(a.numel()), (axis, lag)


def test_winner_is_uniform_over_the_tokens() -> None:
    """With equal scores every token wins equally often, from seed to seed and position to
    position."""
    picks = [
        int(Noise(seed, 40).at(position).argmax()) for seed in range(200) for position in range(30)
    ]
    assert chi_square(picks, {token: 1 / 40 for token in range(40)}) > 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_same_integers_and_values_on_cuda() -> None:
    tokens = torch.arange(BIG)
    on_cuda = noise_bits(7, 123_456, tokens.cuda()).cpu()
    assert torch.equal(on_cuda, noise_bits(7, 123_456, tokens))
    expected = Noise(7, BIG).at(5)
    noise = Noise(7, BIG, "cuda").at(5).cpu()
    assert (noise != expected).sum() <= 5
    assert torch.allclose(noise, expected, rtol=3e-7, atol=3e-7)
