"""The config of a model, from its GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenswift.loader.config import ModelConfig, completed
from tokenswift.loader.families import FAMILIES
from tokenswift.loader.family import CONVOLUTION, FULL, LINEAR, ExpertFields, Family
from tokenswift.loader.fields import Fields
from tokenswift.loader.find import MERGED
from tokenswift.loader.gguf import GgufFile
from tokenswift.loader.gguf_names import (
    ARCHITECTURES,
    BIASES,
    FLOATS,
    NUMBER_KEYS,
    OUTER,
)
from tokenswift.loader.gguf_positions import positions_of
from tokenswift.loader.gguf_tokenizer import words_of
from tokenswift.loader.layout import EMBEDDING, HEAD
from tokenswift.loader.positions import QUERY_SCALE, ROTATED_SHARE, TRAINED_LENGTH
from tokenswift.loader.schema import check_numbers, refusal
from tokenswift.loader.tensors import DENSE
from tokenswift.types import InputError

#: keys that would make another model of the same numbers, and the values with which they do not
NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_gating_func": (0, 1),
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scale_linear": (0, 1),
}
#: the function of a router's scores that is the sigmoid
SIGMOID = 2
#: widths of experts, where a family's files have their own
EXPERT_SIZES = ("moe_intermediate_size", "shared_expert_intermediate_size")
#: the width of all heads of values of the delta rule together
VALUE_WIDTH = "linear_value_width"
#: layers behind the last, which draft
DRAFTING_LAYERS = "nextn_predict_layers"
#: how much queries grow with their positions
QUERY_SCALE_KEY = NUMBER_KEYS[f"rope_parameters.{QUERY_SCALE}"]
#: families whose files name the architecture of another, and have windows
WINDOWED = {"llama": "mistral", "olmo2": "olmo3"}


def auto_dtype(file: GgufFile, place: str = "cpu") -> str:
    """What ``dtype="auto"`` means for a file: the type of its matrices where they are float
    numbers, bfloat16 where a card multiplies with quantized weights, else float32."""
    kinds = {
        tensor.kind
        for name, tensor in file.tensors.items()
        # routers, convolutions, and biases of experts, are float32 in any file
        if len(tensor.shape) > 1
        and not any(part in name for part in FLOATS)
        and not name.endswith(".bias")
    }
    if "BF16" in kinds or (place != "cpu" and kinds - DENSE.keys()):
        return "bfloat16"
    return "float16" if kinds == {"F16"} else "float32"


def config_of(file: GgufFile) -> ModelConfig:
    """The config of a native family's model.

    Raises:
        InputError: the file holds an adapter, is of another architecture, lacks a number, or scales
            positions in a way that is not known here.
    """
    _check_kind(file)
    numbers = _numbers(file)
    reader = Fields(numbers, file.where)
    width = reader.integer("head_dim")
    kind = _native_kind(file, numbers)
    family = FAMILIES[kind]
    _check_neutral(file, numbers, family)
    fields = _fields(file, numbers, family)
    stated = {
        name: value
        for name, value in fields.items()
        if name in family.defaults or name == "head_dim"
    }
    rope = positions_of(file, family, width)
    stated["rope_parameters"] = rope
    if TRAINED_LENGTH in family.defaults and TRAINED_LENGTH in rope:
        stated[TRAINED_LENGTH] = rope[TRAINED_LENGTH]
    stated["dtype"] = auto_dtype(file)
    config = completed(kind, stated)
    if config is None:  # of Llama, a width that its heads do not divide
        raise InputError(
            f"{file.where}: its sizes are not those of a {kind} model; valid: a sound file"
        )
    key_heads = fields.get("linear_num_key_heads")
    if family.recurrent == LINEAR and fields["linear_num_value_heads"] != key_heads:
        config.linear_heads_tiled = True  # heads of values take those of keys in turns
    return config


def _native_kind(file: GgufFile, numbers: Mapping[str, object]) -> str:
    """The native family of a file, told by its numbers where architectures are shared."""
    kind = _family_name(file)
    if kind == "ministral3" and not file.number(QUERY_SCALE_KEY, 0):
        kind = "llama"  # Mistral Small 3, whose positions are plain
    if "sliding_window" in numbers:
        kind = WINDOWED.get(kind, kind)
    return kind


def _fields(file: GgufFile, numbers: Mapping[str, object], family: Family) -> dict[str, object]:
    """Fields of the config by transformers' names, those included that the family does not have.

    Args:
        numbers: the sizes of the model, by the same names.
    Raises:
        InputError: the file lacks a number, or has one that others contradict.
    """
    reader = Fields(numbers, file.where)
    width = reader.integer("head_dim")
    scaled_by_width = reader.integer("num_hidden_layers") == family.layers_scaled_by_width
    width_a_head = reader.integer("hidden_size") // reader.integer("num_attention_heads")
    ends = words_of(file.metadata, file.path, reader.integer("vocab_size")).ends()
    fields: dict[str, object] = {
        "query_pre_attn_scalar": width_a_head if scaled_by_width else width,
        "attention_multiplier": width**-0.5,
        "tie_word_embeddings": OUTER[HEAD] not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }
    for name, part in BIASES.items():
        fields[name] = f"blk.0.{part}.bias" in file.tensors
    fields.update(numbers)
    if family.recurrent == CONVOLUTION:
        fields["layer_types"] = _layer_kinds(file, family, reader.integer("num_hidden_layers"))
        fields["block_auto_adjust_ff_dim"] = False  # widths are those of the tensors
    elif family.recurrent == LINEAR:
        fields["linear_value_head_dim"] = _value_width(file, reader)
    if family.experts is not None:
        fields["norm_topk_prob"] = _renormalised(file, family.experts)
    return fields


def _family_name(file: GgufFile) -> str:
    """The family of a file that `_check_kind` lets pass."""
    return file.family_name() or file.architecture


def _layer_kinds(file: GgufFile, family: Family, layers: int) -> list[str]:
    """Which layers attend: those with heads of keys.

    Raises:
        InputError: the file does not say it of each layer.
    """
    key = f"{file.architecture}.{NUMBER_KEYS['num_key_value_heads']}"
    heads = file.metadata.get(key)
    if not isinstance(heads, list) or len(heads) != layers:
        raise refusal(file.where, key, heads, f"a list of {layers} numbers, one a layer")
    return [FULL if count else family.recurrent for count in heads]


def _value_width(file: GgufFile, reader: Fields) -> int:
    """The width of a head of values of the delta rule.

    Raises:
        InputError: heads of values do not share what the file says of all together, or heads of
            keys do not divide them.
    """
    heads = reader.integer("linear_num_value_heads")
    key_heads = reader.integer("linear_num_key_heads")
    inner = reader.integer(VALUE_WIDTH)
    if inner % heads or heads % key_heads:
        key = file.full_keys()["linear_num_value_heads"]
        valid = f"a divisor of {inner} that is a multiple of {key_heads}"
        raise refusal(file.where, key, heads, valid)
    return inner // heads


def _renormalised(file: GgufFile, experts: ExpertFields) -> bool:
    """Whether a row's scores of experts are divided by their sum."""
    key = f"{file.architecture}.expert_weights_norm"
    value = file.metadata.get(key, experts.gguf_renormalised)
    if not isinstance(value, bool):
        raise refusal(file.where, key, value, "true, false, or a file without it")
    return value


