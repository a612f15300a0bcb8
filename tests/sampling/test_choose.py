"""The choice rule in C against the one in torch: same tokens, same values, whatever the
processors."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.sampling.test_adjust import ALL, RULES, texts_of
from tests.sampling.test_adjust import SETTINGS as ADJUSTED
from tokenswift.config.sampling import SamplingParams
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.sampling.rows import LogitRows, Subset, allowed_tokens
from tokenswift.sampling.sampler import Sampler
from tokenswift.sampling.text_rules import NO_RULES, TextRules
from tokenswift.types import InputError, RunError

V = 3000
OFF: dict[str, Any] = {"min_p": 0.0, "repetition_penalty": 1.0}
SETTINGS = {
    "paper": SamplingParams(),
    "greedy": SamplingParams(greedy=True),
    "nothing": SamplingParams(min_p=0.0, repetition_penalty=1.0),
    "hot": SamplingParams(min_p=0.0, temperature=2.0, repetition_penalty=1.1, penalty_window=7),
    "top-k": SamplingParams(min_p=0.0, top_k=20, temperature=0.7, penalty_window=30),
    "few": SamplingParams(min_p=0.0, top_k=5, temperature=1.5),
    "top-p": SamplingParams(min_p=0.0, top_p=0.9, penalty_window=5),
    "all but nothing of top-p": SamplingParams(min_p=0.0, top_p=1 - 1e-9, penalty_window=5),
    "narrow top-p": SamplingParams(min_p=0.02, top_p=0.2, repetition_penalty=1.0),
    "eta": SamplingParams(min_p=0.0, eta_cutoff=2e-3),
    "all": SamplingParams(min_p=0.01, top_p=0.95, top_k=200, eta_cutoff=1e-3, temperature=1.2),
    "xtc": SamplingParams(**OFF, xtc_probability=0.7, xtc_threshold=0.05),
    "xtc after filters": SamplingParams(
        min_p=0.02, top_p=0.9, eta_cutoff=1e-3, xtc_probability=0.5, temperature=0.8
    ),
    "xtc, greedy": SamplingParams(greedy=True, xtc_probability=1.0),
    **{name: SamplingParams(**OFF | values) for name, values in ADJUSTED.items()},
    "all adjusted": SamplingParams(**ALL),
    "all adjusted, greedy": SamplingParams(**ALL, greedy=True),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("limited", [False, True])
def test_same_candidates_as_torch(kernels: CpuBackend, setting: str, limited: bool) -> None:
    rnd = random.Random(setting)
    torch.manual_seed(rnd.randrange(1000))
    for seed in range(6):
        params = replace(SETTINGS[setting], seed=seed)
        history, paths = texts_of(rnd)
        rules = TextRules(len(history) // 2, **RULES) if params.adjusts else NO_RULES
        plain = Sampler(params, V, rules=rules)
        native = Sampler(params, V, "cpu", kernels.ranker(params), rules=rules)
        subset = Subset(torch.randperm(V)[:500], V) if limited else None
        # the text grows as in decoding; a path stands behind it again each time
        for step, widths in enumerate(([1, 2, 2, 1], [1, 2, 5, 40], [1, 2, 5, 40])):
            positions = [
                len(history) + len(path) + gap
                for path, gap in zip(paths, (0, 0, 2, 40), strict=True)
            ]
            logits = torch.randn(4, V) * rnd.choice([1, 3, 6])
            for row, path in zip(logits, paths, strict=True):
                row[torch.tensor([*history, *path])] += 4  # what the penalty moves decides
            rows = logits if subset is None else logits[:, subset.ids].contiguous()
            for noise in (0.0, 0.5, 1.0):
                batch = LogitRows(rows, history, paths, positions, widths, noise, subset)
                expected = plain.candidates(batch)
                for ours, theirs in zip(native.candidates(batch), expected, strict=True):
                    assert ours.tokens == theirs.tokens
                    assert ours.values == theirs.values
                    assert ours.probs == pytest.approx(theirs.probs, rel=1e-4)
            if subset is None:
                assert native.choose(logits, history, paths) == plain.choose(logits, history, paths)
            history += paths[step][:2]


def test_rows_are_chosen_as_they_are_alone(kernels: CpuBackend) -> None:
    params = SamplingParams(min_p=0.0)
    sampler = Sampler(params, V, "cpu", kernels.ranker(params))
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(1))
    paths = [[token] for token in range(5)]
    alone = [
        sampler.choose(logits[row : row + 1], [3, 4, 5], [path])[0]
        for row, path in enumerate(paths)
    ]
    assert sampler.choose(logits, [3, 4, 5], paths) == alone


def test_repetitions_beyond_the_table_lose_no_more(kernels: CpuBackend) -> None:
    params = SamplingParams(**OFF, dry_multiplier=0.1, dry_base=1.01)
    text = [*range(1, 20)] * 60  # 1,121 tokens are repeated
    rows = LogitRows(torch.zeros(1, V), text, [[]], [len(text)], [V], noise=0.0)
    for ranker in (None, kernels.ranker(params)):
        (ranked,) = Sampler(params, V, "cpu", ranker).candidates(rows)
        assert min(ranked.values) == pytest.approx(-0.1 * 1.01**512, rel=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_sampler_follows_one_text_after_another(kernels: CpuBackend, compiled: bool) -> None:
    """A shorter list, one with another end, and one that was changed at its end in place."""
    params = SamplingParams(**OFF, dry_multiplier=0.1, dry_base=1.01)
    sampler = Sampler(params, V, "cpu", kernels.ranker(params) if compiled else None)
    text = [*range(1, 20)] * 6

    def values(sampler: Sampler, text: list[int]) -> list[float]:
        rows = LogitRows(torch.zeros(1, V), text, [[]], [len(text)], [V], noise=0.0)
        return sampler.candidates(rows)[0].values

    for other in (text, text[:-3], [*text[:50], 7, 8, *text[50:60]], text):
        assert values(sampler, other) == values(Sampler(params, V), other)
    text[-5:] = [100, 101, 102, 103, 104]
    assert min(values(sampler, text)) == 0.0


WIDTH = 1003  # not a multiple of a word's 32 bits


def words_of(allowed: torch.Tensor) -> torch.Tensor:
    """Rows of truth values as bit masks."""
    bits = F.pad(allowed, (0, -allowed.shape[1] % 32)).view(len(allowed), -1, 32)
    return (bits * (1 << torch.arange(32))).sum(-1).to(torch.int32)


def masked_rows(seed: int, share: float, subset: Subset | None) -> tuple[LogitRows, LogitRows]:
    """Four rows, all but the first with masks that allow a share of the tokens, and the same rows
    without masks, whose other logits are -inf."""
    logits = torch.randn(4, WIDTH) * 4
    allowed = torch.rand(4, WIDTH) < share
    allowed[:, [WIDTH - 1, subset.ids[7] if subset else 7]] = True
    if subset:
        allowed[2, subset.ids] = False
    if seed > 5:
        logits[3, ~allowed[3]] = torch.nan  # logits of tokens that may not come are not read
    words = words_of(allowed)[1:]
    assert torch.equal(allowed_tokens(words, WIDTH), allowed[1:])
    hidden = logits.where(allowed, -torch.inf)
    hidden[0] = logits[0]
    if subset:
        hidden[2] = logits[2]
    columns = slice(None) if subset is None else subset.ids
    rows = LogitRows(
        logits=logits[:, columns].contiguous(),
        history=[1, 2, 3],
        paths=[[], [4], [5, 6], [7]],
        positions=[3, 4, 5, 4],
        widths=[40] * 4,
        noise=1.0,
        subset=subset,
        masks=[None, *words],
    )
    return rows, replace(rows, logits=hidden[:, columns].contiguous(), masks=())


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("seed", range(0, 12, 2))
def test_masked_in_c_as_in_torch(kernels: CpuBackend, seed: int, limited: bool) -> None:
    """Masks come first: what they leave is ranked as if the rest had never had a finite score, and
    a row in whose subset nothing is allowed is ranked as it is."""
    rnd = random.Random(seed)
    torch.manual_seed(seed + limited)
    params = rnd.choice([params for params in SETTINGS.values() if not params.adjusts])
    params = replace(params, seed=seed)
    plain = Sampler(params, WIDTH)
    native = Sampler(params, WIDTH, "cpu", kernels.ranker(params))
    subset = Subset(torch.randperm(WIDTH)[:300], WIDTH) if limited else None
    rows, unmasked = masked_rows(seed, rnd.choice([0.003, 0.5, 0.97]), subset)
    expected = native.candidates(unmasked)
    for sampler in (native, plain):
        for ours, theirs in zip(sampler.candidates(rows), expected, strict=True):
            assert ours.tokens == theirs.tokens
            assert ours.values == theirs.values
        for row, theirs in enumerate(expected):
            (alone,) = sampler.candidates(rows.one(row))
            assert alone.values == theirs.values


def test_subsets_and_masks_of_another_vocabulary_are_refused(kernels: CpuBackend) -> None:
    with pytest.raises(InputError, match="token id is 300; valid: 0 to 299"):
        Subset(torch.tensor([5, 300]), 300)
    rows, _ = masked_rows(0, 0.5, None)
    native = Sampler(SamplingParams(), WIDTH, "cpu", kernels.ranker(SamplingParams()))
    words = torch.zeros(31, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"a mask is torch.int32 of shape \(31,\)"):
        native.candidates(replace(rows, masks=[words] * 4))


@pytest.mark.parametrize(
    ("value", "columns", "fault"),
    [
        (math.nan, slice(V - 1, V), "NaN"),
        (math.inf, slice(V - 1, V), "no finite maximum"),
        (-math.inf, slice(None), "no finite maximum"),
    ],
    ids=["nan", "inf", "all -inf"],
)
@pytest.mark.parametrize("setting", ["paper", "greedy", "nothing", "top-p", "eta"])
def test_bad_logits_are_refused(
    kernels: CpuBackend, setting: str, value: float, columns: slice, fault: str
) -> None:
    params = SETTINGS[setting]
    logits = torch.randn(2, V)
    logits[1, columns] = value
    line = rf"position 2 hold {fault}; no token can be chosen \(try dtype float32\)(\n|$)"
    for ranker in (kernels.ranker(params), None):
        sampler = Sampler(params, V, "cpu", ranker)
        with pytest.raises(RunError, match=line):
            sampler.choose(logits, [1], [[], [4]])
        assert len(sampler.choose(logits[:1], [1], [[]])) == 1


@pytest.mark.parametrize("greedy", [True, False])
def test_shares_of_the_largest_logits(kernels: CpuBackend, greedy: bool) -> None:
    """Where the next smaller float is more than 25 away, the best token still has all of the
    probability."""
    params = SamplingParams(greedy=greedy, repetition_penalty=1.0)
    logits = torch.tensor([[3e38, 1.0, 2.0]], dtype=torch.float32)
    rows = LogitRows(logits, [], [[]], [0], [2], noise=0.0, with_probs=True)
    assert Sampler(params, 3, "cpu", kernels.ranker(params)).candidates(rows)[0].probs[0] == 1.0


@pytest.mark.parametrize("size", [3, 40, 512, 1000, 4096])
def test_the_best_tokens_of_rows(kernels: CpuBackend, size: int) -> None:
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(size))
    logits[1, size // 2] = torch.nan
    logits[2] = -torch.inf
    best = logits.nan_to_num(-torch.inf, neginf=-torch.inf).topk(min(5, size))
    for ranker, rows in (
        (kernels.ranker(SamplingParams()), range(4)),
        (None, (0, 3)),
    ):  # torch puts NaN first
        ranked = Sampler(SamplingParams(), size, "cpu", ranker).best(logits, 5)
        for row in rows:
            is_finite = best.values[row] > -torch.inf
            tokens, values = ranked[row]
            expected = best.indices[row][is_finite].tolist()
            assert tokens[: len(expected)] == expected
            assert values[: len(expected)] == best.values[row][is_finite].tolist()
