"""Tiny GGUF files for tests, written with the `gguf` package from random models of transformers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedConfig

from tests.conftest import tiny_tokenizer
from tests.tiny import BYTES, build

QuantType = gguf.GGMLQuantizationType
#: what files call model types, and fields of some besides
ARCHITECTURES = {
    "mistral": "llama",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "gemma3_text": "gemma3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "lfm2_moe": "lfm2moe",
}
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
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "conv_L_cache": "shortconv.l_cache",
    "num_dense_layers": "leading_dense_block_count",
}
DELTA_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
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

    fields = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = set(tokenizer.all_special_tokens) | {
        token["content"] for token in fields["added_tokens"] if token["special"]
    }
    merges = [m if isinstance(m, str) else " ".join(m) for m in fields["model"]["merges"]]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges or None,
    }
    for ours, theirs in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token = getattr(tokenizer, f"{ours}_token_id")
        if token is not None:
            values[f"tokenizer.ggml.{theirs}_token_id"] = token
    if tokenizer.chat_template:
        values["tokenizer.chat_template"] = tokenizer.chat_template
    return values


def fields_of(config: Any, architecture: str) -> dict[str, Any]:
    """What a file says of a model."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if config.model_type.startswith("qwen3_5"):
        return {f"{architecture}.{name}": value for name, value in delta_fields(config).items()}
    is_plain = config.model_type in ("llama", "mistral", "qwen2", "qwen3")
    more = {} if is_plain else MORE
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": kv_heads_of(config),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None)
        or getattr(config, "norm_eps", None),
        "attention.key_length": width,
        "rope.dimension_count": width,
        "rope.freq_base": float(rope["rope_theta"]),
        **{
            theirs: value for name, theirs in more.items() if (value := getattr(config, name, None))
        },
    }
    if config.model_type == "gpt_oss":
        fields["expert_feed_forward_length"] = config.intermediate_size
    fields |= positions_of(config, width)
    if config.model_type == "lfm2_moe":
        fields["expert_gating_func"] = 2
    return {f"{architecture}.{name}": value for name, value in fields.items()}


def delta_fields(config: PreTrainedConfig) -> dict[str, int | float]:
    """What a file says of a model of Qwen3.5."""
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": config.head_dim,
        "rope.dimension_count": config.head_dim // 4,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
    }
    if config.model_type == "qwen3_5_moe_text":
        return {
            **fields,
            **{theirs: getattr(config, name) for name, theirs in DELTA_EXPERTS.items()},
        }
    return {**fields, "feed_forward_length": config.intermediate_size}


