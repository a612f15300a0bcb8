"""Draft models: windows, the loss by its definition, the whole way, reuse of states, packing, the alias."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scripts import pack_draft
from tests.conftest import FAMILIES, tiny_model, tiny_tokenizer
from tests.gguf_files import small as small_model
from tests.gguf_files import write
from tests.train.test_train import chances, filled, frozen, options, small, words
from tokenswift.config import SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.loader import default_model
from tokenswift.loader.load import load
from tokenswift.train.draft import DraftStudent, make_student, train_draft
from tokenswift.train.loss import Distillation
from tokenswift.train.options import Job
from tokenswift.train.states import Windows
from tokenswift.types import InputError

TOKENS = torch.arange(20)[None] * 7 % 256


def draft_run(model: Any, folder: Path, steps: int = 4, layers: int = 1, **changes: Any) -> dict[str, Any]:
    """A draft model in ``folder / "draft"`` from a text that is written there."""
    (folder / "t.txt").write_text(words(800))
    how: dict[str, Any] = {
        "data": options(str(folder / "t.txt")),
        "training": small(steps=steps, lr=0.01, window=64),
    }
    job = Job(**how, out=folder / "draft", work=folder / "work", name="tiny", **changes)
    ignored: Any = lambda *told: None  # noqa: E731
    return train_draft(LLM.from_model(model, tiny_tokenizer()), job, ignored, ignored, layers=layers)


@torch.no_grad()
def test_loss_by_definition(tmp_path: Path) -> None:
    """Position by position: the target's processed distribution against the student's penalised one."""
    model = tiny_model()
    store = filled(tmp_path, model, (56,))
    student = make_student(model, 1)
    windows = Windows(store, 0, 40, 100)
    items = [windows[0], windows[1]]  # the second one: 16 of 40 tokens, 40 before them
    batch = {k: torch.stack([i[k] for i in items]) for k in items[0]}
    sampling = SamplingParams(repetition_penalty=1.5)
    base = frozen(model)
    got = Distillation(DraftStudent(student), base, sampling)(**batch)["loss"]

    tokens, bits = store.arrays()
    text = torch.from_numpy(tokens.astype("int64"))
    states = torch.from_numpy(bits.copy()).view(torch.bfloat16)
    total = torch.zeros(())
    for first, last in ((0, 40), (40, 56)):
        logits = student(text[None, first:last]).logits[0]
        for t in range(first, last):
            p = chances(model.lm_head(base.normed(states[t : t + 1])), text[None, : t + 1], sampling)
            free = SamplingParams(repetition_penalty=1.5, min_p=0.0)
            q = chances(logits[t - first : t - first + 1], text[None, : t + 1], free)
            total -= (p * q.log()).sum()
    torch.testing.assert_close(got, total / 56, rtol=2e-3, atol=2e-3)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_with_all_layers_is_the_target(family: str) -> None:
    model = tiny_model(family)
    student = make_student(model, 2)
    torch.testing.assert_close(student(TOKENS).logits, model(TOKENS).logits)
    other = make_student(model, 1)
    assert len(other.model.layers) == 1 and not torch.allclose(other(TOKENS).logits, model(TOKENS).logits)
    for layers in (0, 3):
        with pytest.raises(InputError, match=f"layers is {layers}; valid: from 1 to 2"):
            make_student(model, layers)


@pytest.mark.parametrize("tied", [True, False])
def test_the_whole_way(tied: bool, tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=tied, initializer_range=0.2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    notes = draft_run(model, tmp_path, 12)
    losses = [float(row.split(",")[1]) for row in (tmp_path / "work" / "log.csv").read_text().split()[1:]]
    assert notes["steps"] == 12 and len(losses) == 12 and losses[-1] < losses[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    made = load(tmp_path / "draft", device="cpu")
    assert made.tokenizer("hi")["input_ids"] == tiny_tokenizer()("hi")["input_ids"]
    assert made.model.config.num_hidden_layers == 1 and made.model.dtype == torch.float32
    weights = made.model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(weights[name], before[name])
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(weights[name], before[name])
    record = json.loads((tmp_path / "draft" / "tokenswift.json").read_text())
    assert record["target"] == "tiny" and record["notes"]["layers"] == 1

    again = draft_run(model, tmp_path, 12)  # goes on from the last checkpoint: nothing is left to do
    assert again["steps"] == 12
    resumed = load(tmp_path / "draft", device="cpu").model.state_dict()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in weights.items())
    with pytest.raises(InputError, match="belongs to a training of other"):
        draft_run(model, tmp_path, 12, layers=2)


def test_the_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of the packed file, embedding, LM head and tokenizer of the default model (here a tiny one)."""
    (tmp_path / "cache").mkdir()
    gguf = write(tmp_path / "cache" / default_model.GGUF, small_model(tie_word_embeddings=True))
    packed = tmp_path / "package" / f"{default_model.NAME}.draft.safetensors"
    draft_run(gguf, tmp_path, 2)
    pack_draft.write(tmp_path / "draft", packed)
    monkeypatch.setattr(default_model, "RIVALS", tmp_path / "package")
    monkeypatch.setattr(default_model, "ensure", lambda cache, on_progress=None: tmp_path / "cache")
    loaded, target = load(default_model.DRAFT, device="cpu"), load(tmp_path / "cache", device="cpu")
    assert loaded.name == "smollm2-135m-draft" and len(loaded.model.model.layers) == 1
    assert loaded.tokenizer.get_vocab() == target.tokenizer.get_vocab()
    made, given = loaded.model.state_dict(), target.model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(made[name], given[name])
    assert torch.equal(made["model.norm.weight"], load_file(packed)["model.norm.weight"].float())
    with pytest.raises(InputError, match="is not a draft model"):
        pack_draft.write(tmp_path / "cache", tmp_path / "x")
    assert not (tmp_path / "x").exists()
