"""config.json and generation_config.json files that are wrong in one way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.malformed.folder_bytes import CONFIG, GENERATION, Folder, base, json_files, places
from tests.tiny import BYTE_FAMILIES

Change = Callable[[Folder], Any]
NUMBERS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
    *("initializer_range", "attention_dropout", "pretraining_tp", "sliding_window", "max_window_layers"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "num_labels", "chunk_size_feed_forward"),
)
VALUES = {
    "0": 0,
    "1": 1,
    "3": 3,
    "-1": -1,
    "2^19": 1 << 19,
    "10^7": 10**7,
    "2^31": 1 << 31,
    "2^63": 1 << 63,
    "10^400": 10**400,
    "1.5": 1.5,
    "NaN": math.nan,
    "infinite": math.inf,
    "1e300": 1e300,
    "a text": "4",
    "null": None,
    "true": True,
    "a list": [2, 3],
    "an empty list": [],
    "an object": {"a": 1},
}
SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache", "use_sliding_window")
#: of other fields: values that no model's file has
OTHERS: dict[str, list[Any]] = {
    "model_type": ["", "nothing", "../x", 3, None, [], {}, "llama\n", "x" * 100_000, "\x1b[31m"],
    "architectures": [None, "LlamaForCausalLM", [1], [None], [], ["../x"], ["X"] * 100_000, {}, 5],
    "dtype": ["float7", "float64", "int8", "complex64", "bool", 5, [], "torch.float32", "__class__", {}],
    "torch_dtype": ["float7", "int8", 5],
    "hidden_act": ["nothing", 5, None, [], "__class__", "relu"],
    "layer_types": [[], ["nothing"] * 2, ["full_attention"] * 3, ["sliding_attention"] * 2, 5, "x", [1, 2]],
    "_attn_implementation": ["nothing", "flash_attention_2", "paged|x", "x/y", 5],
    "attn_implementation": ["nothing", "x/y:z", 5],
    "auto_map": [{"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.Config"}, 5, {"AutoConfig": 5}],
    "quantization_config": [
        *({}, 5, "gptq", [], {"quant_method": 3}, {"quant_method": "nothing"}, {"quant_method": "gptq"}),
        *({"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "fp8"}),
        *({"quant_method": "mxfp4"}, {"quant_method": "torchao"}, {"load_in_8bit": True}),
    ],
    "transformers_version": [5, "nothing", None, "999.0.0"],
    "id2label": [5, {"a": "b"}, {"0": 1}, []],
    "rope_parameters": [
        None,
        3,
        [],
        "x",
        {},
        {"rope_type": None},
        {"rope_theta": None},
        {"full_attention": 3},
    ],
    "is_encoder_decoder": [True, 5, "x"],
    "add_cross_attention": [True],
    "output_attentions": [True, 5],
    "output_hidden_states": [True, 5],
    "return_dict": [False, 5],
    "is_decoder": [False],
    "pruned_heads": [{"0": [0]}, 5],
    "tie_encoder_decoder": [True],
    "text_config": [{}, 5, {"num_hidden_layers": 10**7}],
    "name_or_path": [5, "../x"],
    "_name_or_path": [5],
    "_commit_hash": [5, []],
    "gguf_file": ["x"],
    "base_model_tp_plan": [5, {"layers.*": "nothing"}],
    "to_dict": [5],
    "get_text_config": ["x"],
    "__class__": ["x"],
    "__dict__": [{}],
    "attribute_map": [{"hidden_size": "hidden_size"}, 5],
    "keys_to_ignore_at_inference": [5],
}
#: rules of positions, and what each needs
RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 128},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "factor": 2.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 128,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}
FACTORS = (
    *("factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("short_factor", "long_factor", "attention_factor", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "partial_rotary_factor", "truncate"),
)
FEW = ("0", "-1", "2^63", "10^400", "NaN", "infinite", "1e300", "a text", "null", "a list", "true")
FAMILIES = (
    *("gpt2", "phi", "phi3", "gemma2", "mixtral", "deepseek_v3", "gpt_oss", "granite", "llama4", "mamba"),
    *("bert", "t5", "whisper", "qwen2_vl", "falcon", "bloom", "opt", "gpt_neox", "stablelm", "cohere"),
)


def cases() -> Iterator[tuple[Callable[[Path], Path], str, str]]:
    """What to write, names, and the kind."""
    for name, family, change in _named():
        yield partial(_write, family, change), name, "config"


def _write(family: str, change: Change, folder: Path) -> Path:
    made = base(family)
    change(made)
    return made.write(folder)


def _said(key: str, value: Any) -> Change:
    return lambda folder: folder.set(CONFIG, **{key: value})


def _named() -> Iterator[tuple[str, str, Change]]:
    for key in NUMBERS:
        family = {"sliding_window": "mistral", "max_window_layers": "qwen2"}.get(key, "llama")
        for what, value in VALUES.items():
            yield f"{key} is {what}", family, _said(key, value)
    for family in BYTE_FAMILIES:
        for key in base(family).said(CONFIG):
            yield f"{family} without {key}", family, lambda f, k=key: f.drop(CONFIG, k)
    for key in SWITCHES:
        for value in (True, False, 1, 0, None, "yes", [], 0.5):
            yield f"{key} is {value!r}", "llama", _said(key, value)
    for key, values in OTHERS.items():
        for number, value in enumerate(values):
            yield f"{key} is wrong, {number}: {str(value)[:40]!r}", "llama", _said(key, value)
    yield from _of_shapes()
    yield from _of_positions()
    for kind in FAMILIES:
        yield f"a {kind}", "llama", _said("model_type", kind)
        yield (
            f"a {kind} of 10^7 layers",
            "llama",
            lambda f, k=kind: f.set(CONFIG, model_type=k, num_hidden_layers=10**7, architectures=None),
        )
        yield (
            f"a {kind} of a vocabulary of 10^6",
            "llama",
            lambda f, k=kind: f.set(CONFIG, model_type=k, vocab_size=10**6, architectures=None),
        )
    whole = base()
    for file in (CONFIG, GENERATION):
        for what, content in json_files(whole.files[file]).items():
            yield f"{file} {what}", "llama", lambda f, n=file, c=content: f.files.update({n: c()})
        for what, change in places(file).items():
            yield f"{file} {what}", "llama", change
    yield from _of_generation()


def _of_shapes() -> Iterator[tuple[str, str, Change]]:
    for what, fields in {
        "heads that do not divide the width": {"num_attention_heads": 5, "head_dim": None},
        "keys that do not divide the heads": {"num_attention_heads": 6, "num_key_value_heads": 4},
        "more heads of keys than heads": {"num_key_value_heads": 8},
        "heads of odd width": {"num_attention_heads": 4, "hidden_size": 28, "head_dim": None},
        "heads of width 2^19": {"head_dim": 1 << 19, "num_attention_heads": 1, "num_key_value_heads": 1},
        "everything large": dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 1 << 20),
        "ten times as large": {"hidden_size": 320, "intermediate_size": 640, "vocab_size": 2600},
        "1024 layers": {"num_hidden_layers": 1024},
        "no layers that are there": {"num_hidden_layers": 1},
        "three layers": {"num_hidden_layers": 3},
    }.items():
        for family in BYTE_FAMILIES:
            yield f"{family} with {what}", family, lambda f, s=fields: f.set(CONFIG, **s)


def _of_positions() -> Iterator[tuple[str, str, Change]]:
    for field in ("rope_parameters", "rope_scaling"):
        for rule, needed in RULES.items():
            said = {"rope_type": rule, "rope_theta": 10000.0, **needed}
            yield f"{field}: {rule} as it should be", "llama", _said(field, said)
            for name in needed:
                less = {key: value for key, value in said.items() if key != name}
                yield f"{field}: {rule} without {name}", "llama", _said(field, less)
        for rule in ("nothing", 3, None, [], "", "su", "mrope", "\0"):
            yield (
                f"{field}: the rule {rule!r}",
                "llama",
                _said(field, {"rope_type": rule, "type": rule, "factor": 2.0, "rope_theta": 1e4}),
            )
    for rule, needed in RULES.items():
        for name in FACTORS:
            if name not in needed and name not in ("rope_theta", "attention_factor", "partial_rotary_factor"):
                continue
            for what in FEW:
                said = {"rope_type": rule, "rope_theta": 10000.0, **needed, name: VALUES[what]}
                yield f"{rule} positions, {name} is {what}", "llama", _said("rope_parameters", said)
    for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"):
        for what in FEW:
            said = {"rope_type": "yarn", "rope_theta": 10000.0, **RULES["yarn"], name: VALUES[what]}
            yield f"yarn positions, {name} is {what}", "llama", _said("rope_parameters", said)
    for count in (0, 3, 5, 100_000):
        said = {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            **RULES["longrope"],
            "short_factor": [1.0] * count,
        }
        yield f"longrope positions, {count} factors", "llama", _said("rope_parameters", said)


def _of_generation() -> Iterator[tuple[str, str, Change]]:
    def given(**fields: Any) -> Change:
        return lambda folder: folder.set(GENERATION, **fields)

    for key in ("temperature", "top_k", "top_p", "min_p", "eta_cutoff", "repetition_penalty"):
        for what, value in VALUES.items():
            yield f"{GENERATION}: {key} is {what}", "llama", given(**{key: value, "do_sample": True})
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens", "do_sample"):
        for what in ("0", "-1", "2^31", "2^63", "10^400", "1.5", "a text", "a list", "null", "an object"):
            yield f"{GENERATION}: {key} is {what}", "llama", given(**{key: VALUES[what]})
    for key, value in {
        "num_beams": 10**9,
        "watermarking_config": {"context_width": 10**9},
        "cache_implementation": "nothing",
        "stop_strings": 5,
        "suppress_tokens": [10**9],
        "bad_words_ids": [[]],
        "compile_config": 5,
        "eos_token_id": [257] * 100_000,
    }.items():
        yield f"{GENERATION}: {key} is {str(value)[:40]!r}", "llama", given(**{key: value})
