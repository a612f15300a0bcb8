"""`train-heads`, `train-draft`, `eval-heads`, `import-heads` on tiny checkpoints, good and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.conftest import tiny_model, tiny_tokenizer
from tests.spec.heads.test_published import published
from tests.train.test_train import words
from tokenswift.cli.progress import STAGES, Stages
from tokenswift.loader.load import load
from tokenswift.spec.heads.checkpoint import read_heads


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A tiny checkpoint with its tokenizer; returns its folder."""
    folder = tmp_path / "base"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(words(900))
    return str(path)


DATA = ("--tokens", "1500", "--block", "96", "--prompt-lengths", "16", "--write-batch", "4", "--steps", "4")
SMALL = (*DATA, "--inner", "16")


def test_train_then_generate_then_evaluate(
    cli: Call, base: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = cli(
        "train-heads", "--model", base, "--data", text, "--out", "h.safetensors", "--num-heads", "2", *SMALL
    )
    assert done.code == 0, done.err
    assert "h.safetensors" in done.files and "training: step" not in done.out
    done = cli("generate", "the whale", "--model", base, "--heads", "h.safetensors",
               "--max-new-tokens", "8", "--budget", "32", "--quiet")  # fmt: skip
    assert done.code == 0, done.err
    done = cli("eval-heads", "--model", base, "--data", text, "--heads", "h.safetensors", "--prompt", "64",
               "--max-new-tokens", "16", "--positions", "40", "--count", "1", "--budget", "48",
               "--context", "128", "--json", "e.json", "--quiet")  # fmt: skip
    assert done.code == 0, done.err
    figures = json.loads(Path("e.json").read_text())
    assert figures["heads"] == 2 and set(figures["acceptance"]) == {"partial", "hidden"}
    for source in ("text", "own"):
        assert len(figures[source]) == 2
        for row in figures[source]:
            assert 0 <= row["match"] <= row["match3"] <= 1 and 0 <= row["top1"] <= row["top3"] <= 1
    assert figures["acceptance"]["hidden"]["mean_acceptance_length"] >= 1
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(Stages, "__call__", lambda self, *stage: told.append(stage))
    again = cli("eval-heads", "--model", base, "--data", text, "--heads", "h.safetensors", "--prompt", "64",
                "--max-new-tokens", "16", "--positions", "40", "--count", "1", "--budget", "48",
                "--context", "128", "--json", "f.json")  # fmt: skip
    assert again.code == 0, again.err
    for stage in ("text", "write", "own", "generate"):
        counts = [(done, total) for name, done, total in told if name == stage]
        assert stage in STAGES and len(counts) > 4 and counts == sorted(counts), (stage, counts)
        assert len({total for _, total in counts}) == 1 and counts[-1][0] == counts[-1][1]
    assert json.loads(Path("f.json").read_text())["text"] == figures["text"]
    assert "mean acceptance length" in done.out


def test_medusa_heads_then_generate(cli: Call, base: str, text: str) -> None:
    done = cli("train-heads", "--model", base, "--data", text, "--out", "m.safetensors",
               "--kind", "medusa", "--num-heads", "2", *DATA)  # fmt: skip
    assert done.code == 0, done.err
    heads, _, notes = read_heads("m.safetensors")
    assert heads.kind == notes["kind"] == "medusa" and heads.config.blocks == 1
    done = cli("eval-heads", "--model", base, "--data", text, "--heads", "m.safetensors", "--prompt", "64",
               "--max-new-tokens", "16", "--positions", "16", "--count", "1", "--budget", "48",
               "--context", "128", "--json", "e.json", "--quiet")  # fmt: skip
    assert done.code == 0, done.err
    assert json.loads(Path("e.json").read_text())["kind"] == "medusa"


def test_draft_model_from_text_and_from_states(cli: Call, base: str, text: str) -> None:
    done = cli("train-draft", "--model", base, "--data", text, "--out", "draft", "--layers", "1",
               "--pack", "d.safetensors", *DATA)  # fmt: skip
    assert done.code == 0, done.err
    assert "steps 4, " in done.err and "loss 0.0" not in done.err
    assert Path("d.safetensors").stat().st_mode & 0o777 == 0o644
    assert len(load("draft", device="cpu").model.model.layers) == 1
    for option in (
        ("--model", "draft"),
        ("--model", base, "--strategy", "triforce", "--draft-model", "draft"),
    ):
        done = cli("generate", "the whale", *option, "--max-new-tokens", "4", "--budget", "32", "--quiet")
        assert done.code == 0, done.err
    done = cli("train-draft", "--model", base, "--states", "draft.work", "--out", "other", "--quiet",
               "--layers", "2", "--steps", "2")  # fmt: skip
    assert done.code == 0, done.err
    assert len(load("other", device="cpu").model.model.layers) == 2
    assert not Path("other.work/states").exists()


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("--layers", "0"), "layers is 0"),
        (("--layers", "3"), "--layers is 3; valid: from 1 to 2"),
        (("--data", "empty.txt"), "gives 0 tokens"),
        (("--states", "none"), "not both"),
        (("--lr", "7"), "lr is 7.0"),
        (("--out", "taken"), "--out taken exists and is not a draft model"),
    ],
)
def test_bad_draft_options(cli: Call, base: str, text: str, arguments: tuple[str, ...], message: str) -> None:
    Path("empty.txt").write_text("")
    Path("taken").mkdir()
    Path("taken/file").write_text("mine")
    given = {"--model": base, "--data": text, "--out": "draft", arguments[0]: arguments[1]}
    done = cli("train-draft", *[word for pair in given.items() for word in pair], "--quiet")
    assert done.code == 2 and message in done.error
    assert not Path("draft").exists() and Path("taken/file").read_text() == "mine"


