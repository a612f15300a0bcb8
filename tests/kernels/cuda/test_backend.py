"""The CUDA backend on a CPU, its kernels' work by torch, row by row: its passes, and texts by
it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families import rare
from tests.kernels.cuda.cases import backend_on_cpu, product
from tests.lossless.test_strategies import PROMPT, draft_for, runs
from tests.lossless.test_tokens import PAPER, random_heads
from tests.tiny import FAMILIES, MIXTURES, RECURRENT, SWITCHED, VOCAB, tiny_model
from tokenswift import LLM, SamplingParams, resume
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.engine.step import prefill, step
from tokenswift.kernels.base import Backend
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kv.sparse import OBSERVED
from tokenswift.loader.rope import rotary_of
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.generic import GenericTarget
from tokenswift.speculation.methods import autoregressive
from tokenswift.speculation.sequence_state import SequenceState
from tokenswift.types import InputError, Step

LONG = torch.randint(2, VOCAB, (300,), generator=torch.Generator().manual_seed(6)).tolist()
#: families that the kernels run: those without experts
RUN = [name for name in FAMILIES if name not in MIXTURES | RECURRENT]


@pytest.mark.parametrize("family", RUN)
def test_passes_are_those_of_the_torch_path(backend: CudaBackend, family: str) -> None:
    """A prompt that is read at once, a few rows, and a tree; windows included."""
    model = tiny_model(family)
    logits = logits_of(NativeTarget(model, backend, rotary_of(model)))
    expected = logits_of(NativeTarget(model, Backend(), rotary_of(model)))
    assert float((logits - expected).norm() / expected.norm()) < 1e-4


def logits_of(target: NativeTarget) -> Tensor:
    """Of the prompt, a few rows, and a tree, each of which has its queries."""
    cache = target.new_cache(320)
    logits: list[Tensor] = []
    for rows, parents in ((200, None), (100, None), (5, None), (5, [-1, 0, 0, 1, 3])):
        positions = torch.arange(cache.length, cache.length + rows)
        result = target.forward(torch.tensor(LONG[:rows]), positions, cache, parents)
        cache.commit(tuple(range(rows)))
        logits.append(target.logits(result.hidden))
        assert result.queries[0].shape[1] == rows
    return torch.cat(logits)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_of_experts_is_no_model_of_the_kernels(backend: CudaBackend, family: str) -> None:
    model = tiny_model(family)
    with pytest.raises(ValueError, match="a layer has experts; valid: layers with an MLP alone"):
        NativeTarget(model, backend, rotary_of(model))


def test_a_mixture_of_experts_runs_through_transformers(backend: CudaBackend) -> None:
    llm = LLM.from_model(tiny_model("qwen2_moe"), heads=None)
    assert isinstance(llm.target, GenericTarget)
    plain = llm.generate(PROMPT, 20, "autoregressive", sampling=PAPER, ignore_eos=True)
    automatic = llm.generate(PROMPT, 20, sampling=PAPER, ignore_eos=True)
    assert automatic.token_ids == plain.token_ids


@pytest.mark.parametrize(
    "family", ["llama", *(rare(name) for name in ("qwen3", *SWITCHED) if name in RUN)]
)
def test_every_strategy_writes_what_plain_decoding_writes(
    backend: CudaBackend, family: str
) -> None:
    llm = LLM.from_model(tiny_model(family), heads=random_heads("medusa", 48, VOCAB))
    assert llm.target.backend is backend
    assert isinstance(llm.target, NativeTarget)
    plain = llm.generate(PROMPT, 20, "autoregressive", sampling=PAPER, ignore_eos=True)
    for strategy, options in runs(draft_for(family)):
        drafted = llm.generate(PROMPT, 20, strategy, options, PAPER, ignore_eos=True)
        assert drafted.token_ids == plain.token_ids, (strategy, options)
    automatic = llm.generate(PROMPT, 20, sampling=PAPER, ignore_eos=True)
    assert automatic.token_ids == plain.token_ids


def coarse(states: Tensor, weight: Tensor) -> Tensor:
    """Products whose bits are seen to be others in passes that read a prompt."""
    return product(states, weight) * (1.0 if len(states) in (16, 64) else 1.0 + 2**-9)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> NativeTarget:
    monkeypatch.setattr(NativeTarget, "prefill_chunk", 80)
    model = tiny_model("llama")
    return NativeTarget(model, backend_on_cpu(coarse), rotary_of(model))


def sequence_of(target: NativeTarget, tokens: list[int], prompt: int) -> SequenceState:
    sampler = target.sampler(SamplingParams(greedy=True))
    return SequenceState(list(tokens), prompt, target.new_cache(500), target, sampler)


@pytest.mark.parametrize("rows", [None, 1])
def test_a_text_that_goes_on_has_the_bits_that_it_was_written_with(
    target: NativeTarget, rows: int | None
) -> None:
    """Its prompt is read as before, what was written is decoded again: whole, or a pass at a
    time."""
    assert target.equal_bits
    assert not target.prefill_keeps_bits
    first = sequence_of(target, LONG[:200], 200)
    prefill(first)
    first.strategy = autoregressive(None, None, first.sampler)
    first.remaining = 100
    first.strategy.begin(first)
    while first.remaining:
        assert isinstance(step([first])[0], Step)
    length = first.cache.length
    assert length == 299
    progress: list[tuple[str, int, int]] = []
    again = sequence_of(target, first.tokens, 200)
    while prefill(again, lambda *report: progress.append(report), rows):
        assert rows is not None
    assert again.cache.length == length
    assert progress[-1] == ("prompt", length, length)
    assert torch.equal(again.cache.data[:, :, :length], first.cache.data[:, :, :length])
    assert again.last_pass is not None
    assert len(again.last_pass.hidden) >= OBSERVED
    as_prompt = sequence_of(target, first.tokens, length + 1)
    prefill(as_prompt)  # the same tokens as a prompt have other bits
    assert not torch.equal(as_prompt.cache.data[:, :, :length], first.cache.data[:, :, :length])


def test_runs_are_resumed_and_texts_share_passes(
    backend: CudaBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NativeTarget, "prefill_chunk", 80)
    monkeypatch.setattr(backend, "_product", coarse)
    llm = LLM.from_model(tiny_model("llama"))
    params = SamplingParams(seed=3, temperature=1.5)
    run_dir = tmp_path / "run"
    full = llm.generate(LONG[:200], 60, "autoregressive", sampling=params, ignore_eos=True)
    part = llm.generate(
        LONG[:200], 25, "autoregressive", sampling=params, ignore_eos=True, run_dir=run_dir
    )
    assert part.token_ids == full.token_ids[:25]
    assert resume(run_dir, max_new_tokens=60, llm=llm).token_ids == full.token_ids
    requests = [
        Request(prompt=LONG[:size], max_new_tokens=20, sampling=params, ignore_eos=True)
        for size in (200, 190, 40)
    ]
    with Scheduler(llm) as scheduler:
        tickets = [scheduler.submit(request) for request in requests]
        batched = [ticket.result.token_ids for ticket in tickets if ticket.wait()]
    for request, tokens in zip(requests, batched, strict=True):
        alone = llm.generate(request.prompt, 20, "autoregressive", sampling=params, ignore_eos=True)
        assert tokens == alone.token_ids


@pytest.mark.parametrize("option", ["dtype", "kv_cache_dtype"])
def test_int8_is_refused_in_a_line(
    backend: CudaBackend, option: str, tiny_folder: Callable[..., Path]
) -> None:
    options: Any = {option: "int8"}
    line = rf"^{option} is 'int8', but .*; valid: auto, float32, bfloat16"
    with pytest.raises(InputError, match=line):
        LLM(tiny_folder(), heads="none", device="cpu", **options)
