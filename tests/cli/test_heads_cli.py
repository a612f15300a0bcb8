"""`train` on tiny checkpoints, good and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.conftest import tiny_model, tiny_tokenizer
from tests.spec.heads.test_published import published
from tests.train.test_train import words
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


DATA = ("--tokens", "1500", "--sequence-length", "96", "--prompt-lengths", "16", "--write-batch", "4")
DATA += ("--steps", "4")
SMALL = (*DATA, "--inner", "16")


def test_train_then_generate(cli: Call, base: str, text: str) -> None:
    done = cli("train", "--model", base, "--data", text, "--out", "h.safetensors", "--num-heads", "2", *SMALL)
    assert done.code == 0, done.err
    assert "h.safetensors" in done.files and "training: step" not in done.out
    done = cli("generate", "the whale", "--model", base, "--heads", "h.safetensors",
               "--max-new-tokens", "8", "--budget", "32", "--quiet")  # fmt: skip
    assert done.code == 0, done.err


def test_medusa_heads_then_generate(cli: Call, base: str, text: str) -> None:
    done = cli("train", "--model", base, "--data", text, "--out", "m.safetensors",
               "--kind", "medusa", "--num-heads", "2", *DATA)  # fmt: skip
    assert done.code == 0, done.err
    heads, _, notes = read_heads("m.safetensors")
    assert heads.kind == notes["kind"] == "medusa"


def test_published_heads_load_as_they_are(cli: Call, base: str, tmp_path: Path) -> None:
    published(tmp_path / "c")
    given = ("generate", "the whale", "--model", base, "--max-new-tokens", "4", "--quiet", "--heads")
    done = cli(*given, str(tmp_path / "c"))
    assert done.code == 0, done.err
    published(tmp_path / "other", seed=3)
    done = cli(*given, str(tmp_path / "other"))
    assert done.code == 2 and "weights differ" in done.error
