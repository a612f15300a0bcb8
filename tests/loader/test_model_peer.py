"""Logits of small GGUF files of mixtures, Phi-3, Ministral 3, gpt-oss, LFM2 and Qwen3.5 against
those of llama.cpp, a second opinion beside transformers'.

`make peer` installs its package in an environment of its own and runs this file; elsewhere it is
skipped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gguf_files import QuantType, small, write
from tests.loader.test_gguf import SWITCHED
from tests.loader.test_gguf_experts import CHANGES
from tokenswift import LLM
from tokenswift.loader.mixture_families import GPT_OSS

llama_cpp = pytest.importorskip("llama_cpp", reason="make peer installs llama-cpp-python")
pytestmark = pytest.mark.usefixtures("own_cache")

LENGTH = 200
PROMPT = torch.randint(2, 256, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
#: fields without which llama.cpp reads no file; of tokens that ours has to know
NEEDED: dict[str, object] = {"tokenizer.ggml.merges": ["a b"]}
#: of its logits' range: how far its rounding may move one; beside MXFP4 its states have 8 bits
ROUNDING = {QuantType.F32: 2e-3, QuantType.MXFP4: 1e-2}
MODELS: dict[str, dict[str, object]] = {
    **CHANGES,
    "gpt_oss": {**CHANGES["gpt_oss"], "sliding_window": 128},
    "olmoe": {**CHANGES["olmoe"], "num_key_value_heads": 4},  # it takes no fewer
    # a short text for both: llama.cpp goes by the length of its context
    "phi3": {**SWITCHED["phi3"], "original_max_position_embeddings": 1024},
    "ministral3": SWITCHED["ministral3"],
    "lfm2": SWITCHED["lfm2"],
    "qwen3_5_text": SWITCHED["qwen3_5_text"],
}
#: how pairs of positions are shared among a text, and rows and columns of pictures
SECTIONS: dict[str, dict[str, object]] = {
    "qwen3_5_text": {"qwen35.rope.dimension_sections": [3, 3, 2, 0]},
    "qwen3_5_moe_text": {"qwen35moe.rope.dimension_sections": [3, 3, 2, 0]},
}
#: quantized experts, too
CASES = [*((kind, QuantType.F32) for kind in MODELS), ("gpt_oss", QuantType.MXFP4)]


def their_logits(path: Path) -> np.ndarray:
    """llama.cpp's logits of each position of the prompt."""
    model = llama_cpp.Llama(
        str(path),
        n_ctx=256,
        n_batch=256,
        n_threads=1,
        logits_all=True,
        type_k=0,  # float32
        type_v=0,
        verbose=bool(os.environ.get("PEER_VERBOSE")),
    )
    model.eval(PROMPT)
    return np.array(model.scores[:LENGTH])


def our_logits(path: Path) -> np.ndarray:
    """Ours, in float32."""
    target = LLM(path, dtype="float32", device="cpu", heads="none").target
    tokens = torch.tensor(PROMPT)
    hidden = target.forward(tokens, torch.arange(LENGTH), target.new_cache(LENGTH)).hidden
    return target.logits(hidden).numpy()


def dict_of(fields: Mapping[str, object]) -> dict[str, object]:
    """Fields that may be changed."""
    assert isinstance(fields, dict)
    return fields


def written(path: Path, kind: str, experts: QuantType, fields: Mapping[str, object]) -> None:
    """A family's file, with experts in a format, and more that it says."""
    model = small(kind, **{"max_position_embeddings": 4096, **MODELS[kind]})
    types = {} if experts == QuantType.F32 else {"exps": experts}
    write(path, model, types, fields=fields)


@pytest.mark.parametrize(("kind", "experts"), CASES, ids=lambda each: getattr(each, "name", each))
def test_the_most_probable_tokens_are_those_of_llama_cpp(
    kind: str, experts: QuantType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its own rounding does not decide. It rounds the borders of YaRN to whole numbers, which
    gpt-oss's config forbids."""
    monkeypatch.setitem(dict_of(GPT_OSS.rope), "truncate", True)
    written(tmp_path / "ours.gguf", kind, experts, {})
    written(tmp_path / "theirs.gguf", kind, experts, {**NEEDED, **SECTIONS.get(kind, {})})
    ours = our_logits(tmp_path / "ours.gguf")
    theirs = their_logits(tmp_path / "theirs.gguf")
    choices = ours.argmax(-1)
    best = theirs.max(-1)
    lost = (best - theirs[np.arange(LENGTH), choices]) / (best - theirs.min(-1))
    assert lost.max() < ROUNDING[experts]
    assert (choices == theirs.argmax(-1)).mean() > 0.95
