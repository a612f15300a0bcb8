"""Files of random weights in the shapes of models with recurrent layers: what they say is what
runs; and the prices of passes over them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.random_recurrent import SHAPES, write_random
from tokenswift import LLM
from tokenswift.models.decoder import NativeTarget

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_is_a_model_of_its_sizes(name: str, tmp_path: Path) -> None:
    first = SHAPES[name].attending[0]
    sizes = replace(
        SHAPES[name],
        layers=first + 1,
        attending=(first,),
        hidden=256,
        inner=256,
        vocabulary=64,
    )
    write_random(tmp_path / "model.gguf", sizes)
    target = LLM(tmp_path / "model.gguf", device="cpu", heads="none").target
    assert isinstance(target, NativeTarget)
    recurrence = target.layout.recurrence
    assert recurrence is not None
    assert recurrence.value_heads == sizes.value_heads
    assert target.layers - len(target.windows) == first
    tokens = torch.arange(3, 12)
    hidden = target.forward(tokens, torch.arange(len(tokens)), target.new_cache(16)).hidden
    logits = target.logits(hidden)
    assert logits.isfinite().all()
    assert (logits.argmax(-1) != logits.argmax(-1)[0]).any()
