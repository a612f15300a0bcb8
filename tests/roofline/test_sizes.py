"""Sizes from a config.json or a GGUF header are those of the loaded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.gguf_files import QuantType, small, write
from tests.tiny import FAMILIES, SIZES, build, tiny_model
from tokenswift import LLM
from tokenswift.kernels.torch import TorchBackend
from tokenswift.loader.gguf.file import GgufFile
from tokenswift.loader.rope import RopeScaling
from tokenswift.models.target import make_target
from tokenswift.roofline.cards import CARDS
from tokenswift.roofline.machine import Processor
from tokenswift.roofline.passes import Sizes
from tokenswift.roofline.sizes import sizes_of, sizes_of_target
from tokenswift.types import InputError

pytestmark = pytest.mark.usefixtures("own_cache")
MIX = {"": QuantType.Q4_1, "ffn_down": QuantType.Q6_K, "attn_v": QuantType.Q8_0, "token_embd": QuantType.Q8_0}


def config_alone(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """A folder with a config.json and nothing else."""
    folder = folder / "model"
    AutoConfig.for_model(kind, **{**SIZES, "dtype": "float32", **changes}).save_pretrained(folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return folder


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("llama", True),
        ("llama-yarn", False),
        ("qwen2", False),
        ("qwen2-sliding", False),
        ("qwen3", False),
        ("mistral-sliding", False),
    ],
)
def test_a_config_says_what_the_model_has(family: str, tied: bool, tmp_path: Path) -> None:
    model = tiny_model(family, tie_word_embeddings=tied)
    kind, changes = FAMILIES[family]
    folder = config_alone(tmp_path, kind, **{**changes, "tie_word_embeddings": tied})
    assert sizes_of(str(folder)) == sizes_of_target(make_target(model))


def test_by_hand(tmp_path: Path) -> None:
    """Qwen3 with heads wider than the hidden state: two layers of (4 + 2 · 2) · 16 · 32, 4 · 16 · 32 and
    3 · 32 · 48 weights, and 100 · 32 of the LM head."""
    more = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = config_alone(
        tmp_path,
        "qwen3",
        **more,
        head_dim=16,
        num_hidden_layers=2,
        vocab_size=100,
        max_position_embeddings=64,
    )
    weights = {"float32": 2 * (4096 + 2048 + 4608) + 3200}
    assert sizes_of(str(folder)) == Sizes(32, 4, 2, 16, (0, 0), weights, "float32", limit=64, inner=48)


def test_a_family_that_runs_through_transformers(tmp_path: Path) -> None:
    """Windows in every second layer; of weights the loaded model counts norms too."""
    changes: dict[str, Any] = {"sliding_window": 9, "num_hidden_layers": 2, "head_dim": 8}
    found = sizes_of(str(config_alone(tmp_path, "gemma2", **changes)))
    loaded = sizes_of_target(make_target(build("gemma2", SIZES, **changes)))
    assert found.windows == loaded.windows == (9, 0)
    assert 0 < loaded.weight_bytes - found.weight_bytes < 0.1 * found.weight_bytes
    assert (found.heads, found.kv_heads, found.width) == (loaded.heads, loaded.kv_heads, loaded.width)


def cut_off(file: Path) -> Path:
    """A copy that ends with the header."""
    end = min(entry.start for entry in GgufFile(file).tensors.values())
    (file.parent / "cut.gguf").write_bytes(file.read_bytes()[:end])
    return file.parent / "cut.gguf"


@pytest.mark.parametrize(
    ("how", "tied"),
    [
        ({}, False),
        ({}, True),
        ({"weights": "q8_0"}, False),
        ({"weights": "bfloat16"}, True),
        ({"dtype": "bfloat16"}, False),
    ],
)
def test_a_gguf_header_says_what_the_model_has(how: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    """Also where the file is cut off behind it."""
    whole = tmp_path / "a.gguf"
    write(whole, small(tie_word_embeddings=tied), MIX)
    found = sizes_of(str(whole), **how)
    with LLM(whole, heads=None, device="cpu", **how) as llm:
        assert found == sizes_of_target(llm.target)
    cut = cut_off(whole)
    with pytest.raises(InputError, match="ends before the end of tensor"):
        LLM(cut)
    assert sizes_of(str(cut), **how) == found


def test_positions_of_a_cut_off_file(tmp_path: Path) -> None:
    """Llama 3's factors stand among the tensors."""
    llama3 = {**FAMILIES["llama3-rope"][1]["rope_parameters"], "original_max_position_embeddings": 32}
    write(tmp_path / "a.gguf", small(rope_parameters=llama3))
    assert sizes_of(str(cut_off(tmp_path / "a.gguf"))) == sizes_of(str(tmp_path / "a.gguf"))


