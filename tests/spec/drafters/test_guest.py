"""One ``LLM`` for several threads, and a user's model that is left as it was."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.lossless.test_tokens import random_heads
from tests.models.test_families import GEMMA, family_model
from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, SamplingParams

PROMPTS = [
    torch.randint(2, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (30, 61, 7)
]
RUNS: list[tuple[str, dict[str, Any] | None]] = [
    ("autoregressive", None),
    ("tokenswift", {"tree": (1, 3, 3), "ngrams": 4, "budget": 24, "draft": "partial"}),
    ("magicdec", {"gamma": 3, "budget": 24}),
]


def llm_of(kind: str) -> LLM:
    model = family_model("gemma2", **GEMMA) if kind == "generic" else tiny_model("qwen3")
    return LLM.from_model(model, heads=random_heads("conditioned", 48, VOCAB))


def one(llm: LLM, job: int) -> list[int]:
    strategy, options = RUNS[job % len(RUNS)]
    params = SamplingParams(seed=job, min_p=0.02, penalty_window=20)
    prompt = PROMPTS[job // 3 % len(PROMPTS)]
    return llm.generate(prompt, 30, strategy, options, params, ignore_eos=True).token_ids


@pytest.mark.parametrize("kind", ["native", pytest.param("generic", marks=pytest.mark.slow)])
def test_threads_write_what_they_would_write_alone(kind: str) -> None:
    llm = llm_of(kind)
    jobs = list(range(27))
    alone = [one(llm, job) for job in jobs]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda job: one(llm, job), jobs))
    assert together == alone


@pytest.mark.parametrize("kind", ["native", "generic"])
def test_interleaved_streams(kind: str) -> None:
    llm = llm_of(kind)
    params = SamplingParams(seed=4, min_p=0.02, penalty_window=20)
    alone = [llm.generate(prompt, 30, *RUNS[1], params, ignore_eos=True).token_ids for prompt in PROMPTS]
    streams = [llm.stream(prompt, 30, *RUNS[1], params, ignore_eos=True) for prompt in PROMPTS]
    found: list[list[int]] = [[] for _ in PROMPTS]
    while any(len(tokens) < 30 for tokens in found):
        for tokens, stream in zip(found, streams, strict=True):
            if (step := next(stream, None)) is not None:
                tokens += step.token_ids
    assert found == alone


def state_of(model: Any) -> tuple[Any, ...]:
    """Everything of a model that a guest might change."""
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    modes = [module.training for module in model.modules()]
    tensors = {name: (tensor.data_ptr(), tensor.requires_grad) for name, tensor in model.named_parameters()}
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    return model.config.to_dict(), model.config._attn_implementation, hooks, modes, tensors, str(buffers)


@pytest.mark.parametrize("kind", ["native", "generic"])
def test_the_callers_model_stays_as_it_was(kind: str) -> None:
    model = family_model("gemma2", **GEMMA) if kind == "generic" else tiny_model("mistral-sliding")
    model.train()
    model.model.layers[0].eval()
    before = state_of(model)
    ids = torch.tensor([PROMPTS[0]])
    loss = model(ids, labels=ids).loss
    for _ in range(3):
        llm = LLM.from_model(model, rope_scaling=None if kind == "generic" else "yarn:2")
        llm.generate(PROMPTS[0], 8, ignore_eos=True)
    assert state_of(model) == before
    again = model(ids, labels=ids).loss
    assert torch.equal(loss, again)
    again.backward()  # a forward with gradients works, and nothing of it is kept by us
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()


def test_nothing_of_ours_keeps_a_callers_tensors_alive() -> None:
    model = tiny_model("llama")
    llm = LLM.from_model(model)
    hidden = model(torch.tensor([PROMPTS[0]]), output_hidden_states=True).hidden_states[-1]
    gone = weakref.ref(hidden)
    del hidden
    gc.collect()
    assert gone() is None
    left = weakref.ref(model)
    llm.close()
    del model
    gc.collect()
    assert left() is None


def test_the_callers_heads_are_not_cast_in_place() -> None:
    heads = random_heads("linear", 48, VOCAB)
    model = tiny_model("llama").to(torch.bfloat16)
    with LLM.from_model(model, heads=heads) as llm:
        assert llm.resources.heads is not None and llm.resources.heads.dtype == torch.bfloat16
    assert heads.dtype == torch.float32


def test_a_second_stream_does_not_change_the_first() -> None:
    model = tiny_model("llama")
    plain, scaled = LLM.from_model(model), LLM.from_model(model, rope_scaling="yarn:4")
    params = SamplingParams(seed=1, min_p=0.02)
    alone = plain.generate(PROMPTS[0], 30, sampling=params, ignore_eos=True).token_ids
    stream = plain.stream(PROMPTS[0], 30, sampling=params, ignore_eos=True)
    tokens = list(next(stream).token_ids)
    other = scaled.generate(PROMPTS[0], 30, sampling=params, ignore_eos=True).token_ids
    tokens += [token for step in stream for token in step.token_ids]
    assert tokens == alone != other


def test_a_longer_run_continues_a_shorter_one() -> None:
    llm = LLM.from_model(tiny_model("llama"), rope_scaling="yarn")
    params = SamplingParams(seed=1, min_p=0.02)
    short, long = (
        llm.generate(PROMPTS[0], count, sampling=params, ignore_eos=True).token_ids for count in (20, 600)
    )
    assert long[:20] == short
