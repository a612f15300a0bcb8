"""What a step costs does not depend on how long the text is: counted, not timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.lossless.test_strategies import runs
from tests.lossless.test_tokens import random_heads
from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.engine.step import decode, prefill
from tokenswift.interfaces import TokenSequence
from tokenswift.method_options import build_options
from tokenswift.metrics import Meter
from tokenswift.sampling.choice import Sampler
from tokenswift.spec.drafters import lookup
from tokenswift.spec.methods.table import STRATEGIES

WINDOW = 20


class Watched(list):
    """A text that counts the tokens read from it."""

    read = 0
    longest = 0

    def _count(self, tokens: int) -> None:
        self.read += tokens
        self.longest = max(self.longest, tokens)

    def __iter__(self) -> Iterator[int]:
        self._count(len(self))
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self._count(len(found) if isinstance(place, slice) else 1)
        return found

    def __add__(self, other: Any) -> Any:
        self._count(len(self))
        return super().__add__(other)


@pytest.mark.parametrize("case", range(10))
def test_a_step_reads_no_more_of_the_text_than_the_penalty_window(case: int) -> None:
    strategy, options = runs(tiny_model("llama", seed=1))[case]
    llm = LLM.from_model(tiny_model("llama"), heads=random_heads("medusa", 48, VOCAB))
    params = SamplingParams(seed=1, penalty_window=WINDOW)
    prompt = torch.randint(2, VOCAB, (300,), generator=torch.Generator().manual_seed(6)).tolist()
    sampler = Sampler(params, VOCAB)
    entry = STRATEGIES[strategy]
    drafter = entry.build(llm.resources, build_options(entry.options, strategy, options), sampler)
    text = Watched(prompt)
    cache = llm.target.new_cache(300 + 40 + drafter.max_nodes)
    sequence = TokenSequence(text, len(text), cache, llm.target, sampler)
    prefill(sequence)
    meter = Meter()
    for number, _ in enumerate(decode(sequence, drafter, sampler, 40, (), meter)):
        if number:  # the first step begins with the prompt
            assert text.longest <= WINDOW, (strategy, options)
        text.longest = 0


def test_many_ngrams_of_one_token_are_not_all_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    """More branches than the usual pool holds: ranked is the pool, however many n-grams there are."""
    ranked: list[int] = []

    def counting(items: Any, **how: Any) -> list[Any]:
        held = list(items)
        ranked.append(len(held))
        return sorted(held, **how)

    monkeypatch.setattr(lookup, "sorted", counting, raising=False)
    llm = LLM.from_model(tiny_model("llama"))
    options = build_options(STRATEGIES["tokenswift"].options, "tokenswift", {"ngrams": 40, "tree": (1,)})
    params = SamplingParams(repetition_penalty=1.0)
    strategy: Any = STRATEGIES["tokenswift"].build(llm.resources, options, Sampler(params, VOCAB))
    table = strategy.ngrams[0].table
    for start in range(0, 4000, 40):
        text = [token for i in range(start, start + 40) for token in (2, 3 + i % 89, 3 + i // 89, 5)]
        table.extend(text)
        assert len(table.lookup(2, 160)) == min(160, start + 40)
    assert len(table._entries[2].counts) > 3900
    assert 160 <= max(ranked) <= 2 * 160, max(ranked)
