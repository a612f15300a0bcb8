"""The choice rule in C against the one in torch: same tokens, same values, whatever the
processors."""

from __future__ import annotations

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
                asked = LogitRows(rows, history, paths, positions, widths, noise, subset)
                for ours, theirs in zip(
                    native.candidates(asked), plain.candidates(asked), strict=True
                ):
                    assert ours.tokens == theirs.tokens and ours.values == theirs.values
                    assert ours.probs == pytest.approx(theirs.probs, rel=1e-4)
            if subset is None:
                assert native.choose(logits, history, paths) == plain.choose(logits, history, paths)
            history += paths[step][:2]


def test_masked_in_c_as_in_torch(kernels: CpuBackend) -> None:
    """Masks come first: what they leave is ranked as if the rest had never had a finite score, and
    a row in whose subset nothing is allowed is ranked as it is."""
    width, rnd = 1003, random.Random(5)  # no whole number of words
    for seed, limited in enumerate((False, True) * 6):
        torch.manual_seed(seed)
        params = replace(
            rnd.choice([one for one in SETTINGS.values() if not one.adjusts]), seed=seed
        )
        plain, native = (
            Sampler(params, width),
            Sampler(params, width, "cpu", kernels.ranker(params)),
        )
        subset = Subset(torch.randperm(width)[:300], width) if limited else None
        logits = torch.randn(4, width) * 4
        allowed = torch.rand(4, width) < rnd.choice([0.003, 0.5, 0.97])
        allowed[:, [width - 1, subset.ids[7] if subset else 7]] = True
        if subset:
            allowed[2, subset.ids] = False
        if seed > 5:
            logits[3, ~allowed[3]] = torch.nan  # of what may not come nothing is read
        words = F.pad(allowed, (0, -width % 32)).view(4, -1, 32) * (1 << torch.arange(32))
        masks = [None, *words.sum(-1).to(torch.int32)[1:]]
        assert torch.equal(allowed_tokens(torch.stack(masks[1:]), width), allowed[1:])
        hidden = logits.where(allowed, -torch.inf)
        hidden[0] = logits[0]
        columns = slice(None) if subset is None else subset.ids
        if subset:
            hidden[2] = logits[2]
        asked = LogitRows(
            logits[:, columns].contiguous(),
            [1, 2, 3],
            [[], [4], [5, 6], [7]],
            [3, 4, 5, 4],
            [40] * 4,
            True,
            subset,
            masks=masks,
        )
        wanted = replace(asked, logits=hidden[:, columns].contiguous(), masks=())
        expected = native.candidates(wanted)
        for sampler in (native, plain):
            for ours, theirs in zip(sampler.candidates(asked), expected, strict=True):
                assert (ours.tokens, ours.values) == (theirs.tokens, theirs.values)
            for row, theirs in enumerate(expected):
                assert [one.values for one in sampler.candidates(asked.one(row))] == [theirs.values]
    with pytest.raises(InputError, match="token id is 300; valid: 0 to 299"):
        Subset(torch.tensor([5, 300]), 300)
    words = torch.zeros(31, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"a mask is torch.int32 of shape \(31,\)"):
        native.candidates(replace(asked, masks=[words] * 4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "all -inf"])
@pytest.mark.parametrize("setting", ["paper", "greedy", "nothing", "top-p", "eta"])
def test_bad_logits_are_refused(kernels: CpuBackend, setting: str, bad: Any) -> None:
    params = SETTINGS[setting]
    logits = torch.randn(2, V)
    logits[1, V - 1 if bad != "all -inf" else slice(None)] = (
        -torch.inf if bad == "all -inf" else bad
    )
    for ranker in (kernels.ranker(params), None):
        sampler = Sampler(params, V, "cpu", ranker)
        what = "NaN" if str(bad) == "nan" else "no finite maximum"
        with pytest.raises(
            RunError,
            match=rf"position 2 hold {what}; no token can be chosen \(try dtype float32\)(\n|$)",
        ):
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
    logits[1, size // 2], logits[2] = torch.nan, -torch.inf
    best = logits.nan_to_num(-torch.inf, neginf=-torch.inf).topk(min(5, size))
    for ranker, rows in (
        (kernels.ranker(SamplingParams()), range(4)),
        (None, (0, 3)),
    ):  # torch puts NaN first
        found = Sampler(SamplingParams(), size, "cpu", ranker).best(logits, 5)
        for row in rows:
            real = best.values[row] > -torch.inf
            values, tokens = (part[row][real].tolist() for part in best)
            assert [part[: len(tokens)] for part in found[row]] == [tokens, values]
