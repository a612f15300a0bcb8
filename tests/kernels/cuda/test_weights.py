"""Quantized weights on the CUDA backend, from files to texts, on CPU tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gguf_files import QuantType, small, write
from tests.kernels.cuda.cases import low
from tests.kernels.cuda.conftest import library
from tests.lossless.test_strategies import PAPER, PROMPT, runs
from tests.lossless.test_tokens import random_heads
from tests.tiny import VOCAB, tiny_model
from tokenswift import LLM, SamplingParams
from tokenswift.engine import source
from tokenswift.engine.source import FromFiles, Source, open_model
from tokenswift.kernels.base import Backend
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.weights import CudaPacked
from tokenswift.kernels.formats.registry import FORMATS
from tokenswift.kernels.weights import PRODUCTS
from tokenswift.load_config import LoadConfig
from tokenswift.models import target as targets
from tokenswift.models.decoder import NativeTarget
from tokenswift.spec.drafters.heads import HeadLevels
from tokenswift.types import InputError

pytestmark = pytest.mark.usefixtures("own_cache")
PARAMS = SamplingParams(seed=1, **PAPER)
MIXES: dict[str, dict[str, QuantType]] = {
    "q8_0": {"": QuantType.Q8_0},
    "q4_0": {"": QuantType.Q4_0},
    "q4_1 of q8_0": {"": QuantType.Q4_1, "token_embd": QuantType.Q8_0, "attn_v": QuantType.Q8_0},
}


@pytest.fixture
def backend(backend: CudaBackend) -> CudaBackend:
    """The backend of the CPU for this test; it is kept which models passed its checks."""
    backend.key = "a card"
    return backend


def tiny(kind: str = "llama", **changes: Any) -> Any:
    """A model of the least widths that blocks of 32 fit."""
    return small(kind, hidden_size=64, intermediate_size=64, head_dim=16, initializer_range=0.2, **changes)


def file_of(folder: Path, mix: str, kind: str = "llama", **changes: Any) -> Path:
    """A GGUF file of it."""
    path = folder / "model.gguf"
    write(path, tiny(kind, **changes), MIXES[mix])
    return path


def packed_of(target: Any) -> list[CudaPacked]:
    """All weights that a pass multiplies with."""
    assert isinstance(target, NativeTarget)
    return [target.head, *(getattr(w, name) for w in target.body.weights for name in PRODUCTS)]  # type: ignore


def text(llm: LLM, strategy: str = "autoregressive", options: Any = None, new: int = 24) -> list[int]:
    """What is written after the prompt."""
    return llm.generate(PROMPT, new, strategy, options, PARAMS, ignore_eos=True).token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mix,kind", [("q8_0", "qwen3"), ("q4_0", "qwen2"), ("q4_1 of q8_0", "llama")])
def test_a_file_stays_as_it_is_stored(
    backend: CudaBackend, mix: str, kind: str, dtype: str, tmp_path: Path
) -> None:
    """Matrices, embedding rows and LM head; logits and tokens are those of the unpacked weights."""
    path = file_of(tmp_path, mix, kind, tie_word_embeddings=kind == "qwen2")
    stored = LLM(path, dtype=dtype, device="cpu", heads="none")
    unpacked = LLM(path, dtype=dtype, device="cpu", heads="none", weights=dtype)
    assert isinstance(stored.source, FromFiles) and stored.target.backend is backend
    assert all(weight.stored for weight in packed_of(stored.target))
    assert not any(weight.stored for weight in packed_of(unpacked.target))
    assert stored.target.weight_bytes < 0.6 * unpacked.target.weight_bytes
    ids = torch.tensor(PROMPT[:9])
    assert torch.equal(stored.target.embed(ids), unpacked.target.embed(ids))
    rows = [llm.target.prefill(PROMPT, llm.target.new_cache(99)).hidden for llm in (stored, unpacked)]
    logits = [llm.target.logits(hidden) for llm, hidden in zip((stored, unpacked), rows, strict=True)]
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < (1e-5 if dtype == "float32" else 0.02)
    assert text(stored) == text(unpacked)


@pytest.mark.parametrize(
    "mix,how,each",
    [
        ("q4_1 of q8_0", {"activations": "int8", "dtype": "bfloat16"}, 4),
        *(pytest.param(mix, {}, 1, marks=pytest.mark.slow) for mix in MIXES),
        *(pytest.param(mix, {"dtype": "bfloat16"}, 1, marks=pytest.mark.slow) for mix in MIXES),
        *(pytest.param(mix, {"activations": "int8"}, 1, marks=pytest.mark.slow) for mix in MIXES),
    ],
)
def test_every_strategy_over_stored_weights(
    backend: CudaBackend, mix: str, how: dict[str, str], each: int, tmp_path: Path
) -> None:
    dtype = getattr(torch, how.get("dtype", "float32"))
    heads, draft = random_heads("medusa", 64, 260).to(dtype), tiny(seed=1).to(dtype)
    llm = LLM(file_of(tmp_path, mix), device="cpu", heads=heads, **how)  # type: ignore[arg-type]
    plain = text(llm)
    for strategy, options in runs(draft)[::each]:
        assert text(llm, strategy, options) == plain, (strategy, options)
    assert text(llm, "auto") == plain
    assert llm.target.whole == ("activations" in how)


def test_other_formats_are_unpacked_and_said(
    backend: CudaBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.gguf"
    write(path, small(), {"": QuantType.Q6_K, "ffn": QuantType.Q8_0, "attn_q": QuantType.Q4_K})
    with caplog.at_level(logging.WARNING, "tokenswift"):
        llm = LLM(path, dtype="bfloat16", device="cpu", heads="none")
    assert caplog.messages == [
        f"model {path}: tensors of type Q4_K, Q6_K are unpacked to bfloat16, which takes more memory than "
        "the file"
    ]
    head, *layers = packed_of(llm.target)
    assert not head.stored and layers[2].stored and not layers[0].stored
    assert text(llm, "auto") == text(llm)
    with pytest.raises(InputError, match="activations is 'int8', but not all of the model's weights"):
        LLM(path, dtype="bfloat16", device="cpu", heads="none", activations="int8")


class Elsewhere:
    """Opens models on a backend that stands for a card beside the CPU's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.card, usual = CudaBackend("cpu", library=library), targets.backend_for
        self.card.on_host, self.card.key = False, "another card"
        monkeypatch.setattr(source, "backend_for", lambda *how: self.card if how else usual())

    def open(self, path: Path, weights: str) -> Source:
        return open_model(str(path), LoadConfig(device="cpu", weights=weights))


