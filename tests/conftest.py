"""Shared fixtures: tiny random checkpoints of every family, and the embedded default model."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import shapes
from tests.tiny import BYTE_FAMILIES as FAMILIES
from tests.tiny import byte_model as tiny_model
from tokenswift.kernels.cpu import library
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.loader.default_model import cache_dir, fetch_default

__all__ = ["FAMILIES", "tiny_model"]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (ids 0-255), ids 256-259 special; 257 ends the text."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for name in ("<s>", "</s>", "<unk>", "<x>"):
        vocabulary[name] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def pytest_configure() -> None:
    """A shell starts what it runs in the background with SIGINT ignored, nohup with SIGHUP ignored,
    and children inherit that: tests that interrupt a command would wait for ever."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_runtest_setup() -> None:
    """Each test checks shapes anew."""
    shapes.begin_test()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_folder(family, **config changes)`` → a checkpoint folder, made once; do not write into
    it."""
    folders: dict[str, Path] = {}

    def make(family: str = "llama", **changes: Any) -> Path:
        key = repr((family, sorted(changes.items())))
        if key not in folders:
            folder = tmp_path_factory.mktemp(family)
            tiny_model(family, **changes).save_pretrained(folder)
            tiny_tokenizer().save_pretrained(folder)
            folders[key] = folder
        return folders[key]

    return make


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test; the kernels compiled before are taken along."""
    kernels = cache_dir() / "kernels"
    monkeypatch.setenv("TOKENSWIFT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    if kernels.is_dir():
        (tmp_path / "cache" / "kernels").symlink_to(kernels)
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def embedded() -> str:
    """The folder of the default model; fetched into the user's cache on first use."""
    return str(fetch_default(cache_dir()))


@pytest.fixture(scope="session", params=["native", pytest.param("avx2", marks=pytest.mark.slow)])
def kernels(request: pytest.FixtureRequest) -> CpuBackend:
    """The compiled kernels, and those of a processor with AVX2 alone."""
    if request.param == "avx2" and "avx2" not in library.processor():
        pytest.skip("this processor has no AVX2")
    targets = library.TARGETS if request.param == "native" else (("-mavx2", "-mfma", "-mf16c"),)
    compiled = library.compiled(cache_dir() / "kernels", targets)
    if isinstance(compiled, str):
        pytest.skip("no C compiler here")
    return CpuBackend(compiled)
