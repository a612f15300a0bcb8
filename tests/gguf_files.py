"""Tiny GGUF files for tests, written with the `gguf` package from random models of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.conftest import tiny_tokenizer
from tests.tiny import BYTES, build

QuantType = gguf.GGMLQuantizationType
#: what files call model types, and what they say of some besides
CALLED = {"mistral": "llama", "olmo3": "olmo2", "gemma3_text": "gemma3"}
MORE = {
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}
#: widths that every format's blocks fit
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "initializer_range": 0.05}


def small(kind: str = "llama", **changes: Any) -> Any:
    """A random model whose columns are whole blocks of every format."""
    return build(kind, BYTES, **{**WIDE, **changes})


def names_in(architecture: str, layers: int) -> Any:
    """Names of parameters → a file's names, as llama.cpp's converter has them."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(kind, layers)


def tokenizer_fields(tokenizer: Any, kind: str = "gpt2", pre: str = "gpt-2") -> dict[str, Any]:
    """What a file says of a byte-level tokenizer."""
    import json

    said = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = set(tokenizer.all_special_tokens) | {
        token["content"] for token in said["added_tokens"] if token["special"]
    }
    merges = [m if isinstance(m, str) else " ".join(m) for m in said["model"]["merges"]]
    found: dict[str, Any] = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges or None,
    }
    for ours, theirs in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        if (at := getattr(tokenizer, f"{ours}_token_id")) is not None:
            found[f"tokenizer.ggml.{theirs}_token_id"] = at
    if tokenizer.chat_template:
        found["tokenizer.chat_template"] = tokenizer.chat_template
    return found


def fields_of(config: Any, architecture: str) -> dict[str, Any]:
    """What a file says of a model."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    more = {} if architecture in ("llama", "qwen2", "qwen3") else MORE
    said = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.key_length": width,
        "rope.dimension_count": width,
        "rope.freq_base": float(rope["rope_theta"]),
        **{
            theirs: value for name, theirs in more.items() if (value := getattr(config, name, None))
        },
    }
    return {f"{architecture}.{name}": value for name, value in said.items()}


def factors(config: Any) -> np.ndarray | None:
    """What Llama 3's rule divides each frequency by, as a converter writes it."""
    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    made = []
    for place in range(0, config.head_dim, 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (place / config.head_dim)
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        if wave < high:
            made.append(1.0)
        elif wave > low:
            made.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wave - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            made.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(made, np.float32)


def blocks_of(weight: torch.Tensor, kind: QuantType, seed: int = 0) -> np.ndarray:
    """Blocks of a format: of the weight's values, or random ones of about their size where the
    `gguf` package cannot write the format."""
    try:
        return gguf.quantize(weight.numpy(), kind)
    except NotImplementedError:
        pass
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    shape = (weight.shape[0], weight.shape[1] // columns, size)
    made = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    scale = np.array([0.002 if kind == QuantType.Q6_K else 0.0005], np.float16)
    if kind == QuantType.Q6_K:
        made[..., 192:208] = made[..., 192:208] % 8  # scales of one sign
        made[..., 208:] = scale.view(np.uint8)
    else:
        made[..., :4] = np.tile((scale * [1, 6]).astype(np.float16).view(np.uint8), (*shape[:2], 1))
    return made.reshape(weight.shape[0], -1)


def write(
    path: Path,
    model: Any,
    types: Mapping[str, QuantType] | None = None,
    architecture: str | None = None,
    said: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    split: int = 0,
) -> Any:
    """Write a model's file; the model then holds the very values of the file.

    Args:
        types: of tensors, by a part of their names in the file, the last that fits; F32 else.
        architecture: as the file names it; the model's type otherwise.
        said: more values of the file, which win; None leaves one out.
        tokenizer: byte-level; that of the fixtures otherwise.
        split: so many tensors a file, in files …-00001-of-00003.gguf; 0: one file.
    Returns:
        The model.
    """
    config = model.config
    own = str(config.model_type)
    architecture = architecture or CALLED.get(own, own)
    names, more = (
        names_in(CALLED.get(own, own), config.num_hidden_layers),
        1 if own.startswith("gemma") else 0,
    )
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    values = {**fields_of(config, architecture), **tokenizer_fields(tokenizer or tiny_tokenizer())}
    for key, value in {**values, **(said or {})}.items():
        if value is not None:
            _add(writer, key, value)
    if (found := factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", found)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        weight, called = (
            parameter.detach().float().clone(),
            names.get_name(name, (".weight", ".bias")),
        )
        turned = {"attn_q.": config.num_attention_heads, "attn_k.": config.num_key_value_heads}
        heads = next((n for part, n in turned.items() if part in called), 0)
        heads = heads if architecture in ("llama", "smollm3", "granite") else 0
        weight += more if weight.ndim == 1 else 0
        if heads:
            weight = _paired(weight, heads)
        kinds = [kind for part, kind in (types or {}).items() if part in called]
        kind = kinds[-1] if kinds and weight.ndim == 2 else QuantType.F32
        if kind in (QuantType.F32, QuantType.F16):
            data = weight.numpy().astype(np.float32 if kind == QuantType.F32 else np.float16)
            writer.add_tensor(called, data)
            unpacked = torch.from_numpy(data.astype(np.float32)) - (more if weight.ndim == 1 else 0)
        else:
            data = (
                gguf.quantize(weight.numpy(), kind)
                if kind == QuantType.BF16
                else blocks_of(weight, kind, number)
            )
            writer.add_tensor(called, data, raw_dtype=kind)
            unpacked = torch.from_numpy(gguf.dequantize(data, kind))
        parameter.data = _paired(unpacked, heads, back=True) if heads else unpacked
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _paired(weight: torch.Tensor, heads: int, back: bool = False) -> torch.Tensor:
    """Rows as Llama's converter turns them round, or back: halves of a head interleaved."""
    shape = (2, -1) if not back else (-1, 2)
    return weight.unflatten(0, (heads, *shape)).transpose(1, 2).flatten(0, 2).contiguous()


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
