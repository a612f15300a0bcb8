"""Training: data, the store, the loss by its definition, starts, the whole way, faults, processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.conftest import tiny_model, tiny_tokenizer
from tests.families import rare
from tokenswift.config import NEUTRAL, SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.sampling.choice import processed
from tokenswift.spec.heads import Heads, HeadsConfig, host_of, load_heads, read_heads
from tokenswift.train import loss
from tokenswift.train.data import blocks, read_texts
from tokenswift.train.heads import HeadsStudent, train_heads
from tokenswift.train.loop import picks
from tokenswift.train.loss import Distillation, FrozenBase
from tokenswift.train.options import DataOptions, Job, TrainingOptions
from tokenswift.train.states import HiddenStore, Recorder, Windows
from tokenswift.types import InputError, RunError

D, V = 32, 260


def words(count: int, seed: int = 0) -> str:
    torch.manual_seed(seed)
    lexicon = ["the", "whale", "sea", "and", "captain", "rose", "against", "wind", "a", "sail"]
    return " ".join(lexicon[i] for i in torch.randint(len(lexicon), (count,)).tolist())


def frozen(model: Any) -> FrozenBase:
    return FrozenBase(LLM.from_model(model), torch.arange(V))


def states_of(llm: LLM, tokens: list[int], layers: tuple[int, ...] = (2,)) -> torch.Tensor:
    """What enters these layers, side by side, (n, W)."""
    llm.target.tap(layers)
    found = Recorder()
    llm.target.prefill(tokens, llm.target.new_cache(len(tokens)), ends=False, features=found)
    _, features = found.drain() or pytest.fail("no states")
    return features.transpose(0, 1).flatten(1)


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("a.jsonl", b'{"text": "x"}\nnonsense\n', "a.jsonl: JSON is malformed"),
        ("a.jsonl", b'{"text": 3}\n', "Expected `str`.*valid: a JSON object with a field text"),
        ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl: .*valid: a JSON object"),
        ("a.txt", b"\xff\xfe\xfa", "a.txt: 'utf-8' codec.*valid: UTF-8 text"),
    ],
)
def test_bad_files(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(read_texts(str(tmp_path / name)))


def filled(folder: Path, model: Any, lengths: tuple[int, ...] = (60, 60, 45)) -> HiddenStore:
    store = HiddenStore(folder, D, {"a": 1})
    llm = LLM.from_model(model)
    torch.manual_seed(5)
    for number, length in enumerate(lengths):
        tokens = torch.randint(0, 256, (length,)).tolist()
        store.append(tokens, states_of(llm, tokens), number)
    store.finish()
    return store


def test_store_is_whole_up_to_the_last_indexed_block(tmp_path: Path) -> None:
    store = filled(tmp_path, tiny_model())
    with (tmp_path / "hidden.bin").open("ab") as file:
        file.write(b"half a block")
    again = HiddenStore(tmp_path, D, {"a": 1})
    assert again.complete and again.blocks == store.blocks and again.tokens_stored == 165
    again.append([0] * 10, torch.ones(10, D))
    tokens, hidden = again.arrays()
    assert tokens[-10:].tolist() == [0] * 10
    assert torch.from_numpy(hidden[-10:].copy()).view(torch.bfloat16).eq(1).all()
    with pytest.raises(InputError, match="belongs to a training of other data"):
        HiddenStore(tmp_path, D, {"a": 2})


@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "conditioned", "medusa"])
@pytest.mark.parametrize("targets", ["model", "text"])
def test_loss_by_definition(kind: str, targets: str, tmp_path: Path) -> None:
    """Row by row: processed distribution of the base model, or the text's own token, against the head's."""
    model = tiny_model()
    store = filled(tmp_path, model, (40,))
    torch.manual_seed(2)
    heads = Heads(HeadsConfig(kind, 2, D, V, 8 if kind == "conditioned" else 0))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    warm = {"temperature": 0.7, "min_p": 0.01} if targets == "model" else {}
    sampling = SamplingParams(**{**NEUTRAL, **warm})
    windows = Windows(store, store.blocks, 2, 16)
    items = [windows[0], windows[2]]  # the last one is short: 6 of 16 positions
    assert [int(i["valid"].sum()) for i in items] == [16, 6]
    batch = {k: torch.stack([i[k] for i in items]) for k in items[0]}
    base = frozen(model)
    got = Distillation(HeadsStudent(heads), base, sampling, targets)(**batch)["losses"]

    tokens, bits = store.arrays()
    text = torch.from_numpy(tokens.astype("int64"))
    states = torch.from_numpy(bits.copy()).view(torch.bfloat16)
    want, known = torch.zeros(2), torch.zeros(2)
    rows = [*range(16), *range(32, 38)]
    for t in rows:
        state = start = states[t : t + 1].float()
        for i in range(2):
            embeds = model.get_input_embeddings().weight[text[t + 1 + i]][None]
            state = heads.advance(i, state, start, embeds)
            p = torch.nn.functional.one_hot(text[t + 2 + i : t + 3 + i], V).float()
            if targets == "model":
                logits = model.lm_head(base.normed(states[t + 1 + i : t + 2 + i]))
                p = processed(logits, sampling).softmax(-1)
            q = (model.lm_head(heads.normed(i, state)) / sampling.temperature).softmax(-1)
            want[i] -= (p * q.log()).sum()
            known[i] += len(p)  # the text ends before the last row's second token
    want /= known
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def options(source: str, **changes: Any) -> DataOptions:
    sizes: dict[str, Any] = {"tokens": 1000, "sequence_length": 96, "prompt_length": 16, "write_batch": 4}
    return DataOptions(source, **{**sizes, **changes})


def full_run(
    model: Any,
    source: str,
    folder: Path,
    training: TrainingOptions,
    kind: str = "conditioned",
    told: Any = lambda stage, done, total: None,
    **changes: Any,
) -> dict[str, Any]:
    """Heads in ``folder``, of two levels and a small hidden layer."""
    places = (folder / "h.safetensors", folder / "work", "tiny", SamplingParams())
    job, llm = Job(options(source, **changes), training, *places), LLM.from_model(model, tiny_tokenizer())
    return train_heads(llm, job, lambda line: None, told, kind=kind, count=2, inner=16)


def small(**changes: Any) -> TrainingOptions:
    """A few steps in float32, with a row of the log each."""
    usual = {"steps": 6, "save_every": 2, "log_every": 1, "loss_vocabulary": 128, "bf16": False}
    return TrainingOptions(**{**usual, **changes})


@pytest.mark.parametrize(
    "source,continued,kind",
    [("text", False, "medusa"), ("text", True, "conditioned"), rare("self", False, "linear")],
)
def test_the_whole_way(source: str, continued: bool, kind: str, tmp_path: Path) -> None:
    model = tiny_model()
    if source == "text":
        source = str(tmp_path / "text.txt")
        Path(source).write_text(words(800))
    told: list[tuple[str, int, int]] = []
    how: dict[str, Any] = {"continued": continued, "tokens": 400, "told": lambda *stage: told.append(stage)}
    notes = full_run(model, source, tmp_path, small(steps=12, log_every=6, lr=0.01), kind, **how)
    assert notes["steps"] == 12 and math.isfinite(notes["loss"])
    heads = load_heads(tmp_path / "h.safetensors", host_of(model))
    assert (heads.kind, heads.count) == (kind, 2) and heads.frequent is not None
    _, _, kept = read_heads(tmp_path / "h.safetensors")
    assert kept["kind"] == kind and kept["continued"] is continued
    log = (tmp_path / "work" / "log.csv").read_text().splitlines()
    assert log[0] == "step,loss,learning_rate,seconds,held_out_loss" and len(log) == 3
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]
    assert not any(p.requires_grad and p.grad is not None for p in model.parameters())
    assert [done for stage, done, _ in told if stage == "train"] == list(range(1, 13))
    before = "write" if source == "self" or continued else "states"
    made = [(done, total) for stage, done, total in told if stage == before]
    assert made and made == sorted(made) and all(done < total for done, total in made)


@pytest.mark.parametrize("content", ["", "the whale rose against the wind " * 7])
def test_too_little_data(content: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(content)
    found = len(content) // 96 * 96  # the rest is shorter than a piece may be
    with pytest.raises(InputError, match=f"gives {found} tokens to learn from.* at least 256"):
        full_run(tiny_model(), str(tmp_path / "t.txt"), tmp_path, small())


def test_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.txt").write_text(words(800))
    calls = []
    whole = Distillation.forward

    def forward(self: Distillation, **batch: Any) -> dict[str, torch.Tensor]:
        calls.append(1)
        out = whole(self, **batch)
        return out if len(calls) < 5 else {"loss": out["loss"] * math.nan}

    monkeypatch.setattr(Distillation, "forward", forward)
    with pytest.raises(RunError, match="loss is not finite at step 5"):
        full_run(tiny_model(), str(tmp_path / "t.txt"), tmp_path, small())
    assert torch.load(tmp_path / "work" / "checkpoint.pt")["step"] == 4
    assert not (tmp_path / "h.safetensors").exists()


def test_full_disk_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint before stays whole."""
    (tmp_path / "t.txt").write_text(words(800))
    whole, calls = torch.save, []

    def save(state: Any, file: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        whole(state, file)

    monkeypatch.setattr("tokenswift.train.loop.torch.save", save)
    with pytest.raises(RunError, match="cannot write .*checkpoint.pt"):
        full_run(tiny_model(), str(tmp_path / "t.txt"), tmp_path, small())
    assert torch.load(tmp_path / "work" / "checkpoint.pt")["step"] == 2
    assert not list((tmp_path / "work").glob("*.part"))


# ---- text ------------------------------------------------------------------------------


BOOK = words(2000)


def with_bos() -> PreTrainedTokenizerFast:
    """The tiny tokenizer, made to put <s> before a text as Llama-3's does."""
    made = tiny_tokenizer()
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return made


def test_blocks_begin_as_decoding_begins(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(BOOK)
    tokenizer = with_bos()
    made = list(blocks(str(tmp_path), tokenizer, 1000, 100))
    assert all(block[0] == 256 and len(block) == 100 and 256 not in block[1:] for block in made)
    assert made[0] == tokenizer(BOOK)["input_ids"][:100]
    assert [t for block in made for t in block[1:]] == tokenizer(BOOK)["input_ids"][1 : 1 + 99 * len(made)]


def test_blocks_never_cross_documents(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        "".join(f'{{"text": "{letter * n}"}}\n' for letter, n in (("a", 250), ("b", 30), ("c", 100)))
    )
    made = list(blocks(str(tmp_path), tiny_tokenizer(), 10**6, 100))
    assert [len(b) for b in made] == [100, 100, 100]  # remainders of 50 and 30 tokens teach little
    assert all(len(set(b)) == 1 for b in made)


# ---- what training computes ----------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    "sampling", [SamplingParams(top_p=0.6, temperature=0.7), SamplingParams(greedy=True)]
)
def test_the_teacher_is_the_models_processed_distribution(sampling: SamplingParams) -> None:
    model = tiny_model(initializer_range=0.3)
    base, hidden = frozen(model), torch.randn(1, 40, D)
    shares, places = base.teacher(hidden, sampling)
    teacher = torch.zeros(40, V).scatter_(1, places[0], shares[0])
    want = processed(model.lm_head(model.model.norm(hidden[0])), sampling).softmax(-1)
    if sampling.greedy:
        want = torch.nn.functional.one_hot(want.argmax(-1), V).float()
    torch.testing.assert_close(teacher, want, rtol=1e-4, atol=1e-5)


def test_of_many_tokens_a_step_looks_at_the_likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows are the LM head's, and so is the loss where the others hold nothing."""
    base = frozen(tiny_model())
    places = torch.randint(0, V, (2, 3, 4))
    assert base.among(places)[0] is base.rows
    for name, value in (("MANY", 16), ("OTHERS", 20)):
        monkeypatch.setattr(loss, name, value)
    rows, found = base.among(places)
    assert torch.equal(rows[found], base.rows[places]) and 20 <= len(rows) <= 20 + 2 + places.numel()
    shares, likeliest = base.teacher(torch.randn(1, 5, base.width), SamplingParams(**NEUTRAL))
    assert shares.shape == likeliest.shape == (1, 5, loss.LIKELIEST)
    torch.testing.assert_close(shares.sum(-1), torch.ones(1, 5))


def test_every_item_once_an_epoch() -> None:
    options = TrainingOptions(batch=2, accumulate=3, seed=5)
    taken = [item for step in range(7) for batch in picks(7, options, step) for item in batch]
    assert len(taken) == 42 and all(sorted(taken[i : i + 7]) == list(range(7)) for i in range(0, 42, 7))
    assert taken[:7] != taken[7:14]


def rows(folder: Path) -> list[list[str]]:
    """Rows of the log without its header; none where there is no log."""
    path = folder / "work" / "log.csv"
    return [row.split(",") for row in path.read_text().splitlines()[1:]] if path.exists() else []


def losses(folder: Path) -> list[float]:
    return [float(row[1]) for row in rows(folder)]


def steps(folder: Path) -> list[int]:
    return [int(row[0]) for row in rows(folder)]
