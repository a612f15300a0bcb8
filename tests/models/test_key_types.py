"""Which layers keep keys of 16 bits, and that a planted outlier is seen where they do not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.gguf_files import QuantType, small, write
from tokenswift import LLM, InputError
from tokenswift.audit.logits import IN_FLOATS, int8_quality
from tokenswift.audit.report import surely_worse
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.key_types import needs_wide_keys, score_error
from tokenswift.models.quality import Quality, compared, judged
from tokenswift.models.target import backend_for
from tokenswift.runs.folder import load
from tokenswift.runs.records import check_same

pytestmark = pytest.mark.skipif(
    not isinstance(backend_for(), CpuBackend), reason="no compiled kernels here"
)
CHANNEL = 5
TOKENS = 400


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without outliers."""
    return written(tmp_path_factory.mktemp("plain") / "model.gguf", 1)


@pytest.fixture(scope="module")
def outlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a channel of keys, in the second layer, that is 100 times the others."""
    return written(tmp_path_factory.mktemp("outlier") / "model.gguf", 100)


def written(file: Path, factor: float) -> Path:
    """A random model whose attention decides much, in Q8_0."""
    torch.manual_seed(5)
    model = small("qwen2", initializer_range=0.12, max_position_embeddings=512)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_(std=1)
            layer.self_attn.q_proj.bias.zero_()
        model.model.layers[1].self_attn.k_proj.bias[CHANNEL] = factor
    write(file, model, {"": QuantType.Q8_0})
    return file


def target_of(file: Path, key_type: str) -> NativeTarget:
    llm = LLM(file, device="cpu", dtype="int8", kv_cache_dtype=key_type)
    assert isinstance(llm.target, NativeTarget)
    return llm.target


def quality(file: Path, key_type: str) -> Quality:
    """Of int8 over texts that the model wrote in float32."""
    llm = LLM(file, device="cpu", dtype="float32")
    prompts = [[3, 4, first] for first in range(5, 9)]
    written = llm.generate_many(prompts, TOKENS, "autoregressive", ignore_eos=True)
    texts = [out.token_ids for out in written]
    target = target_of(file, key_type)
    judgements = [judged(target, text, TOKENS - 50) for text in texts]
    with target.computing(IN_FLOATS):
        reference = [judged(target, text, TOKENS - 50) for text in texts]
    return compared(judgements, reference)


def test_a_model_without_outliers_keeps_keys_in_int8(plain: Path) -> None:
    target = target_of(plain, "auto")
    assert target.kv_dtype == torch.int8
    assert target.wide_layers == []


def test_a_layer_with_an_outlier_keeps_keys_of_16_bits(outlier: Path) -> None:
    target = target_of(outlier, "auto")
    assert target.wide_layers == [1]
    assert target.identity().get("int16_keys") == "1"


def test_a_planted_outlier_fails_with_int8_keys(outlier: Path) -> None:
    assert surely_worse(quality(outlier, "int8"))


@pytest.mark.parametrize("key_type", ["auto", "int16"])
def test_a_planted_outlier_passes_with_keys_of_16_bits(outlier: Path, key_type: str) -> None:
    assert not surely_worse(quality(outlier, key_type))


@pytest.mark.parametrize("key_type", ["auto", "int8", "int16"])
def test_a_model_without_outliers_passes(plain: Path, key_type: str) -> None:
    assert not surely_worse(quality(plain, key_type))


def test_the_types_are_part_of_a_runs_identity(outlier: Path) -> None:
    names = [target_of(outlier, key_type).identity() for key_type in ("auto", "int8", "int16")]
    assert [name.get("int16_keys") for name in names] == ["1", "none", "0,1"]
    assert all(name.get("dtype") == "int8" for name in names)


def test_a_run_is_not_resumed_with_other_types_of_keys(outlier: Path, tmp_path: Path) -> None:
    with LLM(outlier, device="cpu") as llm:
        llm.generate([3, 4, 5], 4, ignore_eos=True, run_dir=tmp_path / "run")
    with (
        LLM(outlier, device="cpu", kv_cache_dtype="int8") as other,
        pytest.raises(InputError, match="int16_keys"),
    ):
        other.generate([3, 4, 5], 8, ignore_eos=True, run_dir=tmp_path / "run")


def test_a_run_in_int8_of_an_earlier_version_is_not_resumed(plain: Path, tmp_path: Path) -> None:
    """Its attention weights had 7 bits."""
    with LLM(plain, device="cpu") as llm:
        llm.generate([3, 4, 5], 4, ignore_eos=True, run_dir=tmp_path / "run")
    now = load(tmp_path / "run")[1].header
    assert now.identity.int16_keys == "none"
    identity = msgspec.structs.replace(now.identity, int16_keys=None)
    earlier = msgspec.structs.replace(now, identity=identity)
    with pytest.raises(InputError, match="int16_keys are new: the run was written by an earlier"):
        check_same("run", earlier, now)


def test_keys_of_16_bits_take_half_as_much_memory_again(plain: Path) -> None:
    sizes = {kept: target_of(plain, kept).kv_bytes for kept in ("int8", "int16")}
    numbers = 2 * 2 * 64  # layers, KV heads, numbers of a key
    assert sizes["int16"] - sizes["int8"] == numbers


@pytest.mark.parametrize("error, wide", [(0.0, False), (0.04, False), (0.06, True)])
def test_the_error_of_scores_decides(error: float, wide: bool) -> None:
    assert needs_wide_keys(error) == wide


def test_what_is_no_number_needs_16_bits() -> None:
    assert needs_wide_keys(math.nan)


def rows() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    noise = torch.Generator().manual_seed(1)
    for factor in (1.0, 10.0, 100.0):
        keys = torch.randn(2, 500, 64, generator=noise)
        keys[:, :, CHANNEL] *= factor
        yield keys, torch.randn(6, 500, 64, generator=noise)


def test_the_error_is_that_of_rounded_keys() -> None:
    """σ against scores that were computed with keys in int8."""
    for keys, queries in rows():
        scale = keys.abs().amax(-1, keepdim=True) / 127
        rounded = (keys / scale).round() * scale
        heads = torch.arange(6) // 3
        moved = (queries @ (rounded - keys)[heads].mT) * 0.125
        measured = moved.std(dim=(1, 2)).max()
        assert score_error(keys, queries, 0.125) == pytest.approx(float(measured), rel=0.1)


def test_the_audit_judges_int8_and_nothing_else(plain: Path) -> None:
    with LLM(plain, device="cpu") as llm:
        quality = int8_quality(llm, [[3, 4, 5]])
    assert quality is not None
    assert quality.tokens > 100
    with LLM(plain, device="cpu", dtype="bfloat16") as llm:
        assert int8_quality(llm, [[3, 4, 5]]) is None


def test_a_model_audited_in_float32_is_judged_in_int8_where_that_is_its_default(
    outlier: Path,
) -> None:
    with LLM(outlier, device="cpu") as default, LLM(outlier, dtype="float32") as llm:
        assert int8_quality(llm, [[3, 4, 5]]) == int8_quality(default, [[3, 4, 5]])
        assert llm.dtype == "float32"
        assert llm.target.wide_layers == []
