"""Recurrent layers in every type of numbers: drafts change no bit, states stay in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gguf_files import QuantType, small, write
from tests.loader.test_gguf import SWITCHED as DENSE
from tests.loader.test_gguf_experts import CHANGES as EXPERTS
from tests.lossless.test_recurrent import drafts_change_nothing
from tests.planted import cast
from tests.tiny import RECURRENT, tiny_model
from tokenswift import LLM
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.target import make_target

#: as GGUF files have them
KINDS = ("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", RECURRENT)
def test_two_bytes_a_number(family: str, dtype: torch.dtype) -> None:
    target = make_target(cast(tiny_model(family), dtype))
    assert isinstance(target, NativeTarget)
    states = target.new_cache(8).states
    assert states is not None
    assert states.now.dtype == torch.float32
    assert drafts_change_nothing(target)


@pytest.mark.parametrize("keys", ["auto", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers(kind: str, keys: str, tmp_path: Path) -> None:
    changes = {**DENSE, **EXPERTS}.get(kind, {})
    path = tmp_path / "model.gguf"
    write(path, small(kind, **changes), {"": QuantType.Q8_0})
    llm = LLM(path, device="cpu", heads="none", kv_cache_dtype=keys)
    assert isinstance(llm.target, NativeTarget)
    assert llm.target.int8
    assert drafts_change_nothing(llm.target)
