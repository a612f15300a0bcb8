"""The seed alone decides the text, whatever instruction set the kernels are compiled for."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from tests.lossless import frozen
from tokenswift import LLM, resume
from tokenswift.models import target as targets

NEW = 200
KINDS = [kind for kind in ("avx2", frozen.OWN) if kind in frozen.kinds()]
#: in float32 plain x86-64 has no fused step, and takes minutes for it
SETS = [
    (kind, dtype)
    for dtype in ("int8", "float32")
    for kind in frozen.kinds()
    if kind != frozen.OWN and (dtype == "int8" or kind != "x86-64")
]


def written(kind: str, dtype: str) -> tuple[list[int], str]:
    """200 tokens of the default model, and a hash of the bits of a tree pass behind a prompt."""
    if not frozen.use(kind):
        pytest.skip("no C compiler here")
    llm = LLM("smollm2-135m", dtype=dtype, device="cpu")
    prompt = llm.encode((frozen.PROMPTS / "harbour.txt").read_text(encoding="utf-8"))[
        : frozen.LENGTH
    ]
    out = llm.generate(prompt, NEW, sampling=frozen.SAMPLERS["paper"], ignore_eos=True)
    target = llm.target
    cache = llm.target.new_cache(400)
    target.prefill(prompt, cache)
    nodes = torch.arange(20)
    positions = cache.length + torch.tensor([0, *([1] * 19)])
    hidden = target.forward(nodes + 100, positions, cache, [-1, *([0] * 19)]).hidden
    bits = target.logits(hidden).contiguous().view(torch.uint8).numpy().tobytes()
    return out.token_ids, hashlib.sha256(bits).hexdigest()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(len(KINDS) < 2, reason="the processor has no AVX2")
@pytest.mark.parametrize(("kind", "dtype"), SETS)
def test_texts_and_logits_are_those_of_this_processors_own_kernels(
    kind: str, dtype: str, embedded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "_backends", {})
    assert Path(embedded).is_dir()
    assert written(kind, dtype) == written(frozen.OWN, dtype)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(len(KINDS) < 2, reason="the processor has no AVX2")
def test_a_run_begun_with_one_set_is_resumed_with_another(
    embedded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "_backends", {})
    assert Path(embedded).is_dir()
    models = {}
    for kind in KINDS:
        if not frozen.use(kind):
            pytest.skip("no C compiler here")
        models[kind] = LLM("smollm2-135m", dtype="int8", device="cpu")
    first, second = (models[kind] for kind in KINDS)
    assert first.target.backend.build != second.target.backend.build  # type: ignore[attr-defined]
    uninterrupted = second.generate("Once upon a time", 40, ignore_eos=True)
    first.generate("Once upon a time", 15, ignore_eos=True, run_dir=tmp_path / "run")
    assert (
        resume(tmp_path / "run", max_new_tokens=40, llm=second).token_ids == uninterrupted.token_ids
    )
