"""Token equality: TokenSwift against plain decoding, and plain decoding against transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.default_model import default_llm, prompt_of
from tests.families import families, rare
from tests.tiny import LONGROPE_BORDER, PLAIN, SWITCHED, VOCAB, tiny_model
from tokenswift import LLM, Generation, SamplingParams
from tokenswift.speculation.heads.config import HeadsConfig
from tokenswift.speculation.heads.modules import Heads

GREEDY = SamplingParams(greedy=True, repetition_penalty=1.0)
PAPER = SamplingParams(seed=11)  # T = 1, min-p 0.1, θ 1.2
NUCLEUS = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.0, repetition_penalty=1.0, seed=5)
SAMPLINGS = {"greedy": GREEDY, "paper": PAPER, "nucleus": NUCLEUS}


def random_heads(kind: str, hidden: int, vocab: int, count: int = 3) -> Heads:
    """Untrained heads: they draft nonsense, which must not matter."""
    torch.manual_seed(4)
    heads = Heads(HeadsConfig(kind=kind, count=count, hidden_size=hidden, vocab_size=vocab))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.eval().requires_grad_(False)


def same(expected: Generation, got: Generation) -> bool:
    return expected.token_ids == got.token_ids and expected.finish_reason == got.finish_reason


# ---- tiny models of every family -----------------------------------------------------------------

OPTIONS: list[dict[str, object]] = [
    {"tree": (1, 3, 3, 3), "ngrams": 6, "budget": 24, "draft": "partial"},
    {"tree": (3, 3, 3, 3), "ngrams": 6, "draft": "hidden"},
    {"tree": (2, 2), "ngrams": 0, "budget": 24, "draft": "partial", "cache": "partial"},
    {"tree": (1, 1), "ngrams": 3, "draft": "partial", "cache": "full", "candidates": "probability"},
    {"tree": (1, 2), "ngrams": 2, "budget": 17, "draft": "auto"},
]


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("kind", [None, "linear", "conditioned"])
def test_tiny_models_of_every_family(family: str, kind: str | None) -> None:
    heads = random_heads(kind, 48, VOCAB) if kind else None
    llm = LLM.from_model(tiny_model(family), heads=heads)
    prompt = torch.randint(2, VOCAB, (30,), generator=torch.Generator().manual_seed(6)).tolist()
    short: dict[str, Any] = {"penalty_window": 20}  # so that the window slides within the test
    longest = 0.0
    for params in (
        SamplingParams(greedy=True, repetition_penalty=1.3, **short),
        SamplingParams(seed=3, min_p=0.02, **short),
        NUCLEUS,
    ):
        plain = llm.generate(prompt, 70, "autoregressive", sampling=params, ignore_eos=True)
        assert plain.metrics.steps == 70
        for options in OPTIONS:
            got = llm.generate(prompt, 70, "tokenswift", options, params, ignore_eos=True)
            assert same(plain, got), (params, options)
            longest = max(longest, got.metrics.mean_acceptance_length)
    assert longest > 1.3, "nothing was ever accepted: the test would not see a wrong commit"


def test_one_token_prompt_and_one_new_token() -> None:
    llm = LLM.from_model(tiny_model("llama"), heads=random_heads("conditioned", 48, VOCAB))
    for length in (1, 2, 25):
        plain = llm.generate([7], length, "autoregressive", ignore_eos=True)
        for options in OPTIONS:
            got = llm.generate([7], length, "tokenswift", options, ignore_eos=True)
            assert same(plain, got)
            assert len(got.token_ids) == length


def test_eos_ends_both_at_the_same_token() -> None:
    model = tiny_model("llama")
    llm = LLM.from_model(model, heads=random_heads("linear", 48, VOCAB))
    params = SamplingParams(repetition_penalty=1.0, min_p=0.0, temperature=2.0, seed=1)
    plain = llm.generate([5, 6, 7], 100, "autoregressive", sampling=params, ignore_eos=True)
    model.generation_config.eos_token_id = plain.token_ids[40]
    model.config.eos_token_id = None
    first = plain.token_ids.index(plain.token_ids[40])
    for strategy, options in (("autoregressive", None), ("tokenswift", OPTIONS[0])):
        got = llm.generate([5, 6, 7], 100, strategy, options, params)
        assert got.finish_reason == "eos"
        assert got.token_ids == plain.token_ids[: first + 1]


# ---- plain decoding against transformers ---------------------------------------------------------


#: families that scale or cap their logits, which is before the penalty
SHAPED = ("granite", "granitemoe", "cohere2", "gemma2")


@pytest.mark.parametrize(
    ("family", "penalty"),
    [(family, penalty) for family in PLAIN for penalty in (1.0, 1.3)]
    + [(family, 1.3) if family in SHAPED else rare(family, 1.3) for family in SWITCHED]
    + [rare(family, 1.0) for family in SWITCHED],
)
def test_greedy_equals_transformers_generate(family: str, penalty: float) -> None:
    """In the fast suite `test_families` has the other families' greedy texts."""
    model = tiny_model(family)
    # transformers changes LongRoPE's factors where a text crosses their border
    new = LONGROPE_BORDER - 12 if family == "phi3-longrope" else 60
    prompt = torch.randint(2, VOCAB, (12,), generator=torch.Generator().manual_seed(2)).tolist()
    expected = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 12, dtype=torch.long),
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=new if penalty == 1.0 else None,
        repetition_penalty=penalty,
        eos_token_id=None,
        pad_token_id=0,
    )[0, 12:].tolist()
    llm = LLM.from_model(model, heads=random_heads("linear", 48, VOCAB))
    params = SamplingParams(greedy=True, repetition_penalty=penalty, penalty_window=4096)
    for strategy, options in (("autoregressive", None), ("tokenswift", OPTIONS[0])):
        got = llm.generate(prompt, new, strategy, options, params, ignore_eos=True)
        assert got.token_ids == expected


