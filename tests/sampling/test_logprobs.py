"""Log-probabilities of a text's tokens are those of the distributions that they were drawn from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lossless.test_tokens import random_heads
from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, InputError, Logprob, SamplingParams
from tokenswift.sampling.filters import processed, repetition_penalty

PROMPT, NEW, TOP = [5, 9, 5, 9, 30, 5, 9], 60, 4
TREE: dict[str, Any] = {"tree": (3, 3), "draft": "partial", "budget": 24}
PARAMS = {
    "plain": SamplingParams(seed=3),
    "processed": SamplingParams(
        temperature=0.7, top_k=3, min_p=0.0, repetition_penalty=1.3, penalty_window=8, seed=3
    ),
    "greedy": SamplingParams(greedy=True, repetition_penalty=1.2, penalty_window=8),
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_model(tiny_model("llama"), heads=random_heads("linear", 48, VOCAB))


def wanted(llm: LLM, tokens: list[int], params: SamplingParams) -> list[Logprob]:
    """By transformers' own forward, a row for each token."""
    known = torch.tensor([PROMPT + tokens])
    with torch.no_grad():
        logits = tiny_model("llama")(known).logits[0].float()
    made: list[Logprob] = []
    for at, token in enumerate(tokens, len(PROMPT)):
        row = logits[at - 1 : at]
        if params.window:
            row = repetition_penalty(
                row, known[:, max(0, at - params.window) : at], params.repetition_penalty
            )
        row = processed(row, params).log_softmax(-1)[0]
        best = row.topk(TOP)
        top = [(i, v) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
        rank = 1 + int((row > row[token]).sum())
        made.append(
            Logprob(row[token].item(), tuple((i, v) for i, v in top if v > -torch.inf), rank)
        )
    return made


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_logprobs(llm: LLM, params: SamplingParams) -> None:
    """Drafted and plain decoding tell the same, and what transformers' rows tell."""
    options = {"sampling": params, "ignore_eos": True, "logprobs": TOP}
    plain = llm.generate(PROMPT, NEW, "autoregressive", **options)
    drafted = llm.generate(PROMPT, NEW, "tokenswift", TREE, **options)
    assert drafted.metrics.steps < NEW  # or every token is its step's first
    assert drafted.token_ids == plain.token_ids and drafted.logprobs == plain.logprobs
    right = wanted(llm, plain.token_ids, params)
    for found, due in zip(plain.logprobs, right, strict=True):
        assert [token for token, _ in found.top] == [
            token for token, _ in due.top
        ] and found.rank == due.rank
        values = [found.logprob, *(value for _, value in found.top)]
        assert values == pytest.approx([due.logprob, *(value for _, value in due.top)], abs=1e-4)
    if params.greedy:
        assert all(found.top[0][1] == found.logprob for found in plain.logprobs)
    if params.top_k:
        assert all(len(found.top) == params.top_k for found in plain.logprobs)


def test_a_cut_text_has_as_many_as_tokens(tiny_folder: Callable[..., Path]) -> None:
    llm = LLM(tiny_folder(), heads="none")
    whole = llm.generate(PROMPT, NEW, seed=3, ignore_eos=True, logprobs=0)
    assert len(whole.logprobs) == NEW and not any(one.top for one in whole.logprobs)
    stop = whole.text[11:13]
    cut = llm.generate(PROMPT, NEW, seed=3, ignore_eos=True, logprobs=0, stop=stop)
    assert cut.logprobs == whole.logprobs[: len(cut.token_ids)] and len(cut.token_ids) < NEW
    assert llm.generate(PROMPT, 5, seed=3).logprobs == []
    steps = llm.stream(PROMPT, NEW, seed=3, ignore_eos=True, logprobs=0)
    assert [one for step in steps for one in step.logprobs] == whole.logprobs


def test_bad_counts(llm: LLM) -> None:
    for value in (-1, 21, 1.5, "3", True):
        with pytest.raises(
            InputError, match="^logprobs is .*; valid: an integer from 0 to 20, or None$"
        ):
            llm.generate(PROMPT, 5, logprobs=value)
