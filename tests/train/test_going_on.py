"""A training that goes on from a drafter, texts of runs, and which drafter stays."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_tokenizer
from tests.train.test_eagle import job, model, trained
from tokenswift.config.sampling import NEUTRAL, SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.speculation.eagle.files import load_eagle
from tokenswift.train.agreement import in_words
from tokenswift.train.eagle import float_tensors, train_eagle
from tokenswift.train.options import DataOptions, Job
from tokenswift.train.states import _beginnings
from tokenswift.types import InputError
from tools.agreement import prose
from tools.mean_drafter import write_mean


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_model(model(initializer_range=0.2), tiny_tokenizer())


@pytest.fixture(scope="module")
def first(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained drafter."""
    folder = tmp_path_factory.mktemp("first")
    trained(llm, job(folder, epochs=2))
    return folder


def more(folder: Path, first: Path, **options: Any) -> Job:
    """A training of new texts in a folder with a copy of the drafter."""
    shutil.copy(first / "out.gguf", folder / "out.gguf")
    return job(folder, seed=7, **options)


def test_an_agreement_is_said_in_words() -> None:
    assert in_words([0.621, 0.4]) == "the next token at 62% of the places, the next two at 40%"


def test_a_training_says_what_the_drafter_names(llm: LLM, tmp_path: Path) -> None:
    lines: list[str] = []
    one = job(tmp_path, epochs=2)
    notes = train_eagle(llm, one, lines.append, lambda *_: None, depths=3, hidden=64)
    shares = notes["agreement"]
    assert isinstance(shares, list)
    assert len(shares) == 3
    assert 1 >= shares[0] >= shares[1] >= shares[2] >= 0
    assert any(line.startswith("in texts that it has not learnt from") for line in lines)


def test_going_on_keeps_width_and_tokens(llm: LLM, first: Path, tmp_path: Path) -> None:
    before = load_eagle(first / "out.gguf", llm.target.config)
    one = more(tmp_path, first, epochs=2)
    train_eagle(llm, one, lambda _: None, lambda *_: None, depths=3, hidden=128, goes_on=True)
    after = load_eagle(one.out, llm.target.config)
    assert after.config == before.config
    assert after.d2t is not None
    assert before.d2t is not None
    assert torch.equal(after.d2t, before.d2t)


def test_going_on_begins_with_the_drafter(llm: LLM, first: Path, tmp_path: Path) -> None:
    """Without a step it is the same one; the first weights are its own, not new ones."""
    from safetensors.torch import load_file

    one = more(tmp_path, first, epochs=0)
    train_eagle(llm, one, lambda _: None, lambda *_: None, depths=3, hidden=64, goes_on=True)
    start = load_file(one.work / "start.safetensors")
    weights = load_eagle(first / "out.gguf", llm.target.config)
    assert torch.equal(start["norm"], float_tensors(weights)["norm"])
    assert one.out.read_bytes() == (first / "out.gguf").read_bytes()


def test_the_better_drafter_stays(llm: LLM, first: Path, tmp_path: Path) -> None:
    """An untrained one does not take the place of a trained one, which is said."""
    lines: list[str] = []
    one = more(tmp_path, first, epochs=0)
    train_eagle(llm, one, lines.append, lambda *_: None, depths=3, hidden=64)
    assert one.out.read_bytes() == (first / "out.gguf").read_bytes()
    assert any(line.startswith("the one before names") and "stays" in line for line in lines)


def test_the_mean_of_two_drafters(
    llm: LLM, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each weight lies between those of the two, as far as its share says."""
    monkeypatch.setattr("tokenswift.train.eagle.stays", lambda *_: False)
    one = more(tmp_path, first, epochs=2)
    train_eagle(llm, one, lambda _: None, lambda *_: None, depths=3, hidden=64, goes_on=True)
    write_mean(llm, first / "out.gguf", one.out, tmp_path / "mean.gguf", 0.25)
    before, after, mean = (
        float_tensors(load_eagle(path, llm.target.config))
        for path in (first / "out.gguf", one.out, tmp_path / "mean.gguf")
    )
    for name, tensor in mean.items():
        expected = 0.75 * before[name] + 0.25 * after[name]
        spread = expected.abs().max() / 127  # what int8 leaves open
        assert (tensor - expected).abs().max() <= spread
    to_before = (mean["fc"] - before["fc"]).norm()
    to_after = (mean["fc"] - after["fc"]).norm()
    assert 0 < 2 * to_before < to_after


def test_the_mean_of_drafters_that_name_other_tokens_is_refused(
    llm: LLM, first: Path, tmp_path: Path
) -> None:
    one = more(tmp_path, first, epochs=0, loss_vocabulary=48)
    one.out.unlink()
    train_eagle(llm, one, lambda _: None, lambda *_: None, depths=3, hidden=64)
    with pytest.raises(InputError, match="differ in their sizes or in the tokens they name"):
        write_mean(llm, first / "out.gguf", one.out, tmp_path / "mean.gguf")
    with pytest.raises(InputError, match="holds no drafter of this model"):
        write_mean(llm, first / "out.gguf", tmp_path / "none.gguf", tmp_path / "mean.gguf")
    with pytest.raises(InputError, match=r"weight is 1.5; valid: from 0 to 1"):
        write_mean(llm, first / "out.gguf", one.out, tmp_path / "mean.gguf", 1.5)


def test_prose_too_short_for_its_places_is_refused(llm: LLM, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a sail, " * 20)
    with pytest.raises(InputError, match=r"short.txt has \d+ tokens; valid: at least 5,503"):
        list(prose(llm, text))


def test_a_drafter_of_another_model_is_replaced(first: Path, tmp_path: Path) -> None:
    other = LLM.from_model(model(initializer_range=0.2, seed=1), tiny_tokenizer())
    one = more(tmp_path, first, epochs=0)
    with pytest.raises(InputError, match="out.gguf holds no drafter of this model to go on from"):
        train_eagle(other, one, lambda _: None, lambda *_: None, hidden=64, goes_on=True)
    train_eagle(other, one, lambda _: None, lambda *_: None, hidden=64)
    assert one.out.read_bytes() != (first / "out.gguf").read_bytes()


def test_passages_of_runs_come_in_turns(llm: LLM, tmp_path: Path) -> None:
    """As many as there are; then the others go on."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "text.txt").write_text("a sail, " * 60)
    data = DataOptions("self", tokens=1500, sequence_length=192, from_runs=str(tmp_path))
    one = replace(job(tmp_path), data=data, sampling=SamplingParams(**NEUTRAL))
    begun = list(islice(_beginnings(llm, data, one), 30))
    kinds = [begin.is_passage for begin in begun]
    count = sum(kinds)
    assert count >= 2
    assert kinds[: 2 * count] == [True, False] * count
    assert not any(kinds[2 * count :])
