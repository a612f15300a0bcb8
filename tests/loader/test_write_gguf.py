"""GGUF files that we write: their tensors, and models and tokenizers that are read back alike."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig, PreTrainedTokenizerFast

from tests.chats import chat_tokenizer
from tests.gguf_files import QuantType, name_of, small, write
from tests.loader.test_gguf import GREEDY, POSITIONS, PROMPT, TEXTS, logits, opened, sentencepiece, trained
from tests.tiny import BYTES, build
from tokenswift import LLM
from tokenswift.kernels.formats.registry import FORMATS
from tokenswift.loader.gguf import tokenizer as gguf_tokenizer
from tokenswift.loader.gguf import write as write_gguf
from tokenswift.loader.gguf.file import GgufFile
from tokenswift.loader.gguf.model import config_of, straight
from tokenswift.loader.gguf.vocabulary import vocabulary
from tokenswift.loader.gguf.write import KINDS, quantize
from tokenswift.loader.rope import rotary_of, rotary_of_config
from tokenswift.types import InputError


def saved(folder: Path, model: Any, tokenizer: Any = None) -> Path:
    model.save_pretrained(folder)
    (tokenizer or chat_tokenizer()).save_pretrained(folder)
    return folder


def written(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, 16, sampling=GREEDY, ignore_eos=True).token_ids


def refused(source: Path, **options: Any) -> str:
    target = source.parent / "refused.gguf"
    with pytest.raises(InputError) as caught:
        quantize(source, target, **options)
    assert "\n" not in str(caught.value) and not list(source.parent.glob("refused*"))
    return str(caught.value)


# ---- tensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_file_is_the_quantised_model(kind: str, weights: str, tmp_path: Path) -> None:
    model = small(kind, tie_word_embeddings=kind == "qwen3", vocab_size=288)  # Qwen's tokenizers have more
    source, target = saved(tmp_path / "model", model), tmp_path / "made" / "q.gguf"
    done = quantize(source, target, weights, head_weights=weights)
    assert done.path == target and done.bytes_out == target.stat().st_size < done.bytes_in
    assert [path.name for path in target.parent.iterdir()] == ["q.gguf"]
    more = ("texts from the file also end at <|endoftext|>",) if kind == "qwen2" else ()  # as all of the kind
    assert done.notes == more
    ours, theirs = opened(target), opened(source, weights=weights)
    assert written(ours) == written(theirs)
    assert more or ours.source.end_tokens() == theirs.source.end_tokens()
    assert ours.encode("Hello you") == theirs.encode("Hello you")
    chat = [{"role": "user", "content": "Hi"}]
    assert ours.encode(chat) == theirs.encode(chat)


@pytest.mark.parametrize("weights", KINDS)
def test_tensors_are_what_formats_encode(weights: str, tmp_path: Path) -> None:
    model = small("llama", attention_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    quantize(saved(tmp_path / "model", model), tmp_path / "q.gguf", weights)
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "q.gguf").tensors}
    assert set(read) == {name_of(name) for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        value, found = parameter.detach(), read[name_of(name)]
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)
        if value.ndim == 1:
            expected, kind = value, "F32"
        else:
            kind = "q8_0" if name_of(name).startswith(("token_embd", "output.")) else weights
            encode = FORMATS[kind].encode
            assert encode is not None
            expected = encode(value)
        if heads:
            expected = expected[straight(len(expected), heads).argsort()]
        assert found.tensor_type.name == kind.upper()
        decoded = gguf.dequantize(expected.numpy(), found.tensor_type)
        assert np.array_equal(gguf.dequantize(found.data, found.tensor_type), decoded)
        assert found.shape.tolist() == [*value.shape[::-1]]
    said = GgufFile(tmp_path / "q.gguf").metadata
    assert said["general.architecture"] == "llama" and said["general.name"] == "model"
    assert said["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{weights.upper()}"]
    assert said["general.quantization_version"] == gguf.GGML_QUANT_VERSION


def test_transformers_reads_the_same(tmp_path: Path) -> None:
    quantize(saved(tmp_path / "model", small()), tmp_path / "q.gguf", "q4_1")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="q.gguf",
        quantization_config=GgufConfig(gguf_file="q.gguf", dequantize=True),
        dtype=torch.float32,
    )
    assert torch.equal(logits(theirs), logits(opened(tmp_path / "q.gguf").model))


def test_stored_in_bfloat16(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", small().to(torch.bfloat16))
    quantize(source, tmp_path / "q.gguf", "q4_1", "q4_1")
    theirs = opened(source, weights="q4_1", dtype="float32")
    assert written(opened(tmp_path / "q.gguf")) == written(theirs)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("mix", [{}, {"": QuantType.Q4_1}, {"": QuantType.Q5_0}, {"": QuantType.F16}])
def test_from_another_file(kind: str, mix: dict[str, QuantType], tmp_path: Path) -> None:
    rope = (
        {"rope_parameters": {**POSITIONS["llama 3.2"][0], "rope_theta": 500000.0}} if kind == "llama" else {}
    )
    write(tmp_path / "a.gguf", small(kind, **rope), mix, said={"general.name": "An", "quantize.by": "b"})
    done = quantize(tmp_path / "a.gguf", tmp_path / "b.gguf", "q4_1", "q4_1")
    assert bool(done.notes) == (QuantType.Q5_0 in mix.values())
    first, second = GgufFile(tmp_path / "a.gguf"), GgufFile(tmp_path / "b.gguf")
    made = ("general.file_type", "general.quantization_version")
    assert {k: v for k, v in first.metadata.items() if k != "quantize.by"} == {
        k: v for k, v in second.metadata.items() if k not in made
    }
    assert all(second.kinds[key] == number for key, number in first.kinds.items() if key != "quantize.by")
    assert first.tensors.keys() == second.tensors.keys()
    theirs = opened(tmp_path / "a.gguf", weights="q4_1", dtype="float32")
    assert written(opened(tmp_path / "b.gguf")) == written(theirs)
    again = quantize(tmp_path / "b.gguf", tmp_path / "c.gguf", "q4_1", "q4_1")
    assert not again.notes and (tmp_path / "c.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


# ---- what the file says ---------------------------------------------------------------------------------

FACTOR = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3}


@pytest.mark.parametrize(
    "rope", [*(rope for rope, _ in POSITIONS.values()), FACTOR, {**FACTOR, "beta_fast": 16.0}]
)
def test_positions(rope: dict[str, Any], tmp_path: Path) -> None:
    model = small(rope_parameters={**rope, "rope_theta": 10000.0})
    quantize(saved(tmp_path / "model", model), tmp_path / "q.gguf")
    ours, theirs = rotary_of_config(config_of(GgufFile(tmp_path / "q.gguf"))), rotary_of(model)
    assert torch.equal(ours.single(), theirs.single()) and ours.limit == theirs.limit
    assert ours.scaling == pytest.approx(theirs.scaling, rel=1e-7)


def test_a_number_that_is_no_short_one(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", small(rms_norm_eps=9.999999747378752e-06))
    quantize(source, tmp_path / "q.gguf")
    assert config_of(GgufFile(tmp_path / "q.gguf")).rms_norm_eps == 1e-05


def test_a_sliding_window(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", small("mistral", sliding_window=4))
    quantize(source, tmp_path / "q.gguf")
    llm = opened(tmp_path / "q.gguf")
    assert llm.target.windows == [4, 4] and written(llm) == written(opened(source, weights="q8_0"))


def test_ends_of_texts(tmp_path: Path) -> None:
    model = small()
    model.generation_config = GenerationConfig(eos_token_id=[257, 259, 7])
    source = saved(tmp_path / "model", model)
    done = quantize(source, tmp_path / "q.gguf")
    assert not done.notes and opened(tmp_path / "q.gguf").source.end_tokens() == {7, 257, 259}
    model.generation_config.eos_token_id = [257, 259, 7, 8]
    model.save_pretrained(source)
    assert quantize(source, tmp_path / "q.gguf").notes == ("texts from the file do not end at <x>",)


def test_more_rows_than_tokens(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", small(vocab_size=288))
    quantize(source, tmp_path / "q.gguf")
    said = GgufFile(tmp_path / "q.gguf").metadata
    assert said["tokenizer.ggml.tokens"][260:262] == ["[PAD260]", "[PAD261]"]
    assert set(said["tokenizer.ggml.token_type"][260:]) == {5}
    assert written(opened(tmp_path / "q.gguf")) == written(opened(source, weights="q8_0"))


# ---- tokenizers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_tokenizers(rule: str, tmp_path: Path) -> None:
    real = trained(rule)
    made = vocabulary(real, len(real), "model")
    assert made["tokenizer.ggml.pre"] == rule
    back = gguf_tokenizer.wrapped(gguf_tokenizer.build(made, tmp_path), made)
    for text in TEXTS:
        assert back(text)["input_ids"] == real(text)["input_ids"]
    assert back.special_tokens_map == real.special_tokens_map and back.get_vocab() == real.get_vocab()


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentencepiece_tokenizers(prefixed: bool, tmp_path: Path) -> None:
    fields = sentencepiece(add_space_prefix=prefixed)
    real = gguf_tokenizer.wrapped(gguf_tokenizer.build(fields, tmp_path), fields)
    made = vocabulary(real, len(real), "model")
    assert made["tokenizer.ggml.model"] == "llama" and made["tokenizer.ggml.add_bos_token"] is True
    assert made["tokenizer.ggml.add_space_prefix"] is prefixed
    assert made["tokenizer.ggml.token_type"] == fields["tokenizer.ggml.token_type"]
    back = gguf_tokenizer.wrapped(gguf_tokenizer.build(made, tmp_path), made)
    for text in ("the and in  the", "th\u00e9\n", " there", ""):
        assert back(text)["input_ids"] == real(text)["input_ids"]


def other(change: str) -> Any:
    real = trained("gpt-2")
    own = real.backend_tokenizer
    if change == "normalizer":
        own.normalizer = normalizers.Lowercase()
    elif change == "cut":
        own.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])
    elif change == "metaspace":
        made = Tokenizer(models.BPE(vocab={"a": 0, "<s>": 1}, merges=[], byte_fallback=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        made.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")
    elif change == "words":
        made = Tokenizer(models.WordLevel(vocab={"a": 0, "<s>": 1}, unk_token="a"))
        return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")
    return real


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("normalizer", "no known rule cuts texts as it does: Lowercase, ByteLevel"),
        ("cut", "no known rule cuts texts as it does: Whitespace, ByteLevel"),
        ("metaspace", "no known rule cuts texts as it does: Metaspace"),
        ("words", "its model is WordLevel"),
        ("rows", "for 10 rows of the embedding"),
    ],
)
def test_tokenizers_that_would_be_others(change: str, words: str) -> None:
    real = other(change)
    with pytest.raises(InputError) as caught:
        vocabulary(real, 10 if change == "rows" else len(real), "model")
    assert words in str(caught.value) and "\n" not in str(caught.value)


# ---- what is refused ------------------------------------------------------------------------------------


def test_models_that_are_not_written(tmp_path: Path) -> None:
    assert "is of the type gemma2, which is not written; valid: plain models of the types llama" in refused(
        saved(tmp_path / "gemma2", build("gemma2", BYTES))
    )
    assert "has 48 columns; valid for q8_0: a multiple of 32" in refused(
        saved(tmp_path / "narrow", build("llama", BYTES, hidden_size=48, num_attention_heads=6))
    )
    sliding = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    assert "has layers with a sliding window" in refused(saved(tmp_path / "s", small("qwen2", **sliding)))
    assert (
        "has the weight model.layers.0.self_attn.k_proj.bias, which GGUF files of qwen3 do not hold"
        in refused(saved(tmp_path / "biases", small("qwen3", attention_bias=True)))
    )
    rope = {**POSITIONS["llama 3.1"][0], "rope_theta": 10000.0, "high_freq_factor": 3.0}
    assert "its positions would not be read back alike from a GGUF file (rope_type llama3)" in refused(
        saved(tmp_path / "factors", small(rope_parameters=rope))
    )
    write(tmp_path / "grok.gguf", small(), architecture="grok")
    assert "is of the architecture grok" in refused(tmp_path / "grok.gguf")
    whole = saved(tmp_path / "whole", small())
    assert "weights is 'q6_k'; valid: q8_0, q4_0, q4_1" in refused(whole, weights="q6_k")


def test_numbers_that_are_none(tmp_path: Path) -> None:
    model = small()
    model.model.layers[1].mlp.up_proj.weight.data[3, 3] = torch.inf
    assert "have numbers that are not finite" in refused(saved(tmp_path / "model", model))


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tmp_path / "model", small())
    free = shutil._ntuple_diskusage(100, 50, 50)  # type: ignore[attr-defined]
    monkeypatch.setattr(write_gguf.shutil, "disk_usage", lambda place: free)
    assert "bytes, and 50 are free there; valid: a disk with more" in refused(source)


def test_the_source_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", small())
    (tmp_path / "b.gguf").symlink_to("a.gguf")
    with pytest.raises(InputError, match="is a file of the model"):
        quantize(tmp_path / "a.gguf", tmp_path / "b.gguf")


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", small())
    target = tmp_path / "q.gguf"
    target.write_text("old")

    def stop(stage: str, done: int, total: int) -> None:
        assert stage == "quantize" and 0 <= done <= total
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, target, on_progress=stop)
    assert target.read_text() == "old" and {path.name for path in tmp_path.iterdir()} == {"model", "q.gguf"}


# ---- the default model ----------------------------------------------------------------------------------


@pytest.mark.model
def test_the_default_model(embedded: str, tmp_path: Path) -> None:
    llm = opened(embedded, weights="q4_0")
    done = quantize(embedded, tmp_path / "q.gguf", "q4_0", "q4_0")
    assert done.bytes_out < done.bytes_in
    ours = opened(tmp_path / "q.gguf")
    text = "The lighthouse keeper counted the ships: 12, 345 and"
    expected = llm.generate(text, 40, ignore_eos=True)
    assert ours.generate(text, 40, ignore_eos=True).token_ids == expected.token_ids
