"""Training: data, the store, the loss by its definition, starts, the whole way, faults,
processes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.conftest import tiny_model, tiny_tokenizer
from tests.families import rare
from tokenswift.config.sampling import NEUTRAL, SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.loader.host import host_of
from tokenswift.sampling.filters import processed
from tokenswift.speculation.heads.config import HeadsConfig
from tokenswift.speculation.heads.files import read_heads
from tokenswift.speculation.heads.find import load_heads
from tokenswift.speculation.heads.modules import Heads
from tokenswift.train import distillation
from tokenswift.train.distillation import LIKELIEST, Distillation, FrozenBase, Student
from tokenswift.train.heads import HeadsStudent, train_heads
from tokenswift.train.loop import Report, picks
from tokenswift.train.options import DataOptions, Job, TrainingOptions
from tokenswift.train.states import Recorder
from tokenswift.train.store import HiddenStore, Windows
from tokenswift.train.texts import blocks, read_texts
from tokenswift.types import InputError, OnProgress, RunError

D = 32
V = 260


def words(count: int, seed: int = 0) -> str:
    torch.manual_seed(seed)
    lexicon = ["the", "whale", "sea", "and", "captain", "rose", "against", "wind", "a", "sail"]
    return " ".join(lexicon[i] for i in torch.randint(len(lexicon), (count,)).tolist())


def frozen(model: Any) -> FrozenBase:
    return FrozenBase(LLM.from_model(model), torch.arange(V))


def states_of(llm: LLM, tokens: list[int], layers: tuple[int, ...] = (2,)) -> torch.Tensor:
    """What enters these layers, side by side, (n, W)."""
    llm.target.set_feature_layers(layers)
    recorder = Recorder()
    llm.target.prefill(tokens, llm.target.new_cache(len(tokens)), is_last=False, features=recorder)
    _, features = recorder.drain() or pytest.fail("no states")
    return features.transpose(0, 1).flatten(1)


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(InputError, match="^--data .*a.txt is not UTF-8; valid: UTF-8 text"):
        list(read_texts(str(tmp_path)))


def filled(folder: Path, model: Any, lengths: tuple[int, ...] = (60, 60, 45)) -> HiddenStore:
    store = HiddenStore(folder, "a")
    llm = LLM.from_model(model)
    torch.manual_seed(5)
    for number, length in enumerate(lengths):
        tokens = torch.randint(0, 256, (length,)).tolist()
        store.append(number, tokens, states_of(llm, tokens))
    store.finish()
    return store


def test_a_store_is_complete_up_to_its_last_text(tmp_path: Path) -> None:
    store = filled(tmp_path, tiny_model())
    (tmp_path / "0000003.safetensors.1f.part").write_bytes(b"half a text")
    again = HiddenStore(tmp_path, "a")
    assert again.complete
    assert again.tokens == 165
    assert [*again.texts] == [0, 1, 2]
    assert all(again.texts[number].equal(store.texts[number]) for number in store.texts)
    again.append(3, [0] * 10, torch.ones(10, D))
    assert again.texts[3].tolist() == [0] * 10
    assert again.states(3, 8).eq(1).all()
    assert again.states(3, 8).shape == (2, D)
    assert again.states(3, 2, 3).shape == (3, D)
    again.finish(100)
    assert [*again.texts] == [0, 1]
    assert [*HiddenStore(tmp_path, "a").texts] == [0, 1]
    with pytest.raises(InputError, match="belongs to a training of other data"):
        HiddenStore(tmp_path, "b")
    (tmp_path / "made_from").rename(tmp_path / "index.json")  # as earlier versions have it
    with pytest.raises(InputError, match="belongs to a training of other data"):
        HiddenStore(tmp_path, "a")


@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "conditioned", "medusa"])
@pytest.mark.parametrize("targets", ["model", "text"])
def test_loss_by_definition(kind: str, targets: str, tmp_path: Path) -> None:
    """Row by row: processed distribution of the base model, or the text's own token, against the
    head's."""
    model = tiny_model()
    store = filled(tmp_path, model, (40,))
    torch.manual_seed(2)
    heads = Heads(HeadsConfig(kind, 2, D, V, 8 if kind == "conditioned" else 0))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    warm = {"temperature": 0.7, "min_p": 0.01} if targets == "model" else {}
    sampling = SamplingParams(**{**NEUTRAL, **warm})
    windows = Windows(store, store.texts, 2, 16)
    items = [windows[0], windows[2]]  # the last one is short: 6 of 16 positions
    assert [int(item["valid"].sum()) for item in items] == [16, 6]
    batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
    base = frozen(model)
    losses = Distillation(HeadsStudent(heads), base, sampling, targets)(**batch)

    text = store.texts[0].long()
    states = store.states(0)
    expected = torch.zeros(2)
    counts = torch.zeros(2)
    rows = [*range(16), *range(32, 38)]
    for t in rows:
        start = states[t : t + 1].float()
        state = start
        for i in range(2):
            embeds = model.get_input_embeddings().weight[text[t + 1 + i]][None]
            state = heads.advance(i, state, start, embeds)
            p = torch.nn.functional.one_hot(text[t + 2 + i : t + 3 + i], V).float()
            if targets == "model":
                logits = model.lm_head(base.normed(states[t + 1 + i : t + 2 + i]))
                p = processed(logits, sampling).softmax(-1)
            q = (model.lm_head(heads.normed(i, state)) / sampling.temperature).softmax(-1)
            expected[i] -= (p * q.log()).sum()
            counts[i] += len(p)  # the text ends before the last row's second token
    torch.testing.assert_close(losses, expected / counts, rtol=2e-3, atol=2e-3)


