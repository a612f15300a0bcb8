"""Training of EAGLE-3 drafters: features, training-time test against drafting itself, and the whole way."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import eagles
from tests.conftest import tiny_tokenizer
from tests.spec.eagle.reference import EagleCache, EagleReference
from tests.tiny import byte_model
from tokenswift.config import SamplingParams
from tokenswift.spec.eagle.files import EagleWeights, load_eagle
from tokenswift.train.eagle import EagleStudent, eagle_config, train_eagle
from tokenswift.train.loss import FrozenBase
from tokenswift.train.options import DataOptions, Job, TrainingOptions
from tokenswift.train.states import Backbone
from tokenswift.types import InputError

WORDS = ("the ", "whale ", "sea ", "and ", "captain ", "rose ", "against ", "wind ")


def model(**changes: Any) -> Any:
    return byte_model(num_hidden_layers=7, tie_word_embeddings=False, **changes)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 5])
def test_training_sees_what_drafting_sees(window: int | None) -> None:
    """Each depth of each position, against a chain from there with a cache."""
    base = model()
    config = eagles.config(
        base.config, feature_layers=(2, 3, 4), draft_vocab=260, fc_norm=True, window=window
    )
    found = eagles.tensors(config)
    del found["embed"], found["lm_head"]
    frozen = FrozenBase(base, torch.arange(260))
    student, depths, m = EagleStudent(config, found, 4), 4, 11
    tokens, features = torch.randint(0, 256, (2, m + 5)), torch.randn(2, m + student.extra, 96)
    embedding, head = (part.weight for part in (base.get_input_embeddings(), base.get_output_embeddings()))
    got = [(rows @ head.T).view(2, m, -1) for rows in student(tokens, features, frozen)]
    reference = EagleReference(EagleWeights(config, found, None, ""), embedding, head)
    for row in range(2):
        whole = EagleCache()
        text, at = tokens[row], torch.arange(m)
        states, logits = reference.step(text[1 : m + 1], reference.fuse(features[row, :m]), at, whole)
        torch.testing.assert_close(got[0][row], logits, atol=1e-4, rtol=1e-4)
        for t in range(m):
            chain, state = EagleCache(whole.keys, whole.values, whole.positions), states[t : t + 1]
            chain.cut(t + 1)
            for i in range(1, depths):
                place = torch.tensor([t + i])
                state, logits = reference.step(text[place + 1], state, place, chain)
                torch.testing.assert_close(got[i][row, t], logits[0], atol=1e-4, rtol=1e-4)


def job(folder: Path, data: Path, **options: Any) -> Job:
    torch.manual_seed(3)
    (data / "a.txt").write_text("".join(WORDS[int(i)] for i in torch.randint(8, (900,))))
    training: dict[str, Any] = {"window": 32, "batch": 4, "epochs": 4, "loss_vocabulary": 64, "held_out": 0.1}
    training |= {"save_every": 5, "bf16": False}
    source = DataOptions(data=str(data), tokens=3000, sequence_length=96)
    return Job(
        source,
        TrainingOptions(**{**training, **options}),
        folder / "out",
        folder / "work",
        "tiny",
        SamplingParams(temperature=1.0, min_p=0.0, repetition_penalty=1.0),
    )


def test_the_whole_way(tmp_path: Path) -> None:
    """A drafter learns, is written, read again as it was, and a resumed training equals an unbroken one."""
    data = tmp_path / "data"
    data.mkdir()
    base, tokenizer = model(initializer_range=0.2), tiny_tokenizer()
    lines: list[str] = []
    whole = job(tmp_path / "a", data)
    notes = train_eagle(base, tokenizer, whole, lines.append, lambda *_: None, depths=3)
    first = train_eagle(
        base, tokenizer, job(tmp_path / "c", data, epochs=0), lines.append, lambda *_: None, depths=3
    )
    assert notes["held_out_loss"] < first["held_out_loss"] - 0.05
    assert first["held_out_loss"] < 3 * math.log(64) - 0.5  # the start knows something already
    assert any("GB on the disk" in line for line in lines)
    loaded = load_eagle(whole.out, base.config)
    assert loaded.config == replace(eagle_config(base, 64, 32), vocab=260)
    assert loaded.d2t is not None and len(loaded.d2t) == 64
    head = base.get_output_embeddings().weight.detach()
    torch.testing.assert_close(loaded.tensors["lm_head"], head[loaded.d2t].bfloat16(), atol=0, rtol=0)

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "train" and done == 7:
            raise KeyboardInterrupt

    parted = job(tmp_path / "b", data)
    with pytest.raises(KeyboardInterrupt):
        train_eagle(base, tokenizer, parted, lines.append, stop, depths=3)
    train_eagle(base, tokenizer, parted, lines.append, lambda *_: None, depths=3)
    again = load_eagle(parted.out, base.config)
    for name, tensor in loaded.tensors.items():
        assert torch.equal(torch.as_tensor(again.tensors[name]), torch.as_tensor(tensor)), name
    with pytest.raises(InputError, match="belongs to a training of other data or options"):
        train_eagle(base, tokenizer, parted, lines.append, lambda *_: None, depths=2)


@torch.no_grad()
def test_what_is_written_drafts_as_what_was_trained(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    base = model()
    here = job(tmp_path, data, epochs=0)
    with torch.enable_grad():
        train_eagle(base, tiny_tokenizer(), here, lambda line: None, lambda *_: None)
    embedding, head = (part.weight for part in (base.get_input_embeddings(), base.get_output_embeddings()))
    reference = EagleReference(load_eagle(here.out, base.config), embedding, head)
    drafted = reference.d2t
    assert drafted is not None
    config, tokens = reference.config, torch.randint(0, 256, (1, 20))
    features = Backbone(base).features(config.feature_layers, tokens)
    start = load_file(here.work / "start.safetensors")
    rows = EagleStudent(config, start, 1)(tokens, features, FrozenBase(base, drafted))[0]
    at = torch.arange(19)
    _, logits = reference.step(tokens[0, 1:], reference.fuse(features[0, :19]), at, EagleCache())
    torch.testing.assert_close(logits, rows[:19] @ head[drafted].T, atol=0.05, rtol=0.05)  # bfloat16
