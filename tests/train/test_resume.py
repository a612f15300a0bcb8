"""Resume: no stage and no step is done twice, and only by the training that a work folder belongs
to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_model
from tests.train.test_train import full_run, small, words
from tokenswift.loader.host import host_of
from tokenswift.speculation.heads.find import load_heads
from tokenswift.train import heads, loop
from tokenswift.train.distillation import Distillation
from tokenswift.train.store import HiddenStore

TRAINING = small(steps=9)


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "t.txt").write_text(words(800))
    return str(tmp_path / "t.txt")


def folder_of(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


def test_no_step_is_done_twice(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended in its sixth step, after the checkpoint of the fourth: four and a half steps are not
    repeated."""
    calls: list[int] = []
    steps: list[int] = []

    def on_progress(stage: str, done: int, total: int) -> None:
        if stage == "train":
            steps.append(done)

    real = Distillation.forward

    def forward(self: Distillation, **batch: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == 6:
                raise Killed
        return real(self, **batch)

    calm = folder_of(tmp_path, "calm")
    killed = folder_of(tmp_path, "killed")
    full_run(tiny_model(), text, calm, TRAINING)
    monkeypatch.setattr(Distillation, "forward", forward)
    with pytest.raises(Killed):
        full_run(tiny_model(), text, killed, TRAINING, on_progress=on_progress)
    assert steps == [1, 2, 3, 4, 5]
    calls[:] = [1] * 6
    monkeypatch.setattr(heads, "start", None)  # is not called again
    monkeypatch.setattr(loop, "collect", None)
    full_run(tiny_model(), text, killed, TRAINING, on_progress=on_progress)
    assert len(calls) == 6 + 5
    assert steps == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9]
    expected, weights = (
        load_heads(folder / "h.safetensors", host_of(tiny_model())).state_dict()
        for folder in (calm, killed)
    )
    assert [name for name in expected if not torch.equal(expected[name], weights[name])] == []


def test_no_batch_of_states_is_made_twice(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended after its third append: the rest follows, and the store is that of an unbroken run."""
    stored: list[int] = []  # texts of the store before each append
    real = HiddenStore.append

    def append(self: HiddenStore, number: int, tokens: Sequence[int], states: torch.Tensor) -> None:
        if len(stored) == 3:
            stored.append(0)
            raise Killed
        stored.append(len(self.texts))
        real(self, number, tokens, states)

    calm = folder_of(tmp_path, "calm")
    killed = folder_of(tmp_path, "killed")
    options: dict[str, Any] = {"tokens": 1200, "write_batch": 3}
    start = small(steps=0, epochs=0)
    full_run(tiny_model(), text, calm, start, **options)
    monkeypatch.setattr(HiddenStore, "append", append)
    with pytest.raises(Killed):
        full_run(tiny_model(), text, killed, start, **options)
    before = stored[:3]
    full_run(tiny_model(), text, killed, start, **options)
    assert min(stored[4:]) > max(before)
    expected, files = (
        {path.name: path.read_bytes() for path in (folder / "work" / "states").iterdir()}
        for folder in (calm, killed)
    )
    assert len(expected) > 5
    assert files == expected
