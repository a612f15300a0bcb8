"""Several texts in one step: each is, token by token, what it is alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.engine.step import RunningSequence, advance, prefill
from tokenswift.metrics import Meter
from tokenswift.spec.methods import STRATEGIES
from tokenswift.spec.strategy import TokenSequence
from tokenswift.types import Step

TREE = {"tree": (2, 2), "ngrams": 3, "budget": 40, "sinks": 2, "draft": "partial"}
#: prompt, new tokens, strategy and its options, seed
TEXTS: tuple[tuple[list[int], int, str, dict[str, Any], int], ...] = (
    ([3, 4, 5], 30, "autoregressive", {}, 1),
    ([7] * 20, 45, "tokenswift", TREE, 2),
    (list(range(2, 60)), 12, "magicdec", {"gamma": 3, "budget": 30, "sinks": 2}, 3),
    ([3, 4, 5], 40, "tokenswift", {"tree": (3,), "draft": "partial"}, 1),
)


def text_of(
    llm: LLM, prompt: list[int], new: int, strategy: str, options: dict[str, Any], seed: int
) -> RunningSequence:
    sampler = llm.target.sampler(SamplingParams(seed=seed))
    entry = STRATEGIES[strategy]
    made = entry.build(llm.resources, entry.options(**options), sampler)
    cache = llm.target.new_cache(len(prompt) + new + made.max_nodes)
    sequence = TokenSequence(list(prompt), len(prompt), cache, llm.target, sampler)
    prefill(sequence)
    text = RunningSequence(sequence, made, sampler, new, (), Meter())
    text.begin()
    return text


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_texts_that_share_a_pass_are_what_they_are_alone(family: str) -> None:
    """Of four texts with strategies of their own, which join and leave between steps."""
    llm = LLM.from_model(tiny_model(family))
    alone = [
        llm.generate(prompt, new, strategy, options, SamplingParams(seed=seed), ignore_eos=True)
        for prompt, new, strategy, options, seed in TEXTS
    ]
    waiting = [text_of(llm, *text) for text in TEXTS]
    running: list[RunningSequence] = []
    steps: dict[int, list[Step]] = {id(text): [] for text in waiting}
    texts, most = list(waiting), 0
    while waiting or running:
        if waiting:
            running.append(waiting.pop(0))
        most = max(most, len(running))
        for text, step in zip(running, advance(running), strict=True):
            assert isinstance(step, Step)
            steps[id(text)].append(step)
        running = [text for text in running if not text.is_done]
    assert most >= 3
    for text, one in zip(texts, alone, strict=True):
        assert text.sequence.tokens[text.sequence.prompt_tokens :] == one.token_ids
        assert len(steps[id(text)]) == one.metrics.steps
        assert all(step.times["verify"] > 0 for step in steps[id(text)])
