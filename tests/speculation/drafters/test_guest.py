"""One ``LLM`` for several threads, and a user's model that is left as it was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.lossless.test_tokens import random_heads
from tests.models.test_families import family_model
from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, SamplingParams

PROMPTS = [
    torch.randint(2, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (30, 61, 7)
]
RUNS: list[tuple[str, dict[str, Any] | None]] = [
    ("autoregressive", None),
    ("tokenswift", {"tree": (1, 3, 3), "ngrams": 4, "budget": 24, "draft": "partial"}),
    ("magicdec", {"gamma": 3, "budget": 24}),
]


def llm_of(kind: str) -> LLM:
    model = (
        family_model("starcoder2", sliding_window=16) if kind == "generic" else tiny_model("qwen3")
    )
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


def state_of(model: Any) -> tuple[Any, ...]:
    """Everything of a model that a guest might change."""
    hooks = [
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    ]
    modes = [module.training for module in model.modules()]
    tensors = {
        name: (tensor.data_ptr(), tensor.requires_grad) for name, tensor in model.named_parameters()
    }
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    return (
        model.config.to_dict(),
        model.config._attn_implementation,
        hooks,
        modes,
        tensors,
        str(buffers),
    )


@pytest.mark.parametrize("kind", ["native", "generic"])
def test_the_callers_model_stays_as_it_was(kind: str) -> None:
    model = (
        family_model("starcoder2", sliding_window=16)
        if kind == "generic"
        else tiny_model("mistral-sliding")
    )
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
    again.backward()  # a forward with gradients works, and we keep nothing of it
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