def test_how_weights_are_read(tmp_path: Path) -> None:
    """Few bits stay few bits in the kernels alone, and not in products of float16."""
    folder, file = config_alone(tmp_path / "a"), tmp_path / "b.gguf"
    write(file, small(), MIX)
    assert set(sizes_of(str(folder), weights="q4_0").weights) == {"q4_0"}
    assert set(sizes_of(str(folder), "float16", "q4_0").weights) == {"float16"}
    assert set(sizes_of(str(folder), "bfloat16", "float32").weights) == {"bfloat16"}
    assert set(sizes_of(str(folder), "float32", "bfloat16").weights) == {"bfloat16"}
    torchs = Processor(TorchBackend())
    assert set(sizes_of(str(folder), "float32", "bfloat16", machine=torchs).weights) == {"float32"}
    assert set(sizes_of(str(file)).weights) == {"q4_1", "q6_k", "q8_0"}
    assert set(sizes_of(str(file), machine=torchs).weights) == {"float32"}
    on_card = sizes_of(str(file), machine=CARDS["a100"])
    assert set(on_card.weights) == {"q4_1", "bfloat16", "q8_0"} and on_card.dtype == "bfloat16"
    assert set(sizes_of(str(folder), "float16", "q4_0", machine=CARDS["a100"]).weights) == {"q4_0"}
    assert sizes_of(str(folder), weights="q4_0", whole=True).whole
    longer = sizes_of(str(folder), scaling=RopeScaling(4.0))
    assert longer.limit == 4 * SIZES["max_position_embeddings"]


@pytest.mark.parametrize(
    ("kind", "changes", "how", "line"),
    [
        (
            "mixtral",
            {},
            {},
            r"\(type mixtral\) has weights that a pass reads in part; valid: models without exp",
        ),
        ("llama", {"dtype": None}, {}, "the config.json of .* names none; valid: float32, bfloat16"),
        (
            "llama",
            {"num_attention_heads": 0},
            {},
            "config.json of .*: num_attention_heads is 0; valid: an integer",
        ),
        ("llama", {}, {"whole": True}, "dtype is 'int8', but not all"),
        (
            "llama",
            {},
            {"weights": "q8_0", "whole": True, "machine": Processor(TorchBackend())},
            "dtype is 'int8', but not all",
        ),
        ("gemma2", {}, {"weights": "q8_0"}, "weights is 'q8_0', but model .* valid: stored"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            {},
            "dynamic",
        ),
    ],
)
def test_what_cannot_be_reckoned(
    kind: str, changes: dict[str, Any], how: dict[str, Any], line: str, tmp_path: Path
) -> None:
    AutoConfig.for_model(kind, **{**SIZES, "dtype": "float32"}).save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, **changes}))
    with pytest.raises(InputError, match=line) as caught:
        sizes_of(str(tmp_path), **how)
    assert "\n" not in str(caught.value)


def test_other_files(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", small(), architecture="gpt2")
    with pytest.raises(InputError, match="the architecture is 'gpt2', or has parts that are not known here"):
        sizes_of(str(tmp_path / "a.gguf"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(InputError, match="is no whole GGUF file"):
        sizes_of(str(tmp_path / "a.gguf"))
    with pytest.raises(InputError, match="no such folder"):
        sizes_of("./none")
