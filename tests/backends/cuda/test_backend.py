"""The CUDA backend's own code - buffers, padding, segments, weights - on CPU tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backends.cuda.cases import CPU, random, segment
from tests.backends.test_segments import TEXTS, Layers
from tests.lossless.test_strategies import PAPER, PROMPT, runs
from tests.lossless.test_tokens import random_heads
from tests.tiny import FAMILIES, VOCAB, byte_model, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.backends.cuda import check, products
from tokenswift.backends.cuda.backend import CudaBackend
from tokenswift.backends.cuda.launch import Kernels
from tokenswift.backends.cuda.reference import Reference
from tokenswift.backends.torch import TorchBackend
from tokenswift.models import target as targets
from tokenswift.models.decoder import LeanTarget
from tokenswift.models.low_bit import LowBitTarget, low_bit
from tokenswift.models.rope import rotary_of
from tokenswift.weights.registry import FORMATS


def library(states: Tensor, weight: Tensor) -> Tensor:
    """In place of the vendor's: padded rows, as on the card."""
    assert len(states) in (16, 64, 512)
    return states.float() @ weight.float().T


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other much longer than these tiny products take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    """The backend of the CPU for this test."""
    made = CudaBackend("cpu", library=library)
    monkeypatch.setitem(targets._backends, "cpu", made)
    return made


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_layers_are_those_of_the_torch_path(weights: torch.dtype) -> None:
    ours, torchs = (Layers(made, weights, weights) for made in (CudaBackend("cpu"), TorchBackend()))
    pairs = zip(*(each.run([each.text(*sizes) for sizes in TEXTS]) for each in (ours, torchs)), strict=True)
    near = 2e-2 if weights == torch.bfloat16 else 1e-5
    for found, expected in pairs:
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape
            assert float((one.float() - other.float()).norm() / other.float().norm()) < near


@pytest.mark.parametrize(
    "family,new",
    [
        ("llama", 20),
        ("gemma2", 20),
        *(pytest.param(family, 90, marks=pytest.mark.slow) for family in FAMILIES),
    ],
)
def test_every_strategy_writes_what_plain_decoding_writes(
    backend: CudaBackend, family: str, new: int
) -> None:
    lean = family != "gemma2"
    make = tiny_model if lean else byte_model
    llm = LLM.from_model(make(family), heads=random_heads("medusa", 48, VOCAB) if lean else "none")
    assert llm.target.backend is backend and isinstance(llm.target, LeanTarget) is lean
    draft = make(family, seed=1)
    params = SamplingParams(seed=1, **PAPER)
    plain = llm.generate(PROMPT, new, "autoregressive", sampling=params, ignore_eos=True)
    lengths = []
    for strategy, options in runs(draft):
        if lean or strategy in ("magicdec", "triforce"):  # the others need heads
            got = llm.generate(PROMPT, new, strategy, options, params, ignore_eos=True)
            assert got.token_ids == plain.token_ids, (strategy, options)
            lengths.append(got.metrics.mean_acceptance_length)
    assert max(lengths) > 1.1
    auto = llm.generate(PROMPT, new, sampling=params, ignore_eos=True)
    assert auto.token_ids == plain.token_ids


def test_the_text_is_the_torch_paths(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(seed=2, **PAPER)
    texts = []
    for made in (backend, TorchBackend()):
        monkeypatch.setitem(targets._backends, "cpu", made)
        llm = LLM.from_model(tiny_model("llama"))
        texts.append(llm.generate(PROMPT, 60, "autoregressive", sampling=params, ignore_eos=True).token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "q4_1"])
def test_a_copy_in_few_bits_drafts(backend: CudaBackend, form: str) -> None:
    target: Any = targets.make_target(tiny_model("llama", hidden_size=64, num_attention_heads=4, head_dim=16))
    low = low_bit(target, form)
    assert low is not None and 0 < low.copied_bytes < target.weight_bytes / 2
    tokens = torch.tensor(PROMPT[:20])
    found, expected = (
        model.logits(model.forward(tokens, torch.arange(20), target.new_cache(20)).hidden)
        for model in (low, target)
    )
    assert 0 < float((found - expected).norm() / expected.norm()) < (0.05 if form == "q8_0" else 0.5)


