"""Training: data, the store, the loss by its definition, closed-form start, resume, two processes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift.config import SamplingParams
from tokenswift.spec.heads.checkpoint import load_heads, read_heads
from tokenswift.spec.heads.modules import Heads, HeadsConfig
from tokenswift.train.data import read_texts
from tokenswift.train.loss import Distillation, FrozenBase
from tokenswift.train.options import DataOptions, Job, TrainingOptions
from tokenswift.train.pipeline import train_heads
from tokenswift.train.ridge import ridge_start
from tokenswift.train.selftext import Backbone, BatchCache, chances, continuations
from tokenswift.train.store import HiddenStore, Windows
from tokenswift.train.trainer import last_checkpoint
from tokenswift.train.vocabulary import counts, covering, frequent
from tokenswift.types import InputError, RunError

D, V = 32, 260


def words(count: int, seed: int = 0) -> str:
    torch.manual_seed(seed)
    lexicon = ["the", "whale", "sea", "and", "captain", "rose", "against", "wind", "a", "sail"]
    return " ".join(lexicon[i] for i in torch.randint(len(lexicon), (count,)).tolist())


def frozen(model: Any, size: int = 0) -> FrozenBase:
    return FrozenBase(model, torch.arange(V) if not size else torch.randperm(V)[:size].sort().values)


def test_reading_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n\n{"text": "three"}\n')
    assert list(read_texts(str(tmp_path))) == ["one", "two", "three"]


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("a.jsonl", b'{"text": "x"}\nnonsense\n', "line 2 is not JSON"),
        ("a.jsonl", b'{"input_ids": [1, 2]}\n', "line 1 holds token ids of some tokenizer"),
        ("a.jsonl", b'{"words": "x"}\n', "no field text"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "a\\ud800"}\n', "line 2: text holds a lone surrogate"),
        ("a.txt", b"\xff\xfe\xfa", "not UTF-8"),
    ],
)
def test_bad_files(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(read_texts(str(tmp_path / name)))


def test_states_are_those_before_the_final_norm() -> None:
    model = tiny_model()
    tokens = torch.randint(0, 256, (3, 20))
    with torch.no_grad():
        want = model(tokens).logits
    backbone = Backbone(model)
    whole = backbone.hidden(tokens)
    torch.testing.assert_close(backbone.logits(whole), want)
    cache = BatchCache(20)
    parts = [backbone.hidden(tokens[:, :15], cache)] + [
        backbone.hidden(tokens[:, i : i + 1], cache) for i in range(15, 20)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_chances_are_those_of_the_sampler() -> None:
    from tokenswift.sampling.choice import Sampler

    sampling = SamplingParams(temperature=0.7, min_p=0.05, repetition_penalty=1.3)
    logits = torch.randn(1, V) * 4
    history = torch.randint(0, V, (30,))
    mine = chances(logits.clone(), history[None], sampling)
    scores = Sampler(sampling, V).scores(logits.clone(), history.tolist(), [[]])
    torch.testing.assert_close(mine, scores.softmax(-1))


def test_continuations_repeat_and_vary_with_the_seed() -> None:
    backbone = Backbone(tiny_model())
    prompts = torch.randint(0, 256, (2, 8))

    def run(seed: int) -> list[list[int]]:
        return [t.tolist() for t, _ in continuations(backbone, prompts, 12, SamplingParams(), seed)]

    assert run(1) == run(1) != run(2)


def filled(folder: Path, model: Any, lengths: tuple[int, ...] = (60, 60, 45)) -> HiddenStore:
    store = HiddenStore(folder, D, {"a": 1})
    backbone = Backbone(model)
    torch.manual_seed(5)
    for length in lengths:
        tokens = torch.randint(0, 256, (1, length))
        store.append(tokens, backbone.hidden(tokens))
    store.finish()
    return store


def test_store_is_whole_up_to_the_last_indexed_block(tmp_path: Path) -> None:
    store = filled(tmp_path, tiny_model())
    with (tmp_path / "hidden.bin").open("ab") as file:
        file.write(b"half a block")
    again = HiddenStore(tmp_path, D, {"a": 1})
    assert again.complete and again.blocks == store.blocks and again.tokens_stored == 165
    again.append(torch.zeros(1, 10, dtype=torch.long), torch.ones(1, 10, D))
    tokens, hidden = again.arrays()
    assert tokens[-10:].tolist() == [0] * 10
    assert torch.from_numpy(hidden[-10:].copy()).view(torch.bfloat16).eq(1).all()
    with pytest.raises(InputError, match="another training .a differ."):
        HiddenStore(tmp_path, D, {"a": 2})


@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "conditioned", "medusa"])
def test_loss_by_definition(kind: str, tmp_path: Path) -> None:
    """Row by row: processed distribution of the base model against the penalised distribution of the head."""
    model = tiny_model()
    store = filled(tmp_path, model, (40,))
    torch.manual_seed(2)
    heads = Heads(HeadsConfig(kind, 2, D, V, 8 if kind == "conditioned" else 0))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    sampling = SamplingParams()
    windows = Windows(store, 2, 16, 100)
    items = [windows[0], windows[2]]  # the last one is short: 6 of 16 positions
    assert [int(i["valid"].sum()) for i in items] == [16, 6]
    batch = {k: torch.stack([i[k] for i in items]) for k in items[0]}
    base = frozen(model)
    got = Distillation(heads, base, sampling)(**batch)["losses"]

    tokens, bits = store.arrays()
    text = torch.from_numpy(tokens.astype("int64"))
    states = torch.from_numpy(bits.copy()).view(torch.bfloat16)
    want = torch.zeros(2)
    rows = [*range(16), *range(32, 38)]
    for t in rows:
        state = start = states[t : t + 1].float()
        for i in range(2):
            known = text[t + 1 + i]
            embeds = model.get_input_embeddings().weight[known][None]
            state = heads.advance(i, state, start, embeds)
            seen = text[None, : t + 2 + i]
            p = chances(model.lm_head(base.normed(states[t + 1 + i : t + 2 + i])), seen, sampling)
            q = chances(model.lm_head(heads.normed(i, state)), seen, SamplingParams(min_p=0.0))
            want[i] -= (p * q.log()).sum() / len(rows)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "conditioned"])
def test_closed_form_start_beats_nothing(kind: str, tmp_path: Path) -> None:
    model = tiny_model()
    store = filled(tmp_path, model, (200,) * 6)
    base = frozen(model)
    windows = Windows(store, 2, 64, 64)
    batch = {k: torch.stack([windows[j][k] for j in range(8)]) for k in windows[0]}
    losses = []
    for start in (False, True):
        torch.manual_seed(0)
        heads = Heads(HeadsConfig(kind, 2, D, V, 64 if kind == "conditioned" else 0))
        if start:
            ridge_start(heads, [store], base)
        losses.append(float(Distillation(heads, base, SamplingParams())(**batch)["loss"]))
    assert losses[1] < losses[0]


def test_frequent_tokens(tmp_path: Path) -> None:
    store = HiddenStore(tmp_path, D, {})
    store.append(torch.tensor([[5, 5, 5, 9, 9, 2, 7]]), torch.zeros(1, 7, D))
    found = counts([store], V)
    assert frequent(found, 3).tolist() == [2, 5, 9]
    assert len(frequent(found, 0)) == V


def test_draft_vocabulary_covers_a_share_of_the_text(tmp_path: Path) -> None:
    store = HiddenStore(tmp_path, D, {})
    store.append(torch.tensor([[7] * 90 + [3] * 8 + [1, 2]]), torch.zeros(1, 100, D))
    found = counts([store], V)
    assert covering(found, 0.9).tolist() == [7]
    assert covering(found, 0.98).tolist() == [3, 7]
    assert covering(found, 0.985).tolist() == [1, 3, 7]
    assert covering(found, 1.0).tolist() == [1, 2, 3, 7]


def options(source: str, **changes: Any) -> DataOptions:
    values: dict[str, Any] = {"tokens": 2000, "sequence_length": 96, "prompt": (16,), "write_batch": 4}
    return DataOptions(source, **{**values, **changes})


def full_run(
    model: Any,
    source: str,
    folder: Path,
    training: TrainingOptions,
    kind: str = "conditioned",
    inner: int = 16,
    blocks: int = 1,
    tokenizer: Any = None,
    vocabulary: int = 128,
    **changes: Any,
) -> dict[str, Any]:
    return train_heads(
        model,
        tokenizer or tiny_tokenizer(),
        Job(
            options(source, **changes),
            training,
            folder / "h.safetensors",
            folder / "work",
            vocabulary,
            "tiny",
        ),
        lambda line: None,
        kind=kind,
        count=2,
        inner=inner,
        blocks=blocks,
    )


@pytest.mark.parametrize("source,continued", [("text", False), ("text", True), ("self", False)])
def test_the_whole_way(source: str, continued: bool, tmp_path: Path) -> None:
    model = tiny_model()
    if source == "text":
        source = str(tmp_path / "text.txt")
        Path(source).write_text(words(800))
    training = TrainingOptions(steps=6, save_every=3, log_every=2, bf16=False)
    notes = full_run(model, source, tmp_path, training, continued=continued)
    assert notes["steps"] == 6 and math.isfinite(notes["loss"])
    assert load_heads(tmp_path / "h.safetensors", model).count == 2
    _, _, kept = read_heads(tmp_path / "h.safetensors")
    assert kept["kind"] == "conditioned"
    log = (tmp_path / "work" / "log.csv").read_text().splitlines()
    assert log[0] == "step,epoch,loss,learning_rate,seconds,held_out_loss" and len(log) == 4
    assert not any(p.requires_grad and p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("content,message", [("", "is empty"), ("short text", "10 tokens; at least 256")])
def test_too_little_data(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(content)
    with pytest.raises(InputError, match=message):
        full_run(tiny_model(), str(tmp_path / "t.txt"), tmp_path, TrainingOptions(steps=1))


def test_foreign_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(words(300))
    with pytest.raises(InputError, match="vocabulary has 100"):
        full_run(tiny_model(vocab_size=100, bos_token_id=1, eos_token_id=2, pad_token_id=2),
                 str(tmp_path / "t.txt"), tmp_path, TrainingOptions(steps=1))  # fmt: skip


def test_loss_that_is_not_finite_stops_and_keeps_checkpoints(
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
        full_run(tiny_model(), str(tmp_path / "t.txt"), tmp_path,
                 TrainingOptions(steps=9, save_every=2, bf16=False))  # fmt: skip
    assert last_checkpoint(tmp_path / "work" / "checkpoints") is not None
    assert not (tmp_path / "h.safetensors").exists()


@pytest.mark.parametrize(
    "full", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")]
)
def test_full_disk_in_training(full: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.txt").write_text(words(800))

    def save(*args: object, **kwargs: object) -> None:
        raise full

    monkeypatch.setattr("transformers.Trainer._save_checkpoint", save)
    with pytest.raises(RunError, match="cannot write a checkpoint.*older ones are kept"):
        full_run(tiny_model(), str(tmp_path / "t.txt"), tmp_path,
                 TrainingOptions(steps=3, save_every=2, bf16=False))  # fmt: skip


def test_broken_checkpoint_is_passed_over(tmp_path: Path) -> None:
    for number, whole in ((2, True), (4, False)):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        for name in ("trainer_state.json", "scheduler.pt"):
            (folder / name).write_text("{}")
        torch.save({"state": {}}, folder / "optimizer.pt")
        if not whole:
            (folder / "optimizer.pt").write_bytes(b"half")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert not (tmp_path / "checkpoint-4").exists()


SCRIPT = """
import sys
from pathlib import Path
from tests.conftest import tiny_model
from tests.train.test_train import full_run
from tokenswift.train.trainer import TrainingOptions
folder = Path(sys.argv[1])
training = TrainingOptions(steps=int(sys.argv[2]), save_every=5, log_every=5, bf16=False, batch=2)
notes = full_run(tiny_model(), str(folder / "t.txt"), folder, training)
print("loss", notes["loss"])
"""


def command(folder: Path, steps: int, *launcher: str) -> list[str]:
    (folder / "t.txt").write_text(words(800))
    (folder / "s.py").write_text(SCRIPT)
    return [sys.executable, *launcher, str(folder / "s.py"), str(folder), str(steps)]


def environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    return os.environ | {"PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}


def losses(folder: Path) -> list[float]:
    rows = (folder / "work" / "log.csv").read_text().splitlines()[1:]
    return [float(row.split(",")[2]) for row in rows]


@pytest.mark.slow
def test_kill_and_resume(tmp_path: Path) -> None:
    """Kill -9 in training, same command: it goes on behind the checkpoint and ends as an undisturbed run."""
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        folder.mkdir()
    subprocess.run(command(calm, 300), env=environment(), check=True, capture_output=True)
    process = subprocess.Popen(command(killed, 300), env=environment(), stdout=-3, stderr=-3)
    deadline = time.monotonic() + 120
    while not (killed / "work/checkpoints/checkpoint-10").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "h.safetensors").exists()
    before = len(steps(killed))
    checkpoint = last_checkpoint(killed / "work" / "checkpoints")
    assert checkpoint is not None
    subprocess.run(command(killed, 300), env=environment(), check=True, capture_output=True)
    done = int(checkpoint.name.rpartition("-")[2])
    assert steps(killed)[before:] == list(range(done + 5, 301, 5))  # no step up to the checkpoint again
    assert losses(killed)[-1] == pytest.approx(losses(calm)[-1], rel=1e-3)


def steps(folder: Path) -> list[int]:
    path = folder / "work" / "log.csv"
    return [int(row.split(",")[0]) for row in path.read_text().splitlines()[1:]] if path.exists() else []


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """torchrun with two gloo processes on the CPU, twice: the second time nothing is left to do."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29533")
    for times in (1, 2):
        done = subprocess.run(
            command(tmp_path, 10, *launcher), env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "h.safetensors").exists()
        assert json.loads((tmp_path / "work" / "states" / "index.json").read_text())["complete"]
        assert steps(tmp_path) == [5, 10]
        (tmp_path / "h.safetensors").unlink()
        start = (tmp_path / "work" / "start.safetensors").stat()
        if times == 1:
            made = start.st_mtime_ns
    assert start.st_mtime_ns == made  # the closed form once
    with pytest.raises(subprocess.CalledProcessError):  # the batch was that of two processes
        subprocess.run(command(tmp_path, 10), env=environment(), check=True, capture_output=True)
