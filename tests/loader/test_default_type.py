"""Loading a model leaves torch's default type alone: it is the whole process's, texts run beside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, modeling_utils

from tests.tiny import SIZES, build
from tokenswift.loader.load import making_models, quiet_transformers

#: model types, some with more than the usual buffers: of embeddings, routers, sinks, several rotary tables
TYPES = ("llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "granite", "phi3", "mixtral", "deepseek_v3")


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


@pytest.fixture
def bfloat16() -> Iterator[None]:
    """Torch's default type, for a test."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(usual)


@pytest.mark.parametrize("kind", TYPES)
def test_models_are_what_transformers_makes(kind: str, tmp_path: Path, asked: list[torch.dtype]) -> None:
    made = build(kind, SIZES, head_dim=8) if kind not in ("phi3", "deepseek_v3") else build(kind, SIZES)
    made.to(torch.bfloat16).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    with quiet_transformers():
        expected: list[Any] = [
            AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16),
            AutoModelForCausalLM.from_config(config),
        ]
    assert torch.bfloat16 in asked
    asked.clear()
    with making_models():
        found: list[Any] = [
            AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16),
            AutoModelForCausalLM.from_config(config),
        ]
    assert not asked
    for theirs, ours in zip(expected, found, strict=True):
        assert _types(ours) == _types(theirs)
        assert len(set(_types(ours).values())) == 2  # weights, and tables of positions in float32
    for name, value in expected[0].state_dict().items():
        assert torch.equal(found[0].state_dict()[name], value)


def test_transformers_is_as_it_was() -> None:
    """After the block, within one in another, and after one that failed."""
    usual = modeling_utils.local_torch_dtype
    with making_models(), making_models():
        assert modeling_utils.local_torch_dtype is not usual
    assert modeling_utils.local_torch_dtype is usual
    with pytest.raises(OSError), making_models():
        raise OSError
    assert modeling_utils.local_torch_dtype is usual


def _types(model: Any) -> dict[str, torch.dtype]:
    return {name: part.dtype for name, part in (*model.named_parameters(), *model.named_buffers())}


def test_settings_come_back_whoever_ends_first() -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with quiet_transformers():
            inside.set()
            leave.wait(10)

    thread, second = threading.Thread(target=other), threading.Event()

    def waiting() -> None:
        with quiet_transformers():
            second.set()

    late = threading.Thread(target=waiting)
    thread.start()
    assert inside.wait(10)
    late.start()
    assert not second.wait(0.2)  # one after the other: settings that were saved within are not put back
    leave.set()
    thread.join()
    late.join()
    assert second.is_set()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