# ---- the default model, float32 ------------------------------------------------------------------


@cache
def _plain(name: str, length: int, sampling: str, new: int) -> Generation:
    return default_llm().generate(
        prompt_of(name, length),
        new,
        "autoregressive",
        sampling=SAMPLINGS[sampling],
        ignore_eos=True,
    )


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_default_model_small(embedded: str, sampling: str) -> None:
    """In the fast suite the runs of `test_frozen` stand for these."""
    plain = _plain("observatory", 1000, sampling, 40)
    for heads, options in (
        ("auto", {"tree": (1, 3, 3, 3), "ngrams": 20, "budget": 64, "draft": "partial"}),
        ("auto", {}),
        ("none", {"tree": (3, 3), "ngrams": 0, "budget": 512, "draft": "partial"}),
    ):
        got = default_llm(heads=heads).generate(
            prompt_of("observatory", 1000),
            40,
            "tokenswift",
            options,
            SAMPLINGS[sampling],
            ignore_eos=True,
        )
        assert same(plain, got), (heads, options)
        assert got.metrics.steps < 40 or not options  # adaptive drafting drafts where it pays


@pytest.mark.model
def test_default_model_greedy_equals_transformers(embedded: str) -> None:
    llm = LLM(
        "smollm2-135m", dtype="float32", device="cpu", heads="none"
    )  # its weights are unpacked here
    prompt = prompt_of("harbour", 100)
    got = llm.generate(prompt, 40, "autoregressive", sampling=GREEDY, ignore_eos=True).token_ids
    with (
        torch.inference_mode()
    ):  # one pass over the text is what transformers would choose at each place
        logits = llm.model(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]
    assert got == logits.argmax(-1).tolist()


CASES = [("harbour", 1000), ("observatory", 1500), ("orchard", 2400)]
TREES = [(1, 1), (1, 3, 3, 3), (3, 3, 3, 3)]
#: (tree, budget, n-grams, heads, draft): every pair of values of two of the first four occurs
COVER = [
    ((1, 1), 64, 20, "none", "partial"),
    ((1, 1), 1024, 0, "auto", "partial"),
    ((1, 3, 3, 3), 64, 0, "auto", "hidden"),
    ((1, 3, 3, 3), 1024, 20, "none", "partial"),
    ((1, 3, 3, 3), 64, 20, "auto", "partial"),
    ((3, 3, 3, 3), 64, 0, "none", "partial"),
    ((3, 3, 3, 3), 1024, 20, "auto", "hidden"),
]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name,length", CASES)
def test_default_model_full_matrix(embedded: str, name: str, length: int, sampling: str) -> None:
    plain = _plain(name, length, sampling, 200)
    for tree, budget, ngrams, heads, draft in COVER:
        options = {"tree": tree, "budget": budget, "ngrams": ngrams, "draft": draft}
        got = default_llm(heads=heads).generate(
            prompt_of(name, length),
            200,
            "tokenswift",
            options,
            SAMPLINGS[sampling],
            ignore_eos=True,
        )
        assert same(plain, got), (options, heads)
        print(
            name,
            sampling,
            options,
            heads,
            f"{got.metrics.mean_acceptance_length:.2f} tokens a step",
        )
