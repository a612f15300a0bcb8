"""Files of random weights in the shapes of mixtures: what they say is what runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.random_mixture import SHAPES, write_random
from tokenswift import LLM
from tokenswift.models.decoder import NativeTarget
from tools import summaries

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_is_a_model_of_its_sizes(name: str, tmp_path: Path) -> None:
    sizes = replace(SHAPES[name], layers=1, experts=4, used=2, vocabulary=64)
    write_random(tmp_path / "model.gguf", sizes)
    target = LLM(tmp_path / "model.gguf", device="cpu", heads="none").target
    assert isinstance(target, NativeTarget)
    mixture = target.layout.mixture
    assert mixture is not None
    assert (mixture.experts, mixture.used, mixture.inner) == (4, 2, sizes.inner)
    tokens = torch.arange(3, 12)
    hidden = target.forward(tokens, torch.arange(len(tokens)), target.new_cache(16)).hidden
    logits = target.logits(hidden)
    assert logits.isfinite().all()
    assert (logits.argmax(-1) != logits.argmax(-1)[0]).any()


def test_the_docs_show_a_file_beside_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = {"model": "m", "machine": "cpu", "commit": "c", "context": 64, "rounds": 2}
    rows: list[dict[str, object]] = []
    for program, writing in (("tokenswift", 5.0), ("tokenswift", 12.0), ("llama.cpp", 8.0)):
        measured = {"reading": 9.0, "writing": writing, "loading": 1.0, "peak": 10**9}
        rows.append({**about, **measured, "program": program, "version": "1.2"})
    file = tmp_path / "mixtures.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(summaries, "MIXTURES", file)
    ours, llama = summaries.mixtures().body
    times = "(**{}** times llama.cpp's)"
    assert ours[2:4] == [f"9.0 {times.format('1.00')}", f"12.0 {times.format('1.50')}"]
    assert llama == ["m", "llama.cpp", "9.0", "8.0", "", "1.0", "1.0"]
    monkeypatch.setattr(summaries, "MIXTURES", tmp_path / "none.jsonl")
    assert "Not measured yet" in summaries.mixtures().below
