"""The quantized target: it computes what the reference does and leaves the target alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gguf_files import QuantType, small, write
from tests.tiny import SIZES, VOCAB, build, tiny_model
from tokenswift import LLM, InputError, resume
from tokenswift.interfaces import Segment
from tokenswift.kernels.formats.format import Format, Stored
from tokenswift.kernels.formats.registry import FORMATS
from tokenswift.kernels.torch import TorchBackend
from tokenswift.kernels.weights import Packed
from tokenswift.memory import Memory
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.low_bit import LowBitTarget, copy_bytes

WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def wide(dtype: torch.dtype = torch.float32, kind: str = "llama") -> LLM:
    """A tiny model whose widths are multiples of 32."""
    return LLM.from_model(build(kind, SIZES, 3, "eager", **WIDE).to(dtype), heads="none")


@pytest.fixture
def native() -> None:
    if not isinstance(wide().target, NativeTarget) or not wide().target.backend.panels:
        pytest.skip("no compiled kernels here")


@torch.inference_mode()
def reference(
    target: NativeTarget, form: Format, tokens: torch.Tensor, parents: list[int] | None
) -> torch.Tensor:
    """Logits by the torch path over the same quantized values."""

    def values(weight: Packed) -> Packed:
        assert form.encode is not None
        return Packed(Stored(form, form.encode(weight.unpack().float())).decode(), False)

    backend, shape = TorchBackend(), target.body.shape
    names = ("qkv", "out", "gate_up", "down")
    weights = [replace(w, **{name: values(getattr(w, name)) for name in names}) for w in target.body.weights]
    body = backend.body(replace(shape, active=torch.int8, weights=torch.float32), weights)
    own, target.backend = target.backend, backend
    try:
        cache = target.new_cache(len(tokens))
        at = torch.arange(len(tokens))
        hidden = target.run([Segment(tokens, at, cache, parents)], False, body)[0].hidden
        return backend.linear(target.norm(hidden, torch.float32), values(target.head), None, torch.int8)
    finally:
        target.backend = own


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1"])
def test_passes_are_the_references(native: None, kind: str, name: str) -> None:
    target = wide(kind=kind).target
    assert isinstance(target, NativeTarget)
    low = LowBitTarget(target, FORMATS[name])
    tokens = torch.randint(2, VOCAB, (40,), generator=torch.Generator().manual_seed(1))
    for parents in (None, [-1] * 40):
        cache = target.new_cache(40)
        found = low.logits(low.forward(tokens, torch.arange(40), cache, parents).hidden)
        expected = reference(target, FORMATS[name], tokens, parents)
        far = (found - expected).norm(dim=1) / expected.norm(dim=1)
        # where a half is rounded to the other side, that row and those after it differ by more
        assert far[0] < 1e-5 and far.max() < 0.05
        assert parents is None or (far < 1e-5).float().mean() > 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_near_the_target_and_leaves_it_alone(native: None, dtype: torch.dtype) -> None:
    target = wide(dtype).target
    assert isinstance(target, NativeTarget)
    tokens, at, cache = torch.arange(2, 34), torch.arange(32), target.new_cache(32)
    before = target.logits(target.forward(tokens, at, cache).hidden)
    low = LowBitTarget(target, FORMATS["q8_0"])
    assert low.copied_bytes == low.weight_bytes and low.weight_bytes < 0.6 * target.weight_bytes
    near = low.logits(low.forward(tokens, at, cache).hidden)
    assert 0 < (near - before).norm() / before.norm() < 0.1
    assert torch.equal(target.logits(target.forward(tokens, at, cache).hidden), before)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_its_own_bits(native: None, threads: int) -> None:
    target = wide().target
    assert isinstance(target, NativeTarget)
    low = LowBitTarget(target, FORMATS["q4_0"])
    target.backend._fixed = threads  # type: ignore[attr-defined]
    try:
        tokens, cache = torch.arange(2, 22), target.new_cache(30)
        target.prefill(tokens[:10].tolist(), cache)
        one = [
            low.forward(tokens[10 + i : 11 + i], torch.tensor([10]), cache, [-1]).hidden for i in range(10)
        ]
        together = low.forward(tokens[10:20], torch.full((10,), 10), cache, [-1] * 10).hidden
        assert torch.equal(torch.cat(one), together)
        assert torch.equal(torch.cat([low.logits(row) for row in one]), low.logits(together))
    finally:
        target.backend._fixed = None  # type: ignore[attr-defined]


def test_what_cannot_be_quantised(native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = LLM.from_model(tiny_model("llama"), heads="none")
    assert narrow.resources.low_bit() is None and narrow.resources.low_bit("none") is None
    with pytest.raises(InputError, match=r"draft_weights is 'q8_0', .* valid: auto or none"):
        narrow.generate([3, 4], 3, strategy_options={"draft_weights": "q8_0"})
    with pytest.raises(InputError, match=r"draft_weights is 'q3'.*valid: auto, q8_0, q4_1, q4_0, none"):
        narrow.generate([3, 4], 3, strategy_options={"draft_weights": "q3"})
    llm = wide()
    assert isinstance(llm.target, NativeTarget)
    needed = copy_bytes(llm.target, FORMATS["q8_0"])
    monkeypatch.setattr(type(llm.target.backend), "memory", lambda self: Memory(needed + 1, 2 * needed))
    assert llm.resources.low_bit() is None  # half of it is enough for others
    before = llm.target.copied_bytes
    assert llm.resources.low_bit("q8_0") is llm.resources.low_bit("q8_0") is not None
    assert llm.target.copied_bytes > before  # once
    assert llm.target.copied_bytes <= before + 1.2 * needed
    monkeypatch.setattr(type(llm.target.backend), "memory", lambda self: Memory(needed // 2 - 1, needed))
    with pytest.raises(InputError, match=r"draft_weights is 'q4_1': a copy takes"):
        llm.resources.low_bit("q4_1")


def test_the_text_is_plain_decodings(native: None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        llm = wide(dtype)
        plain = llm.generate([5, 6, 7], 60, "autoregressive", ignore_eos=True)
        for name in ("auto", "q8_0", "q4_0", "none"):
            found = llm.generate([5, 6, 7], 60, strategy_options={"draft_weights": name}, ignore_eos=True)
            assert found.token_ids == plain.token_ids


# ---- activations of 8 bits for the model itself -----------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A GGUF file of low-bit weights."""
    path = tmp_path_factory.mktemp("low") / "small.gguf"
    write(path, small(), {"": QuantType.Q8_0})
    return str(path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_numbers_are_another_model_and_exact(native: None, file: str, dtype: str) -> None:
    llm, plain = LLM(file, dtype=dtype, activations="int8"), LLM(file, dtype=dtype)
    assert llm.resources.identity() == plain.resources.identity() | {"activations": "int8"}
    tokens, at = torch.arange(3, 43), torch.arange(40)
    logits = [
        one.target.logits(one.target.forward(tokens, at, one.target.new_cache(40)).hidden)
        for one in (llm, plain)
    ]
    assert 0 < (logits[0] - logits[1]).norm() / logits[1].norm() < 0.1
    expected = llm.generate([3, 4, 5], 50, "autoregressive", ignore_eos=True).token_ids
    for strategy, options in (("auto", {}), ("tokenswift", {"tree": (1, 3)}), ("magicdec", {"budget": 24})):
        found = llm.generate([3, 4, 5], 50, strategy, options, ignore_eos=True)
        assert found.token_ids == expected, strategy


def test_a_run_goes_on_with_its_activations_alone(native: None, file: str, tmp_path: Path) -> None:
    llm, where = LLM(file, activations="int8"), str(tmp_path / "run")
    llm.generate([3, 4, 5], 8, ignore_eos=True, run_dir=where)
    whole = llm.generate([3, 4, 5], 16, ignore_eos=True)
    with pytest.raises(InputError, match=r"activations is 'float', was 'int8'"):
        LLM(file).generate([3, 4, 5], 16, ignore_eos=True, run_dir=where)
    assert resume(where, max_new_tokens=16).token_ids == whole.token_ids


def test_whole_numbers_need_weights_in_few_bits(native: None, tmp_path: Path, file: str) -> None:
    path = tmp_path / "dense.gguf"
    write(path, small())
    with pytest.raises(InputError, match=r"activations is 'int8', but not all .* valid: float, or int8"):
        LLM(str(path), activations="int8")
    with pytest.raises(InputError, match=r"activations is 'int4'; valid: float, int8"):
        LLM(file, activations="int4")
    assert LLM(str(path), weights="q8_0", activations="int8").target.whole
