"""Models with recurrent layers where the device's own kernels have none: plain torch runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_tokenizer
from tests.kernels.cuda.cases import backend_on_cpu
from tests.tiny import RECURRENT, VOCAB, byte_model, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.kernels.base import Backend
from tokenswift.models import target as targets
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.target import make_target

GREEDY = SamplingParams(greedy=True, repetition_penalty=1.0)
PROMPT = torch.randint(2, VOCAB, (90,), generator=torch.Generator().manual_seed(6)).tolist()


@pytest.fixture
def without_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's backend is that of CUDA."""
    monkeypatch.setattr(targets, "_backends", {"cpu": backend_on_cpu()})


@pytest.mark.parametrize("family", RECURRENT)
def test_texts_are_those_of_the_cpu(
    family: str, without_states: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM.from_model(tiny_model(family), heads=None)
    assert isinstance(llm.target, NativeTarget)
    assert type(llm.target.backend) is Backend
    drafted = llm.generate(PROMPT, 40, "auto", sampling=GREEDY, ignore_eos=True)
    plain = llm.generate(PROMPT, 40, "autoregressive", sampling=GREEDY, ignore_eos=True)
    monkeypatch.undo()
    compiled = LLM.from_model(tiny_model(family), heads=None)
    assert compiled.target.backend is not llm.target.backend
    expected = compiled.generate(PROMPT, 40, "autoregressive", sampling=GREEDY, ignore_eos=True)
    assert drafted.token_ids == plain.token_ids == expected.token_ids


def test_files_are_read_there_too(without_states: None, own_cache: None, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    byte_model("lfm2", **sizes).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    llm = LLM(tmp_path, heads="none")
    assert type(llm.target.backend) is Backend
    assert len(llm.generate("hello", 12, ignore_eos=True).token_ids) == 12


def test_other_models_keep_their_backend(without_states: None) -> None:
    target = make_target(tiny_model("llama"))
    assert target.backend is targets.backend_for()
    assert target.backend.name == "cuda"


@pytest.mark.parametrize("family", RECURRENT)
def test_a_recurrent_draft_model_is_refused_in_one_line(family: str) -> None:
    llm = LLM.from_model(tiny_model("llama"), heads=None)
    draft = tiny_model(family)
    with pytest.raises(targets.InputError, match="has recurrent layers, whose states follow"):
        llm.generate(PROMPT, 10, "magicdec", {"draft_model": draft, "budget": 24})
