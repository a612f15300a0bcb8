"""Training of EAGLE-3 drafters: features, training-time test against drafting itself, and the whole
way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import eagles
from tests.conftest import tiny_tokenizer
from tests.speculation.eagle.reference import EagleCache, EagleReference
from tests.tiny import byte_model
from tests.train.test_train import states_of
from tokenswift.config.sampling import SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.speculation.eagle.config import EagleWeights
from tokenswift.speculation.eagle.files import load_eagle
from tokenswift.speculation.eagle.model import EagleModel
from tokenswift.train.distillation import FrozenBase
from tokenswift.train.eagle import PARTS, EagleStudent, eagle_config, train_eagle
from tokenswift.train.options import DataOptions, Job, TrainingOptions
from tokenswift.types import InputError, OnProgress


def model(**changes: Any) -> Any:
    return byte_model(num_hidden_layers=7, tie_word_embeddings=False, **changes)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 5])
def test_training_sees_what_drafting_sees(window: int | None) -> None:
    """Each depth of each position, against a chain from there with a cache."""
    base = model()
    sizes = {
        "hidden": 64,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 64,
        "draft_vocab": 260,
        "window": window,
    }
    config = eagles.config(base.config, feature_layers=(2, 3, 4), parts=PARTS, **sizes)
    tensors = eagles.tensors(config)
    frozen = FrozenBase(LLM.from_model(base), torch.arange(260))
    depths = 4
    m = 11
    student = EagleStudent(config, tensors, depths).eval()
    tokens = torch.randint(0, 256, (2, m + depths + 1))
    features = torch.randn(2, m + depths, 96)
    embedding = base.get_input_embeddings().weight
    head = base.get_output_embeddings().weight
    logits_by_depth = [(rows @ head.T).view(2, m, -1) for rows in student(tokens, features, frozen)]
    reference = EagleReference(EagleWeights(config, tensors, None, ""), embedding, head)
    for row in range(2):
        cache = EagleCache()
        text = tokens[row]
        fused = reference.fuse(features[row, :m])
        states, logits = reference.step(text[1 : m + 1], fused, torch.arange(m), cache)
        torch.testing.assert_close(logits_by_depth[0][row], logits, atol=1e-4, rtol=1e-4)
        for t in range(m):
            chain = EagleCache(cache.keys, cache.values, cache.positions)
            chain.cut(t + 1)
            state = states[t : t + 1]
            for depth in range(1, depths):
                position = torch.tensor([t + depth])
                state, logits = reference.step(text[position + 1], state, position, chain)
                drafted = logits_by_depth[depth][row, t]
                torch.testing.assert_close(drafted, logits[0], atol=1e-4, rtol=1e-4)


def job(folder: Path, **options: Any) -> Job:
    """A short training on what the model writes."""
    training: dict[str, Any] = {
        "window": 32,
        "batch": 4,
        "epochs": 4,
        "loss_vocabulary": 64,
        "held_out": 0.1,
    }
    training |= {"save_every": 5, "bf16": False, "lr": 3e-3}
    source = DataOptions(data="self", tokens=1500, sequence_length=96, write_batch=4)
    sampling = SamplingParams(temperature=1.0, min_p=0.0, repetition_penalty=1.0)
    return Job(
        source,
        TrainingOptions(**{**training, **options}),
        folder / "out.gguf",
        folder / "work",
        "tiny",
        sampling,
    )


def trained(
    llm: LLM, job: Job, on_progress: OnProgress = lambda *_: None, depths: int = 3
) -> dict[str, Any]:
    return train_eagle(llm, job, lambda line: None, on_progress, depths=depths, hidden=64)


def test_the_whole_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter learns, is written, read again as it was, and a resumed training equals an unbroken
    one."""
    llm = LLM.from_model(model(initializer_range=0.2), tiny_tokenizer())
    unbroken = job(tmp_path / "a")
    notes = trained(llm, unbroken)
    first = trained(llm, job(tmp_path / "c", epochs=0))
    assert notes["held_out_loss"] < first["held_out_loss"] - 0.05
    loaded = load_eagle(unbroken.out, llm.target.config)
    assert loaded.config == eagle_config(llm, 64, 64)
    assert loaded.d2t is not None
    assert len(loaded.d2t) == 64
    monkeypatch.setenv("TOKENSWIFT_CACHE", str(tmp_path))
    (tmp_path / "drafters").symlink_to(tmp_path / "a")
    eagle = LLM.from_model(llm.model).resources.eagle
    assert eagle is not None
    assert eagle.name == str(tmp_path / "drafters" / "out.gguf")
    assert LLM.from_model(llm.model, eagle="none").resources.eagle is None
    assert LLM.from_model(model(initializer_range=0.2, seed=1)).resources.eagle is None

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "train" and done == 7:
            raise KeyboardInterrupt

    parted = job(tmp_path / "b")
    with pytest.raises(KeyboardInterrupt):
        trained(llm, parted, stop)
    trained(llm, parted)
    assert parted.out.read_bytes() == unbroken.out.read_bytes()
    with pytest.raises(InputError, match="belongs to a training of other data or options"):
        trained(llm, parted, depths=2)


@torch.no_grad()
def test_what_is_written_drafts_as_what_was_trained(tmp_path: Path) -> None:
    base = model()
    llm = LLM.from_model(base, tiny_tokenizer())
    untrained = job(tmp_path, epochs=0)
    with torch.enable_grad():
        trained(llm, untrained)
    weights = load_eagle(untrained.out, llm.target.config)
    assert weights.d2t is not None
    tokens = torch.randint(0, 256, (20,))
    states = states_of(llm, tokens.tolist(), weights.config.feature_layers)
    frozen = FrozenBase(llm, weights.d2t)
    start = load_file(untrained.work / "start.safetensors")
    student = EagleStudent(weights.config, start, 1).eval()
    expected = student(tokens[None], states[None].float(), frozen)[0] @ frozen.rows[:64].T
    drafter = EagleModel(weights, llm.target)
    features = states.float().unflatten(1, (3, -1)).transpose(0, 1).contiguous()
    fused = drafter.fuse(features[:, :19])
    logits = drafter.logits(drafter.run(tokens[1:], fused, 0, drafter.new_cache()))
    torch.testing.assert_close(logits, expected[:19], atol=0.02, rtol=0.05)  # int8, not float32
