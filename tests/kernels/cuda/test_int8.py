"""Keys and values in int8 on the CUDA backend, with its reference on the CPU: the CPU kernels' bits, what
caches copy, and whole texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gguf_files import QuantType, small, write
from tests.kernels.cuda.cases import CPU, from_pages, int_segment, plan, random, tree
from tests.lossless.test_strategies import PAPER, PROMPT, runs
from tests.lossless.test_tokens import random_heads
from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, InputError, SamplingParams
from tokenswift.interfaces import Segment
from tokenswift.kernels.case import TAIL, Case
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.cpu.entries import IntFullCache as CpuCache
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.check import int8_fault
from tokenswift.kernels.cuda.entries import (
    INVERSE,
    KEY,
    IntFullCache,
    IntSparseCache,
    entry_bytes,
    scales_of,
)
from tokenswift.kernels.cuda.int_reference import entries_of, exp, fused, natural_log
from tokenswift.kernels.cuda.plan import CHUNK
from tokenswift.kernels.cuda.reference import Reference
from tokenswift.models import target as targets
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.target import backend_for

native = pytest.mark.skipif(not isinstance(backend_for(), CpuBackend), reason="no compiled kernels here")

#: committed keys, rows, reach of a tree (None: a chain), window, heads, KV heads, width
CASES = [
    (0, 1, None, 0, 3, 1, 64),
    (700, 1, None, 0, 9, 3, 64),
    (CHUNK - 1, 5, None, 0, 9, 3, 64),
    (530, 20, 3, 0, 8, 2, 40),
    (300, 13, None, 100, 2, 2, 128),
    (990, 64, 9, 0, 7, 1, 80),
    (100, 12, 4, 60, 20, 1, 96),
    (2 * CHUNK - 1, 3, 1, 7, 2, 1, 4),
    (5 * CHUNK - 40, 90, None, 300, 4, 2, 256),
]


@native
@pytest.mark.parametrize("case", CASES)
def test_attention_has_the_bits_of_the_cpu_kernels(case: Any) -> None:
    before, rows, reach, window, heads, kv_heads, width = case
    parents = None if reach is None else tree(rows, reach)
    text, pages = int_segment(before, rows, parents, kv_heads, width)
    other = int_segment(17, 3, None, kv_heads, width, seed=5)[0]
    query = random(rows, heads, width, seed=1)
    queries = torch.cat([random(3, heads, width, seed=2), query])
    found = Reference().attend(plan([other, text], heads), queries, 0, width**-0.5, window)[3:]
    expected = backend_for().attend(query.transpose(0, 1), 0, pages, parents, width**-0.5, window)
    assert torch.equal(found, expected)


@native
def test_what_is_no_number_is_seen_as_by_the_cpu_kernels() -> None:
    text, pages = int_segment(CHUNK + 9, 2, None, 1, 16)
    pages.pages.scales[..., 0, 7] = torch.nan  # keys at 7, 23, … of both chunks
    text.cache.data.copy_(from_pages(pages.pages))
    query = random(2, 2, 16, seed=1)
    query[1, 0, 3] = torch.inf
    found = Reference().attend(plan([text], 2), query, 0, 0.25)
    expected = backend_for().attend(query.transpose(0, 1), 0, pages, None, 0.25)
    assert found.isnan().all() and expected.isnan().all()
    pages.pages.scales[..., 0, 7] = 0.01
    text.cache.data.copy_(from_pages(pages.pages))
    found = Reference().attend(plan([text], 2), query, 0, 0.25)
    expected = backend_for().attend(query.transpose(0, 1), 0, pages, None, 0.25)
    assert torch.equal(found.isnan(), expected.isnan())
    assert found.isnan().all(-1).tolist() == [[False, False], [True, False]]


@native
def test_a_pass_writes_the_entries_of_the_cpu_kernels() -> None:
    """Queries, keys and values of the first layer, whose projections are the CPU kernels' own."""
    kernels = backend_for()
    assert isinstance(kernels, CpuBackend)
    case = Case(kernels, torch.float32)
    shape = replace(case.shape, keys=torch.int8)
    pages = kernels.new_cache(shape.layers, shape.kv_heads, shape.width, 40, torch.int8)
    assert isinstance(pages, CpuCache)
    pages.clear()
    numbers, layer = torch.arange(TAIL), case.weights[0]
    assert layer.norm is not None
    cpu = kernels.batch([Segment(numbers, numbers, pages)], shape)
    kept = kernels.layers(kernels.body(shape, case.weights), case.states.clone(), case.cos, case.sin, cpu)[0]
    mixed = kernels.linear(
        kernels.norm(case.states, layer.norm, shape.eps, torch.float32), layer.qkv, layer.qkv_bias
    )
    cache = IntFullCache(shape.layers, shape.kv_heads, shape.width, 40, CPU)
    cache.clear()
    query = Reference().append(
        plan([Segment(numbers, numbers, cache)], shape.heads), mixed[None], case.cos, case.sin, 0, shape.heads
    )
    assert torch.equal(query.transpose(0, 1), kept[0])
    assert torch.equal(cache.data[0, :, :TAIL], from_pages(pages.pages)[0, :, :TAIL])


