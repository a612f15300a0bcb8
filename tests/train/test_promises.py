"""What the docs say of training: the paper's recipe, what a work folder depends on, what is learnt
from, where heads start, and what a full disk leaves."""

from __future__ import annotations

import errno
import itertools
import shutil
from pathlib import Path
from typing import IO

import pytest
import torch

from tests.conftest import tiny_model, tiny_tokenizer
from tests.train.test_train import D, V, filled, frozen, full_run, small, words
from tokenswift.cli.train import CUDA_DEFAULTS
from tokenswift.config.sampling import NEUTRAL, SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.speculation.heads.config import HeadsConfig
from tokenswift.speculation.heads.modules import Heads
from tokenswift.train import texts
from tokenswift.train.distillation import Distillation
from tokenswift.train.eagle import eagle_config
from tokenswift.train.heads import HeadsStudent, start
from tokenswift.train.options import RECIPES, DataOptions, TrainingOptions
from tokenswift.train.store import Windows, covering, frequent, held_out
from tokenswift.train.texts import blocks, fingerprint, questions, read_texts
from tokenswift.types import InputError

START = small(steps=0, epochs=0)


def test_linear_heads_have_the_papers_recipe() -> None:
    """Table 9: AdamW (0.9, 0.999), decay 0.1, warm-up 50, lr 5e-3, 3 sequences of 8K, 10 times, 200
    steps."""
    recipe = dict(RECIPES["linear"])
    assert recipe.pop("sequence_length") == 8192
    assert recipe.pop("prose") == 0
    how = TrainingOptions(**recipe)
    assert how.lr == 5e-3
    assert how.weight_decay == 0.1
    assert how.beta2 == 0.999
    assert how.warmup == 50
    assert how.steps == 200
    assert how.batch * how.window * how.accumulate == 3 * 8192 * 10
    assert how.targets == "text"
    assert how.loss_vocabulary == 0


@pytest.mark.parametrize("name", ["tokens", "sequence_length", "write_batch", "prose_length"])
def test_help_says_the_defaults_that_there_are(name: str) -> None:
    default = getattr(DataOptions("self"), name)
    defaults = f"({default:,}, with CUDA {CUDA_DEFAULTS[name]:,}, by default)"
    assert defaults in str(DataOptions.__doc__)


# ---- whose a work folder is ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"tokens": 999}, {"sequence_length": 90}, {"write_batch": 3}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_states_depend_on_is_refused_in_their_folder(
    changes: dict[str, int], tmp_path: Path
) -> None:
    text = tmp_path / "t.txt"
    text.write_text(words(800))
    full_run(tiny_model(), str(text), tmp_path, START)
    line = "belongs to a training of other data or options; name another --work folder$"
    with pytest.raises(InputError, match=line):
        full_run(tiny_model(), str(text), tmp_path, START, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"batch": 2}, {"lr": 0.1}, {"held_out": 0.1}, {"warmup": 3}])
def test_what_losses_depend_on_is_refused_in_their_folder(
    changes: dict[str, float], tmp_path: Path
) -> None:
    text = tmp_path / "t.txt"
    text.write_text(words(800))
    full_run(tiny_model(), str(text), tmp_path, START)
    with pytest.raises(InputError, match="belongs to a training of other data or options"):
        full_run(tiny_model(), str(text), tmp_path, small(steps=0, epochs=0, **changes))


