"""Models from GGUF files: the same logits as the tensors that they were written from, and what is
refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tests.chats import chat_tokenizer
from tests.conftest import tiny_tokenizer
from tests.gguf_files import QuantType, small, tokenizer_fields, write
from tests.malformed.gguf_bytes import TEXT, Draft, Value
from tokenswift import LLM, SamplingParams
from tokenswift.config.loading import Weights
from tokenswift.kernels.formats import FORMATS
from tokenswift.loader import plain_tokenizer
from tokenswift.loader.ends import turn_ends, unnamed_rows
from tokenswift.loader.gguf import GgufFile
from tokenswift.loader.gguf_config import config_of
from tokenswift.loader.gguf_tokenizer import Words, build, gguf_tokenizer, words_of
from tokenswift.loader.rope import rotary_of, rotary_of_config
from tokenswift.models.source import FromFiles
from tokenswift.types import InputError

PROMPT = [5, 9, 200, 33, 5, 9, 200, 34, 71, 5, 9]
GREEDY = SamplingParams(greedy=True, repetition_penalty=1.0)
Q4_K_M = {"blk": QuantType.Q4_K, "attn_v": QuantType.Q6_K, "ffn_down": QuantType.Q5_K}
MIXES: dict[str, dict[str, QuantType]] = {
    "f32": {},
    "f16": {"": QuantType.F16},
    "bf16": {"": QuantType.BF16},
    "q8_0": {"": QuantType.Q8_0},
    "q4_1 of q8_0": {"": QuantType.Q4_1, "token_embd": QuantType.Q8_0},
    "q4_0": {"": QuantType.Q4_0},
    "q4_k_m": {"": QuantType.Q6_K, **Q4_K_M},
    "fives": {"": QuantType.Q5_1, "ffn_up": QuantType.Q5_0},
}


#: families of other blocks: windows that the prompt crosses, layers with and without positions
SWITCHED: dict[str, dict[str, object]] = {
    "phi3": {
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.75,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + n / 32 for n in range(24)],
            "long_factor": [1.0 + n for n in range(24)],
        },
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 32.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "smollm3": {"num_hidden_layers": 4},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "logits_scaling": 1.5},
    "olmo2": {},
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 4},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 4, "logit_scale": 0.5},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 64},
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 4, "query_pre_attn_scalar": 64},
    "qwen3_5_text": {
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
}

pytestmark = pytest.mark.usefixtures("own_cache")


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0].float()


def lean_logits(llm: LLM) -> torch.Tensor:
    cache = llm.target.new_cache(len(PROMPT))
    return llm.target.logits(llm.target.prefill(PROMPT, cache).hidden)


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def opened(path: Path | str, **options: Any) -> LLM:
    """The model in float32, unless said otherwise: its logits are compared with transformers'."""
    keywords: dict[str, Any] = {"dtype": "float32", **options}
    return LLM(path, device="cpu", heads="none", **keywords)


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mix"),
    [
        *(("llama", mix) for mix in MIXES),
        ("qwen2", "q8_0"),
        ("qwen3", "q4_k_m"),
        ("mistral", "f16"),
        *((kind, "q4_k_m") for kind in SWITCHED),
    ],
)
def test_logits_are_those_of_the_tensors(kind: str, mix: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tied = kind in ("llama", "qwen3", "cohere2", "gemma2", "gemma3_text")
    model = write(path, small(kind, tie_word_embeddings=tied, **SWITCHED.get(kind, {})), MIXES[mix])
    first = opened(path)
    second = opened(path)
    assert isinstance(first.source, FromFiles)
    assert isinstance(second.source, FromFiles)
    expected = logits(model)
    for llm in (first, second):
        assert far(lean_logits(llm), expected) < 1e-5
    assert first.resources.identity() == second.resources.identity()
    assert first.source.end_tokens() == {257}
    rounding = 1e-6 if kind == "qwen3_5_text" else 0  # of its files' decays
    assert far(logits(first.model), expected) <= rounding
    written = first.generate(PROMPT, 12, sampling=GREEDY, ignore_eos=True).token_ids
    wrapped = LLM.from_model(model, heads="none").generate(
        PROMPT, 12, sampling=GREEDY, ignore_eos=True
    )
    assert (
        written
        == wrapped.token_ids
        == second.generate(PROMPT, 12, sampling=GREEDY, ignore_eos=True).token_ids
    )


def test_olmo_3_as_llama_cpp_writes_it(tmp_path: Path) -> None:
    """Positions by YaRN with an attention factor where layers see everything; which do is a
    list."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    }
    ropes = {"full_attention": {**rope, "attention_factor": 1.3}}
    ropes["sliding_attention"] = {"rope_type": "default", "rope_theta": 5e5}
    model = small("olmo3", num_hidden_layers=4, sliding_window=4, rope_parameters=ropes)
    fields = {"type": "yarn", "factor": 8.0, "attn_factor": 1.3, "original_context_length": 64}
    fields = {f"olmo2.rope.scaling.{key}": value for key, value in fields.items()}
    fields["olmo2.attention.sliding_window_pattern"] = [True, True, True, False]
    write(tmp_path / "model.gguf", model, fields=fields)
    llm = opened(tmp_path / "model.gguf")
    assert far(lean_logits(llm), logits(model)) < 1e-5
    write(tmp_path / "other.gguf", model, fields={**fields, "olmo2.rope.scaling.attn_factor": 1.0})
    assert far(lean_logits(opened(tmp_path / "other.gguf")), logits(model)) > 1e-3


def test_phi_beyond_its_short_texts(tmp_path: Path) -> None:
    """The long list of factors is read, too; both stand beside the weights."""
    model = write(tmp_path / "model.gguf", small("phi3", **SWITCHED["phi3"]))
    llm = opened(tmp_path / "model.gguf")
    ids = (PROMPT * 8)[:70]
    cache = llm.target.new_cache(70, is_long=llm.target.rotary.is_long(70))
    logits = llm.target.logits(llm.target.prefill(ids, cache).hidden)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    assert far(logits, expected[-len(logits) :]) < 1e-5


@pytest.mark.parametrize("name", ["rope_factors_long", "rope_factors_short"])
def test_one_list_of_factors_is_refused(name: str, tmp_path: Path) -> None:
    model = small("phi3", **SWITCHED["phi3"])
    lists = {"long_factor", "short_factor"} - {name.removeprefix("rope_factors_") + "_factor"}
    write(tmp_path / "model.gguf", model, lists=lists)
    words = refused(tmp_path / "model.gguf")
    assert f"{name}.weight is None; valid: a list of factors, beside the other one" in words


def test_mistral_small_in_files_of_mistral_3(tmp_path: Path) -> None:
    """Its positions are plain, and nothing scales its queries."""
    model = small("mistral", sliding_window=None)
    write(tmp_path / "model.gguf", model, architecture="mistral3")
    assert far(lean_logits(opened(tmp_path / "model.gguf")), logits(model)) < 1e-5


@pytest.mark.parametrize("rotated", [0, 7, 66])
def test_a_part_of_a_head_that_none_is(rotated: int, tmp_path: Path) -> None:
    fields = {"phi3.rope.dimension_count": rotated}
    write(tmp_path / "model.gguf", small("phi3"), fields=fields)
    words = refused(tmp_path / "model.gguf")
    assert f"phi3.rope.dimension_count is {rotated}; valid: an even number up to 64" in words


@pytest.mark.parametrize(
    ("mix", "dtype"),
    [("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16"), ("q4_k_m", "int8")],
)
def test_the_type_that_auto_means(mix: str, dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write(path, small(), MIXES[mix])
    llm = opened(path, dtype="auto")
    assert llm.dtype == dtype
    assert str(llm.model.dtype).removeprefix("torch.") == ("float32" if dtype == "int8" else dtype)
    assert far(lean_logits(llm), logits(model)) < 0.05


BIASED: list[tuple[str, dict[str, object]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True})
]
BIASED += [("llama", {"vocab_size": 263}), ("qwen2", {})]  # the last has none behind attention


@pytest.mark.parametrize(("kind", "changes"), BIASED)
def test_biases_and_odd_sizes(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = small(kind, **changes)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    tokenizer = chat_tokenizer(adds_bos=False)
    tokenizer.add_tokens([f"<{i}>" for i in range(model.config.vocab_size - 260)])
    write(
        tmp_path / "model.gguf",
        model,
        {"": QuantType.Q8_0},
        tokenizer=tokenizer,
        architecture="llama",
    )
    llm = opened(tmp_path / "model.gguf")
    assert far(lean_logits(llm), logits(model)) < 1e-5
    assert torch.equal(logits(llm.model), logits(model))


# ---- positions -----------------------------------------------------------------------------------

POSITIONS: dict[str, dict[str, float]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
}


@pytest.mark.parametrize("kind", POSITIONS)
def test_positions_are_those_of_the_config(kind: str, tmp_path: Path) -> None:
    rope = POSITIONS[kind]
    scaling = dict[str, object]()
    if kind in ("linear", "yarn"):
        keys = {"factor": "factor", "original_max_position_embeddings": "original_context_length"}
        scaling = {keys[name]: value for name, value in rope.items()} | {"type": kind}
    model = small(rope_parameters={"rope_type": kind, **rope, "rope_theta": 500000.0})
    write(
        tmp_path / "model.gguf",
        model,
        fields={f"llama.rope.scaling.{key}": v for key, v in scaling.items()},
    )
    config = config_of(GgufFile(tmp_path / "model.gguf"))
    assert config.rope_parameters == model.config.rope_parameters
    ours = rotary_of_config(config)
    theirs = rotary_of(model)
    assert torch.equal(ours.single(), theirs.single())
    assert (ours.scaling, ours.limit) == (theirs.scaling, theirs.limit)
    assert far(lean_logits(opened(tmp_path / "model.gguf")), logits(model)) < 1e-5


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({}, 1024),
        ({"type": "yarn", "factor": 4.0}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 256}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 1024}, 4096),
    ],
)
@pytest.mark.parametrize("kind", ["default", "llama3"])
def test_a_factor_of_positions_counts_once(
    kind: str, scaling: dict[str, object], limit: int, tmp_path: Path
) -> None:
    rope = {"rope_type": kind, **POSITIONS[kind], "rope_theta": 500000.0}
    model = small(rope_parameters=rope, max_position_embeddings=1024)
    keys = {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    write(tmp_path / "model.gguf", model, fields=keys)
    expected = 1024 if kind == "llama3" else limit
    assert rotary_of_config(config_of(GgufFile(tmp_path / "model.gguf"))).limit == expected


# ---- tokenizers ----------------------------------------------------------------------------------

TEXTS = (
    "Hello, world! It's 12345 o'clock; WE'LL see.",
    "  spaces   and\n\nlines\t\r\n end  ",
    "Grüße, 世界 \U0001f600 n\u0303 ½ x² 3.14159 1000000",
    "<s>marked</s> text<x>",
    "def f(x):\n    return x**2  # ok",
    "",
)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def words(fields: dict[str, Any]) -> Words:
    return words_of(fields, Path("x.gguf"))


def built(fields: dict[str, Any]) -> Tokenizer:
    return build(words(fields), Path("x.gguf"))


def trained(rule: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of a family's kind, trained on a page."""
    backend = Tokenizer(models.BPE(ignore_merges=rule == "llama-bpe"))
    digits = {"llama-bpe": "{1,3}", "qwen2": ""}
    if rule in digits:
        cut = pre_tokenizers.Split(Regex(WORDS % digits[rule]), "isolated")
        parts: list[object] = [
            cut,
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        parts = [pre_tokenizers.Digits(individual_digits=True)] if rule == "smollm" else []
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    if rule == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
    )
    page = Path("README.md").read_text(encoding="utf-8")
    backend.train_from_iterator([page, *TEXTS], trainer)
    backend.add_special_tokens(["<x>"])
    if rule == "llama-bpe":
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("rule", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_tokenizers(rule: str, tmp_path: Path) -> None:
    real = trained(rule)
    fields = tokenizer_fields(real, pre=rule)
    backend = built(fields)
    ours = plain_tokenizer.wrapped(gguf_tokenizer(fields, tmp_path))
    for text in TEXTS:
        ids = real(text)["input_ids"]
        assert ours(text)["input_ids"] == ids == backend.encode(text).ids, text
        plain = [
            tokenizer(text, add_special_tokens=False)["input_ids"] for tokenizer in (ours, real)
        ]
        assert plain[0] == plain[1]
        assert (
            ours.decode(ids) == real.decode(ids) == backend.decode(ids, skip_special_tokens=False)
        )
    assert ours.special_tokens_map == real.special_tokens_map
    assert ours.get_vocab() == real.get_vocab()


def sentencepiece(**more: object) -> dict[str, object]:
    """What a file says of a small sentencepiece model: bytes, letters, and words by score."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    words = ["▁t", "he", "▁the", "in", "er", "▁a", "nd", "▁and", "▁▁", "ing", "re", "the"]
    pieces += [(word, -float(place), 1) for place, word in enumerate(words)]
    pieces += [(letter, -1000.0 - place, 1) for place, letter in enumerate("▁theinradg")]
    fields = {
        "model": "llama",
        "tokens": [token for token, _, _ in pieces],
        "scores": [score for _, score, _ in pieces],
        "token_type": [kind for _, _, kind in pieces],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**fields, **more}.items()}


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("the and", ["<s>", "▁the", "▁and"]),
        ("in  the", ["<s>", "▁", "in", "▁", "▁the"]),
        ("thé", ["<s>", "▁t", "h", "<0xC3>", "<0xA9>"]),
        ("a\n", ["<s>", "▁a", "<0x0A>"]),
        ("", ["<s>"]),
    ],
)
def test_sentencepiece_tokenizers(text: str, tokens: list[str], tmp_path: Path) -> None:
    fields = sentencepiece()
    ours = plain_tokenizer.wrapped(gguf_tokenizer(fields, tmp_path))
    ids = ours(text)["input_ids"]
    assert ours.convert_ids_to_tokens(ids) == tokens
    assert ours.decode(ids, skip_special_tokens=True) == text
    bare = sentencepiece(add_space_prefix=False, add_bos_token=False)
    plain = plain_tokenizer.wrapped(gguf_tokenizer(bare, tmp_path))
    assert plain.decode(plain(text)["input_ids"]) == text


@pytest.mark.parametrize("kind", [1, 3])
def test_well_known_ends_of_turns_whatever_the_file_says(kind: int, tmp_path: Path) -> None:
    fields = tokenizer_fields(trained("smollm"), pre="smollm")
    tokens = fields["tokenizer.ggml.tokens"]
    fields["tokenizer.ggml.tokens"] = [*tokens, "<|im_end|>", "<end_of_turn>"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], kind, kind]
    at = len(tokens)
    assert words(fields).ends() == [1, at, at + 1]
    added = built(fields).get_added_tokens_decoder()
    assert added[at].special  # so that no message can hold them
    assert added[at + 1].special
    del fields["tokenizer.ggml.eos_token_id"]
    fields["tokenizer.ggml.token_type"][1] = kind  # of </s>
    assert words(fields).ends() == ([1, at, at + 1] if kind == 3 else [at, at + 1])


@pytest.mark.parametrize("form", ["gguf", "folder", "program"])
def test_the_template_tells_which_token_ends_a_turn(form: str, tmp_path: Path) -> None:
    """Files that number another token: the one behind an assistant's message ends texts, too."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.add_special_tokens(["<x>"])  # of the vocabulary
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m.role + ' ' + m.content | trim }} <x>{% endfor %}"
        "{% if add_generation_prompt %}<s>{% endif %}"
    )
    model = small()
    if form == "gguf":
        write(tmp_path / "model.gguf", model, tokenizer=tokenizer)
        llm = opened(tmp_path / "model.gguf")
    elif form == "folder":
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        llm = opened(tmp_path)
    else:
        llm = LLM.from_model(model, tokenizer)
    assert llm.source.end_tokens() == {257, 259}
    for template in ("{{ 1 // 0 }}", "{{ messages[-1].content }} <x>", "", None):
        tokenizer.chat_template = template
        assert turn_ends(tokenizer) == ({259} if "<x>" in (template or "") else set())


