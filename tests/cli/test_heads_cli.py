"""`train` on tiny checkpoints, good and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.conftest import tiny_model, tiny_tokenizer
from tests.spec.heads.test_published import published
from tests.train.test_train import words
from tokenswift.cli.terminal import STAGES, Stages
from tokenswift.spec.heads.files import read_heads


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
    done = cli("train", "--model", base, "--data", text, "--out", "h.safetensors", "--num-heads", "2", *SMALL)
    assert done.code == 0, done.err
    assert "h.safetensors" in done.files and "training: step" not in done.out
    done = cli("generate", "the whale", "--model", base, "--heads", "h.safetensors",
               "--max-new-tokens", "8", "--budget", "32", "--quiet")  # fmt: skip
    assert done.code == 0, done.err
    done = cli("train", "--model", base, "--data", text, "--evaluate", "h.safetensors",
               "--max-new-tokens", "16", "--positions", "40", "--count", "1", "--budget", "48",
               "--prompt-tokens", "64", "--context", "128", "--json", "e.json", "--quiet")  # fmt: skip
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
    again = cli("train", "--model", base, "--data", text, "--evaluate", "h.safetensors",
                "--max-new-tokens", "16", "--positions", "40", "--count", "1", "--budget", "48",
                "--prompt-tokens", "64", "--context", "128", "--json", "f.json")  # fmt: skip
    assert again.code == 0, again.err
    for stage in ("text", "write", "own", "generate"):
        counts = [(done, total) for name, done, total in told if name == stage]
        assert stage in STAGES and len(counts) > 1 and counts == sorted(counts), (stage, counts)
        assert len({total for _, total in counts}) == 1
    assert json.loads(Path("f.json").read_text())["text"] == figures["text"]
    assert "mean acceptance length" in done.out


def test_medusa_heads_then_generate(cli: Call, base: str, text: str) -> None:
    done = cli("train", "--model", base, "--data", text, "--out", "m.safetensors",
               "--kind", "medusa", "--num-heads", "2", *DATA)  # fmt: skip
    assert done.code == 0, done.err
    heads, _, notes = read_heads("m.safetensors")
    assert heads.kind == notes["kind"] == "medusa" and heads.config.blocks == 1
    done = cli("train", "--model", base, "--data", text, "--evaluate", "m.safetensors",
               "--max-new-tokens", "16", "--positions", "16", "--count", "1", "--budget", "48",
               "--prompt-tokens", "64", "--context", "128", "--json", "e.json", "--quiet")  # fmt: skip
    assert done.code == 0, done.err
    assert json.loads(Path("e.json").read_text())["kind"] == "medusa"


def test_published_heads_load_as_they_are(cli: Call, base: str, tmp_path: Path) -> None:
    published(tmp_path / "c")
    given = ("generate", "the whale", "--model", base, "--max-new-tokens", "4", "--quiet", "--heads")
    done = cli(*given, str(tmp_path / "c"))
    assert done.code == 0, done.err
    published(tmp_path / "other", seed=3)
    done = cli(*given, str(tmp_path / "other"))
    assert done.code == 2 and "weights differ" in done.error
