"""Prose beside answers: what share it has, how it begins, and how it is written."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from tests.conftest import tiny_tokenizer
from tests.train.test_eagle import job, model, trained
from tokenswift.config.sampling import CONTINUED
from tokenswift.engine.llm import LLM
from tokenswift.engine.request import Request
from tokenswift.train.options import DataOptions, Job
from tokenswift.train.states import Beginning, _beginnings, _requests
from tokenswift.train.texts import openings
from tokenswift.types import InputError


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_model(model(initializer_range=0.2), tiny_tokenizer())


def begun(llm: LLM, folder: Path, data: DataOptions, count: int = 60) -> list[Beginning]:
    """The first beginnings of a training's texts."""
    return list(islice(_beginnings(llm, data, replace(job(folder), data=data)), count))


def test_openings_repeat_with_their_seed_alone() -> None:
    first = list(islice(openings(3), 40))
    assert first == list(islice(openings(3), 40))
    assert first != list(islice(openings(4), 40))


def test_openings_are_of_several_kinds_and_none_comes_twice_soon() -> None:
    several = list(islice(openings(0), 200))
    assert len(set(several)) == 200
    assert not any("{0}" in opening for opening in several)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.6, 1.0])
def test_prose_has_its_share_of_the_tokens(share: float, llm: LLM, tmp_path: Path) -> None:
    """Answers count as half of what they may have."""
    data = DataOptions("self", tokens=20_000, sequence_length=96, prose=share, prose_length=320)
    texts = begun(llm, tmp_path, data, 200)
    prose = 320 * sum(text.is_prose for text in texts)
    others = 48 * sum(not text.is_prose for text in texts)
    assert prose / (prose + others) == pytest.approx(share, abs=0.06)


def test_prose_is_written_as_a_text_is_continued(llm: LLM, tmp_path: Path) -> None:
    """To its length, without an end mark; a text that repeats itself ends."""
    data = DataOptions("self", tokens=20_000, sequence_length=96, prose=1.0, prose_length=240)
    request = next(_requests(llm, data, replace(job(tmp_path), data=data)))
    assert isinstance(request, Request)
    assert isinstance(request.prompt, list)
    new = 240 - len(request.prompt)
    assert request.max_new_tokens == new
    assert request.sampling == replace(CONTINUED, min_tokens=new, seed=0)
    assert request.on_loop == "stop"


def test_texts_of_prose_are_so_short_that_some_can_be_held_out() -> None:
    few = DataOptions("self", tokens=8_000, sequence_length=96)
    assert few.long_length == 200
    assert DataOptions("self", tokens=256).long_length == 768
    assert DataOptions("self").long_length == 3072


def test_prose_goes_on_from_the_texts_of_runs_first(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "text.txt").write_text("a sail, " * 100)
    data = DataOptions(
        "self",
        tokens=16_000,
        sequence_length=96,
        prose=0.5,
        prose_length=240,
        from_runs=str(tmp_path),
    )
    prose = [text for text in begun(llm, tmp_path, data, 300) if text.is_prose]
    passage = llm.encode("a sail, " * 100)[:80]
    assert prose[0].tokens == passage
    assert prose[0].new == 240 - len(passage)
    assert llm.tokenizer.decode(prose[-1].tokens) != llm.tokenizer.decode(passage)


def test_a_drafter_learns_from_prose(llm: LLM, tmp_path: Path) -> None:
    one = job(tmp_path, epochs=1)
    data = replace(one.data, tokens=6_000, sequence_length=64, prose=0.6, prose_length=150)
    prose = replace(one, data=data)
    notes = trained(llm, prose)
    assert notes["tokens"] == pytest.approx(6_000, abs=150)
    with pytest.raises(InputError, match="belongs to a training of other data or options"):
        trained(llm, of_share(prose, 0.5))


def of_share(job: Job, share: float) -> Job:
    """A training with another share of prose."""
    return replace(job, data=replace(job.data, prose=share))


@pytest.mark.parametrize("share", [-0.1, 1.2])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(InputError, match="prose is .*; valid: from 0 to 1"):
        DataOptions("self", prose=share)