def options(source: str, **changes: int) -> DataOptions:
    small = DataOptions(source, tokens=1000, sequence_length=96, write_batch=4)
    return replace(small, **changes)


def full_run(
    model: PreTrainedModel,
    source: str,
    folder: Path,
    training: TrainingOptions,
    kind: str = "conditioned",
    on_progress: OnProgress = lambda stage, done, total: None,
    report: Report = lambda line: None,
    **changes: int,
) -> dict[str, Any]:
    """Heads in ``folder``, of two levels and a small hidden layer."""
    job = Job(
        data=options(source, **changes),
        training=training,
        out=folder / "h.safetensors",
        work=folder / "work",
        name="tiny",
    )
    llm = LLM.from_model(model, tiny_tokenizer())
    return train_heads(llm, job, report, on_progress, kind=kind, count=2, inner=16)


def small(**changes: Any) -> TrainingOptions:
    """A few steps in float32."""
    options = {"steps": 6, "save_every": 2, "loss_vocabulary": 128, "bf16": False}
    return TrainingOptions(**{**options, **changes})


@pytest.mark.parametrize(
    "source,kind", [("text", "conditioned"), rare("text", "medusa"), rare("self", "linear")]
)
def test_the_whole_way(source: str, kind: str, tmp_path: Path) -> None:
    model = tiny_model()
    model.lm_head.weight.data *= 50  # a random model says hardly anything that could be learnt
    if source == "text":
        source = str(tmp_path / "text.txt")
        Path(source).write_text(words(800))
    calls: list[tuple[str, int, int]] = []
    lines: list[str] = []
    notes = full_run(
        model,
        source,
        tmp_path,
        small(steps=12, lr=0.01),
        kind,
        on_progress=lambda *call: calls.append(call),
        report=lines.append,
        tokens=400,
    )
    assert notes["steps"] == 12
    assert math.isfinite(notes["loss"])
    heads = load_heads(tmp_path / "h.safetensors", host_of(model))
    assert heads.kind == kind
    assert heads.count == 2
    assert heads.frequent is not None
    _, _, header = read_heads(tmp_path / "h.safetensors")
    assert header["kind"] == kind
    assert header["data"] == Path(source).name
    reports = [line for line in lines if " of 12, loss " in line]
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in reports]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert not any(p.requires_grad and p.grad is not None for p in model.parameters())
    assert [done for stage, done, _ in calls if stage == "train"] == list(range(1, 13))
    written = [(done, total) for stage, done, total in calls if stage == "write"]
    assert written
    assert written == sorted(written)
    assert all(done < total for done, total in written)


