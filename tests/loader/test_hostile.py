"""Files from strangers: what they say is held against what they hold, in one line, before it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AddedToken

from tests.conftest import tiny_model, tiny_tokenizer
from tests.gguf_files import small, write
from tests.malformed.gguf_bytes import ARRAY, F32, I32, I64, TEXT, U32, Draft, Value
from tokenswift import LLM
from tokenswift.cli.models import sizes_of
from tokenswift.kernels.cpu.arguments import MOST_NUMBERS
from tokenswift.loader.native import layout_of
from tokenswift.loader.numbers import check_numbers
from tokenswift.loader.prompts import prompt_ids
from tokenswift.types import InputError

pytestmark = pytest.mark.usefixtures("own_cache")


def line_of(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def opened(path: Path) -> LLM:
    return LLM(path, device="cpu", heads="none")


# ---- numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"hidden_size": 0}, "x: hidden_size is 0; valid: an integer from 1 to 262,144"),
        ({"hidden_size": 32.0}, "x: hidden_size is 32.0; valid: an integer from 1 to 262,144"),
        ({"hidden_size": True}, "x: hidden_size is True; valid: an integer from 1 to 262,144"),
        (
            {"num_hidden_layers": 10**7},
            "x: num_hidden_layers is 10000000; valid: an integer from 1 to 1,024",
        ),
        ({"head_dim": 1 << 19}, "x: head_dim is 524288; valid: an integer from 2 to 1,024"),
        ({"head_dim": 63}, "x: head_dim is 63; valid: an even number up to 1,024"),
        ({"rms_norm_eps": math.inf}, "x: rms_norm_eps is infinite; valid: a number above 0, at most 1"),
        ({"rms_norm_eps": math.nan}, "x: rms_norm_eps is not a number; valid: a number above 0, at most 1"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 4},
            "x: num_key_value_heads is 4; valid: a divisor of 6, the number of heads",
        ),
        (
            {"num_attention_heads": 6, "hidden_size": 32, "head_dim": None},
            "x: hidden_size is 32; valid: an even multiple of 6 heads, of up to 1,024 each",
        ),
        (
            {"rope_scaling": {"factor": -2.0}},
            "x: rope_scaling.factor is -2.0; valid: a number above 0, at most 10^12",
        ),
        (
            {"rope_parameters": {"low_freq_factor": 4.0, "high_freq_factor": 1.0}},
            "x: rope_parameters.low_freq_factor is 4.0; valid: less than high_freq_factor, which is 1.0",
        ),
        ({"rope_parameters": 3}, "x: rope_parameters is 3; valid: an object"),
    ],
)
def test_numbers_that_no_model_has(said: dict[str, Any], line: str) -> None:
    assert line_of(lambda: check_numbers(said, "x")) == line


def test_numbers_are_named_as_the_file_does() -> None:
    line = line_of(lambda: check_numbers({"num_hidden_layers": 0}, "x", {"num_hidden_layers": "a.b"}))
    assert line.startswith("x: a.b is 0; valid: ")


# ---- GGUF files -----------------------------------------------------------------------------------------


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    write(tmp_path / "whole.gguf", small("llama"))
    return Draft.of(tmp_path / "whole.gguf")


def twice(made: Draft) -> None:
    made.tensors.append(made.tensors[0])


CHANGES: dict[str, tuple[Callable[[Draft], Any], str]] = {
    "block_count": (
        lambda d: d.set("llama.block_count", Value(U32, 1 << 31)),
        ": llama.block_count is 2147483648; valid: an integer from 1 to 1,024",
    ),
    "no heads": (
        lambda d: d.set("llama.attention.head_count", Value(U32, 0)),
        ": llama.attention.head_count is 0; valid: an integer from 1 to 16,384",
    ),
    "a part of each head": (
        lambda d: d.set("llama.rope.dimension_count", Value(U32, 32)),
        ": llama.rope.dimension_count is 32; valid: 64",
    ),
    "another width": (
        lambda d: d.set("llama.embedding_length", Value(U32, 128)),
        ": llama.embedding_length is 128; valid: 256",
    ),
    "scaled scores": (
        lambda d: d.set("llama.attention.scale", Value(F32, 2.0)),
        ": llama.attention.scale is 2.0; valid: 0.0, or a file without it",
    ),
    "a negative factor": (
        lambda d: d.set("llama.rope.scaling.type", Value(TEXT, "linear")).set(
            "llama.rope.scaling.factor", Value(F32, -2.0)
        ),
        ": llama.rope.scaling.factor is -2.0; valid: a number above 0, at most 10^12",
    ),
    "an infinite eps": (
        lambda d: d.set("llama.attention.layer_norm_rms_epsilon", Value(F32, math.inf)),
        ": llama.attention.layer_norm_rms_epsilon is infinite; valid: a number above 0, at most 1",
    ),
    "a tensor twice": (twice, "it has the tensor 'token_embd.weight' twice"),
    "a key twice": (lambda d: d.values.append(d.values[0]), "it has the key 'general.architecture' twice"),
    "an overlap": (lambda d: setattr(d.tensors[1][1], "offset", 32), "overlap"),
    "beyond the end": (
        lambda d: setattr(d.tensors[1][1], "offset", 1 << 40),
        "it ends before the end of tensor",
    ),
    "no place": (lambda d: setattr(d.tensors[1][1], "offset", 40), "begins at 40, no multiple of 32"),
    "no rows": (lambda d: setattr(d.tensors[1][1], "dims", (256, 0)), "has shape (0, 256)"),
    "a type": (lambda d: setattr(d.tensors[1][1], "code", 4096), "is of type 4096, which nobody knows"),
    "alignment 0": (
        lambda d: d.set("general.alignment", Value(U32, 0)),
        "alignment 0, a power of two from 8 on is valid",
    ),
    "alignment 24": (lambda d: d.set("general.alignment", Value(U32, 24)), "alignment 24, a power of two"),
    "many keys": (lambda d: setattr(d, "counts", (None, 1 << 40)), "1099511627776 keys, at most"),
    "many tensors": (lambda d: setattr(d, "counts", (1 << 40, None)), "1099511627776 tensors and"),
    "a long list": (
        lambda d: d.values.append(("x", Value(ARRAY, [], U32, 1 << 40))),
        "lists of 10995116",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_files_that_are_refused(name: str, draft: Draft, tmp_path: Path) -> None:
    change, words = CHANGES[name]
    change(draft)
    path = draft.write(tmp_path / "model.gguf")
    assert words in (line := line_of(lambda: opened(path))) and f"model file {path}" in line


def test_what_nobody_changed_is_taken(draft: Draft, tmp_path: Path) -> None:
    assert opened(draft.write(tmp_path / "model.gguf")).generate([1, 2], 2, ignore_eos=True).token_ids


SHAPES = {
    "attn_q": (256, ".bias"),
    "attn_k": (128, ".bias"),
    "attn_v": (128, ".bias"),
    "attn_output": (256, ".bias"),
    "ffn_gate": (256, ".bias"),
    "ffn_down": (256, ".bias"),
    "attn_q_norm": (64, ".weight"),
    "attn_k_norm": (64, ".weight"),
}


@pytest.mark.parametrize("count", [1, 63, 4096])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_biases_and_norms_have_the_shapes_of_the_table(
    kind: str, name: str, count: int, tmp_path: Path
) -> None:
    write(tmp_path / "whole.gguf", small(kind))
    made, called = Draft.of(tmp_path / "whole.gguf"), f"blk.0.{name}{SHAPES[name][1]}"
    made.tensors = [entry for entry in made.tensors if entry[0] != called]
    made.add(called, (count,), bytes(4 * count))
    line = line_of(lambda: opened(made.write(tmp_path / "model.gguf")))
    wrong = f"tensor {called} has shape ({count},); valid: ({SHAPES[name][0]},)"
    assert wrong in line or f"tensor {called} is none of a {kind} model's" in line
    known = {"llama": ".bias", "qwen2": "attn_q.bias attn_k.bias attn_v.bias"}.get(kind, "_norm.weight")
    if any(part in called for part in known.split()):
        assert wrong in line


def test_a_mistral_has_no_biases(tmp_path: Path) -> None:
    write(tmp_path / "whole.gguf", small("mistral", sliding_window=4))
    made = Draft.of(tmp_path / "whole.gguf").set("llama.attention.sliding_window", Value(U32, 4))
    made.add("blk.0.attn_q.bias", (256,), bytes(1024))
    line = line_of(lambda: opened(made.write(tmp_path / "model.gguf")))
    assert "tensor blk.0.attn_q.bias is none of a mistral model's" in line


def resized(made: Draft, hidden: int, heads: int, width: int, inner: int) -> None:
    """A model of a layer with other sizes, all of its tensors zeros in float16."""
    sizes = {
        "embedding_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": 1,
        "feed_forward_length": inner,
        "block_count": 1,
    }
    sizes |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), width)
    for name, value in sizes.items():
        made.set(f"llama.{name}", Value(U32, value))
    made.tensors = []
    shapes = {"token_embd": (260, hidden), "output_norm": (hidden,)}
    layer = {
        **{"attn_q": (heads * width, hidden), "attn_k": (width, hidden), "attn_v": (width, hidden)},
        **{"attn_output": (hidden, heads * width), "attn_norm": (hidden,), "ffn_norm": (hidden,)},
        **{"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)},
    }
    for name, shape in (shapes | {f"blk.0.{name}": shape for name, shape in layer.items()}).items():
        made.add(f"{name}.weight", shape[::-1], bytes(2 * math.prod(shape)), code=1)


def test_rows_that_no_kernel_takes(draft: Draft, tmp_path: Path) -> None:
    """All tensors are there: the schema alone says that the kernels run no such rows."""
    resized(draft, 2, 1, 2, MOST_NUMBERS + 2)
    assert line_of(lambda: opened(draft.write(tmp_path / "model.gguf"))).endswith(
        ": llama.feed_forward_length is 262146; valid: an integer from 1 to 262,144"
    )
    resized(draft, 2, 1, 2, MOST_NUMBERS)
    assert opened(draft.write(tmp_path / "model.gguf")).generate([5], 2, ignore_eos=True).token_ids


def test_sizes_that_a_family_does_not_have(draft: Draft, tmp_path: Path) -> None:
    resized(draft, 6, 4, 2, 8)
    line = line_of(lambda: opened(draft.write(tmp_path / "model.gguf")))
    assert "llama.embedding_length is 6; valid: a multiple of 4" in line
    assert "; valid: " in line


def test_figures_of_a_file_that_is_refused(draft: Draft, tmp_path: Path) -> None:
    draft.set("llama.attention.head_count_kv", Value(U32, 3))
    path = draft.write(tmp_path / "model.gguf")
    assert "llama.attention.head_count_kv is 3; valid: a divisor of 4" in line_of(lambda: sizes_of(str(path)))


def test_the_table_has_all_weights_of_the_families() -> None:
    for kind in ("llama", "qwen2", "qwen3", "mistral"):
        more = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}}
        model = tiny_model(kind, **more.get(kind, {}))
        layout = layout_of(model.config)
        found = {name: tuple(part.shape) for name, part in model.named_parameters()}
        assert layout.shapes() | layout.biases() == found


# ---- ids ------------------------------------------------------------------------------------------------


def test_more_tokens_than_rows(draft: Draft, tmp_path: Path) -> None:
    there = dict(draft.values)["tokenizer.ggml.tokens"].value
    draft.set("tokenizer.ggml.tokens", Value(ARRAY, [*there, *(f"t{i}" for i in range(140))], TEXT))
    draft.set("tokenizer.ggml.token_type", Value(ARRAY, [1] * 400, I32))
    path = draft.write(tmp_path / "model.gguf")
    assert line_of(lambda: opened(path)) == (
        f"model file {path}: tokenizer.ggml.tokens has 400 tokens; valid: 1 to 260, the rows of the embedding"
    )


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom", "unknown"])
@pytest.mark.parametrize("value", [Value(U32, 260), Value(I32, -1)])
def test_ids_of_a_file_beyond_the_rows(name: str, value: Value, draft: Draft, tmp_path: Path) -> None:
    path = draft.set(f"tokenizer.ggml.{name}_token_id", value).write(tmp_path / "model.gguf")
    assert line_of(lambda: opened(path)) == (
        f"model file {path}: tokenizer.ggml.{name}_token_id is {value.value}; valid: 0 to 259, a row of the "
        "embedding"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(path: Path, **fields: Any) -> None:
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


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("ids", [260, [1, 260], -1])
def test_ids_of_configs_beyond_the_rows_end_no_text(file: str, ids: Any, folder: Path) -> None:
    change(folder / file, eos_token_id=ids)
    llm = opened(folder)
    assert llm.source.end_tokens() <= {1, 257} and llm.generate([3, 4], 3).token_ids


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"num_hidden_layers": 10**7},
            "num_hidden_layers is 10000000; valid: an integer from 1 to 1,024",
        ),
        ({"num_labels": 10**9}, "num_labels is 1000000000; valid: an integer from 0 to 65,536"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; valid"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; valid: a number above 0, at most 1"),
        ({"intermediate_size": 65}, "mlp.down_proj.weight has shape (32, 64); valid: (32, 65)"),
        ({"model_type": "gemma2", "vocab_size": 10**6}, "numbers of files with"),
        ({"model_type": "phi", "num_hidden_layers": 10**7}, "num_hidden_layers is 10000000; valid"),
        ({"model_type": "gpt2", "n_layer": 10**7}, "n_layer is 10000000; valid"),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M" * 200_000},
            "hybrid_override_pattern is 'MMM",
        ),
        (
            {"model_type": "recurrent_gemma", "block_types": ["recurrent"] * 10**6},
            "…; valid: up to 4,096 entries or letters",
        ),
        ({"model_type": "xlstm", "num_blocks": 10**7}, "num_blocks is 10000000; valid"),
        ({"model_type": "bart", "decoder_layers": 10**7}, "decoder_layers is 10000000; valid"),
        (
            {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 10**8]]},
            "valid: numbers up to 1,048,576 in a list",
        ),
        ({"architectures": 5}, "is not a causal language model (its architectures are 5); valid: causal"),
        (
            {"architectures": {"LlamaForCausalLM": 1}},
            "(its architectures are {'LlamaForCausalLM': 1}); valid",
        ),
        ({"architectures": ["X" * 999]}, "(its architectures are ['XX"),
    ],
)
def test_configs_that_are_refused(fields: dict[str, Any], words: str, folder: Path) -> None:
    change(folder / "config.json", **fields)
    assert words in (line := line_of(lambda: opened(folder))) and str(folder) in line


def test_weights_of_other_types_and_shapes(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.input_layernorm.weight"
    for made, words in {
        torch.zeros(33): "has shape (33,); valid: (32,)",
        torch.zeros(32, dtype=torch.int32): "has the type I32, which cannot be unpacked; valid: F32",
    }.items():
        save_file(weights | {name: made}, folder / "model.safetensors", {"format": "pt"})
        assert f"weight {name} {words}" in line_of(lambda: opened(folder))


def test_a_header_that_is_too_large(folder: Path) -> None:
    size = (1 << 24) + 8
    (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + b" " * size)
    assert "has a header of 16,777,224 bytes; valid: up to 16,777,216" in line_of(lambda: opened(folder))


@pytest.mark.parametrize(
    "file", ["../model/a.safetensors", "/etc/passwd", "a.safetensors\0", "\ud800", 3, ""]
)
def test_an_index_names_files_of_its_folder(file: Any, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    names = load_file(folder / "a.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "a.safetensors")}))
    assert opened(folder).generate([1, 2], 2, ignore_eos=True).token_ids
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, file)}))
    assert f"names the file {file!r}; valid: safetensors files of the folder" in line_of(
        lambda: opened(folder)
    )


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", b'{"a": ' * 100_000, "config.json cannot be used"),
        ("config.json", b"[]", "its config.json cannot be used (it is not an object)"),
        (
            "config.json",
            json.dumps({f"x{i}": 1 for i in range(5000)}).encode(),
            "it has 5,000 fields, at most 4,096 are valid",
        ),
        ("generation_config.json", b'{"x": ' + b'{"a": ' * 900 + b"1" + b"}" * 901, "more than 64 deep"),
        ("tokenizer_config.json", b"\xff", "its tokenizer_config.json cannot be used ('utf-8' codec"),
        ("chat_template.jinja", None, "its chat_template.jinja is not a regular file"),
    ],
)
def test_json_within_bounds(file: str, content: bytes | None, words: str, folder: Path) -> None:
    if content is None:
        (folder / file).mkdir()
    else:
        (folder / file).write_bytes(content)
    assert words in line_of(lambda: opened(folder))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size must be non-zero"),
        ({"model": {"type": "Nothing"}}, "tokenizer.json cannot be read ("),
    ],
)
def test_a_tokenizer_that_cannot_be_used(fields: dict[str, Any], words: str, folder: Path) -> None:
    """As its library says it, in a line: where it is made, or where it meets a text."""
    change(folder / "tokenizer.json", **fields)
    assert words in line_of(lambda: opened(folder).generate("Hi", 2))


def test_texts_that_a_tokenizer_refuses() -> None:
    class Refuses:
        bos_token = None

        def __call__(self, text: str, **options: Any) -> Any:
            raise Exception("no such piece")

    with pytest.raises(InputError, match=r"^the model's tokenizer refuses prompt \(no such piece\)$"):
        prompt_ids("ab", Refuses(), 260)


@pytest.mark.parametrize("value", [Value(I32, -1), Value(I64, -(1 << 63)), Value(U32, 1 << 31)])
def test_a_padding_without_a_row_is_none(value: Value, draft: Draft, tmp_path: Path) -> None:
    path = draft.set("tokenizer.ggml.padding_token_id", value).write(tmp_path / "model.gguf")
    llm = opened(path)
    assert llm.tokenizer.pad_token is None and llm.model.config.pad_token_id is None
