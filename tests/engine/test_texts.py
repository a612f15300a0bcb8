"""Several texts in one step: each is, token by token, what it is alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.engine.request import Request
from tokenswift.engine.sequence import Sequence
from tokenswift.engine.step import step
from tokenswift.types import Step

TREE = {"tree": (2, 2), "ngrams": 3, "budget": 40, "sinks": 2, "draft": "partial"}
#: prompt, new tokens, strategy and its options, seed
TEXTS: tuple[tuple[list[int], int, str, dict[str, Any], int], ...] = (
    ([3, 4, 5], 30, "autoregressive", {}, 1),
    ([7] * 20, 45, "tokenswift", TREE, 2),
    (list(range(2, 60)), 12, "magicdec", {"gamma": 3, "budget": 30, "sinks": 2}, 3),
    ([3, 4, 5], 40, "tokenswift", {"tree": (3,), "draft": "partial"}, 1),
)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_texts_that_share_a_pass_are_what_they_are_alone(family: str) -> None:
    """Of four texts with strategies of their own, which join and leave between steps."""
    llm = LLM.from_model(tiny_model(family))
    alone = [
        llm.generate(prompt, new, strategy, options, SamplingParams(seed=seed), ignore_eos=True)
        for prompt, new, strategy, options, seed in TEXTS
    ]
    waiting = [
        Sequence(llm, Request(prompt, new, strategy, options, SamplingParams(seed=seed), ignore_eos=True))
        for prompt, new, strategy, options, seed in TEXTS
    ]
    running: list[Sequence] = []
    steps: dict[int, list[Step]] = {id(text): [] for text in waiting}
    texts, most = list(waiting), 0
    while waiting or running:
        if waiting:
            running.append(waiting.pop(0))
            assert running[-1].read() == 0
        most = max(most, len(running))
        for text, made in zip(running, step(running), strict=True):
            assert isinstance(made, Step)
            steps[id(text)].append(made)
        running = [text for text in running if not text.is_done]
    assert most >= 3
    for text, one in zip(texts, alone, strict=True):
        assert text.tokens[text.prompt_tokens :] == one.token_ids
        assert len(steps[id(text)]) == one.metrics.steps
        assert all(made.times["verify"] > 0 for made in steps[id(text)])