@pytest.mark.parametrize("states", ["none", "empty"])
def test_draft_model_from_no_states(cli: Call, base: str, states: str) -> None:
    Path("empty").mkdir()
    done = cli("train-draft", "--model", base, "--states", states, "--out", "draft", "--quiet")
    assert done.code == 2 and f"states {states} holds no hidden states" in done.error


def test_import_and_export(cli: Call, base: str, tmp_path: Path) -> None:
    published(tmp_path / "c")
    done = cli("import-heads", "--checkpoint", str(tmp_path / "c"), "--out", "h.safetensors", "--model", base)
    assert done.code == 0, done.err
    done = cli("import-heads", "--heads", "h.safetensors", "--model", base, "--export", "back")
    assert done.code == 0, done.err
    assert {p.name for p in Path("back").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    done = cli("generate", "the whale", "--model", "back", "--max-new-tokens", "4", "--quiet")
    assert done.code == 0, done.err
    published(tmp_path / "other", seed=3)
    done = cli("import-heads", "--checkpoint", str(tmp_path / "other"), "--out", "x", "--model", base)
    assert done.code == 2 and "weights differ" in done.error and "x" not in done.files


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("--data", "none.txt"), "--data none.txt does not exist"),
        (("--heads", "0"), "heads is 0"),
        (("--lr", "7"), "lr is 7.0"),
        (("--tokens", "3"), "tokens is 3"),
        (("--continued", "--block", "64", "--prompt-lengths", "60"), "--prompt-lengths is 60"),
        (("--kind", "square"), "square"),
        (("--targets", "text"), "--targets"),
        (("--data", "self", "--continued"), "--continued"),
        (("--model", "no-such-model"), "no-such-model"),
    ],
)
def test_bad_training_options(
    cli: Call, base: str, text: str, arguments: tuple[str, ...], message: str
) -> None:
    given = {"--model": base, "--data": text, "--out": "h.safetensors"}
    if arguments[0] in given:
        del given[arguments[0]]
    done = cli("train-heads", *[word for pair in given.items() for word in pair], *arguments)
    assert done.code == 2 and message in done.error
    assert done.files == []


def test_bad_imports(cli: Call, tmp_path: Path) -> None:
    done = cli("import-heads", "--checkpoint", str(tmp_path / "none"), "--out", "h")
    assert done.code == 2 and "is not a folder" in done.error
    done = cli("import-heads", "--checkpoint", str(tmp_path))
    assert done.code == 2 and "--out" in done.error
    done = cli("import-heads", "--export", "x")
    assert done.code == 2 and "--heads and --model" in done.error


def test_evaluation_without_heads(cli: Call, base: str, text: str) -> None:
    done = cli("eval-heads", "--model", base, "--data", text, "--quiet")
    assert done.code == 2 and "no heads fit" in done.error
