"""``numerics``: measures against near-ties leave the promise alone, and the rows they fill up are idle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny import FAMILIES, VOCAB, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.models.numerics import PRESETS, Numerics, parse_numerics
from tokenswift.models.target import HFTarget
from tokenswift.types import InputError

PROMPT = torch.randint(2, VOCAB, (30,), generator=torch.Generator().manual_seed(6)).tolist()
MEASURES = [
    Numerics(block=4),
    Numerics(block=16),
    Numerics(head_float32=True),
    Numerics(attention=torch.float32),
    Numerics(attention=torch.float64),
    Numerics(block=16, head_float32=True, attention=torch.float64),
]
OPTIONS: list[dict[str, Any]] = [
    {"tree": (1, 3, 3, 3), "ngrams": 6, "budget": 24, "draft": "partial"},
    {"tree": (2, 2), "ngrams": 2, "draft": "partial", "cache": "full"},
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("numerics", MEASURES, ids=str)
def test_passes_compute_the_same(family: str, numerics: Numerics) -> None:
    model = tiny_model(family)
    usual, other = HFTarget(model), HFTarget(model, numerics)
    parents = (-1, 0, 1, 1, 3)
    found = []
    for target in (usual, other):
        cache = target.new_cache(len(PROMPT) + 5)
        newest = target.prefill(PROMPT, cache)
        positions = torch.tensor([30, 31, 32, 32, 33])
        result = target.forward(torch.tensor([5, 6, 7, 8, 9]), positions, cache, parents)
        cache.commit((0, 1, 3))
        last = target.forward(torch.tensor([11]), torch.tensor([33]), cache)
        assert cache.length == 33 and len(result.hidden) == 5 and result.queries[0].shape[2] == 5
        assert newest.hidden.shape == (len(PROMPT), last.hidden.shape[1])
        found.append(torch.cat([target.logits(p.hidden) for p in (newest, result, last)]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=3e-5)
    usual.close()


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stable_tokens(family: str, dtype: torch.dtype) -> None:
    """float32: the tokens of plain decoding, and of default numerics. bfloat16: it runs."""
    model = tiny_model(family).to(dtype)
    default, stable = LLM.from_model(model), LLM.from_model(model, numerics="stable")
    params = SamplingParams(seed=3, min_p=0.02, penalty_window=20)
    plain = stable.generate(PROMPT, 60, "autoregressive", sampling=params, ignore_eos=True).token_ids
    if dtype == torch.float32:
        assert plain == default.generate(PROMPT, 60, sampling=params, ignore_eos=True).token_ids
    for options in OPTIONS:
        got = stable.generate(PROMPT, 60, "tokenswift", options, params, ignore_eos=True).token_ids
        assert len(got) == 60 and (dtype == torch.bfloat16 or got == plain)


def test_the_head_in_blocks_does_not_know_how_many_rows_there_are() -> None:
    target = HFTarget(tiny_model("llama").to(torch.bfloat16), "stable")
    hidden = torch.randn(70, 48, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    whole = target.logits(hidden)
    for rows in (1, 2, 15, 16, 17, 70):
        assert torch.equal(target.logits(hidden[:rows]), whole[:rows])


def test_names() -> None:
    assert parse_numerics("default") == Numerics()
    assert parse_numerics(PRESETS["stable"]) == PRESETS["stable"]
    with pytest.raises(InputError, match="numerics is 'best'; valid: default, stable"):
        LLM.from_model(tiny_model("llama"), numerics="best")