def test_a_checkpoint_is_quantized_on_its_way_to_a_card(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Callable[..., Path]
) -> None:
    elsewhere, folder = Elsewhere(monkeypatch), tiny_folder("llama")
    opened = elsewhere.open(folder, "q8_0")
    assert isinstance(opened, FromFiles)
    made = opened.target()
    assert made.backend is elsewhere.card
    assert all(weight.stored for weight in packed_of(made))
    plain = elsewhere.open(folder, "stored").target()
    assert made.weight_bytes < 0.6 * plain.weight_bytes
    assert isinstance(elsewhere.open(folder, "stored"), FromFiles)


@pytest.mark.parametrize("tied", [False, True])
def test_everything_of_a_file_goes_to_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tied: bool
) -> None:
    """A device without memory stands for the card."""
    meta = torch.device("meta")
    made = CudaBackend(meta)
    monkeypatch.setattr(source, "backend_for", lambda *how: made)
    path = file_of(tmp_path, "q4_1 of q8_0", "qwen2", tie_word_embeddings=tied)
    opened = open_model(str(path), LoadConfig("bfloat16", "cpu"))
    assert isinstance(opened, FromFiles)
    target = NativeTarget(opened._weights, made, opened._files.rotary.to(meta))
    assert all(t.is_meta for w in target.body.weights for t in w.tensors())
    assert target.embed(torch.zeros(2, dtype=torch.long, device=meta)).is_meta
    assert target.logits(torch.empty(2, 64, device=meta)).is_meta and opened.host.device == meta


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "q4_1"])
def test_rows_are_taken_from_what_is_stored(form: str) -> None:
    stored = low(form, 70, 96)
    packed = CudaPacked([stored, stored], torch.float32, torch.device("cpu"))
    alone = CudaPacked(stored, torch.bfloat16, torch.device("cpu"))
    ids = torch.tensor([3, 69, 0, 3])
    assert torch.equal(alone.take(ids), stored.decode()[ids].to(torch.bfloat16))
    assert torch.equal(packed.take(ids + 70), stored.decode()[ids])


# ---- draft heads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_packed_for_it(backend: CudaBackend, dtype: torch.dtype) -> None:
    """Their levels are those of the heads' own modules; another backend packs them anew."""
    heads = random_heads("conditioned", 48, VOCAB).to(dtype)
    llm = LLM.from_model(tiny_model("llama").to(dtype), heads=heads)
    levels = HeadLevels(llm.target, heads, frequent=False)
    plain = HeadLevels(llm.target, heads, frequent=False)
    assert levels._steps is not None and levels._steps[0].backend is backend
    plain._steps = None
    base = torch.randn(1, 48, generator=torch.Generator().manual_seed(1))
    near = 1e-5 if dtype == torch.float32 else 0.03
    found, expected = (each.start(base).expand(2, -1) for each in (levels, plain))
    for head in range(2):
        (found, logits), (expected, wanted) = (
            each.level(head, states, [4, 5]) for each, states in ((levels, found), (plain, expected))
        )
        assert float((logits - wanted).norm() / wanted.norm()) < near
    new = CudaBackend("cpu")
    llm.target.backend = new
    assert HeadLevels(llm.target, heads, False)._steps[0].backend is new  # type: ignore[index]


def test_text_with_packed_heads(backend: CudaBackend) -> None:
    llm = LLM.from_model(tiny_model("qwen3"), heads=random_heads("conditioned", 48, VOCAB))
    plain = text(llm)
    for strategy, options in (("tokenswift", {"tree": (1, 3, 3)}), ("auto", {})):
        assert text(llm, strategy, options) == plain


# ---- the protocol -----------------------------------------------------------------------------------


def test_which_formats_products_read() -> None:
    card, cpu = CudaBackend("cpu"), targets.backend_for()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert {form for form in FORMATS if card.keeps(form, dtype)} == {"q8_0", "q4_0", "q4_1"}
        on_cpu = {form for form in FORMATS if cpu.keeps(form, dtype)}
        assert on_cpu == (set(cpu.formats) if dtype != torch.float16 else set())
    assert card.graphs and card.fused and isinstance(card, Backend)
