"""The lossless tests on a CUDA device (marker ``gpu``; run by benchmarks/gpu.sh)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.lossless.test_strategies import PROMPT, draft_for, runs
from tests.lossless.test_tokens import NUCLEUS, OPTIONS, PAPER, random_heads
from tests.speculation.drafters.test_eagle_rows import FORMS, SAMPLINGS, TEXT, drafts_always
from tests.speculation.eagle_drafters import random_eagle
from tests.tiny import FAMILIES, VOCAB, tiny_model
from tokenswift import LLM, SamplingParams, resume

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def full_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """No TF32: equality is promised for real float32."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["linear", "conditioned"])
def test_token_equality_on_cuda(family: str, kind: str) -> None:
    heads = random_heads(kind, 48, VOCAB).cuda()
    llm = LLM.from_model(tiny_model(family).cuda(), heads=heads)
    prompt = torch.randint(2, VOCAB, (30,), generator=torch.Generator().manual_seed(6)).tolist()
    for params in (SamplingParams(greedy=True, penalty_window=20), PAPER, NUCLEUS):
        plain = llm.generate(prompt, 70, "autoregressive", sampling=params, ignore_eos=True)
        for options in OPTIONS:
            drafted = llm.generate(prompt, 70, "tokenswift", options, params, ignore_eos=True)
            assert drafted.token_ids == plain.token_ids, (params, options)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy_on_cuda(family: str) -> None:
    llm = LLM.from_model(tiny_model(family).cuda(), heads=random_heads("medusa", 48, VOCAB).cuda())
    draft = draft_for(family).cuda()
    for params in (SamplingParams(greedy=True, penalty_window=20), PAPER):
        plain = llm.generate(PROMPT, 70, "autoregressive", sampling=params, ignore_eos=True)
        for strategy, options in runs(draft):
            drafted = llm.generate(PROMPT, 70, strategy, options, params, ignore_eos=True)
            assert drafted.token_ids == plain.token_ids, (strategy, params, options)


@pytest.mark.parametrize("form", FORMS)
def test_a_trained_drafter_on_cuda(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """It drafts in every step, and the text is plain decoding's."""
    drafts_always(monkeypatch)
    eagle = random_eagle(window=9, **FORMS[form])
    llm = LLM.from_model(tiny_model("llama").cuda(), heads=None, eagle=eagle)
    for params in SAMPLINGS.values():
        plain = llm.generate(TEXT, 60, "autoregressive", sampling=params, ignore_eos=True)
        drafted = llm.generate(TEXT, 60, "auto", sampling=params, ignore_eos=True)
        assert drafted.token_ids == plain.token_ids
        assert drafted.metrics.draft_passes > 0


def test_the_same_tokens_as_on_the_cpu() -> None:
    prompt = list(range(2, 40))
    texts = [
        LLM.from_model(tiny_model("llama").to(device)).generate(
            prompt, 60, "autoregressive", sampling=PAPER, ignore_eos=True
        )
        for device in ("cpu", "cuda")
    ]
    assert texts[0].token_ids == texts[1].token_ids


def test_a_run_goes_on_with_the_bits_that_it_was_written_with(tmp_path: Path) -> None:
    """Its prompt is read by torch's attention, what it wrote is decoded again; in bfloat16, which
    tells."""
    llm = LLM.from_model(tiny_model("llama").to("cuda", torch.bfloat16), heads="none")
    prompt = torch.randint(2, VOCAB, (200,), generator=torch.Generator().manual_seed(6)).tolist()
    params = SamplingParams(seed=3, temperature=1.5)
    full = llm.generate(prompt, 150, sampling=params, ignore_eos=True)
    llm.generate(prompt, 70, sampling=params, ignore_eos=True, run_dir=tmp_path / "run")
    assert resume(tmp_path / "run", max_new_tokens=150, llm=llm).token_ids == full.token_ids


@pytest.mark.model
def test_default_model_on_cuda(embedded: str) -> None:
    llm = LLM("smollm2-135m", dtype="float32", device="cuda")
    for params in (PAPER, NUCLEUS):
        plain = llm.generate(
            "The lamp at the end", 200, "autoregressive", sampling=params, ignore_eos=True
        )
        drafted = llm.generate("The lamp at the end", 200, sampling=params, ignore_eos=True)
        assert drafted.token_ids == plain.token_ids
