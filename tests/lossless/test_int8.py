"""In int8 every way of generating writes what plain decoding in int8 writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.default_model import default_llm
from tests.lossless.frozen import LENGTH, NEW, PROMPTS, SAMPLERS, STRATEGIES
from tokenswift import LLM, InputError, resume
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.cpu.int8_cache import Pages
from tokenswift.models.target import backend_for

pytestmark = pytest.mark.skipif(
    not isinstance(backend_for(), CpuBackend), reason="no compiled kernels here"
)


@pytest.fixture(scope="module")
def llm(embedded: str) -> LLM:
    assert Path(embedded).is_dir()
    return default_llm("int8")


def prompt(llm: LLM, name: str = "harbour") -> list[int]:
    return llm.encode((PROMPTS / f"{name}.txt").read_text(encoding="utf-8"))[:LENGTH]


@pytest.mark.model
@pytest.mark.parametrize(
    "sampler", [pytest.param(name, marks=pytest.mark.slow) for name in SAMPLERS]
)
def test_strategies_write_plain_decodings_tokens(llm: LLM, sampler: str) -> None:
    """In the fast suite the runs of `test_frozen` stand for these."""
    assert llm.dtype == "int8"
    assert llm.resources.identity()["dtype"] == "int8"
    text = prompt(llm)
    plain = llm.generate(text, NEW, "autoregressive", sampling=SAMPLERS[sampler], ignore_eos=True)
    accepted = 0
    for strategy, options in {**STRATEGIES, "auto": {}}.items():
        out = llm.generate(text, NEW, strategy, options, SAMPLERS[sampler], ignore_eos=True)
        assert out.token_ids == plain.token_ids, strategy
        accepted += out.metrics.steps < NEW
    assert accepted >= 2  # drafts are good for something


@pytest.mark.model
def test_batches_and_resumed_runs_write_the_same(llm: LLM, tmp_path: Path) -> None:
    texts = [prompt(llm), prompt(llm, "letters")[:90]]
    sampling = SAMPLERS["paper"]
    alone = [
        llm.generate(text, 40, "autoregressive", sampling=sampling, ignore_eos=True).token_ids
        for text in texts
    ]
    batched = llm.generate_many(texts, 40, sampling=sampling, ignore_eos=True, at_once=2)
    assert [out.token_ids for out in batched] == alone
    half = llm.generate(texts[0], 17, sampling=sampling, ignore_eos=True, run_dir=tmp_path / "run")
    assert half.token_ids == alone[0][:17]
    assert resume(tmp_path / "run", max_new_tokens=40, llm=llm).token_ids == alone[0]


@pytest.mark.slow
@pytest.mark.model
def test_keys_in_int8_beside_floats(embedded: str) -> None:
    assert Path(embedded).is_dir()
    bytes_by_type = {}
    for key_type in ("int8", "bfloat16"):
        llm = LLM("smollm2-135m", dtype="float32", device="cpu", kv_cache_dtype=key_type)
        assert llm.resources.identity().get("kv_cache_dtype") == key_type
        assert llm.dtype == "float32"
        plain, drafted = (
            llm.generate(prompt(llm), NEW, strategy, options, SAMPLERS["paper"], ignore_eos=True)
            for strategy, options in (("autoregressive", {}), ("magicdec", STRATEGIES["magicdec"]))
        )
        assert plain.token_ids == drafted.token_ids
        bytes_by_type[key_type] = llm.target.kv_bytes
    assert bytes_by_type["int8"] * 256 == bytes_by_type["bfloat16"] * (
        128 + 12
    )  # numbers of 8 bits and three scales


def test_dense_weights_are_refused_with_the_way(tiny_folder: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match="dtype is 'int8'.*q8_0"):
        LLM(tiny_folder(), dtype="int8", device="cpu")
    with pytest.raises(InputError, match="kv_cache_dtype is 'int4'.*int8"):
        LLM(tiny_folder(), kv_cache_dtype="int4", device="cpu")


def test_what_is_no_number_ends_a_run(llm: LLM) -> None:
    target = llm.target
    cache = target.new_cache(32)
    tokens = torch.arange(5)
    assert isinstance(cache.entries, Pages)
    scales = cache.entries.scales(0)
    target.forward(tokens, tokens, cache)
    cache.commit(tuple(range(5)))
    scales[0, 0, 0, 2] = float("nan")
    hidden = target.forward(tokens[:1], tokens[:1] + 5, cache).hidden
    assert target.logits(hidden).isnan().all()