def test_fused_steps_are_rounded_once() -> None:
    made = torch.Generator().manual_seed(2)
    x, y, z = (torch.randn(20_000, generator=made) for _ in range(3))
    z = torch.where(torch.arange(20_000) % 3 > 0, -(x * y) * (1 + z * 1e-7), z)  # that nearly cancel
    found, rounded = fused(x, y, z), x * y + z
    exact = [a * b + c for a, b, c in zip(*(map(fraction, each.tolist()) for each in (x, y, z)), strict=True)]
    for one, other in zip(exact, found.tolist(), strict=True):
        assert one == other or abs(one - fraction(other)) <= abs(one) * 2**-24
    assert (found != rounded).any()
    assert torch.allclose(exp(-8 * x.abs()), (-8 * x.abs()).exp(), rtol=4e-7, atol=0)
    assert torch.allclose(natural_log(x.abs()), x.abs().double().log(), rtol=1e-14, atol=1e-15)


def fraction(x: float) -> Any:
    from fractions import Fraction

    return Fraction(x)


def filled(layers: int, kv_heads: int, width: int, length: int, room: int) -> IntFullCache:
    backend = CudaBackend("cpu")
    made = backend.new_cache(layers, kv_heads, width, room, torch.int8)
    assert isinstance(made, IntFullCache)
    made.data[:, :, :length] = entries_of(random(2 * layers, kv_heads, length, width))
    made.commit(tuple(range(length)))
    return made


def test_entries_move_by_token() -> None:
    full = filled(2, 3, 20, 90, 100)
    before, numbers = full.keys(1), full.data.clone()
    assert full.nbytes == 2 * 3 * 100 * entry_bytes(20) == 2 * 3 * 100 * 56
    full._length = 50
    full.commit((0, 3, 4, 17))
    assert full.length == 54
    moved = [*range(50), 50, 53, 54, 67]
    assert torch.equal(full.data[:, :, :54], numbers[:, :, moved])
    assert torch.equal(full.keys(1), before[:, moved])
    copy = full.fork(60, 33)
    assert isinstance(copy, IntFullCache) and copy.capacity == 60
    assert torch.equal(copy.data[:, :, :33], full.data[:, :, :33]) and copy.length == 33
    sparse = CudaBackend("cpu").partial_cache(full, 20, 2, 8)
    assert isinstance(sparse, IntSparseCache)
    noise = torch.Generator().manual_seed(1)
    chosen = [torch.stack([torch.randperm(54, generator=noise)[:20] for _ in range(3)]) for _ in range(2)]
    sparse.load(full, chosen)
    for layer in range(2):
        for head in range(3):
            wanted = full.data[layer, head, chosen[layer][head]]
            assert torch.equal(sparse.data[layer, head, :20], wanted)
    sparse.append(full, 50, 54)  # the ring's first slots after the sinks
    assert torch.equal(sparse.data[:, :, 2:6], full.data[:, :, 50:54])
    values = sparse.data[..., 20:40].clone(), scales_of(sparse.data)[..., 1:].clone()
    turned = sparse.first_keys()
    sparse.turn_sinks(0, torch.ones(10), turned)
    assert (sparse.first_keys() - turned).abs().max() <= turned.abs().max() / 127
    assert torch.equal(sparse.data[..., 20:40], values[0])
    assert torch.equal(scales_of(sparse.data)[..., 1:], values[1])


