"""A prefilled state and its forks: the tokens of ``generate``, and no fork that another one
disturbs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.lossless.test_tokens import random_heads
from tests.tiny import SIZES, VOCAB, build, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.generic import GenericTarget
from tokenswift.types import InputError, Step

PROMPT = torch.randint(2, VOCAB, (60,), generator=torch.Generator().manual_seed(6)).tolist()
SAMPLING = [SamplingParams(seed=seed, min_p=0.02, penalty_window=30) for seed in (1, 2)]
SMALL = {"budget": 24, "sinks": 3}
WAYS: list[tuple[str, dict[str, object]]] = [
    ("autoregressive", {}),
    ("tokenswift", {"tree": (2, 2), "ngrams": 4, "draft": "partial", **SMALL}),
    ("tokenswift", {"tree": (2, 2), "draft": "partial", "cache": "full"}),
    ("medusa", {"tree": (3, 2)}),
    ("magicdec", {"gamma": 3, "kv": "snapkv", **SMALL}),
    ("magicdec", {"gamma": 2, "kv": "streaming", **SMALL}),
    ("triforce", {"gamma": 4, "chunk": 4, "draft_budget": 12, **SMALL}),
]
NEW = 40


def llm_of(kind: str) -> LLM:
    """A tiny model that the native decoder runs, or one that runs through transformers' own
    forward."""
    model = tiny_model("llama") if kind == "native" else build("gemma", {**SIZES, "head_dim": 8})
    llm = LLM.from_model(model, heads=random_heads("medusa", 48, VOCAB))
    assert type(llm.target) is (NativeTarget if kind == "native" else GenericTarget)
    return llm


@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_forks_go_on_as_generate_does_and_do_not_disturb_one_another(kind: str) -> None:
    """Every strategy from one state, all of them under way at once, a step of each in turn."""
    llm = llm_of(kind)
    draft = tiny_model("llama", seed=1)
    base = llm.prefill(PROMPT)
    expected: list[list[int]] = []
    streams: list[Iterator[Step]] = []
    for i, (strategy, options) in enumerate(WAYS):
        strategy_options = options | ({"draft_model": draft} if strategy == "triforce" else {})
        params = SAMPLING[i % 2]
        plain = llm.generate(PROMPT, NEW, "autoregressive", sampling=params, ignore_eos=True)
        expected.append(plain.token_ids)
        streams.append(base.stream(NEW, strategy, strategy_options, params, ignore_eos=True))
    texts: list[list[int]] = [[] for _ in streams]
    left = dict(enumerate(streams))
    while left:
        for i, stream in list(left.items()):
            step = next(stream, None)
            if step is None:
                del left[i]
            else:
                texts[i] += step.token_ids
    assert texts == expected
    assert expected[0] != expected[1]  # the two samplings write different texts
    again = base.generate(NEW, sampling=SAMPLING[0], strategy="autoregressive", ignore_eos=True)
    assert again.token_ids == expected[0]
    assert again.prompt_tokens == len(PROMPT)


def test_one_token_is_a_prompt() -> None:
    """Nothing to prefill: a state all the same."""
    llm = llm_of("native")
    got = llm.prefill([5]).generate(20, ignore_eos=True)
    assert got.token_ids == llm.generate([5], 20, ignore_eos=True).token_ids
    with pytest.raises(InputError, match="prompt is empty"):
        llm.prefill([])


@pytest.mark.parametrize("method", ["generate", "stream", "prefill", "encode", "chat"])
def test_a_prefilled_prompt_where_a_prompt_is_wanted_says_what_to_call(method: str) -> None:
    llm = llm_of("native")
    with pytest.raises(InputError, match=r"is a result of LLM.prefill; valid: prefilled.generate"):
        getattr(llm, method)(llm.prefill([5]))


def test_prefilled_prompts_of_several_are_named() -> None:
    llm = llm_of("native")
    with pytest.raises(InputError, match=r"prompts\[1\] is a result of LLM.prefill; valid: "):
        llm.generate_many([[5], llm.prefill([5])])  # type: ignore[list-item]
    with pytest.raises(InputError, match="^prompts is a result of LLM.prefill; valid: "):
        llm.generate_many(llm.prefill([5]))  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [("Hello",), ([5, 6], 3)])
def test_a_prompt_where_one_is_prefilled_says_what_to_call(arguments: Any) -> None:
    prefilled = llm_of("native").prefill([5])
    for call in (prefilled.generate, prefilled.stream):
        with pytest.raises(
            InputError, match=r"together with a prefilled one; valid: generate\(max_new"
        ):
            call(*arguments)
    with pytest.raises(InputError, match="prompt is 'x', together with a prefilled one; valid: "):
        prefilled.generate(3, prompt="x")  # type: ignore[call-arg]
