"""A model whose logits break midway: the line names the position, and the text so far is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tokenswift
from tests.conftest import tiny_model, tiny_tokenizer
from tests.runs.common import CALL
from tokenswift import LLM, RunError
from tokenswift.runs import folder as folders


def test_not_a_number_names_the_position_and_keeps_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on, with the same tokens, once the model is well again."""
    llm = LLM.from_model(tiny_model(), tiny_tokenizer())
    expected = llm.generate("hello", **CALL)
    folder = tmp_path / "run"
    real = llm.target.logits
    calls = 0

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return real(hidden) if calls <= 30 else real(hidden) * torch.nan

    with monkeypatch.context() as broken:
        broken.setattr(llm.target, "logits", logits)
        with pytest.raises(RunError, match="logits for position 35 hold NaN"):
            llm.generate("hello", **CALL, strategy="autoregressive", run_dir=folder)
    state = folders.load_whole(folder)
    assert state.tokens == expected.token_ids[:30]
    assert state.text
    assert expected.text.startswith(state.text)
    assert tokenswift.resume(folder, llm=llm).token_ids == expected.token_ids