def test_a_path_is_committed_by_the_kernels(backend: CudaBackend) -> None:
    moves: list[tuple[int, list[int]]] = []

    class Noted(Reference):
        def move(self, data: Tensor, start: int, nodes: Any) -> None:
            moves.append((start, list(nodes)))
            super().move(data, start, nodes)

    cache = CudaBackend("cpu", Noted()).new_cache(1, 2, 4, 9, torch.float32)
    cache.data.copy_(random(*cache.data.shape))
    expected = cache.data[:, :, [0, 1, 2, 3, 5, 8]].clone()
    cache.commit((0, 1))
    cache.fork(9).commit((0, 1, 3, 6))
    assert moves == [(4, [1, 4])]
    cache.commit((0, 1, 3, 6))
    assert torch.equal(cache.data[:, :, :6], expected)


class Broken(Reference):
    """Kernels that are not what they should be."""

    def __init__(self, defect: str) -> None:
        self.defect = defect

    def attend(self, plan: Any, query: Tensor, *rest: Any) -> Tensor:
        made = super().attend(plan, query, *rest)
        if self.defect == "wrong":
            return made * 1.05
        return made + 1e-6 * (len(query) > 1) if self.defect == "rows" else made


@pytest.mark.parametrize("defect,said", [("wrong", "from the reference"), ("rows", "rows in 1 passes")])
def test_kernels_that_do_not_work_are_found(defect: str, said: str) -> None:
    found = check.fault(CudaBackend("cpu", Broken(defect)), [(torch.float32, None, None)])
    assert found is not None and said in found


def test_torch_takes_over_where_kernels_do_not_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(targets, "_backends", {})
    monkeypatch.setattr(check, "started", lambda device: "no driver")
    with caplog.at_level(logging.WARNING, "tokenswift"):
        found = targets.backend_for("cuda:0")
    assert isinstance(found, TorchBackend) and not found.decodes and not found.equal_bits
    assert caplog.messages == ["the CUDA kernels do not work here (no driver); the slower torch path is used"]


def test_torch_is_chosen_for_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_backends", {})
    monkeypatch.setenv("TOKENSWIFT_KERNELS", "torch")
    assert targets.backend_for("cuda").name == "torch"


def test_a_weight_of_another_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="packed by another backend"):
        CudaBackend("cpu").linear(random(2, 4), TorchBackend().pack(random(3, 4)))


def test_keys_of_other_types_are_torchs() -> None:
    text, query = segment(5, 2, None, 2, 8, torch.float64), random(4, 2, 8, dtype=torch.float64)
    found = CudaBackend("cpu").attend(query, 0, text.cache, None, 0.3)
    assert torch.equal(found, TorchBackend(CPU).attend(query, 0, text.cache, None, 0.3))


class Unstarted(Kernels):
    """Kernels that are not started; what they would be given is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []

    def run(self, kernel: Any, grid: tuple[int, ...], warps: int, stages: int, **given: Any) -> None:
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        wrong = [name for name, value in tensors.items() if not (value.is_meta and value.is_contiguous())]
        assert not wrong, (kernel, wrong)
        self.started.append(kernel.__name__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_pass_leaves_nothing_on_the_host(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without memory stands for the card: an operation over two devices is an error. A layer starts
    as many kernels for 48 rows as for one."""
    meta, ops = torch.device("meta"), Unstarted()
    backend = CudaBackend(
        meta, ops, lambda states, weight: torch.empty(len(states), len(weight), device=meta)
    )
    model = tiny_model("qwen3", hidden_size=64, num_attention_heads=4).to(meta, dtype)
    monkeypatch.setattr(
        products, "keeps_bits", lambda library, weight: True
    )  # there are no values to compare
    target = LeanTarget(model, backend, rotary_of(model))
    cache = target.new_cache(60)
    made = target.prefill(list(range(2, 50)), cache)
    assert made.hidden.is_meta and target.logits(made.hidden).shape == (32, VOCAB)
    cache.commit((1, 3))
    assert ops.started.count("attend_chunks") == 2 * target.layers and ops.started[-1] == "move_rows"
    low = LowBitTarget(target, FORMATS["q8_0"])
    tokens = torch.zeros(2, dtype=torch.long, device=meta)
    drafted = low.forward(tokens, tokens, cache)
    assert low.logits(drafted.hidden).is_meta and ops.started.count("low_product") == 4 * target.layers + 1
