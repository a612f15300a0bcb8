"""Drafters and heads that nobody named: one that cannot be used is left out, with a line why."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import eagles
from tests.conftest import tiny_model, tiny_tokenizer
from tests.malformed.gguf_bytes import ARRAY, F32, I32, U32, Draft, Value
from tokenswift import LLM
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.loader.identity import base_of
from tokenswift.memory import Memory
from tokenswift.speculation.eagle.files import BASE

WINDOW = "eagle3.attention.sliding_window"
Change = Callable[[Draft], object]


@pytest.fixture
def folder(tmp_path: Path, own_cache: Path) -> Path:
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def trained(cache: Path, change: Change) -> Path:
    """A drafter in the cache that says it was trained for the model."""
    model = tiny_model("qwen3")
    of = eagles.config(model.config, trained=1 << 31, feature_layers=(0, 1, 2))
    tensors = eagles.tensors(of)
    del tensors["embed"], tensors["lm_head"]
    (cache / "drafters").mkdir(parents=True)
    path = cache / "drafters" / "mine.gguf"
    eagles.write_gguf(path, of, tensors, eagles.ids(of))
    sample = base_of(model).sample.tolist()
    draft = Draft.of(path).set(BASE, Value(ARRAY, sample, F32))
    change(draft)
    return draft.write(path)


def opened(folder: Path) -> LLM:
    return LLM(folder, device="cpu", dtype="float32")


def test_a_drafter_that_was_trained_for_the_model_is_used(folder: Path, own_cache: Path) -> None:
    file = trained(own_cache, lambda draft: draft.set(WINDOW, Value(U32, 256)))
    with opened(folder) as llm:
        assert llm.resources.eagle is not None
        assert llm.resources.eagle.name == str(file)


def without_norm(draft: Draft) -> None:
    draft.tensors = [entry for entry in draft.tensors if entry[0] != "output_norm.weight"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.set(WINDOW, Value(U32, 1 << 31)), "sliding_window is 2147483648; valid: up"),
        (lambda d: d.set(WINDOW, Value(I32, -1)), "sliding_window is -1; valid: int >= 0"),
        (lambda d: setattr(d, "cut", 3000), "is not a complete GGUF file"),
        (without_norm, "lacks the tensor norm"),
        (lambda d: d.set("eagle3.context_length", Value(U32, 0)), "max_position_embeddings is 0"),
    ],
)
def test_a_drafter_that_cannot_run_is_left_out(
    change: Change, words: str, folder: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(own_cache, change)
    with caplog.at_level(logging.WARNING, "tokenswift"), opened(folder) as llm:
        assert llm.generate([1, 2, 3], 4, ignore_eos=True).token_ids
        assert llm.resources.eagle is None
    (line,) = [line for line in caplog.messages if line.startswith("mine.gguf is left out: ")]
    assert words in line


def test_a_drafter_that_leaves_texts_no_room_is_left_out(
    folder: Path, own_cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(own_cache, lambda draft: draft.set(WINDOW, Value(U32, 1 << 18)))
    monkeypatch.setattr(CpuBackend, "memory", lambda self: Memory(1 << 28, 1 << 30))
    with caplog.at_level(logging.WARNING, "tokenswift"), opened(folder) as llm:
        assert llm.generate([1, 2, 3], 4, ignore_eos=True).token_ids
        assert llm.resources.eagle is None
    assert "mine.gguf is left out: it takes " in caplog.text


def test_heads_beside_the_model_that_cannot_be_used_are_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "medusa_heads": 3}))
    with caplog.at_level(logging.WARNING, "tokenswift"), opened(folder) as llm:
        assert llm.generate([1, 2, 3], 4, ignore_eos=True).token_ids
        assert llm.resources.heads is None
    assert "model is left out: heads " in caplog.text
