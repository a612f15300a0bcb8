"""`train` on a tiny checkpoint, then `generate` with what it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.train.test_train import words
from tokenswift.cli.train import place_for
from tokenswift.speculation.heads.files import read_heads

SMALL = "--tokens 1500 --sequence-length 96 --write-batch 4 --steps 4 --num-heads 2"


@pytest.mark.parametrize("kind", ["conditioned", "medusa"])
def test_train_then_generate(cli: Call, tiny: Path, tmp_path: Path, kind: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text(words(900))
    argv = (
        "--model",
        tiny,
        "--data",
        text,
        "--out",
        "h.safetensors",
        "--kind",
        kind,
        "--inner",
        "16",
    )
    done = cli("train", *argv, *SMALL.split())
    assert done.code == 0, done
    assert "h.safetensors" in done.files
    assert done.out == ""
    heads, _, notes = read_heads("h.safetensors")
    assert heads.kind == notes["kind"] == kind
    assert heads.count == 2
    options = ("--heads", "h.safetensors", "--max-new-tokens", "8", "--quiet")
    assert cli("generate", "the whale", "--model", tiny, *options).code == 0


def test_each_model_and_kind_has_a_file_of_its_own() -> None:
    models = ("meta/Llama-3.1-8B", "meta/Llama-3.2-1B", "a/b:b-q4_0.gguf", "b.gguf")
    names = [
        place_for(model, kind).name for model in models for kind in ("eagle", "linear", "medusa")
    ]
    assert len({*names}) == len(names)
    assert names[-3:] == [
        "b.gguf",
        "b.linear.heads.safetensors",
        "b.medusa.heads.safetensors",
    ]
