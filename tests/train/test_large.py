"""Training on the shapes of Llama-3.2-1B, cut to two layers: forward, loss over all tokens, resume."""

from __future__ import annotations

import math
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.train.test_text import with_bos
from tests.train.test_train import full_run, steps, words
from tokenswift.spec.heads.checkpoint import load_heads
from tokenswift.train.loss import Distillation
from tokenswift.train.options import TrainingOptions

LLAMA_32_1B = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "tie_word_embeddings": True,
}


@pytest.mark.slow
def test_forward_loss_and_resume_on_the_shapes_of_a_large_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LlamaForCausalLM(LlamaConfig(**LLAMA_32_1B, num_hidden_layers=2)).eval()  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(torch.float32)
    (tmp_path / "t.txt").write_text(words(400))
    training = TrainingOptions(steps=6, save_every=2, log_every=1, batch=1, window=64, held_out=0.0)
    calls: list[int] = []
    whole = Distillation.forward

    def forward(self: Distillation, **batch: Any) -> dict[str, torch.Tensor]:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return whole(self, **batch)

    monkeypatch.setattr(Distillation, "forward", forward)
    more: dict[str, Any] = {"tokens": 800, "sequence_length": 200, "tokenizer": with_bos()}
    with pytest.raises(KeyboardInterrupt):
        full_run(model, str(tmp_path / "t.txt"), tmp_path, training, **more)
    notes = full_run(model, str(tmp_path / "t.txt"), tmp_path, training, **more)
    assert notes["steps"] == 6 and math.isfinite(notes["loss"]) and notes["vocabulary"] == 128_256
    assert steps(tmp_path) == [1, 2, 3, 3, 4, 5, 6] and len(calls) == 8
    assert load_heads(tmp_path / "h.safetensors", model).count == 2
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB, loss {notes['loss']:.3f}")