def _check_kind(file: GgufFile) -> None:
    """Refuse what is no model, or one of another architecture than those that run."""
    kind = file.metadata.get("general.type", "model")
    if kind == "adapter":
        raise InputError(f"{file.where} holds an adapter; valid: {MERGED}")
    if kind != "model":
        raise refusal(file.where, "general.type", kind, "model")
    if file.architecture not in ARCHITECTURES:
        valid = f"{', '.join(ARCHITECTURES)}, or the model in transformers' format"
        raise InputError(
            f"{file.where}: the architecture {file.architecture} cannot be run; valid: {valid}"
        )


def _numbers(file: GgufFile) -> dict[str, object]:
    """The sizes of a model by transformers' names, within their ranges; without those that are 0:
    none."""
    embedding = file.tensors.get(OUTER[EMBEDDING])
    if embedding is None or len(embedding.shape) != 2:
        raise InputError(
            f"{file.where} lacks tensor {OUTER[EMBEDDING]}, a matrix; valid: a whole model's file"
        )
    vocab_size, hidden_size = embedding.shape
    numbers: dict[str, object] = {"vocab_size": vocab_size, "hidden_size": hidden_size}
    family_keys = FAMILIES[_family_name(file)].gguf_keys
    defaults: dict[str, float] = {name: 0 for name in family_keys}
    defaults["head_dim"] = 0
    defaults["sliding_window"] = 0
    defaults["num_key_value_heads"] = file.number(NUMBER_KEYS["num_attention_heads"])
    left_out = {*numbers}
    if "layer_norm_eps" in family_keys:
        left_out.add("rms_norm_eps")
    if "intermediate_size" not in FAMILIES[_family_name(file)].defaults:
        left_out.add("intermediate_size")
    for name, key in file.number_keys().items():
        if "." in name or name in left_out:
            continue
        value = file.number(key, defaults.get(name))
        if name == "num_hidden_layers":
            value -= file.number(DRAFTING_LAYERS, 0)
        if value or name not in defaults:
            numbers[name] = value
    check_numbers({"head_dim": None, **numbers}, file.where, file.full_keys())
    heads = Fields(numbers, file.where).integer("num_attention_heads")
    return {"head_dim": hidden_size // heads, **numbers}


def _check_neutral(file: GgufFile, numbers: Mapping[str, object], family: Family) -> None:
    """Refuse what a file says besides that would make another model of it.

    Raises:
        InputError: naming the key, and what is valid.
    """
    reader = Fields(numbers, file.where)
    every = family.full_every
    layers = range(reader.integer("num_hidden_layers"))
    slides = [every == 0 or (layer + 1) % every != 0 for layer in layers]
    width = reader.integer("head_dim")
    valid: dict[str, Sequence[object]] = {
        name: values for name, values in NEUTRAL.items() if name not in family.gguf_keys.values()
    }
    valid["attention.sliding_window_pattern"] = (slides, every)
    if family.experts is not None and family.experts.sigmoid:
        valid["expert_gating_func"] = (SIGMOID,)
    valid["embedding_length"] = (reader.integer("hidden_size"),)
    valid["attention.value_length"] = (width,)
    if ROTATED_SHARE not in family.rope_fields:
        valid["rope.dimension_count"] = (width,)  # less: a part of each head is rotated
    for name, values in valid.items():
        key = f"{file.architecture}.{name}"
        value = file.metadata.get(key, values[0])
        if value not in values:
            raise refusal(file.where, key, value, f"{values[-1]}, or a file without it")
    sizes = ("hidden_size", "intermediate_size", *EXPERT_SIZES)
    for name in sizes:
        if name != "hidden_size" and name not in numbers:
            continue
        size = reader.integer(name)
        if size % 2:
            raise refusal(file.where, file.full_keys()[name], size, "an even number")
