"""Vocabularies of models that have more rows than the tokenizer has tokens: none of those is ever
chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_tokenizer
from tests.tiny import byte_model
from tokenswift import LLM, InputError, SamplingParams

NAMED = 260
MOST = 300
PROMPT = [72, 101, 108, 108, 111]
HOT = SamplingParams(seed=5, temperature=1.3, top_p=0.9, penalty_window=16)
SMALL: dict[str, object] = {"budget": 24, "sinks": 2}


def padded(rows: int) -> Any:
    """A model with so many rows, the same but for the last ones, which are the likeliest tokens by
    far."""
    unpadded = byte_model(vocab_size=MOST)
    model = byte_model(vocab_size=rows)
    state = {
        name: weight[:rows] if len(weight) == MOST else weight
        for name, weight in unpadded.state_dict().items()
    }
    model.load_state_dict(state)
    with torch.no_grad():
        model.lm_head.weight[:NAMED] = unpadded.lm_head.weight[:NAMED] * 20
        model.lm_head.weight[NAMED:] = unpadded.lm_head.weight[NAMED:rows] * 200
    return model


def saved(folder: Path, rows: int) -> Path:
    padded(rows).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def opened(folder: Path, native: bool = True) -> LLM:
    how: Any = (
        {"device": "cpu", "heads": "none"} if native else {"device": "cpu", "backend": "torch"}
    )
    return LLM(folder, **how)


@pytest.mark.parametrize("sampling", [HOT, SamplingParams(greedy=True)], ids=["hot", "greedy"])
@pytest.mark.parametrize("native", [True, False])
def test_texts_are_those_of_the_model_without_the_padding(
    native: bool, sampling: SamplingParams, tmp_path: Path
) -> None:
    """The law over the tokens with names is the same, and so is the choice from it."""
    plain = opened(saved(tmp_path / "a", NAMED), native)
    more = opened(saved(tmp_path / "b", 288), native)
    wanted = plain.generate(
        PROMPT, 60, "autoregressive", sampling=sampling, ignore_eos=True
    ).token_ids
    for strategy in ("autoregressive", "auto", "magicdec"):
        result = more.generate(PROMPT, 60, strategy, sampling=sampling, ignore_eos=True, logprobs=2)
        assert result.token_ids == wanted
        assert result.logprobs
        assert all(token < NAMED for place in result.logprobs for token, _ in place.top)
    lent = LLM.from_model(padded(288))  # nobody knows its tokens
    ids = lent.generate(PROMPT, 60, "autoregressive", sampling=sampling, ignore_eos=True).token_ids
    assert max(ids) >= NAMED


@pytest.mark.parametrize("rows", [264, 300])
@pytest.mark.parametrize("strategy", ["magicdec", "triforce", "auto"])
def test_draft_models_with_fewer_or_more_rows(strategy: str, rows: int, tmp_path: Path) -> None:
    """With the target's tokenizer they draft what has a name; the prompt may hold anything."""
    llm = opened(saved(tmp_path / "target", 288))
    draft = str(saved(tmp_path / "draft", rows))
    more = (
        {}
        if strategy == "auto"
        else SMALL
        if strategy == "triforce"
        else {**SMALL, "kv": "streaming"}
    )
    for prompt in (PROMPT, [*PROMPT, 287, 270, 3]):
        wanted = llm.generate(prompt, 50, "autoregressive", sampling=HOT, ignore_eos=True).token_ids
        options = {"draft_model": draft, **more}
        result = llm.generate(prompt, 50, strategy, options, sampling=HOT, ignore_eos=True)
        assert result.token_ids == wanted
        if strategy == "magicdec" and prompt is PROMPT:
            assert result.metrics.acceptance_rate > 0.3  # it is the same model
    with pytest.raises(InputError, match=f"a vocabulary of {rows} tokens, the target one of 288"):
        llm.generate(PROMPT, 4, "triforce", {"draft_model": padded(rows)})
