"""Resume: no stage and no step is done twice, and only by the training that a work folder belongs to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_model, tiny_tokenizer
from tests.train.test_train import full_run, rows, small, steps, words
from tokenswift.config import SamplingParams
from tokenswift.loader.identity import base_of
from tokenswift.spec.heads.checkpoint import load_heads
from tokenswift.train import collect, heads, recipe
from tokenswift.train.loss import Distillation
from tokenswift.train.options import DataOptions, Job, TrainingOptions
from tokenswift.train.store import HiddenStore, held_out
from tokenswift.train.work import states_part, training_part
from tokenswift.types import InputError

TRAINING = small(steps=9)


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "t.txt").write_text(words(800))
    return str(tmp_path / "t.txt")


def test_no_step_is_done_twice(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended in its sixth step, after the checkpoint of the fourth: four and a half steps are not repeated."""
    calls: list[int] = []
    whole = Distillation.forward

    def forward(self: Distillation, **batch: Any) -> dict[str, torch.Tensor]:
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == 6:
                raise Killed
        return whole(self, **batch)

    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        folder.mkdir()
    full_run(tiny_model(), text, calm, TRAINING)
    monkeypatch.setattr(Distillation, "forward", forward)
    with pytest.raises(Killed):
        full_run(tiny_model(), text, killed, TRAINING)
    assert steps(killed) == [1, 2, 3, 4, 5]
    calls[:] = [1] * 6
    monkeypatch.setattr(heads, "start", None)  # is not called again
    monkeypatch.setattr(recipe, "collect", None)
    full_run(tiny_model(), text, killed, TRAINING)
    assert len(calls) == 6 + 5 and steps(killed) == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9]
    one, other = (load_heads(f / "h.safetensors", tiny_model()).state_dict() for f in (calm, killed))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("continued", [False, True])
