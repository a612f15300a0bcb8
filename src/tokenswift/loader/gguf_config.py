"""The config of a model, from its GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from tokenswift.loader.config import completed
from tokenswift.loader.families import FAMILIES, FULL, SLIDING, Family
from tokenswift.loader.find import MERGED
from tokenswift.loader.gguf import GgufFile, short
from tokenswift.loader.gguf_names import ARCHITECTURES, BIASES, CALLED, FACTORS, OUTER
from tokenswift.loader.gguf_tokenizer import words_of
from tokenswift.loader.layout import EMBEDDING, HEAD
from tokenswift.loader.schema import check_numbers, refusal
from tokenswift.loader.tensors import DENSE
from tokenswift.loader.weights import unstored
from tokenswift.types import InputError

#: Llama 3's rule: wavelengths between these parts of the first model's positions are scaled in part
LOW, HIGH, TRAINED = 1.0, 4.0, 8192
#: parameters of YaRN that may be left out
YARN = ("beta_fast", "beta_slow", "original_max_position_embeddings")
#: keys that would make another model of the numbers above, and the values with which they do not
UNKNOWN: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
}
UNKNOWN |= dict.fromkeys(
    ("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias"), (0,)
)
UNKNOWN |= dict.fromkeys(
    ("attn_logit_softcapping", "final_logit_softcapping", "expert_count"), (0,)
)
UNKNOWN |= dict.fromkeys(
    ("logit_scale", "embedding_scale", "residual_scale", "rope.scale_linear"), (0, 1)
)


def positions(file: GgufFile, width: int) -> dict[str, Any]:
    """``rope_parameters`` as transformers' configs have them; of YaRN what the file says.

    Raises:
        InputError: the file scales positions in a way that is not known here.
    """
    key = f"{file.architecture}.rope.scaling"
    rule = "none" if FACTORS in file.tensors else file.metadata.get(f"{key}.type", "none")
    if rule not in ("none", "linear", "yarn"):
        raise refusal(file.where, f"{key}.type", rule, f"none, linear, yarn, or tensor {FACTORS}")
    made: dict[str, Any] = {"rope_theta": file.number("rope.freq_base", 10000.0)}
    made["rope_type"] = "default" if rule == "none" else rule
    if rule != "none":
        made["factor"] = file.number("rope.scaling.factor")
    if rule == "yarn":
        given = {name: file.number(CALLED[f"rope_parameters.{name}"], 0) for name in YARN}
        made |= {name: value for name, value in given.items() if value}
    if (scale := file.number("rope.scaling.attn_factor", 1)) not in (0, 1):
        if rule != "yarn" or file.architecture != "olmo2":  # elsewhere it means something else
            raise refusal(file.where, f"{key}.attn_factor", scale, "1, or a file without it")
        made["attention_factor"] = scale
    check_numbers({"rope_parameters": made}, file.where, file.called())
    return made | (_llama3(file, width, made["rope_theta"]) if FACTORS in file.tensors else {})


def _llama3(file: GgufFile, width: int, theta: float) -> dict[str, Any]:
    """Llama 3's rule from the factors that it gave.

    Raises:
        InputError: no such rule gives them.
    """
    factors = unstored(file[FACTORS], torch.float32).double()
    if factors.shape == (width // 2,) and bool(((factors >= 1) & (factors < 1e6)).all()):
        factor = short(float(factors.max()))
        waves = 2 * math.pi * theta ** (torch.arange(0, width, 2).double() / width)
        smooth = ((TRAINED / waves - LOW) / (HIGH - LOW)).clamp(0, 1)
        if torch.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-4, atol=0):
            made = {"rope_type": "llama3", "factor": factor, "low_freq_factor": LOW}
            return made | {"high_freq_factor": HIGH, "original_max_position_embeddings": TRAINED}
    raise InputError(
        f"{file.where}: {FACTORS} does not follow Llama 3's rule; valid: factors that do"
    )


def own_dtype(file: GgufFile, place: str = "cpu") -> str:
    """What ``dtype="auto"`` means for a file: the type of its matrices where they are float
    numbers, bfloat16 where a card multiplies with quantized weights, else float32."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if "BF16" in kinds or (place != "cpu" and kinds - DENSE.keys()):
        return "bfloat16"
    return "float16" if kinds == {"F16"} else "float32"


