"""After the third long text with a model without a drafter, one line says what training would
bring and take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.conftest import tiny_tokenizer
from tests.tiny import byte_model
from tokenswift.cli import drafter_advice


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A tiny model with enough layers for a drafter."""
    folder = tmp_path / "deep"
    byte_model(num_hidden_layers=7).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_it_is_said_once(
    cli: Call, deep: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_advice, "LONG_TEXT", 20)
    short = ("generate", "a", "-m", deep, "--ignore-eos", "-n", "10")
    long = ("generate", "a", "-m", deep, "--ignore-eos", "-n", "30")
    said = [
        "tokenswift train -m" in cli(*argv).err for argv in (long, short, long, short, long, long)
    ]
    assert said == [False, False, False, False, True, False]
    (own_cache / drafter_advice.COUNTS).write_text("[")
    done = [cli(*long) for _ in range(3)]
    (line,) = [line for line in done[-1].err.splitlines() if "tokenswift train -m" in line]
    assert f"tokenswift train -m {deep} makes texts 1.1 to 1.2 times as fast" in line
    assert "at most, for 300,000 tokens that the model writes" in line


def test_nothing_is_said_where_it_does_not_help(
    cli: Call, deep: Path, tiny: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quiet; another strategy than auto; a model of few layers."""
    monkeypatch.setattr(drafter_advice, "LONG_TEXT", 20)
    monkeypatch.setattr(drafter_advice, "SAID_AT", 1)
    usual = ("generate", "a", "--ignore-eos", "-n", "30", "-m")
    for argv in (
        (deep, "--quiet"),
        (deep, "--strategy", "autoregressive"),
        (tiny,),
    ):
        assert "tokenswift train" not in cli(*usual, *argv).err


def test_training_that_goes_on_needs_a_drafter(cli: Call, deep: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    for argv, message in (
        (
            ("--more", "500"),
            "out.gguf, which --more continues, is not there; valid: train without --more",
        ),
        (
            ("--more", "500", "--kind", "medusa"),
            "more is given with kind medusa; valid: kind eagle",
        ),
        (("--more", "5"), "more is 5; valid: "),
        (("--from-runs", runs), f"--from-runs {runs} holds no text; valid: "),
        (("--from-runs", runs, "--data", runs), "from_runs is given together with data "),
    ):
        outcome = cli("train", "-m", deep, "--out", "out.gguf", *argv)
        assert outcome.code == 2
        assert message in outcome.error.replace("--from-runs is", "from_runs is").replace(
            "--more is", "more is"
        )


def test_a_training_goes_on_and_leaves_no_work_folder(
    cli: Call, deep: Path, own_cache: Path
) -> None:
    small = "--tokens 1200 --sequence-length 96 --write-batch 4 --steps 3 --hidden 64 --window 32"
    usual = ("train", "-m", deep, "--out", "out.gguf")
    first = cli(*usual, *small.split())
    assert first.code == 0, first
    again = cli(*usual, *small.split()[2:], "--more", "600", "--held-out", "0.3")
    assert again.code == 0, again
    assert "out.gguf.work" in again.files
    assert "out.gguf.more" not in again.files
    assert "the one before" in again.err