def test_no_batch_of_states_is_made_twice(
    continued: bool, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended after its third append: the rest follows, and the store is that of an unbroken run."""
    made: list[int] = []
    whole = HiddenStore.append

    def append(self: HiddenStore, *given: Any) -> None:
        if len(made) == 3:
            made.append(0)
            raise Killed
        made.append(len(self.blocks))
        whole(self, *given)

    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        folder.mkdir()
    options: dict[str, Any] = {
        "continued": continued,
        "tokens": 1200,
        "prompt_lengths": (8, 20),
        "write_batch": 3,
    }
    start = small(steps=0, epochs=0)
    full_run(tiny_model(), text, calm, start, **options)
    monkeypatch.setattr(HiddenStore, "append", append)
    with pytest.raises(Killed):
        full_run(tiny_model(), text, killed, start, **options)
    first = made[:3]
    full_run(tiny_model(), text, killed, start, **options)
    assert min(made[4:]) > max(first)
    for name in ("tokens.bin", "hidden.bin"):
        assert (calm / "work/states" / name).read_bytes() == (killed / "work/states" / name).read_bytes()


def test_prompts_of_several_lengths(text: str, tmp_path: Path) -> None:
    """Of a long prompt, as many tokens are learnt from as of the shortest; W more are kept before them."""
    options: dict[str, Any] = {
        "continued": True,
        "tokens": 960,
        "prompt_lengths": (16, 40, 72),
        "write_batch": 4,
    }
    sampling = SamplingParams(penalty_window=30)
    groups: list[tuple[int, int]] = []
    whole = collect.continuations

    def continuations(backbone: Any, prompts: torch.Tensor, *rest: Any) -> Any:
        groups.append((prompts.shape[0], prompts.shape[1]))
        return whole(backbone, prompts, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "continuations", continuations)
        full_run(tiny_model(), text, tmp_path, small(steps=0, epochs=0), sampling=sampling, **options)
    assert groups == [(4, 16), (3, 40), (1, 40), (2, 72), (2, 72)]
    folder = tmp_path / "work" / "states"
    store = HiddenStore(folder, 32, json.loads((folder / "index.json").read_text())["made_from"])
    new = 96 - 16
    assert [(b.length - b.learn, b.learn) for b in store.blocks] == (
        [(16 + new - 1, 0)] * 4 + [(16 + new - 1, 24)] * 4 + [(16 + new - 1, 30)] * 4
    )


def test_a_manifest_holds_what_matters(text: str, tmp_path: Path) -> None:
    """Every option that changes states or losses makes another manifest; others do not."""
    model, tokenizer = tiny_model(), tiny_tokenizer()

    def job(sampling: Any = None, **changes: Any) -> Job:
        return Job(None, TrainingOptions(**changes), tmp_path, tmp_path, "", sampling or SamplingParams())

    def states(sampling: Any = None, seed: Any = 0, **changes: Any) -> dict[str, Any]:
        data = DataOptions(**{"data": text, **changes})
        return states_part(model, tokenizer, base_of(model), data, job(sampling, seed=seed))

    (tmp_path / "copy.txt").write_text(words(800))
    (tmp_path / "other.txt").write_text(words(801))
    given, own = states(), states(continued=True)
    assert given == states(data=str(tmp_path / "copy.txt"), seed=3, write_batch=7, prompt_lengths=(64,))
    assert given == states(SamplingParams(temperature=2.0))
    for changes in ({"data": str(tmp_path / "other.txt")}, {"tokens": 999}, {"sequence_length": 700}):
        assert given != states(**changes) and own != states(continued=True, **changes)
    samplers = [{"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"eta_cutoff": 0.1}]
    samplers += [{"penalty_window": 9}, {"repetition_penalty": 1.1}, {"greedy": True}]
    for changes in ({"seed": 1}, {"write_batch": 7}, {"prompt_lengths": (64,)}, {"prompt_lengths": (64, 256)},
                    *({"sampling": SamplingParams(**s)} for s in samplers)):  # fmt: skip
        assert own != states(continued=True, **changes), changes
    assert own == states(SamplingParams(seed=4), continued=True)

    def training(sampling: Any = None, **changes: Any) -> dict[str, Any]:
        return training_part([], job(sampling, **changes), torch.arange(9), {})

    assert training() == training(save_every=7, log_every=3)
    for name, value in {"epochs": 4.0, "steps": 5, "lr": 0.1, "weight_decay": 0.5, "beta2": 0.9, "warmup": 1,
                        "batch": 2, "window": 64, "accumulate": 2, "targets": "text", "held_out": 0.1,
                        "seed": 1, "bf16": False}.items():  # fmt: skip
        assert training() != training(**{name: value}), name
    assert training() != training(SamplingParams(top_p=0.9))
    assert training() == training(SamplingParams(seed=9))


def test_another_training_is_refused(text: str, tmp_path: Path) -> None:
    full_run(tiny_model(), text, tmp_path, TRAINING)
    before = rows(tmp_path)
    again = small(steps=9, save_every=3, log_every=2)
    assert full_run(tiny_model(), text, tmp_path, again)["steps"] == 9 and rows(tmp_path) == before
    with pytest.raises(InputError, match="another training .lr differ.; name another --work"):
        full_run(tiny_model(), text, tmp_path, small(steps=9, lr=0.01))
    with pytest.raises(InputError, match="another training .heads differ."):
        full_run(tiny_model(), text, tmp_path, TRAINING, "linear")
    Path(text).write_text(words(800, 1))
    with pytest.raises(InputError, match="another training .data differ."):
        full_run(tiny_model(), text, tmp_path, TRAINING)


def test_held_out_loss_is_of_sequences_not_learnt_from(text: str, tmp_path: Path) -> None:
    notes = full_run(tiny_model(), text, tmp_path, small(steps=4, held_out=0.25))
    assert [bool(row[4]) for row in rows(tmp_path)] == [False, True, False, True]
    assert float(rows(tmp_path)[-1][4]) == pytest.approx(notes["held_out_loss"], abs=1e-3)
    store = HiddenStore(tmp_path / "x", 32, {})
    store.append(torch.arange(80).view(8, 10), torch.zeros(8, 10, 32))
    learnt, kept = held_out(store, 0.25)
    assert [b.start for b in kept] == [30, 70] and len(learnt) == 6
    assert held_out(store, 0.02) == (store.blocks, [])