def test_entries_are_the_numbers_rounded() -> None:
    floats = random(4, 2, 30, 12)
    data = entries_of(floats)
    keys = data[..., :12].float() * scales_of(data)[..., KEY, None]
    values = data[..., 12:24].float() / scales_of(data)[..., INVERSE, None]
    for found, given in ((keys, floats[0::2]), (values, floats[1::2])):
        assert ((found - given).abs() <= given.abs().amax(-1, keepdim=True) / 254 * 1.001).all()


def test_a_cache_of_random_entries_is_made_of_numbers() -> None:
    cache = filled(1, 2, 8, 0, 20)
    cache.fill_random()
    cache.commit(tuple(range(20)))
    assert cache.keys(0).isfinite().all() and scales_of(cache.data)[..., :3].isfinite().all()


def test_widths_and_options_that_the_kernels_do_not_have() -> None:
    backend = CudaBackend("cpu")
    assert backend.has_int8_keys(128) and not backend.has_int8_keys(6) and not backend.has_int8_keys(260)
    assert backend.entry_bytes(128, torch.int8) == 272 and backend.entry_bytes(128, torch.bfloat16) == 512
    cache, query = filled(1, 1, 8, 4, 8), random(2, 2, 8)
    for more in ({"softcap": 3.0}, {"sinks": torch.zeros(2)}):
        with pytest.raises(ValueError, match="keys are int8"):
            backend.attend(query, 0, cache, None, 0.3, 0, **more)  # type: ignore[arg-type]


def test_int8_alone_is_given_up_where_its_kernels_do_not_work() -> None:
    class Broken(Reference):
        factor: float | None = 1.0

        def attend(self, plan: Any, query: torch.Tensor, *rest: Any) -> torch.Tensor:
            if self.factor is None:
                raise RuntimeError("no such\nproduct")
            return super().attend(plan, query, *rest) * self.factor

    kind = (torch.float32, None, None)
    backend = CudaBackend("cpu", ops := Broken())
    ops.factor = 1.05
    found = int8_fault(backend, kind)
    assert found is not None and "keys torch.int8 is" in found and "from the reference" in found
    ops.factor = None
    assert int8_fault(backend, kind) == "no such product"
    backend.int8_keys = False
    assert not backend.has_int8_keys(128)


def test_every_strategy_writes_what_plain_decoding_writes(backend: CudaBackend) -> None:
    llm = LLM.from_model(tiny_model("llama"), heads=random_heads("medusa", 48, VOCAB))
    target = llm.target
    assert isinstance(target, NativeTarget) and target.backend is backend
    params = SamplingParams(seed=1, **PAPER)
    entry = target.kv_bytes
    target.take_keys(torch.int8, "kv_cache_dtype")
    assert target.kv_bytes < entry and isinstance(target.new_cache(9), IntFullCache)
    plain = llm.generate(PROMPT, 20, "autoregressive", sampling=params, ignore_eos=True)
    lengths = []
    for strategy, options in runs(tiny_model("llama", seed=1))[::4]:
        got = llm.generate(PROMPT, 20, strategy, options, params, ignore_eos=True)
        assert got.token_ids == plain.token_ids, (strategy, options)
        lengths.append(got.metrics.mean_acceptance_length)
    assert max(lengths) > 1.1


def test_int8_is_asked_for_and_not_chosen(
    backend: CudaBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantized weights alone leave a card's model in floats."""
    path = tmp_path / "small.gguf"
    write(path, small(), {"": QuantType.Q8_0})
    monkeypatch.setitem(targets._backends, "cpu", backend)
    assert LLM(str(path), device="cpu").dtype != "int8"
    llm = LLM(str(path), dtype="int8", device="cpu")
    assert llm.dtype == "int8" and llm.target.keys == torch.int8 and llm.target.backend is backend
    plain = llm.generate([3, 4, 5], 50, "autoregressive", ignore_eos=True).token_ids
    for strategy, options in (("tokenswift", {"tree": (1, 3)}), ("magicdec", {"budget": 24})):
        assert llm.generate([3, 4, 5], 50, strategy, options, ignore_eos=True).token_ids == plain
    monkeypatch.setattr(backend, "has_int8_keys", lambda width: False)
    with pytest.raises(InputError, match="the cuda backend keeps no keys .*on CUDA up to 256"):
        LLM(str(path), dtype="int8", device="cpu")
