"""What heads learn: scripted heads, which are right, have next to no loss; whatever is off by one has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.spec.drafters.scripted import HEADS, VOCAB, WIDTH, prompt, scripted_heads, scripted_model
from tokenswift.config import SamplingParams
from tokenswift.spec.heads.modules import Heads, HeadsConfig
from tokenswift.train.heads import HeadsStudent, start
from tokenswift.train.loss import Distillation, FrozenBase
from tokenswift.train.selftext import Backbone
from tokenswift.train.store import HiddenStore, Windows

PLAIN = SamplingParams(repetition_penalty=1.0)


def stored(folder: Path, texts: list[list[int]]) -> tuple[HiddenStore, FrozenBase]:
    """States of texts in a store, and the parts of the model that training needs."""
    model = scripted_model()
    backbone = Backbone(model)
    store = HiddenStore(folder, WIDTH, {})
    for text in texts:
        tokens = torch.tensor([text])
        store.append(tokens, backbone.hidden(tokens), learn=1)  # the first token has none before it
    store.finish()
    return store, FrozenBase(model, torch.arange(VOCAB))


def losses(heads: Any, store: HiddenStore, base: FrozenBase) -> list[float]:
    """The loss of each head over the whole store."""
    windows = Windows(store, heads.count, 16, 20)
    batch = {k: torch.stack([windows[j][k] for j in range(len(windows))]) for k in windows[0]}
    with torch.no_grad():
        return Distillation(HeadsStudent(heads), base, PLAIN)(**batch)["losses"].tolist()


def random_texts() -> list[list[int]]:
    """Texts that the model would not write: what comes next has to be looked up."""
    made = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (90,), generator=made).tolist() for _ in range(40)]


@pytest.mark.parametrize("kind", ["linear", "conditioned", "medusa"])
def test_heads_that_are_right_have_no_loss(kind: str, tmp_path: Path) -> None:
    """Parallel heads know what the model writes; conditioned ones what it would say after any text."""
    texts = random_texts()[:4] if kind == "conditioned" else [prompt(70), prompt(45)]
    found = losses(scripted_heads(kind), *stored(tmp_path, texts))
    assert len(found) == HEADS and all(loss < 0.01 for loss in found), found


def test_the_closed_form_finds_conditioned_heads(tmp_path: Path) -> None:
    """The first head's step is linear in what it sees, so it is found."""
    store, base = stored(tmp_path, random_texts())
    torch.manual_seed(0)
    heads = Heads(HeadsConfig("conditioned", 1, WIDTH, VOCAB)).eval()
    start(heads, [store], base)
    assert losses(heads, store, base)[0] < 0.5
