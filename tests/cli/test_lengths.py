"""What a text that lost its thread says: the summary where, and a line what helps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift.cli.lengths import advice_on_litany
from tokenswift.cli.results import summary
from tokenswift.config.sampling import SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.engine.request import Request
from tokenswift.types import Generation, Litany


@pytest.fixture(scope="module")
def sound() -> Generation:
    """A text without a litany."""
    with LLM.from_model(tiny_model(), tiny_tokenizer()) as llm:
        return llm.generate([1, 2, 3], 8, ignore_eos=True)


@pytest.fixture(scope="module")
def litany(sound: Generation) -> Generation:
    """A text that becomes one."""
    found = Litany(start=5, span=3, opening="i no")
    return replace(sound, metrics=replace(sound.metrics, litany=found))


def test_a_summary_names_the_litany_and_its_form(sound: Generation, litany: Generation) -> None:
    assert 'from token 5 on it has few new words, and its sentences have one form ("i no …")' in (
        summary(litany)
    )
    assert "few new words" not in summary(sound)


def test_a_litany_is_told_what_delays_it(sound: Generation, litany: Generation) -> None:
    request = Request([1, 2, 3])
    assert advice_on_litany(litany, request).startswith("--xtc-probability 0.5 ")
    assert advice_on_litany(sound, request) == ""


@pytest.mark.parametrize("settings", [{"xtc_probability": 0.2}, {"greedy": True}])
def test_where_xtc_is_on_or_has_no_effect_it_is_not_named(
    litany: Generation, settings: dict[str, float]
) -> None:
    request = Request([1, 2, 3], sampling=SamplingParams(**settings))  # type: ignore[arg-type]
    assert advice_on_litany(litany, request) == ""
