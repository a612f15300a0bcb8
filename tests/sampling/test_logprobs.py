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

PROMPT = [5, 9, 5, 9, 30, 5, 9]
NEW = 60
TOP = 4
TREE: dict[str, object] = {"tree": (3, 3), "draft": "partial", "budget": 24}
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


def reference(tokens: list[int], params: SamplingParams) -> list[Logprob]:
    """By transformers' own forward, a row for each token."""
    text = torch.tensor([PROMPT + tokens])
    with torch.no_grad():
        logits = tiny_model("llama")(text).logits[0].float()
    records: list[Logprob] = []
    for position, token in enumerate(tokens, len(PROMPT)):
        row = logits[position - 1 : position]
        if params.window:
            window = text[:, max(0, position - params.window) : position]
            row = repetition_penalty(row, window, params.repetition_penalty)
        row = processed(row, params).log_softmax(-1)[0]
        best = row.topk(TOP)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        likeliest = tuple(pair for pair in pairs if pair[1] > -torch.inf)
        rank = 1 + int((row > row[token]).sum())
        records.append(Logprob(row[token].item(), likeliest, rank))
    return records


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_logprobs(llm: LLM, params: SamplingParams) -> None:
    """Drafted and plain decoding tell the same, and what transformers' rows tell."""
    options = {"sampling": params, "ignore_eos": True, "logprobs": TOP}
    plain = llm.generate(PROMPT, NEW, "autoregressive", **options)
    drafted = llm.generate(PROMPT, NEW, "tokenswift", TREE, **options)
    assert drafted.metrics.steps < NEW  # or every token is its step's first
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs
    for record, expected in zip(plain.logprobs, reference(plain.token_ids, params), strict=True):
        assert [token for token, _ in record.top] == [token for token, _ in expected.top]
        assert record.rank == expected.rank
        assert record.logprob == pytest.approx(expected.logprob, abs=1e-4)
        values = [value for _, value in record.top]
        assert values == pytest.approx([value for _, value in expected.top], abs=1e-4)
    if params.greedy:
        assert all(record.top[0][1] == record.logprob for record in plain.logprobs)
    if params.top_k:
        assert all(len(record.top) == params.top_k for record in plain.logprobs)


def test_a_cut_text_has_as_many_as_tokens(tiny_folder: Callable[..., Path]) -> None:
    llm = LLM(tiny_folder(), heads="none")
    full = llm.generate(PROMPT, NEW, seed=3, ignore_eos=True, logprobs=0)
    assert len(full.logprobs) == NEW
    assert not any(record.top for record in full.logprobs)
    stop = full.text[11:13]
    cut = llm.generate(PROMPT, NEW, seed=3, ignore_eos=True, logprobs=0, stop=stop)
    assert len(cut.token_ids) < NEW
    assert cut.logprobs == full.logprobs[: len(cut.token_ids)]
    assert llm.generate(PROMPT, 5, seed=3).logprobs == []
    steps = llm.stream(PROMPT, NEW, seed=3, ignore_eos=True, logprobs=0)
    assert [record for step in steps for record in step.logprobs] == full.logprobs


def test_bad_counts(llm: LLM) -> None:
    values: tuple[Any, ...] = (-1, 21, 1.5, "3", True)
    for value in values:
        with pytest.raises(
            InputError, match="^logprobs is .*; valid: an integer from 0 to 20, or None$"
        ):
            llm.generate(PROMPT, 5, logprobs=value)