def config_of(file: GgufFile) -> SimpleNamespace:
    """The config of a native family's model.

    Raises:
        InputError: the file holds an adapter, is of another architecture, lacks a number, or scales
            positions in a way that is not known here.
    """
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
    numbers, said = _numbers(file), file.metadata
    hidden, width, layers = (
        numbers[name] for name in ("hidden_size", "head_dim", "num_hidden_layers")
    )
    kind = ARCHITECTURES[file.architecture]
    kind = (
        {"llama": "mistral", "olmo2": "olmo3"}.get(kind, kind)
        if "sliding_window" in numbers
        else kind
    )
    family = FAMILIES[kind]
    _check_meant(file, numbers, family)
    ends = words_of(said, file.path, numbers["vocab_size"]).ends()
    widest = hidden // numbers["num_attention_heads"]
    usual = {
        "query_pre_attn_scalar": widest if family.layers_scaled_by_width == layers else width,
        "attention_multiplier": width**-0.5,
        "tie_word_embeddings": OUTER[HEAD] not in file.tensors,
        "bos_token_id": said.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        **{name: f"blk.0.{part}.bias" in file.tensors for name, part in BIASES.items()},
    }
    own = {
        name: value
        for name, value in (usual | numbers).items()
        if name in {*family.defaults, "head_dim"}
    }
    rope = positions(file, width)
    if len(family.rope_bases) > 1:  # a file says at most the base of layers with windows
        base = rope["rope_theta"] if len(set(family.rope_bases)) == 1 else family.rope_bases[1]
        local = {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", base)}
        check_numbers({"rope_parameters": local}, file.where, file.called())
        rope = {FULL: rope, SLIDING: local}
    made = completed(kind, own | {"rope_parameters": rope, "dtype": own_dtype(file)})
    if made is None:  # of Llama, a width that its heads do not divide
        raise InputError(
            f"{file.where}: its sizes are not those of a {kind} model; valid: a sound file"
        )
    return made


def _numbers(file: GgufFile) -> dict[str, Any]:
    """The sizes of a model by transformers' names, within their ranges; without those that are 0:
    none."""
    embedding = file.tensors.get(OUTER[EMBEDDING])
    if embedding is None or len(embedding.shape) != 2:
        raise InputError(
            f"{file.where} lacks tensor {OUTER[EMBEDDING]}, a matrix; valid: a whole model's file"
        )
    own = FAMILIES[ARCHITECTURES[file.architecture]].gguf_keys
    usual: dict[str, Any] = dict.fromkeys((*own, "head_dim", "sliding_window"), 0)
    usual["num_key_value_heads"] = file.number(CALLED["num_attention_heads"])
    numbers: dict[str, Any] = dict(zip(("vocab_size", "hidden_size"), embedding.shape, strict=True))
    left = {*numbers, *({"rms_norm_eps"} if "layer_norm_eps" in own else ())}
    for name, key in file.keys().items():
        if "." not in name and name not in left:
            value = file.number(key, usual.get(name))
            if value or name not in usual:
                numbers[name] = value
    check_numbers({"head_dim": None} | numbers, file.where, file.called())
    return {"head_dim": numbers["hidden_size"] // numbers["num_attention_heads"]} | numbers


def _check_meant(file: GgufFile, numbers: Mapping[str, Any], family: Family) -> None:
    """Refuse what a file says besides that would make another model of it.

    Raises:
        InputError: naming the key, and what is valid.
    """
    every, width = family.full_every, numbers["head_dim"]
    slides = [every == 0 or (n + 1) % every != 0 for n in range(numbers["num_hidden_layers"])]
    valid = {
        **{name: one for name, one in UNKNOWN.items() if name not in family.gguf_keys.values()},
        "attention.sliding_window_pattern": (slides, every),
        "embedding_length": (numbers["hidden_size"],),
        "attention.value_length": (width,),
        "rope.dimension_count": (width,),  # less: a part of each head is turned
    }
    for name, values in valid.items():
        key = f"{file.architecture}.{name}"
        if (found := file.metadata.get(key, values[0])) not in values:
            raise refusal(file.where, key, found, f"{values[-1]}, or a file without it")
    for name in ("hidden_size", "intermediate_size"):
        if numbers[name] % 2:
            raise refusal(file.where, file.called()[name], numbers[name], "an even number")