def test_tokens_that_fill_up_a_padded_vocabulary_have_no_names(tmp_path: Path) -> None:
    real = trained("qwen2")
    fields = tokenizer_fields(real, pre="qwen2")
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "[PAD901]", "[PAD902]"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 5, 5]
    ours = gguf_tokenizer(fields, tmp_path)
    assert ours.get_vocab() == real.get_vocab()
    assert unnamed_rows(ours, 905) == list(range(len(real), 905))
    assert unnamed_rows(None, 3) == []


def test_a_file_without_merges_is_refused() -> None:
    fields = tokenizer_fields(trained("gpt-2"))
    fields["tokenizer.ggml.merges"] = None
    with pytest.raises(
        InputError, match="lacks tokenizer.ggml.merges; valid: a file with its tokenizer"
    ):
        built(fields)


# ---- files ---------------------------------------------------------------------------------------


ADAPTER = "holds an adapter; valid: the model that it was merged into"


@pytest.mark.parametrize("has_model", [True, False])
def test_folders_of_adapters_are_refused_with_what_to_do(has_model: bool, tmp_path: Path) -> None:
    if has_model:
        small().save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert ADAPTER in refused(tmp_path)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("adapter", ADAPTER), ("mmproj", "general.type is 'mmproj'; valid: model")],
)
def test_files_of_adapters_are_refused_with_what_to_do(
    kind: str, words: str, tmp_path: Path
) -> None:
    write(tmp_path / "whole.gguf", small())
    draft = Draft.of(tmp_path / "whole.gguf").set("general.type", Value(TEXT, kind))
    draft.tensors = [("blk.0.attn_q.weight.lora_a", draft.tensors[0][1])]
    assert words in refused(draft.write(tmp_path / "adapter.gguf"))


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        opened(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"llama.block_count": None}, "lacks llama.block_count, a number"),
        ({"llama.block_count": 3}, "lacks the tensor model.layers.2."),
        (
            {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
            "llama.rope.scaling.type is 'longrope'; valid: none, linear, yarn",
        ),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'; valid: gpt2, llama"),
        (
            {"tokenizer.ggml.pre": None},
            "tokenizer.ggml.pre is None; valid: gpt-2, smollm, llama-bpe, qwen2",
        ),
    ],
)
def test_what_a_file_lacks(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", small(), fields=fields)
    assert words in refused(tmp_path / "model.gguf")


def test_other_architectures(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", small(), architecture="grok")
    words = refused(tmp_path / "model.gguf")
    assert "the architecture grok cannot be run" in words
    assert "valid: llama, qwen2, qwen3" in words


# ---- stored otherwise ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", get_args(Weights)[1:])
def test_weights(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = small("qwen3")
    path = tmp_path / "model"
    model.save_pretrained(path)
    chat_tokenizer().save_pretrained(path)
    with caplog.at_level(logging.WARNING, "tokenswift"):
        llm = opened(path, weights=kind)
    warnings = [record.message for record in caplog.records if "quantized" in record.message]
    assert len(warnings) == (kind in FORMATS)
    assert all(f"is quantized to {kind}, which makes it another model" in s for s in warnings)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.ndim == 2):
            parameter.copy_(recoded(parameter, kind))
    assert far(lean_logits(llm), logits(model)) < 1e-5
    assert torch.equal(logits(llm.model), logits(model))
    plain = opened(path)
    assert (llm.resources.identity()["weights"] == plain.resources.identity()["weights"]) == (
        kind == "float32"
    )
    assert llm.loading is not None
    assert llm.loading["weights"] == kind
    loading = llm.loading
    loading["heads"] = "none"
    assert LLM(**loading).resources.identity() == llm.resources.identity()


def recoded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    if kind not in FORMATS:
        return weight.to(getattr(torch, kind)).float()
    from tokenswift.kernels.formats import Stored

    return Stored(FORMATS[kind], FORMATS[kind].encode(weight)).decode()