def test_too_little_data(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("")
    with pytest.raises(InputError, match="gives 0 tokens to learn from.* at least 256"):
        full_run(tiny_model(), str(tmp_path / "t.txt"), tmp_path, small())


def test_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.txt").write_text(words(800))
    calls = []
    real = Distillation.forward

    def forward(self: Distillation, **batch: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        losses = real(self, **batch)
        return losses if len(calls) < 5 else losses * math.nan

    monkeypatch.setattr(Distillation, "forward", forward)
    with pytest.raises(RunError, match="loss is not finite at step 5"):
        full_run(tiny_model(), str(tmp_path / "t.txt"), tmp_path, small())
    assert torch.load(tmp_path / "work" / "checkpoint.pt")["step"] == 4
    assert not (tmp_path / "h.safetensors").exists()


# ---- text ----------------------------------------------------------------------------------------


BOOK = words(2000)


def with_bos() -> PreTrainedTokenizerFast:
    """The tiny tokenizer, made to put <s> before a text as Llama-3's does."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    return tokenizer


def test_blocks_begin_as_decoding_begins(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(BOOK)
    tokenizer = with_bos()
    texts = list(blocks(str(tmp_path), tokenizer, 1000, 100))
    assert {len(text) for text in texts} == {100}
    assert {text[0] for text in texts} == {256}
    assert [token for text in texts for token in text].count(256) == len(texts)
    book = tokenizer(BOOK)["input_ids"]
    assert texts[0] == book[:100]
    assert [token for text in texts for token in text[1:]] == book[1 : 1 + 99 * len(texts)]


def test_blocks_never_cross_documents(tmp_path: Path) -> None:
    for letter, n in (("a", 250), ("b", 30), ("c", 100)):
        (tmp_path / f"{letter}.txt").write_text(letter * n)
    texts = list(blocks(str(tmp_path), tiny_tokenizer(), 10**6, 100))
    # remainders of 50 and 30 tokens teach little
    assert [len(text) for text in texts] == [100, 100, 100]
    assert {len(set(text)) for text in texts} == {1}


# ---- what training computes ----------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    "sampling", [SamplingParams(top_p=0.6, temperature=0.7), SamplingParams(greedy=True)]
)
def test_the_teacher_is_the_models_processed_distribution(sampling: SamplingParams) -> None:
    model = tiny_model(initializer_range=0.3)
    base = frozen(model)
    hidden = torch.randn(1, 40, D)
    shares, places = base.teacher(hidden, sampling)
    teacher = torch.zeros(40, V).scatter_(1, places[0], shares[0])
    expected = processed(model.lm_head(model.model.norm(hidden[0])), sampling).softmax(-1)
    if sampling.greedy:
        expected = torch.nn.functional.one_hot(expected.argmax(-1), V).float()
    torch.testing.assert_close(teacher, expected, rtol=1e-4, atol=1e-5)


def test_a_loss_over_many_tokens_is_over_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model's distribution the likeliest are learnt; what the student gives any other token
    counts."""
    monkeypatch.setattr(distillation, "MANY", 16)
    base = frozen(tiny_model())
    states = torch.randn(1, 9, D)
    rows = torch.randn(8, D)
    plain = SamplingParams(**NEUTRAL)
    student = Mock(spec=Student, levels=1, return_value=[rows])
    loss = Distillation(student, base, plain)(
        torch.zeros(1, 10).long(), states, torch.ones(1, 8).bool()
    )
    shares, places = base.teacher(states[:, 1:], plain)
    assert shares.shape == (1, 8, LIKELIEST)
    log_chances = base.logits(rows).log_softmax(-1).gather(-1, places[0])
    torch.testing.assert_close(loss, -(shares[0] * log_chances).sum(-1).mean()[None])


def test_every_item_once_an_epoch() -> None:
    options = TrainingOptions(batch=2, accumulate=3, seed=5)
    taken = [item for step in range(7) for batch in picks(7, options, step) for item in batch]
    epochs = [taken[start : start + 7] for start in range(0, len(taken), 7)]
    assert len(epochs) == 6
    assert [sorted(epoch) for epoch in epochs] == [[*range(7)]] * 6
    assert epochs[0] != epochs[1]
