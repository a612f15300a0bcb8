"""Runs that the model ended, gone on with: ``min_tokens`` may grow, and takes back the end mark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tokenswift
from tests.conftest import tiny_model, tiny_tokenizer
from tests.runs.common import Stop, after
from tokenswift import LLM, Generation, InputError, SamplingParams
from tokenswift.runs import folder as folders
from tokenswift.runs.lists import summary_of

SAMPLING = SamplingParams(seed=3, temperature=1.3, min_p=0.0, repetition_penalty=1.0)
LENGTH = 90


@pytest.fixture(scope="module")
def ending() -> LLM:
    """A tiny model that ends its text well before 90 tokens."""
    plain = LLM.from_model(tiny_model(), tiny_tokenizer())
    tokens = plain.generate("hello", LENGTH, sampling=SAMPLING, ignore_eos=True).token_ids
    model = tiny_model()
    model.generation_config.eos_token_id = tokens[40]
    return LLM.from_model(model, tiny_tokenizer())


def begun(llm: LLM, folder: Path, **call: Any) -> Generation:
    result = llm.generate("hello", LENGTH, sampling=SAMPLING, run_dir=folder, **call)
    assert result.finish_reason == "eos"
    return result


def unending(llm: LLM, length: int = LENGTH) -> Generation:
    """The text of which no end mark can be a part."""
    return llm.generate(
        "hello",
        length,
        temperature=1.3,
        seed=3,
        min_p=0.0,
        dry_multiplier=0.0,
        min_tokens=length,
    )


def test_a_run_that_the_model_ended_goes_on_in_place_of_its_end_mark(
    ending: LLM, tmp_path: Path
) -> None:
    """Without filters, the text is that of a run which could not end from its beginning."""
    begun(ending, tmp_path / "run")
    longer = tokenswift.resume(tmp_path / "run", llm=ending, min_tokens=LENGTH)
    assert longer.finish_reason == "length"
    assert longer.token_ids == unending(ending).token_ids


def test_text_and_journal_have_no_trace_of_the_end_mark(ending: LLM, tmp_path: Path) -> None:
    begun(ending, tmp_path / "run")
    longer = tokenswift.resume(tmp_path / "run", llm=ending, min_tokens=LENGTH)
    state = folders.load(tmp_path / "run")[1]
    assert state.tokens == longer.token_ids
    assert state.text + state.tail == longer.text
    assert (tmp_path / "run" / "text.txt").read_bytes().decode() == longer.text
    assert len(state.chars) == len(state.sources) == sum(step[0] for step in state.steps) == LENGTH


def test_it_is_interrupted_and_resumed_with_the_same_tokens(ending: LLM, tmp_path: Path) -> None:
    begun(ending, tmp_path / "run")
    with pytest.raises(Stop):
        tokenswift.resume(tmp_path / "run", llm=ending, min_tokens=LENGTH, on_step=after(5))
    assert summary_of(tmp_path / "run")["state"] == "interrupted"
    again = tokenswift.resume(tmp_path / "run", llm=ending)
    assert again.token_ids == unending(ending).token_ids


def test_a_run_that_cannot_end_early_still_cannot_when_it_is_made_longer(
    ending: LLM, tmp_path: Path
) -> None:
    begun(ending, tmp_path / "run")
    tokenswift.resume(tmp_path / "run", llm=ending, min_tokens=LENGTH)
    longer = tokenswift.resume(tmp_path / "run", LENGTH + 30, llm=ending)
    assert longer.token_ids == unending(ending, LENGTH + 30).token_ids


def test_the_same_call_with_more_min_tokens_goes_on_too(ending: LLM, tmp_path: Path) -> None:
    begun(ending, tmp_path / "run")
    call: dict[str, Any] = {"temperature": 1.3, "seed": 3, "min_p": 0.0, "dry_multiplier": 0.0}
    call |= {"penalty_window": SAMPLING.penalty_window, "dry_breakers": SAMPLING.dry_breakers}
    longer = ending.generate("hello", LENGTH, min_tokens=60, run_dir=tmp_path / "run", **call)
    assert len(longer.token_ids) > 60


def test_min_tokens_of_a_run_never_fall(ending: LLM, tmp_path: Path) -> None:
    begun(ending, tmp_path / "run")
    tokenswift.resume(tmp_path / "run", llm=ending, min_tokens=LENGTH)
    with pytest.raises(InputError, match="min_tokens is 0, was 90"):
        ending.generate("hello", LENGTH, sampling=SAMPLING, run_dir=tmp_path / "run")


@pytest.mark.parametrize("least", [-1, LENGTH + 1])
def test_min_tokens_are_at_most_those_of_the_run(ending: LLM, tmp_path: Path, least: int) -> None:
    begun(ending, tmp_path / "run")
    with pytest.raises(InputError, match=f"min_tokens is {least}; valid: from 0, the run's, to 90"):
        tokenswift.resume(tmp_path / "run", llm=ending, min_tokens=least)


def test_a_stop_text_still_ends_a_run_for_good(ending: LLM, tmp_path: Path) -> None:
    plain = ending.generate("hello", LENGTH, sampling=SAMPLING)
    stop = next(letter for letter in plain.text[10:] if letter.isascii())
    call: dict[str, Any] = {"sampling": SAMPLING, "stop": (stop,), "run_dir": tmp_path / "run"}
    first = ending.generate("hello", LENGTH, **call)
    again = tokenswift.resume(tmp_path / "run", llm=ending, min_tokens=LENGTH)
    assert first.finish_reason == "stop"
    assert again.token_ids == first.token_ids
