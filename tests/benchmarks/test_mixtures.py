"""Files of random weights in the shapes of mixtures: what they say is what runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.random_mixture import SHAPES, write_random
from tokenswift import LLM
from tokenswift.models.decoder import NativeTarget

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
