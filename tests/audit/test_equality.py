"""Token equality, the numeric error, and what counts as a near-tie."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.families import families
from tests.planted import cast, prefilled, second_part_shifted
from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.audit import equality
from tokenswift.audit.logits import numeric_error
from tokenswift.models.decoder import NativeTarget
from tokenswift.sampling.choice import Sampler

OPTIONS: dict[str, Any] = {"tree": (1, 3, 3, 3), "ngrams": 6, "budget": 24, "draft": "partial"}
PROMPT = torch.randint(2, VOCAB, (30,), generator=torch.Generator().manual_seed(6)).tolist()


def written(family: str, params: SamplingParams, dtype: torch.dtype = torch.float32):
    llm = LLM.from_model(cast(tiny_model(family), dtype))
    plain = equality.plain_text(llm, PROMPT, 60, params)
    return llm, plain, numeric_error(llm, PROMPT, plain.tokens, plain.kept)


@pytest.mark.parametrize("family", families())
def test_equal_tokens_and_a_small_sound_error(family: str) -> None:
    llm, plain, error = written(family, SamplingParams())
    assert error.positions >= 30 and error.sound and 0 <= error.error < 1e-4, error
    assert 0 < error.rounding.own.typical <= error.rounding.own.worst < 1e-4
    got = llm.generate(PROMPT, 60, "tokenswift", OPTIONS, plain.params, ignore_eos=True)
    assert equality.account(llm, plain, "tokenswift", OPTIONS, got.token_ids, error) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", families())
def test_half_precision_is_sound(family: str, dtype: torch.dtype) -> None:
    llm, plain, error = written(family, SamplingParams(), dtype)
    assert error.sound, error


def test_the_published_rule_is_no_near_tie() -> None:
    llm, plain, error = written("llama", SamplingParams())
    options = OPTIONS | {"acceptance": "published"}
    got = llm.generate(PROMPT, 60, "tokenswift", options, plain.params, ignore_eos=True)
    found = equality.account(llm, plain, "tokenswift", options, got.token_ids, error)
    assert found is not None and not found.near_tie and not found.reproduced
    assert found.plain[0] != found.other[0] and found.before


def test_a_model_that_computes_trees_wrongly_is_no_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong positions make the measured error large as well; the reference pass tells it from rounding."""
    llm, plain, good = written("llama", SamplingParams())
    real = llm.target.forward

    def late(tokens: Any, positions: Any, cache: Any, parents: Any = None) -> Any:
        off = 3 if parents is not None and len(tokens) > 1 else 0
        return real(tokens, positions + off, cache, parents)

    monkeypatch.setattr(llm.target, "forward", late)
    bad = numeric_error(llm, PROMPT, plain.tokens, plain.kept)
    assert not bad.sound and bad.error > 100 * good.unit
    got = llm.generate(PROMPT, 60, "tokenswift", OPTIONS, plain.params, ignore_eos=True)
    found = equality.account(llm, plain, "tokenswift", OPTIONS, got.token_ids, good)
    assert found is not None and not found.near_tie


def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of different numbers of rows round differently, by about a unit of bfloat16. The rounding is
    planted: how a machine rounds bfloat16 depends on its kind."""
    real = NativeTarget.logits

    def logits(self: NativeTarget, hidden: torch.Tensor) -> torch.Tensor:
        found = real(self, hidden)
        return found * (1 + 2**-8 * torch.sin(1000 * found + len(hidden)))

    monkeypatch.setattr(NativeTarget, "logits", logits)


def divergences(plant: Callable[[LLM], LLM] = lambda llm: llm) -> list[equality.Divergence]:
    """The divergences of texts by a bfloat16 model with a planted defect; the error is a sound model's."""
    found = []
    for seed in range(6):
        params = SamplingParams(seed=seed, min_p=0.02)
        _, _, error = written("llama", params, torch.bfloat16)
        assert error.sound
        llm = plant(LLM.from_model(cast(tiny_model("llama"), torch.bfloat16)))
        plain = equality.plain_text(llm, PROMPT, 60, params)
        got = llm.generate(PROMPT, 60, "tokenswift", OPTIONS, plain.params, ignore_eos=True)
        found.append(equality.account(llm, plain, "tokenswift", OPTIONS, got.token_ids, error))
    return [divergence for divergence in found if divergence is not None]


def test_divergences_by_rounding_are_near_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded(monkeypatch)
    found = divergences()
    assert found, "no divergence: nothing was tested"
    assert all(divergence.near_tie for divergence in found), found


def test_a_tie_between_passes_that_are_both_wrong_is_no_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both passes share the wrong positions, so each reproduces its own token and both agree."""
    rounded(monkeypatch)
    found = divergences(lambda llm: prefilled(llm, second_part_shifted(20)))
    assert found, "no divergence: nothing was tested"
    assert all(d.reproduced and d.difference <= 4 * d.error for d in found), found
    assert not any(divergence.near_tie for divergence in found), found


def test_flipping_shift_measures_ties_and_filter_edges() -> None:
    plain = Sampler(SamplingParams(greedy=True, repetition_penalty=1.0), 3)
    row = torch.tensor([1.0, 0.9, -5.0])
    assert equality.flipping_shift(plain, row, [0], 0, 1) == pytest.approx(0.05, rel=1e-3)
    # Token 1 would win by its noise, but min-p drops it by a hair: 0.001 of its logit is missing.
    seed = next(s for s in range(99) if Sampler(SamplingParams(seed=s), 3).noise.at(1).argmax() == 1)
    filtered = Sampler(SamplingParams(min_p=0.5, repetition_penalty=1.0, seed=seed), 3)
    edge = torch.tensor([0.0, math.log(0.5) - 0.001, -9.0])
    if filtered.noise.at(1)[1] - filtered.noise.at(1)[0] > 1:
        assert filtered.choose(edge[None], [0], [[]]) == [0]
        assert equality.flipping_shift(filtered, edge, [0], 0, 1) == pytest.approx(0.0005, rel=1e-2)


def test_not_a_number_is_an_infinite_error(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, plain, _ = written("llama", SamplingParams())
    first = next(iter(plain.kept))
    plain.kept[first] = torch.full((VOCAB,), math.nan)
    assert numeric_error(llm, PROMPT, plain.tokens, plain.kept).error == math.inf