def tiled(
    name: str, weight: torch.Tensor, config: PreTrainedConfig, back: bool = False
) -> torch.Tensor:
    """A weight of the delta rule with its heads of values in the order of llama.cpp's files, or
    back in that of checkpoints."""
    groups = (config.linear_num_key_heads, config.linear_num_value_heads)
    shape = (groups[0], groups[1] // groups[0])
    shape = shape[::-1] if back else shape
    before = 2 * groups[0] * config.linear_key_head_dim
    width = config.linear_value_head_dim

    def turned(part: torch.Tensor, size: int) -> torch.Tensor:
        return part.unflatten(0, (*shape, size)).transpose(0, 1).flatten(0, 2)

    if "in_proj_qkv" in name or "conv1d" in name:
        return torch.cat([weight[:before], turned(weight[before:], width)])
    if "in_proj_z" in name:
        return turned(weight, width)
    if "out_proj" in name:
        return turned(weight.T, width).T.contiguous()
    return turned(weight, 1)


def kv_heads_of(config: PreTrainedConfig) -> int | list[int]:
    """Heads of keys; of a model with recurrent layers by layer."""
    if not config.model_type.startswith("lfm2"):
        return config.num_key_value_heads
    attends = (kind == "full_attention" for kind in config.layer_types)
    return [config.num_key_value_heads * attend for attend in attends]


def positions_of(config: Any, width: int) -> dict[str, Any]:
    """What a file says of positions that a part of a head has, of LongRoPE and of Ministral 3."""
    rope = config.rope_parameters
    fields: dict[str, Any] = {
        "rope.dimension_count": int(width * rope.get("partial_rotary_factor", 1.0))
    }
    trained = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope":
        growth = config.max_position_embeddings / trained
        fields["rope.scaling.original_context_length"] = trained
        fields["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(growth) / math.log(trained))
    if "llama_4_scaling_beta" in rope or config.model_type == "gpt_oss":
        fields["rope.scaling.type"] = "yarn"
        fields["rope.scaling.factor"] = float(rope["factor"])
        fields["rope.scaling.original_context_length"] = trained
    if "llama_4_scaling_beta" in rope:
        fields["rope.scaling.yarn_log_multiplier"] = float(rope["mscale_all_dim"])
        fields["attention.temperature_scale"] = float(rope["llama_4_scaling_beta"])
    return fields


def factors(config: Any) -> np.ndarray | None:
    """What Llama 3's rule divides each frequency by, as a converter writes it."""
    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    divisors = []
    for place in range(0, config.head_dim, 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (place / config.head_dim)
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        if wave < high:
            divisors.append(1.0)
        elif wave > low:
            divisors.append(rope["factor"])
        else:
            turns = rope["original_max_position_embeddings"] / wave - rope["low_freq_factor"]
            smooth = turns / (rope["high_freq_factor"] - rope["low_freq_factor"])
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)


def blocks_of(weight: torch.Tensor, kind: QuantType, seed: int = 0) -> np.ndarray:
    """Blocks of a format: of the weight's values, or random ones of about their size where the
    `gguf` package cannot write the format."""
    try:
        return gguf.quantize(weight.numpy(), kind)
    except NotImplementedError:
        pass
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    shape = (weight.shape[0], weight.shape[1] // columns, size)
    blocks = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    scale = np.array([0.002 if kind == QuantType.Q6_K else 0.0005], np.float16)
    if kind == QuantType.Q6_K:
        blocks[..., 192:208] = blocks[..., 192:208] % 8  # scales of one sign
        blocks[..., 208:] = scale.view(np.uint8)
    else:
        scales = (scale * [1, 6]).astype(np.float16).view(np.uint8)
        blocks[..., :4] = np.tile(scales, (*shape[:2], 1))
    return blocks.reshape(weight.shape[0], -1)


def write(
    path: Path,
    model: Any,
    types: Mapping[str, QuantType] | None = None,
    architecture: str | None = None,
    fields: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    split: int = 0,
    lists: Collection[str] = ("long_factor", "short_factor"),
    more: Mapping[str, torch.Tensor] | None = None,
    joint: bool = False,
) -> Any:
    """Write a model's file; the model then holds the very values of the file.

    Args:
        types: of tensors, by a part of their names in the file, the last that fits; F32 else.
        architecture: as the file names it; the model's type otherwise.
        fields: more values of the file, which win; None leaves one out.
        tokenizer: byte-level; that of the fixtures otherwise.
        split: so many tensors a file, in files …-00001-of-00003.gguf; 0: one file.
        lists: LongRoPE's lists of factors that the file has.
        more: other tensors of the file.
        joint: whether gate and up of experts are one tensor.
    Returns:
        The model.
    """
    config = model.config
    model_type = str(config.model_type)
    usual = ARCHITECTURES.get(model_type, model_type)
    architecture = architecture or usual
    names = names_in(usual, config.num_hidden_layers)
    # what the files of a family add to the weights of norms
    added = 1 if config.model_type.startswith(("gemma", "qwen3_5")) else 0
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    values = {**fields_of(config, architecture), **tokenizer_fields(tokenizer or tiny_tokenizer())}
    for key, value in {**values, **(fields or {})}.items():
        if value is not None:
            _add(writer, key, value)
    divisors = factors(config)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    if config.rope_parameters.get("rope_type") == "longrope":
        for name in lists:
            listed = np.array(config.rope_parameters[name], np.float32)
            writer.add_tensor(f"rope_factors_{name.removesuffix('_factor')}.weight", listed)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if ".experts." in name:
            add = _add_experts_in_turn if model_type == "gpt_oss" else _add_experts
            values = parameter.detach().float()
            if joint and name.endswith("gate_up_proj"):
                parameter.data = _add_gates_and_ups(writer, name, values, types or {})
            else:
                parameter.data = add(writer, name, values, types or {})
            continue
        name = name.replace("block_sparse_moe.router", "mlp.gate")
        if name.endswith(".sinks"):
            name += ".weight"
        name = name.replace("dt_bias", "dt_proj.bias")
        file_name = names.get_name(name, (".weight", ".bias"))
        heads = _paired_heads(file_name, config, architecture)
        weight = parameter.detach().float().clone()
        is_delta = "linear_attn" in name
        is_norm = weight.ndim == 1 and not is_delta
        if is_norm:
            weight += added
        turns = is_delta and "linear_attn.norm" not in name
        if turns:
            weight = tiled(name, weight, config)
        if name.endswith("A_log"):
            weight = -weight.exp()
        if heads:
            weight = _paired(weight, heads)
        is_convolution = weight.ndim == 3
        if is_convolution:
            weight = weight.squeeze(1)
        kinds = [kind for part, kind in (types or {}).items() if part in file_name]
        is_matrix = weight.ndim == 2 and "ffn_gate_inp" not in file_name and not is_convolution
        kind = kinds[-1] if kinds and is_matrix else QuantType.F32
        unpacked = _add_weight(writer, file_name, weight, kind, number)
        if is_norm:
            unpacked -= added
        if name.endswith("A_log"):
            unpacked = (-unpacked).log()
        if is_convolution:
            unpacked = unpacked.unsqueeze(1)
        if turns:
            unpacked = tiled(name, unpacked, config, back=True)
        parameter.data = _paired(unpacked, heads, back=True) if heads else unpacked
    for name, bias in model.named_buffers():
        if name.endswith("expert_bias"):
            writer.add_tensor(f"blk.{name.split('.')[2]}.exp_probs_b.bias", bias.numpy())
    for file_name, tensor in (more or {}).items():
        writer.add_tensor(file_name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _paired_heads(file_name: str, config: Any, architecture: str) -> int:
    """The heads of queries or keys whose rows the file has in pairs; 0 for other weights."""
    if architecture not in ("llama", "smollm3", "granite", "granitemoe", "mistral3"):
        return 0
    if "attn_q." in file_name:
        return config.num_attention_heads
    if "attn_k." in file_name:
        return config.num_key_value_heads
    return 0


def _add_experts(
    writer: gguf.GGUFWriter, name: str, values: torch.Tensor, types: Mapping[str, QuantType]
) -> torch.Tensor:
    """Add a parameter of all experts, a tensor for each of its projections; returns the values that
    the file holds."""
    projections = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
    unpacked: list[torch.Tensor] = []
    for projection, weights in zip(projections, values.chunk(len(projections), 1), strict=True):
        file_name = f"blk.{name.split('.')[2]}.ffn_{projection}_exps.weight"
        unpacked.append(_add_experts_as(writer, file_name, weights.contiguous(), types))
    return torch.cat(unpacked, 1)


def _add_gates_and_ups(
    writer: gguf.GGUFWriter, name: str, values: torch.Tensor, types: Mapping[str, QuantType]
) -> torch.Tensor:
    """Add gate and up of all experts as one tensor; returns the values that the file holds."""
    file_name = f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight"
    return _add_experts_as(writer, file_name, values.contiguous(), types)


def _add_experts_as(
    writer: gguf.GGUFWriter, file_name: str, weights: torch.Tensor, types: Mapping[str, QuantType]
) -> torch.Tensor:
    kinds = [kind for part, kind in types.items() if part in file_name]
    return _add_joint(writer, file_name, weights, kinds[-1] if kinds else QuantType.F32)


def _add_experts_in_turn(
    writer: gguf.GGUFWriter, name: str, values: torch.Tensor, types: Mapping[str, QuantType]
) -> torch.Tensor:
    """The same of a parameter in which gate and up take turns, as columns or as biases."""
    is_bias = name.endswith("_bias")
    joint = values if is_bias else values.mT.contiguous()
    names = ("gate", "up") if "gate_up_proj" in name else ("down",)
    unpacked = torch.empty_like(joint)
    for number, projection in enumerate(names):
        rows = joint[:, number :: len(names)].contiguous()
        layer = name.split(".")[2]
        file_name = f"blk.{layer}.ffn_{projection}_exps.{'bias' if is_bias else 'weight'}"
        kinds = [kind for part, kind in types.items() if part in file_name]
        kind = kinds[-1] if kinds and not is_bias else QuantType.F32
        unpacked[:, number :: len(names)] = _add_joint(writer, file_name, rows, kind)
    return unpacked if is_bias else unpacked.mT.contiguous()


def _add_joint(
    writer: gguf.GGUFWriter, file_name: str, weights: torch.Tensor, kind: QuantType
) -> torch.Tensor:
    """Add a tensor of all experts in a format; returns the values that the file holds."""
    if kind in (QuantType.F32, QuantType.F16):
        data = weights.numpy().astype(np.float32 if kind == QuantType.F32 else np.float16)
        writer.add_tensor(file_name, data)
        return torch.from_numpy(data.astype(np.float32))
    if kind == QuantType.BF16:
        data = gguf.quantize(weights.numpy(), kind)
    else:
        data = np.stack([blocks_of(expert, kind, seed) for seed, expert in enumerate(weights)])
    writer.add_tensor(file_name, data, raw_dtype=kind)
    return torch.from_numpy(gguf.dequantize(data, kind)).view_as(weights)


def _add_weight(
    writer: gguf.GGUFWriter, file_name: str, weight: torch.Tensor, kind: QuantType, seed: int
) -> torch.Tensor:
    """Add a weight in a format; returns the values that the file holds, float32."""
    if kind in (QuantType.F32, QuantType.F16):
        data = weight.numpy().astype(np.float32 if kind == QuantType.F32 else np.float16)
        writer.add_tensor(file_name, data)
        return torch.from_numpy(data.astype(np.float32))
    if kind == QuantType.BF16:
        data = gguf.quantize(weight.numpy(), kind)
    else:
        data = blocks_of(weight, kind, seed)
    writer.add_tensor(file_name, data, raw_dtype=kind)
    return torch.from_numpy(gguf.dequantize(data, kind))


def _paired(weight: torch.Tensor, heads: int, back: bool = False) -> torch.Tensor:
    """Rows as Llama's converter turns them round, or back: halves of a head interleaved."""
    shape = (2, -1) if not back else (-1, 2)
    return weight.unflatten(0, (heads, *shape)).transpose(1, 2).flatten(0, 2).contiguous()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
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
