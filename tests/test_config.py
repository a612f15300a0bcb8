"""Numbers that no run can use are refused at the door, by name, whatever their size."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import torch

from tokenswift import SamplingParams
from tokenswift.config.fields import AtLeast, Between, Option, check_fields, field_types
from tokenswift.config.strategies import OPTIONS, TokenSwiftOptions
from tokenswift.sampling.sampler import Sampler
from tokenswift.types import InputError


@pytest.mark.parametrize("value", [-(10**400), 10**5000, 2**63], ids=["-10^400", "10^5000", "2^63"])
def test_huge_integers(value: int) -> None:
    options_classes: list[Any] = [SamplingParams, *OPTIONS.values()]
    for options_class in options_classes:
        for name, field_type in field_types(options_class).items():
            scales = name in ("temperature", "repetition_penalty")  # of which 2^63 is one
            if field_type.is_number and not (scales and value == 2**63):
                with pytest.raises(InputError, match=rf"^{name} is .{{1,90}}; valid: [^\n]+$"):
                    options_class(**{name: value})


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
        assert caught.value.field == field
        assert str(caught.value).startswith(f"{field} is ")
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


@dataclass(frozen=True)
class Lengths:
    """Options whose fields carry their own rules."""

    window: Annotated[int, AtLeast(16), Option(shown=True)] = 16
    share: Annotated[float | None, Between(0, 1, "from 0 to 1")] = None
    most: int = 1

    def __post_init__(self) -> None:
        check_fields(self)


def test_a_field_carries_its_rule_and_its_option() -> None:
    window = field_types(Lengths)["window"]
    assert window.rule.valid == "an integer of at least 16"
    assert window.option.shown


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"window": 15}, "window is 15; valid: an integer of at least 16"),
        ({"window": None}, "window is None; valid: an integer of at least 16"),
        ({"share": 1.5}, "share is 1.5; valid: from 0 to 1"),
        ({"share": float("nan")}, "share is nan; valid: from 0 to 1"),
        ({"most": 0}, "most is 0; valid: an integer of at least 1"),
    ],
)
def test_a_number_against_the_rule_of_its_field(values: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        Lengths(**values)
    assert str(caught.value) == line


def test_none_and_numbers_within_the_rules_pass() -> None:
    assert Lengths(window=16, share=None, most=1) == Lengths()
    assert Lengths(share=1).share == 1
