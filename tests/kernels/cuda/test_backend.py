"""The CUDA backend on a CPU, its kernels' work by torch, row by row: its passes, and texts by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.families import rare
from tests.kernels.cuda.cases import Rows, product, standing
from tests.lossless.test_strategies import PROMPT, draft_for, runs
from tests.lossless.test_tokens import PAPER, random_heads
from tests.tiny import FAMILIES, SWITCHED, VOCAB, tiny_model
from tokenswift import LLM, SamplingParams, resume
from tokenswift.engine.prefix_cache import Prefixes
from tokenswift.engine.request import Request
from tokenswift.engine.scheduler import Scheduler
from tokenswift.engine.step import decode, prefill
from tokenswift.interfaces import Segment
from tokenswift.kernels.cuda import backend as backends
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.torch import TorchBackend
from tokenswift.kv.select import OBSERVED
from tokenswift.loader.rope import rotary_of
from tokenswift.models.decoder import NativeTarget
from tokenswift.spec.methods import Autoregressive
from tokenswift.spec.strategy import TokenSequence
from tokenswift.types import InputError

LONG = torch.randint(2, VOCAB, (300,), generator=torch.Generator().manual_seed(6)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_are_those_of_the_torch_path(backend: CudaBackend, family: str) -> None:
    """A prompt that is read at once, a few rows, and a tree; windows included."""
    model = tiny_model(family)
    ours, torchs = (NativeTarget(model, each, rotary_of(model)) for each in (backend, TorchBackend()))
    found = []
    for target in (ours, torchs):
        cache, states = target.new_cache(320), []
        for rows, parents in ((200, None), (100, None), (5, None), (5, [-1, 0, 0, 1, 3])):
            at = cache.length
            made = target.forward(torch.tensor(LONG[:rows]), torch.arange(at, at + rows), cache, parents)
            cache.commit(tuple(range(rows)))
            states.append(target.logits(made.hidden))
            assert made.queries[0].shape[1] == rows
        found.append(torch.cat(states))
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-4


@pytest.mark.parametrize("family", ["llama", *(rare(name) for name in ("qwen3", *SWITCHED))])
def test_every_strategy_writes_what_plain_decoding_writes(backend: CudaBackend, family: str) -> None:
    llm = LLM.from_model(tiny_model(family), heads=random_heads("medusa", 48, VOCAB))
    assert llm.target.backend is backend and isinstance(llm.target, NativeTarget)
    params = PAPER
    plain = llm.generate(PROMPT, 20, "autoregressive", sampling=params, ignore_eos=True)
    for strategy, options in runs(draft_for(family)):
        got = llm.generate(PROMPT, 20, strategy, options, params, ignore_eos=True)
        assert got.token_ids == plain.token_ids, (strategy, options)
    assert llm.generate(PROMPT, 20, sampling=params, ignore_eos=True).token_ids == plain.token_ids


def coarse(states: Tensor, weight: Tensor) -> Tensor:
    """Products whose bits are seen to be others in passes that read a prompt."""
    return product(states, weight) * (1.0 if len(states) in (16, 64) else 1.0 + 2**-9)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> NativeTarget:
    monkeypatch.setattr(NativeTarget, "prefill_chunk", 80)
    model = tiny_model("llama")
    return NativeTarget(model, standing(coarse), rotary_of(model))


def sequence_of(target: NativeTarget, tokens: list[int], prompt: int) -> TokenSequence:
    sampler = target.sampler(SamplingParams(greedy=True))
    return TokenSequence(list(tokens), prompt, target.new_cache(500), target, sampler)


@pytest.mark.parametrize("rows", [None, 1])
def test_a_text_that_goes_on_has_the_bits_that_it_was_written_with(
    target: NativeTarget, rows: int | None
) -> None:
    """Its prompt is read as before, what was written is decoded again: whole, or a pass at a time."""
    assert target.equal_bits and not target.prefill_keeps_bits
    first = sequence_of(target, LONG[:200], 200)
    prefill(first)
    first.strategy, first.left = Autoregressive(None, None, first.sampler), 100
    first.strategy.begin(first)
    for _ in decode(first):
        pass
    known, told = first.cache.length, []
    again = sequence_of(target, first.tokens, 200)
    while prefill(again, lambda *progress: told.append(progress), rows):
        assert rows is not None
    assert again.cache.length == known == 299 and told[-1] == ("prompt", known, known)
    assert torch.equal(again.cache.data[:, :, :known], first.cache.data[:, :, :known])
    assert again.newest is not None and len(again.newest.hidden) >= OBSERVED
    read = sequence_of(target, first.tokens, known + 1)  # the same tokens as a prompt have other bits
    prefill(read)
    assert not torch.equal(read.cache.data[:, :, :known], first.cache.data[:, :, :known])


def test_beginnings_are_shared_in_whole_chunks_of_both_prompts(target: NativeTarget) -> None:
    prefixes = Prefixes(1 << 30)
    first = sequence_of(target, LONG[:230], 230)
    prefill(first)
    prefixes.watch(first)
    for length, prompt, shared in ((250, 250, 160), (250, 180, 80), (90, 90, None)):
        alone = sequence_of(target, LONG[:length], prompt)
        found = prefixes.begin(alone, 400)
        assert (None if found is None else found.length) == shared
        if found is not None:
            prefill(alone)
            assert torch.equal(found.data[:, :, :shared], alone.cache.data[:, :, :shared])


def test_runs_are_resumed_and_texts_share_passes(
    backend: CudaBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NativeTarget, "prefill_chunk", 80)
    monkeypatch.setattr(backend, "_product", coarse)
    llm = LLM.from_model(tiny_model("llama"))
    params = SamplingParams(seed=3, temperature=1.5)
    whole = llm.generate(LONG[:200], 60, "autoregressive", sampling=params, ignore_eos=True)
    part = llm.generate(
        LONG[:200], 25, "autoregressive", sampling=params, ignore_eos=True, run_dir=tmp_path / "run"
    )
    assert part.token_ids == whole.token_ids[:25]
    assert resume(tmp_path / "run", max_new_tokens=60, llm=llm).token_ids == whole.token_ids
    with Scheduler(llm) as scheduler:
        asked = [
            Request(prompt=LONG[:size], max_new_tokens=20, sampling=params, ignore_eos=True)
            for size in (200, 190, 40)
        ]
        tickets = [scheduler.submit(request) for request in asked]
        found = [ticket.result.token_ids for ticket in tickets if ticket.wait()]
    for request, tokens in zip(asked, found, strict=True):
        alone = llm.generate(request.prompt, 20, "autoregressive", sampling=params, ignore_eos=True)
        assert tokens == alone.token_ids


@pytest.mark.parametrize("option", ["dtype", "kv_cache_dtype"])
def test_int8_is_refused_in_a_line(
    backend: CudaBackend, option: str, tiny_folder: Callable[..., Path]
) -> None:
    asked: Any = {option: "int8"}
    with pytest.raises(InputError, match=rf"^{option} is 'int8', but .*; valid: auto, float32, bfloat16"):
        LLM(tiny_folder(), heads="none", device="cpu", **asked)


class Waits(TorchDispatchMode):
    """Notes what a host would wait for: numbers that are sent in a way that blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        here = bool(args) and isinstance(args[0], Tensor) and args[0].device.type == "cpu"
        there = str(kwargs.get("device", "")) == "meta"
        if name == "_to_copy" and here and there and not kwargs.get("non_blocking"):
            self.seen.append(name)
        if name == "copy_" and args[1].device.type == "cpu" and args[0].is_meta and not any(args[2:]):
            self.seen.append(name)
        return func(*args, **kwargs)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_layer_is_ten_launches_and_nothing_is_waited_for(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without memory stands for the card: whatever looks at a value is an error."""
    pytest.importorskip("triton")
    from tokenswift.kernels.cuda.launch import Kernels

    class Unstarted(Kernels):
        started: list[str] = []

        def run(self, kernel: Any, grid: tuple[int, ...], warps: int, stages: int, **given: Any) -> None:
            assert all(
                each.is_meta and each.is_contiguous() for each in given.values() if isinstance(each, Tensor)
            )
            self.started.append(kernel.__name__)

    def library(states: Tensor, weight: Tensor) -> Tensor:
        assert len(states) in (16, 64) and states.dtype == weight.dtype and states.is_contiguous()
        ops.started.append("product")
        return torch.empty(len(states), len(weight), device=meta)

    meta = torch.device("meta")
    ops = Unstarted(meta)
    monkeypatch.setattr(backends, "sizes_that_keep", lambda product, weight: (16, 64))
    model = tiny_model("llama").to(meta, torch.bfloat16)
    target = NativeTarget(model, CudaBackend(meta, ops, library), rotary_of(model))
    cache, numbers = target.new_cache(80), torch.arange(rows)
    with Waits() as waits:
        target.forward_all([Segment(numbers, numbers, cache, list(range(-1, rows - 1)))])
    block = ["product", "turn_append", "attend", "merge", "product"]
    layer = ["add_norm", *block, "add_norm", "product", "gated", "product"]
    assert ops.started == [*layer * target.layers, "add_norm"]
    assert not waits.seen


def test_a_step_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of a tree's tokens, with penalty and noise: one copy back."""
    meta, copies = torch.device("meta"), []
    model = tiny_model("llama").to(meta)
    monkeypatch.setattr(backends, "sizes_that_keep", lambda product, weight: (16, 64))
    target = NativeTarget(model, CudaBackend(meta, Rows(), product), rotary_of(model))
    sampler = target.sampler(PAPER)

    def tolist(made: Tensor) -> Any:
        copies.append(made.shape)
        return [[[1.0]] * made.shape[1]] * len(made)

    paths = [[], [5], [5, 6], [7]]
    with Waits() as waits:
        monkeypatch.setattr(Tensor, "tolist", tolist)
        chosen = sampler.choose(torch.empty(4, VOCAB, device=meta), LONG, paths)
        monkeypatch.undo()
    assert chosen == [1, 1, 1, 1] and copies == [(3, 4, 1)] and not waits.seen
