"""Loading a model leaves torch's default type alone: it is the whole process's, texts run beside it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tests.gguf_files import small, write
from tokenswift import LLM
from tokenswift.loader.load import quiet_transformers


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """What torch's default type was set to."""
    found: list[torch.dtype] = []
    usual = torch.set_default_dtype

    def told(dtype: torch.dtype) -> None:
        found.append(dtype)
        usual(dtype)

    monkeypatch.setattr(torch, "set_default_dtype", told)
    return found


def test_a_model_beside_running_texts(tmp_path: Path, asked: list[torch.dtype]) -> None:
    """Where transformers' own model is asked for behind one that is read from its file."""
    write(tmp_path / "model.gguf", small())
    with LLM(tmp_path / "model.gguf", dtype="bfloat16", device="cpu", heads="none") as llm:
        made = llm.source.model
    assert set(asked) <= {torch.float32}  # the usual one
    assert {part.dtype for part in made.parameters()} == {torch.bfloat16}
    assert made.config.dtype == torch.bfloat16
    assert {part.dtype for part in made.buffers()} == {torch.float32}  # tables of positions


def test_settings_come_back_whoever_ends_first() -> None:
    """One after the other: settings that were saved within are not put back."""
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    inside, leave = threading.Event(), threading.Event()

    def other(ends: threading.Event) -> None:
        with quiet_transformers():
            inside.set()
            ends.wait(10)

    first, second = (threading.Thread(target=other, args=(leave,)) for _ in range(2))
    first.start()
    assert inside.wait(10)
    inside.clear()
    second.start()
    assert not inside.wait(0.2)
    leave.set()
    first.join()
    second.join()
    assert inside.is_set()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
