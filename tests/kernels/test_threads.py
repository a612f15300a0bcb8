"""The team of threads: how many, at the same time, and after a fork."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import Queue

import pytest
import torch

from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.kernels.cpu.backend import CpuBackend


@pytest.mark.parametrize("count", [2, 7])
def test_products_on_any_number_of_threads(kernels: CpuBackend, count: int) -> None:
    noise = torch.Generator().manual_seed(count)
    packed = kernels.pack(torch.randn(1100, 600, generator=noise))
    one = CpuBackend(kernels._lib, 1)
    many = CpuBackend(kernels._lib, count)
    for rows in (1, 3, 40):
        states = torch.randn(rows, 600, generator=noise)
        expected = one.linear(states, packed)
        for _ in range(200):
            assert torch.equal(many.linear(states, packed), expected)


def test_threads_of_a_program_share_the_library(kernels: CpuBackend) -> None:
    generator = torch.Generator().manual_seed(1)
    packed = kernels.pack(torch.randn(700, 512, generator=generator))
    states = torch.randn(4, 512, generator=generator)
    backend = CpuBackend(kernels._lib, 2)
    expected = backend.linear(states, packed)

    def is_right(_: int) -> bool:
        return torch.equal(backend.linear(states, packed), expected)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_right, range(800)))


def _text(llm: LLM) -> list[int]:
    prompt = [i % VOCAB for i in range(2, 402)]
    return llm.generate(
        prompt, max_new_tokens=30, sampling=SamplingParams(seed=3), ignore_eos=True
    ).token_ids


def _in_child(llm: LLM, results: Queue[list[int]]) -> None:
    results.put(_text(llm))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_writes_the_same_text() -> None:
    llm = LLM.from_model(tiny_model("llama", hidden_size=96, intermediate_size=256))
    expected = _text(llm)  # the team and torch's own threads are at work before the fork
    torch.mm(torch.randn(600, 600), torch.randn(600, 600))
    context = multiprocessing.get_context("fork")
    results: Queue[list[int]] = context.Queue()
    child = context.Process(target=_in_child, args=(llm, results))
    child.start()
    try:
        assert results.get(timeout=120) == expected
        child.join(timeout=60)
        assert child.exitcode == 0
    finally:
        child.kill()
    assert _text(llm) == expected