def test_where_data_lie_and_how_often_is_saved_decides_nothing(tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text(words(800))
    full_run(tiny_model(), str(text), tmp_path, START)
    moved = shutil.move(text, tmp_path / "other.txt")
    full_run(tiny_model(), str(moved), tmp_path, small(steps=0, epochs=0, save_every=5))
    assert fingerprint(str(moved)) != fingerprint("self")


# ---- data ----------------------------------------------------------------------------------------


def test_large_files_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PIECE", 7)
    (tmp_path / "t.txt").write_text("an Übergröße", encoding="utf-8")
    assert [*read_texts(str(tmp_path))] == ["an Über", "größe"]


def test_long_documents_give_in_proportion_to_their_length(tmp_path: Path) -> None:
    for letter, length in (("a", 1000), ("b", 3000)):
        (tmp_path / f"{letter}.txt").write_text(letter * length)
    tokenizer = tiny_tokenizer()
    taken = [block[-1] for block in blocks(str(tmp_path), tokenizer, 800, 100)]
    ends = [tokenizer(letter)["input_ids"][-1] for letter in "ab"]
    assert [taken.count(end) for end in ends] == [2, 6]


def test_questions_repeat_with_their_seed_alone() -> None:
    def first(seed: int) -> list[tuple[str, float]]:
        return [*itertools.islice(questions(seed), 30)]

    assert first(1) == first(1)
    assert first(1) != first(2)
    assert len({*first(1)}) == 30


def test_held_out_texts_are_evenly_spaced_and_not_learnt_from(tmp_path: Path) -> None:
    store = filled(tmp_path, tiny_model(), (64,) * 8)
    learnt, unseen = held_out(store, 0.25)
    assert unseen == [3, 7]
    assert sorted(learnt + unseen) == [*range(8)]
    assert held_out(store, 0.02) == ([*range(8)], [])
    assert held_out(store, 0.0) == ([*range(8)], [])


@pytest.mark.parametrize(
    ("size", "tokens"), [(1, [2]), (2, [0, 2]), (3, [0, 2, 3]), (0, [*range(5)])]
)
def test_frequent_tokens_are_ascending_and_ties_go_to_the_smaller(
    size: int, tokens: list[int]
) -> None:
    assert frequent(torch.tensor([3, 0, 5, 3, 1]), size).tolist() == tokens


@pytest.mark.parametrize(
    ("share", "tokens"), [(0.0, [2]), (0.4, [2]), (0.6, [0, 2]), (1.0, [0, 2, 3])]
)
def test_the_fewest_tokens_cover_a_share(share: float, tokens: list[int]) -> None:
    assert covering(torch.tensor([3, 0, 5, 2, 0]), share).tolist() == tokens


# ---- where training starts, and ends -------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "medusa"])
def test_plain_heads_start_by_saying_what_the_model_says(kind: str) -> None:
    model = tiny_model()
    torch.nn.init.uniform_(model.base_model.norm.weight, 0.5, 1.5)
    base = frozen(model)
    heads = Heads(HeadsConfig(kind, 2, D, V, eps=1e-6))
    start(heads, None, base)  # type: ignore[arg-type]  # no text is looked at
    rows = torch.randn(5, D) * 3
    for i in range(2):
        normed = heads.normed(i, heads.advance(i, rows, rows, None))
        torch.testing.assert_close(normed, base.normed(rows), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_conditioned_heads_start_better_than_nothing(tmp_path: Path) -> None:
    model = tiny_model()
    store = filled(tmp_path, model, (200,) * 6)
    base = frozen(model)
    windows = Windows(store, store.texts, 2, 64)
    batch = {name: torch.stack([windows[j][name] for j in range(8)]) for name in windows[0]}
    losses = []
    for begin in (False, True):
        torch.manual_seed(0)
        heads = Heads(HeadsConfig("conditioned", 2, D, V, 64))
        if begin:
            start(heads, store, base)
        objective = Distillation(HeadsStudent(heads), base, SamplingParams(**NEUTRAL))
        losses.append(float(objective(**batch).sum()))
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    ("layers", "hidden", "line"),
    [
        (2, 64, "the model has 2 layers; valid: 6 or more"),
        (7, 65, "hidden is 65; valid: a multiple of 64"),
        (7, 0, "hidden is 0; valid: a multiple of 64"),
    ],
)
def test_what_takes_no_drafter_is_refused(layers: int, hidden: int, line: str) -> None:
    llm = LLM.from_model(tiny_model(num_hidden_layers=layers))
    with pytest.raises(InputError, match=line):
        eagle_config(llm, 1, hidden)


def test_a_full_disk_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "t.txt"
    text.write_text(words(800))
    save = torch.save
    calls = []

    def full(state: object, file: IO[bytes]) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, file)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(OSError, match="No space left"):
            full_run(tiny_model(), str(text), tmp_path, small())
    assert torch.load(tmp_path / "work" / "checkpoint.pt")["step"] == 2
    assert not [*(tmp_path / "work").glob("*.part")]
    notes = full_run(tiny_model(), str(text), tmp_path, small())
    assert notes["steps"] == 6
