"""What sampling answers and continued texts have where none is given: the model's own, ours, the
paper's."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chats import chat_tokenizer
from tests.conftest import tiny_model
from tests.gguf_files import small, write
from tokenswift import LLM, SamplingParams, resume
from tokenswift.config.sampling import ANSWERS, CONTINUED, NEUTRAL
from tokenswift.loader.load import load
from tokenswift.models.source import FromFiles, FromModel
from tokenswift.runs import folder as folders

HELLO = [{"role": "user", "content": "Hello"}]
NAMED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
OWN = SamplingParams(**{**NAMED, "min_p": 0.0})


@pytest.fixture
def saved(tmp_path: Path, own_cache: Path) -> Callable[..., Path]:
    """``saved(temperature=0.6)`` → a model's folder with these in its generation_config.json."""

    def save(file: str = "generation_config.json", **changes: object) -> Path:
        folder = tmp_path / "m"
        tiny_model().save_pretrained(folder)
        chat_tokenizer().save_pretrained(folder)
        before = json.loads((folder / file).read_text())
        (folder / "generation_config.json").unlink()
        (folder / file).write_text(json.dumps(before | changes))
        return folder

    return save


def through(kind: type, folder: Path) -> LLM:
    """The model of a folder: transformers' own, or read from its files."""
    if kind is FromFiles:
        return LLM(folder, heads=None)
    loaded = load(folder, device="cpu")
    return LLM.from_model(loaded.model, loaded.tokenizer, heads=None)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_the_models_own_however_it_was_loaded(saved: Callable[..., Path], file: str) -> None:
    """Through transformers and from its files; and a text has what its journal says."""
    folder = saved(file, **NAMED)
    for kind in (FromModel, FromFiles):
        with through(kind, folder) as llm:
            assert type(llm.source) is kind
            assert llm.default_sampling(HELLO) == OWN
            assert llm.default_sampling("Hello") == CONTINUED
            assert (
                "model" not in llm.source.__dict__ or kind is FromModel
            )  # nothing was loaded for it
            call: dict[str, Any] = {"ignore_eos": True, "strategy": "autoregressive"}
            plain = llm.generate(HELLO, 12, sampling=replace(OWN, seed=4), **call)
            run = folder.parent / kind.__name__
            first = llm.generate(HELLO, 6, seed=4, run_dir=run, **call)
            assert folders.load(run)[1].header.identity.sampling["top_k"] == 20
            assert first.token_ids == plain.token_ids[:6]
            assert resume(run, 12, llm).token_ids == plain.token_ids
            assert llm.prefill(HELLO).generate(12, seed=4, **call).token_ids == plain.token_ids
            (many,) = llm.generate_many([HELLO], 12, seed=4, **call)
            assert many.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("unfit", "line"),
    [
        ({"repetition_penalty": 0.5}, "repetition_penalty is 0.5; valid: at least 1"),
        ({"top_k": -5}, "top_k is -5; valid: an integer of at least 1, or 0"),
        ({"top_p": math.nan}, "top_p is nan; valid: in (0, 1]"),
        ({"min_p": "much"}, "min_p is 'much'; valid: in [0, 1)"),
    ],
)
def test_a_setting_that_is_not_usable_is_left_aside_alone(
    unfit: dict[str, object],
    line: str,
    saved: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = saved(**{"temperature": 0.6, "top_p": 0.9, **unfit})
    usual = {"top_p": 0.9, **dict.fromkeys(unfit, None)}
    expected = SamplingParams(
        **{**NEUTRAL, "temperature": 0.6, **{k: v for k, v in usual.items() if v}}
    )
    for kind in (FromModel, FromFiles):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tokenswift"), through(kind, folder) as llm:
            assert llm.default_sampling(HELLO) == llm.default_sampling(HELLO) == expected
        (warning,) = [r.getMessage() for r in caplog.records if "is ignored" in r.getMessage()]
        assert line in warning


def test_a_model_without_a_usable_setting_answers_with_ours(
    saved: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(temperature=-1.0)
    with caplog.at_level(logging.WARNING, "tokenswift"), through(FromFiles, folder) as llm:
        assert llm.default_sampling(HELLO) == ANSWERS
    assert f"a sampling setting of model {folder} is ignored: temperature is -1.0" in caplog.text


def test_a_setting_of_a_gguf_file_is_left_aside_alone(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"general.sampling.temp": 0.6, "general.sampling.penalty_repeat": 0.5}
    write(tmp_path / "m.gguf", small(), fields=settings)
    with caplog.at_level(logging.WARNING, "tokenswift"), LLM(tmp_path / "m.gguf") as llm:
        assert llm.default_sampling(HELLO) == SamplingParams(**{**NEUTRAL, "temperature": 0.6})
    assert "is ignored: repetition_penalty is 0.5; valid: at least 1" in caplog.text


def test_what_a_gguf_file_names(tmp_path: Path, own_cache: Path) -> None:
    settings = {
        "general.sampling.temp": 0.6,
        "general.sampling.top_p": 0.9,
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.05,
    }
    write(tmp_path / "m.gguf", small(), fields=settings)
    with LLM(tmp_path / "m.gguf") as llm:
        assert isinstance(llm.source, FromFiles)
        assert llm.default_sampling(HELLO) == OWN
        assert llm.default_sampling("Hi") == CONTINUED
