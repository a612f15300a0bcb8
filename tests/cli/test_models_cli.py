"""``tokenswift models``: both caches listed, and what a model takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.chats import chat_tokenizer
from tests.cli.conftest import Call
from tests.conftest import tiny_model
from tests.gguf_files import small, write
from tokenswift.loader import default_model

REVISION = "a" * 40


def repository(hub: Path, name: str, files: Path, kind: str = "models") -> Path:
    """A repository in the hub's cache, as its library lays one out: blobs, and links to them."""
    repo = hub / f"{kind}--{name.replace('/', '--')}"
    snapshot, blobs = repo / "snapshots" / REVISION, repo / "blobs"
    for folder in (snapshot, blobs, repo / "refs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(REVISION)
    for number, path in enumerate(sorted(files.iterdir())):
        shutil.copyfile(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    return repo


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> Path:
    """A hub's cache with two models and one of GGUF files, a data set, and a repository that is broken."""
    made = tmp_path / "hub"
    made.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(made))
    for name, layers in (("big", 9), ("draft", 1)):
        tiny_model(num_hidden_layers=layers).save_pretrained(tmp_path / name)
        chat_tokenizer().save_pretrained(tmp_path / name)
        repository(made, f"owner/{name}", tmp_path / name)
    (tmp_path / "ggufs").mkdir()
    write(tmp_path / "ggufs" / "one.gguf", small())
    (tmp_path / "ggufs" / "two.GGUF").write_bytes(b"GGUF and no more")
    repository(made, "owner/files", tmp_path / "ggufs")
    repository(made, "owner/texts", tmp_path / "draft", "datasets")
    (made / "models--owner--broken").mkdir()
    return made


def listed(cli: Call) -> dict[str, dict]:
    made = json.loads(cli("models", "--json", "-", "--quiet").out)
    return {one["name"]: one for one in made["models"]}


def test_the_list(cli: Call, hub: Path, own_cache: Path, tmp_path: Path) -> None:
    own = own_cache / default_model.NAME / default_model.GGUF
    own.parent.mkdir(parents=True)
    shutil.copyfile(tmp_path / "ggufs" / "one.gguf", own)
    found = listed(cli)
    files = ["owner/files:one.gguf", "owner/files:two.GGUF"]
    assert list(found) == ["owner/big", "owner/draft", *files, default_model.NAME]
    big, _, file, bad, ours = found.values()
    assert (ours["cache"], ours["nbytes"]) == ("tokenswift", file["nbytes"])
    assert big["nbytes"] == sum(path.stat().st_size for path in (tmp_path / "big").iterdir())
    assert (big["family"], big["stored"], big["native"], big["problem"]) == ("llama", "f32", True, None)
    model = tiny_model(num_hidden_layers=9)
    assert big["parameters"] == sum(one.numel() for one in model.parameters())
    assert file["stored"] == "f32" and file["nbytes"] == (tmp_path / "ggufs/one.gguf").stat().st_size
    assert "not a complete GGUF file" in bad["problem"]
    shown = cli("models")
    assert all(name in shown.out for name in found)
    assert "models--owner--broken" in shown.err


def test_show(cli: Call, tiny: Path) -> None:
    made = json.loads(cli("models", "show", tiny, "--json", "-", "--quiet").out)
    model = tiny_model()
    numbers = sum(part.numel() for part in model.parameters())
    config = model.config
    row = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert made["sizes"]["weight_bytes"] == 4 * numbers and made["sizes"]["token_bytes"] == row
    assert made["contexts"] == [{"context": 256, "nbytes": 4 * numbers + 256 * row}]
    shown = cli("models", "show", tiny)
    assert "context: 256 tokens" in shown.out and shown.err == f"reading {tiny}\n"
