"""Files from strangers: what they say is held against what they hold, in one line, before it is
used."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AddedToken

from tests.conftest import tiny_model, tiny_tokenizer
from tests.gguf_files import small, write
from tests.malformed.cases import entry, put
from tests.malformed.gguf_bytes import ARRAY, F32, TEXT, U32, Draft, Value
from tokenswift import LLM
from tokenswift.checks import shown
from tokenswift.loader.config_file import read_config
from tokenswift.loader.schema import check_numbers
from tokenswift.types import InputError

pytestmark = pytest.mark.usefixtures("own_cache")


def line_of(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def opened(path: Path) -> LLM:
    return LLM(path, device="cpu", heads="none")


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"hidden_size": 0}, "x: hidden_size is 0; valid: int >= 1"),
        ({"max_window_layers": None}, "x: max_window_layers is None; valid: int"),
        ({"rms_norm_eps": math.inf}, "x: rms_norm_eps is inf; valid: float <= 1.0"),
        ({"eos_token_id": [2, "x"]}, "x: eos_token_id is [2, 'x']; valid: int"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 4},
            "x: num_key_value_heads is 4; valid: a divisor of 6, the number of heads",
        ),
        ({"rope_scaling": {"factor": 0.0}}, "x: rope_scaling.factor is 0.0; valid: float > 0.0"),
        (
            {"rope_scaling": {"low_freq_factor": 4.0, "high_freq_factor": 1.0}},
            "x: rope_scaling.low_freq_factor is 4.0; valid: less than high_freq_factor, which is "
            "1.0",
        ),
        (
            {"rope_parameters": {"low_freq_factor": 4, "high_freq_factor": 4}},
            "x: rope_parameters.low_freq_factor is 4.0; valid: less than high_freq_factor, which "
            "is 4.0",
        ),
    ],
)
def test_numbers_that_no_model_has(fields: dict[str, object], line: str) -> None:
    assert line_of(lambda: check_numbers(fields, "x")) == line


# ---- GGUF files ----------------------------------------------------------------------------------


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    write(tmp_path / "whole.gguf", small("llama"))
    return Draft.of(tmp_path / "whole.gguf")


TOKENS = Value(ARRAY, [f"t{i}" for i in range(400)], TEXT)
CHANGES: list[tuple[Callable[[Draft], object], str]] = [
    (
        put("llama.block_count", Value(U32, 1 << 31)),
        "llama.block_count is 2147483648; valid: int <= 1024",
    ),
    (
        put("llama.rope.dimension_count", Value(U32, 32)),
        "llama.rope.dimension_count is 32; valid: 64",
    ),
    (
        put("llama.attention.scale", Value(F32, 2.0)),
        "llama.attention.scale is 2.0; valid: 0, or a file",
    ),
    (entry(offset=1 << 40), "it ends before the end of tensor"),
    (entry(offset=0), "overlap"),
    (
        entry(code=24),
        "is of type 24, which is not known here; valid: a file in another, such as Q4_K_M",
    ),
    (lambda d: setattr(d, "counts", (None, 1 << 40)), "1099511627776 keys, at most"),
    (
        put("tokenizer.ggml.tokens", TOKENS),
        "ggml.tokens has 400 tokens; valid: 1 to 260, the rows of the",
    ),
    (
        put("tokenizer.ggml.eom_token_id", Value(U32, 260)),
        "eom_token_id is 260; valid: 0 to 259, a row of",
    ),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_files_that_are_refused(
    change: Callable[[Draft], Any], words: str, draft: Draft, tmp_path: Path
) -> None:
    change(draft)
    path = draft.write(tmp_path / "model.gguf")
    assert words in (line := line_of(lambda: opened(path))) and f"model file {path}" in line


@pytest.mark.parametrize(
    ("kind", "called", "count", "words"),
    [
        (
            "llama",
            "attn_q.bias",
            256,
            "lacks the tensor model.layers.0.self_attn.k_proj.bias; valid: files",
        ),
        ("qwen2", "ffn_down.bias", 256, "ffn_down.bias is (256,) in F32; valid: a file without it"),
        (
            "qwen3",
            "attn_k_norm.weight",
            1,
            "attn_k_norm.weight is (1,) in F32; valid: (64,) in F32",
        ),
    ],
)
def test_biases_and_norms_are_those_of_the_table(
    kind: str, called: str, count: int, words: str, tmp_path: Path
) -> None:
    write(tmp_path / "whole.gguf", small(kind))
    draft = Draft.of(tmp_path / "whole.gguf")
    called = f"blk.0.{called}"
    draft.tensors = [entry for entry in draft.tensors if entry[0] != called]
    draft.add(called, (count,), bytes(4 * count))
    line = line_of(lambda: opened(draft.write(tmp_path / "model.gguf")))
    assert words in line


# ---- ids -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_added_tokens_without_rows_are_refused_where_they_are_written(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<pad>", special=True)])
    tokenizer.save_pretrained(folder)
    for _ in range(2):  # from transformers, and with the card that was kept
        llm = opened(folder)
        assert llm.generate("Hi", 2, ignore_eos=True).token_ids
        line = "holds '<pad>', whose token id is 260; valid: tokens of the model, 0 to 259"
        assert line in line_of(partial(llm.generate, "Hi <pad>", 2))
    assert "token id is 260; valid: 0 to 259" in line_of(lambda: opened(folder).generate([260], 2))


@pytest.mark.parametrize(
    ("file", "ids"), [("generation_config.json", [1, 260]), ("config.json", -1)]
)
def test_ids_of_configs_beyond_the_rows_end_no_text(file: str, ids: object, folder: Path) -> None:
    change(folder / file, eos_token_id=ids)
    llm = opened(folder)
    assert llm.source.end_tokens() <= {1, 257}
    assert llm.generate([3, 4], 3).token_ids


TURNED_ROUND = {"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; valid: float"),
        ({"model_type": "gemma2", "vocab_size": 10**6}, "numbers of files with"),
        (
            {"model_type": "arcee", "rope_parameters": {"rope_type": "llama3"} | TURNED_ROUND},
            "rope_parameters.low_freq_factor is 4.0; valid: less than high_freq_factor, which",
        ),
    ],
)
def test_configs_that_are_refused(fields: dict[str, object], words: str, folder: Path) -> None:
    change(folder / "config.json", **fields)
    assert words in (line := line_of(lambda: opened(folder))) and str(folder) in line


@pytest.mark.parametrize(
    ("kind", "name", "value", "valid"),
    [
        ("bart", "encoder_layers", 10**7, "up to 1,024"),
        ("bart", "decoder_layers", 10**7, "up to 1,024"),
        ("bart", "num_labels", 10**7, "up to 65,536"),
        ("xlstm", "num_blocks", 10**7, "up to 1,024"),
        ("gpt2", "n_layer", 10**7, "up to 1,024"),
        ("gpt2", "n_embd", 10**7, "up to 262,144"),
        ("mpt", "n_layers", 1e7, "up to 1,024"),
        ("prophetnet", "num_decoder_layers", 10**7, "up to 1,024"),
        ("deepseek_v3", "num_nextn_predict_layers", 10**7, "up to 1,024"),
        ("qwen2_moe", "num_experts", 10**7, "up to 16,384"),
        ("git", "num_image_with_embedding", 10**7, "up to 4,096"),
        ("phi3", "vocab_size", 10**7, "up to 1,048,576"),
        ("phi3", "hidden_size", 10**7, "up to 262,144"),
        ("phi3", "max_position_embeddings", 10**13, "up to 1,099,511,627,776"),
        ("nemotron_h", "hybrid_override_pattern", "M" * 200_000, "up to 1,024 letters"),
        ("gpt_neo", "attention_types", [[["global"], 10**8]], "numbers up to 1,048,576 in a list"),
    ],
)
@pytest.mark.parametrize("within", [False, True])
def test_configs_of_any_family_without_end(
    kind: str, name: str, value: object, valid: str, within: bool, tmp_path: Path
) -> None:
    """A family's own code would go through all of them."""
    fields: dict[str, object] = {name: value}
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"model_type": kind, **({"text_config": fields} if within else fields)})
    )
    line = line_of(lambda: LLM(tmp_path, device="cpu"))
    assert line.startswith(
        f"config.json of model {tmp_path}: {name} is {shown(value)}; valid: {valid}"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "mamba2", "time_step_limit": [0.0, math.inf]},
        {
            "model_type": "deepseek_v3",
            "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0},
        },
        {
            "model_type": "qwen2_vl",
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        },
        {"model_type": "phi3", "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 48}},
        {"model_type": "doge", "num_experts": 16_384},
        {
            "model_type": "llama",
            "rope_scaling": None,
            "quantization_config": {"ignore": ["x"] * 9999},
        },
    ],
)
def test_what_configs_of_other_families_say_is_taken(
    fields: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_config("x", tmp_path / "config.json") == fields


def test_an_index_names_files_of_its_folder(folder: Path) -> None:
    file = "../model/a.safetensors"
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    names = load_file(folder / "a.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "a.safetensors")})
    )
    assert opened(folder).generate([1, 2], 2, ignore_eos=True).token_ids
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, file)}))
    assert f"names the file {file!r}; valid: safetensors files of the folder" in line_of(
        lambda: opened(folder)
    )


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", b"[]", "its config.json cannot be used (it is not an object)"),
        (
            "generation_config.json",
            b'{"x": ' + b'{"a": ' * 900 + b"1" + b"}" * 901,
            "more than 64 deep",
        ),
        ("tokenizer_config.json", b"\xff", "its tokenizer cannot be loaded ('utf-8' codec"),
        ("chat_template.jinja", None, "its chat_template.jinja is not a regular file"),
    ],
)
def test_json_within_bounds(file: str, content: bytes | None, words: str, folder: Path) -> None:
    if content is None:
        (folder / file).mkdir()
    else:
        (folder / file).write_bytes(content)
    assert words in line_of(lambda: opened(folder))
