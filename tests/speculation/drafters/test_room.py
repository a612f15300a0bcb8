"""Nothing is drafted that cannot be used, and a draft that nobody wants any more ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.tiny import tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler

VOCAB = 12
PROMPT = [5, 9, 2, 7, 7, 3, 8, 1, 4, 6] * 3
SMALL = {"budget": 24, "sinks": 2}
CHAINS: tuple[tuple[str, dict[str, object], bool], ...] = (
    ("triforce", {"gamma": 12, "inner_gamma": 7, "draft_budget": 16, **SMALL}, True),
    ("magicdec", {"gamma": 12, **SMALL}, False),
    ("magicdec", {"gamma": 12, "kv": "streaming", **SMALL}, True),
)


def model_of() -> object:
    return tiny_model("llama", vocab_size=VOCAB)


def small_model() -> object:
    """Another model of the same vocabulary, but so like the target that some of its drafts are
    right."""
    model = tiny_model("llama", vocab_size=VOCAB)
    for number, parameter in enumerate(model.parameters()):
        parameter.data *= 1 + 0.1 * (number % 3)
    return model


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_model(model_of())


def options_of(options: dict[str, object], small: bool) -> dict[str, object]:
    return {**options, "draft_model": small_model()} if small else options


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(("strategy", "options", "small"), CHAINS, ids=lambda part: str(part)[:40])
def test_chains_end_where_the_text_does(
    llm: LLM, strategy: str, options: dict[str, object], small: bool, greedy: bool
) -> None:
    """Of the last token that is wanted there is no draft: the target chooses it itself."""
    sampling = SamplingParams(seed=3, greedy=greedy)
    options = options_of(options, small)
    for new in (1, 2, 3, 5, 14, 30):
        plain = llm.generate(PROMPT, new, "autoregressive", sampling=sampling, ignore_eos=True)
        left = new
        with llm.stream(PROMPT, new, strategy, options, sampling, ignore_eos=True) as steps:
            for step in steps:
                assert step.drafted <= left - 1
                left -= len(step.token_ids)
            assert steps.result.token_ids == plain.token_ids
        if new == 1:
            assert steps.result.metrics.draft_passes == 0


class Passes:
    """Counts a model's draft passes; in the one numbered ``at`` something happens."""

    def __init__(self, model: Any, at: int, happens: Callable[[], None]) -> None:
        self.number = 0
        self.at = at
        self.happens = happens
        self.real = model.forward
        model.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.number += 1
        if self.number == self.at:
            self.happens()
        return self.real(*args, **kwargs)


@pytest.mark.parametrize(("strategy", "options", "small"), CHAINS, ids=lambda part: str(part)[:40])
def test_a_draft_ends_between_two_passes(
    strategy: str, options: dict[str, object], small: bool
) -> None:
    """Whoever cancels a text waits for one pass and not for a whole draft; the others go on."""
    llm = LLM.from_model(model_of())
    options = options_of(options, small)
    cancelled = threading.Event()

    def happens() -> None:
        ticket.cancel()
        cancelled.set()

    drafter = llm.resources.draft_models.get(options["draft_model"]) if small else llm.target
    passes = Passes(drafter, 3, happens)
    with Scheduler(llm) as scheduler:
        ticket = scheduler.submit(Request(PROMPT, 40, strategy, options, ignore_eos=True))
        assert cancelled.wait(60)
        assert ticket.wait(60)
        assert passes.number == 3, "passes were made for a text that nobody wanted"
        assert ticket.result.finish_reason == "cancelled"
        other = scheduler.submit(Request(PROMPT, 5, "autoregressive", ignore_eos=True))
        assert other.wait(60)
        assert len(other.result.token_ids) == 5
