"""Numbers that no run can use are refused at the door, by name, whatever their size."""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

import pytest
import torch

from tokenswift import SamplingParams
from tokenswift.config.strategies import OPTIONS, TokenSwiftOptions
from tokenswift.sampling.sampler import Sampler
from tokenswift.types import InputError


@pytest.mark.parametrize("value", [-(10**400), 10**5000, 2**63], ids=["-10^400", "10^5000", "2^63"])
def test_huge_integers(value: int) -> None:
    kinds: list[Any] = [SamplingParams, *OPTIONS.values()]
    for kind in kinds:
        for field in fields(kind):
            scales = field.name in ("temperature", "repetition_penalty")  # of which 2^63 is one
            if str(field.type).startswith(("int", "float")) and not (scales and value == 2**63):
                with pytest.raises(
                    InputError, match=rf"^{field.name} is .{{1,90}}; valid: [^\n]+$"
                ):
                    kind(**{field.name: value})


def test_errors_carry_the_field() -> None:
    for make, field in (
        (lambda: SamplingParams(top_p=2), "top_p"),
        (lambda: SamplingParams(seed=-1), "seed"),
        (lambda: SamplingParams(greedy=1), "greedy"),  # type: ignore[arg-type]
        (lambda: SamplingParams(temperature=1e-31), "temperature"),
        (lambda: TokenSwiftOptions(cache="all"), "cache"),  # type: ignore[arg-type]
        (lambda: TokenSwiftOptions(tree=()), "tree"),
        (lambda: TokenSwiftOptions(budget=3), "budget"),
    ):
        with pytest.raises(InputError) as caught:
            make()
        assert caught.value.field == field and str(caught.value).startswith(f"{field} is ")
        copied = pickle.loads(pickle.dumps(caught.value))
        assert (copied.field, str(copied)) == (field, str(caught.value))
    assert InputError("no field").field is None


@pytest.mark.parametrize("extreme", [1e-30, 1e30])
@pytest.mark.parametrize(
    "rest",
    [{}, {"top_p": 0.5}, {"eta_cutoff": 0.1}, {"min_p": 5e-324}, {"repetition_penalty": 1e30}],
)
def test_the_extremes_that_are_taken_work(extreme: float, rest: dict[str, Any]) -> None:
    sampler = Sampler(SamplingParams(temperature=extreme, **rest), 50)
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 30
    tokens = sampler.choose(rows, [1, 2], [[], [3], [4, 5]])
    if extreme < 1 and not rest:
        assert tokens == sampler.scores(rows, [1, 2], [[], [3], [4, 5]]).argmax(-1).tolist()
    assert all(0 <= token < 50 for token in tokens)
