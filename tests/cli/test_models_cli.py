"""``tokenswift models``: both caches listed and emptied, and nothing outside of them touched."""

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
from tokenswift.loader.find import ALIASES

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
    """A hub's cache with three models, whose revisions have one name, and one of GGUF files; beside it what
    links in it lead to."""
    made, outside = tmp_path / "hub", tmp_path / "outside"
    made.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(made))
    for name, layers in (("big", 9), ("draft", 1)):
        tiny_model(num_hidden_layers=layers).save_pretrained(tmp_path / name)
        chat_tokenizer().save_pretrained(tmp_path / name)
        repository(made, f"owner/{name}", tmp_path / name)
    (tmp_path / "ggufs").mkdir()
    write(tmp_path / "ggufs" / "one.gguf", small())
    (tmp_path / "ggufs" / "two.GGUF").write_bytes(b"GGUF and no more")
    files = repository(made, "owner/files", tmp_path / "ggufs")
    repository(made, "owner/texts", tmp_path / "draft", "datasets")
    shutil.copytree(tmp_path / "draft", outside)
    (made / "models--owner--link").symlink_to(outside)
    (files / "snapshots" / REVISION / "three.gguf").symlink_to(outside / "model.safetensors")
    (made / "models--owner--broken").mkdir()
    return made


def seen(*folders: Path) -> dict[str, int]:
    """Every file below some folders, links aside, with its size."""
    found = (path for folder in folders for path in folder.rglob("*"))
    return {str(path): path.lstat().st_size for path in found if path.is_file() and not path.is_symlink()}


def listed(cli: Call) -> dict[str, dict]:
    made = json.loads(cli("models", "--json", "-", "--quiet").out)
    return {one["name"]: one for one in made["models"]}


def test_the_list(cli: Call, hub: Path, tmp_path: Path) -> None:
    found = listed(cli)
    assert list(found) == ["owner/big", "owner/draft", "owner/files:one.gguf", "owner/files:two.GGUF"]
    big, draft, file, bad = found.values()
    assert big["nbytes"] == sum(path.stat().st_size for path in (tmp_path / "big").iterdir())
    assert (big["family"], big["stored"], big["native"], big["problem"]) == ("llama", "f32", True, None)
    model = tiny_model(num_hidden_layers=9)
    assert big["parameters"] == sum(one.numel() for one in model.parameters())
    assert (big["drafts"], draft["drafts"], big["heads"]) == (["owner/draft"], [], [])
    assert file["stored"] == "f32" and file["nbytes"] == (tmp_path / "ggufs/one.gguf").stat().st_size
    assert "not a complete GGUF file" in bad["problem"]
    shown = cli("models")
    assert all(name in shown.out for name in found) and "owner/link" not in shown.out
    assert "models--owner--broken" in shown.err


def test_a_repository_is_removed_and_nothing_else(cli: Call, hub: Path, tmp_path: Path) -> None:
    """Another repository's revision has the same name; links lead out of the cache."""
    others = [path for path in hub.iterdir() if path.name != "models--owner--files"]
    outside = tmp_path / "outside"
    before, gone = seen(*others, outside), seen(hub / "models--owner--files")
    done = cli("models", "remove", "owner/files", "--yes", "--json", "-")
    assert json.loads(done.out) == {"removed": "owner/files", "freed": sum(gone.values())}
    assert not (hub / "models--owner--files").exists() and seen(*others, outside) == before
    assert list(listed(cli)) == ["owner/big", "owner/draft"]
    done = cli("models", "remove", "owner/draft", "-y")
    assert done.out.startswith("owner/draft removed, ") and list(listed(cli)) == ["owner/big"]
    assert (hub / "models--owner--big").exists()


@pytest.mark.parametrize(
    "name", ["owner/link", "owner/texts", "owner/files:one.gguf", "../outside", "kernels"]
)
def test_what_is_no_model_of_a_cache_stays(cli: Call, hub: Path, tmp_path: Path, name: str) -> None:
    before = seen(tmp_path)
    done = cli("models", "remove", name, "--yes")
    assert done.code == 2 and done.error.startswith(f"name is {name!r}; valid: owner/"), done
    assert seen(tmp_path) == before


def test_a_model_of_ours(cli: Call, hub: Path, own_cache: Path, tmp_path: Path) -> None:
    """Its folder goes, what a link in it leads to stays; a link in its place is refused."""
    name = ALIASES[0]
    shutil.copytree(tmp_path / "draft", own_cache / name)
    (own_cache / name / "more").symlink_to(tmp_path / "outside")
    size = sum(seen(own_cache / name).values())
    assert listed(cli)[name]["nbytes"] == size
    before = seen(tmp_path / "outside", hub)
    done = cli("models", "remove", name, "--yes", "--json", "j")
    assert done.code == 0 and json.loads(Path("j").read_text())["freed"] == size
    assert not (own_cache / name).exists() and seen(tmp_path / "outside", hub) == before
    (own_cache / name).symlink_to(tmp_path / "outside")
    assert "is a link; valid: " in cli("models", "remove", name, "--yes").error
    assert name not in listed(cli) and seen(tmp_path / "outside", hub) == before


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
