"""Drafts of scripted models and heads are accepted in full: whatever is off by one is not.

See `scripted`: what follows is known from a hidden state that holds the two newest tokens, and
every drafter here has what it takes to know it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from tests.speculation.drafters.scripted import (
    CLASSES,
    VARIANTS,
    classes,
    prompt,
    scripted_heads,
    scripted_model,
)
from tokenswift import LLM, SamplingParams

GREEDY = SamplingParams(greedy=True, repetition_penalty=1.0)
#: three variants are about equally likely, some of them have just been used: every draft hangs on
#: the noise of its position and on its own penalty window, which just reaches the last token of the
#: same class
NOISY = SamplingParams(seed=5, repetition_penalty=1.02, penalty_window=CLASSES, min_p=0.05)
SAMPLINGS = {"greedy": GREEDY, "noisy": NOISY}
SMALL = {"budget": 12, "sinks": 2}
PROMPT = 50


@cache
def llm_of(kind: str | None, sure: bool) -> LLM:
    heads = scripted_heads(kind) if kind else None
    return LLM.from_model(scripted_model(sure), heads=heads)


def run(
    llm: LLM,
    strategy: str,
    options: dict[str, object],
    params: SamplingParams,
    steps: int,
    gamma: int,
) -> None:
    """Check that all drafts of ``steps`` steps are accepted, ``gamma`` tokens deep."""
    new = steps * (gamma + 1)
    text: list[int] = []
    for step in llm.stream(prompt(PROMPT), new, strategy, options, params):
        assert (step.gamma, step.accepted) == (gamma, gamma), (options, len(text))
        text += step.token_ids
    assert [token // VARIANTS for token in text] == classes(PROMPT + new)[PROMPT:]
    plain = llm.generate(prompt(PROMPT), new, "autoregressive", sampling=params)
    assert plain.token_ids == text


def sampled(name: str) -> tuple[SamplingParams, bool]:
    """A sampling, and whether the model is sure under it."""
    return SAMPLINGS[name], name == "greedy"


TREES = [(1, 1, 1, 1), (3, 1, 2), (2,)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", ["linear", "conditioned", "medusa"])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: ",".join(map(str, tree)))
def test_heads_on_the_verified_state(tree: tuple[int, ...], kind: str, sampling: str) -> None:
    params, sure = sampled(sampling)
    options = {"tree": tree, "ngrams": 0, "draft": "hidden"}
    run(llm_of(kind, sure), "tokenswift", options, params, 12, len(tree))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", [None, "linear", "conditioned", "medusa"])
@pytest.mark.parametrize("cache", ["full", "dynamic"])
def test_heads_on_a_partial_pass(cache: str, kind: str | None, sampling: str) -> None:
    """The backbone first, then the heads; the cache is far smaller than the text and is selected
    anew again and again."""
    params, sure = sampled(sampling)
    for tree in ((1, 1, 1, 1), (2, 1, 3, 1, 1)):
        options = {"tree": tree, "ngrams": 0, "draft": "partial", "cache": cache, **SMALL}
        gamma = len(tree) if kind else 1
        run(llm_of(kind, sure), "tokenswift", options, params, 12, gamma)


@pytest.mark.parametrize("kind", [None, "linear", "conditioned"])
@pytest.mark.parametrize("draft", ["hidden", "partial"])
def test_ngrams_of_a_text_that_repeats(draft: str, kind: str | None) -> None:
    """After the root, or after the backbone's token, three tokens of the text; none is the heads'
    own."""
    tree = (1, 1)
    options = {"tree": tree, "ngrams": 2, "ngram_count": 1, "draft": draft, **SMALL}
    backbone = draft == "partial"
    heads = len(tree) if kind else int(backbone)
    gamma = 3 + backbone
    llm = llm_of(kind, True)
    for step in llm.stream(prompt(PROMPT), 12 * (gamma + 1), "tokenswift", options, GREEDY):
        assert (step.gamma, step.accepted, step.ngram_accepted) == (gamma, gamma, gamma - heads)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_medusa(sampling: str) -> None:
    params, sure = sampled(sampling)
    for tree in TREES:
        run(llm_of("medusa", sure), "medusa", {"tree": tree}, params, 12, len(tree))


def chains(sure: bool) -> Iterator[tuple[str, dict[str, object], int]]:
    """Chains over caches that are far smaller than the text; the draft model is the target's
    twin."""
    twin = scripted_model(sure)
    for kv in ("snapkv", "streaming"):
        yield "magicdec", {"gamma": 3, "kv": kv, **SMALL}, 3
        yield "magicdec", {"gamma": 3, "kv": kv, "draft_model": twin, **SMALL, "budget": 16}, 3
    for refresh in (0, 16):
        options = {
            "gamma": 5,
            "inner_gamma": 2,
            "chunk": 2,
            "refresh": refresh,
            "draft_model": twin,
        }
        yield "triforce", {**options, "budget": 24, "sinks": 2, "draft_budget": 16}, 6


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_chains(sampling: str) -> None:
    params, sure = sampled(sampling)
    llm = llm_of(None, sure)
    for strategy, options, gamma in chains(sure):
        run(llm, strategy, options, params, 20, gamma)
