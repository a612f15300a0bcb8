"""`train` on a tiny checkpoint, then `generate` with what it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.train.test_train import words
from tokenswift.cli.main import parsed
from tokenswift.cli.train import _check_request, place_for
from tokenswift.loader.default_model import packaged_drafter
from tokenswift.loader.named_models import QWEN
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


def test_a_training_goes_on_from_the_drafter_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name of the model or of its file; a worse one does not take its place."""
    monkeypatch.setenv("TOKENSWIFT_CACHE", str(tmp_path))
    shipped = packaged_drafter(QWEN.name)
    assert shipped is not None
    assert packaged_drafter(f"/models/{QWEN.file}") == shipped
    assert packaged_drafter("my-llama") is None
    args = parsed(["train", "-m", QWEN.name, "--more", "1000"])
    _check_request(args)
    assert args.out.parent == tmp_path / "drafters"
    assert args.out.read_bytes() == shipped.read_bytes()
