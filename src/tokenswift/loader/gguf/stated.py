"""What a GGUF file says of its model in numbers, by the names of transformers, positions included.

What would make another model of the same numbers is refused, not passed over.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from torch import Tensor

from tokenswift.checks import shown
from tokenswift.kernels.formats.format import Stored
from tokenswift.loader.gguf.file import GgufFile
from tokenswift.loader.numbers import check_numbers, refusal
from tokenswift.types import InputError

FACTORS = "rope_freqs.weight"  # what Llama 3's rule divides each frequency by
#: Llama 3's rule: wavelengths between these parts of the first model's positions are scaled in part
LOW, HIGH = 1.0, 4.0
GREATEST = 3.4e38  # that float32 holds
#: what files call a config's numbers, behind the name of the architecture
CALLED = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "rope_parameters.rope_theta": "rope.freq_base",
    "rope_parameters.factor": "rope.scaling.factor",
    "rope_parameters.attention_factor": "rope.scaling.attn_factor",
    "rope_parameters.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope_parameters.beta_slow": "rope.scaling.yarn_beta_slow",
    "rope_parameters.original_max_position_embeddings": "rope.scaling.original_context_length",
}
#: keys that would make another model of the numbers above, and the values with which they do not
UNKNOWN = {
    "attention.scale": (0, 0.0),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0, 0.0),
    "attention.max_alibi_bias": (0, 0.0),
    "attn_logit_softcapping": (0, 0.0),
    "final_logit_softcapping": (0, 0.0),
    "logit_scale": (0, 0.0, 1.0),
    "embedding_scale": (0, 0.0, 1.0),
    "residual_scale": (0, 0.0, 1.0),
    "expert_count": (0,),
    "use_parallel_residual": (False,),
    "rope.scale_linear": (0, 0.0, 1.0),
}


def called(file: GgufFile) -> dict[str, str]:
    """What a file calls the numbers of a config."""
    return {name: f"{architecture(file)}.{theirs}" for name, theirs in CALLED.items()}


def number_of(file: GgufFile, name: str, default: Any = None) -> Any:
    """A number of the file's architecture.

    Raises:
        InputError: it is not there and there is no default.
    """
    found = file.metadata.get(f"{architecture(file)}.{name}", default)
    if isinstance(found, list):  # one for each layer: only where they are the same
        same = found and all(value == found[0] for value in found)
        found = found[0] if same else None
    if found is None or isinstance(found, str | bool | list):
        raise InputError(
            f"model file {file.path} lacks {architecture(file)}.{name}, a number; valid: a whole model's file"
        )
    return found


def short(value: float) -> float:
    """The shortest decimal number that is the same in float32: 1e-05 for 9.99999974e-06."""
    if not abs(value) < GREATEST:
        return float(value)
    return next(
        short
        for digits in range(1, 18)
        if struct.pack("f", short := float(f"{value:.{digits}g}")) == struct.pack("f", value)
    )


def architecture(file: GgufFile) -> str:
    """The file's own name of its model's kind."""
    return str(file.metadata.get("general.architecture"))


def check_meant(file: GgufFile, hidden: int, width: int) -> None:
    """Refuse what a file says besides that would make another model of it.

    Raises:
        InputError: naming the key, and what is valid.
    """
    kind, where = architecture(file), f"model file {file.path}"
    same = {
        "embedding_length": hidden,
        "attention.value_length": width,
        "rope.dimension_count": width,  # less: a part of each head is turned
    }
    for name, valid in same.items():
        if (found := file.metadata.get(f"{kind}.{name}", valid)) != valid or type(found) is not int:
            raise refusal(where, f"{kind}.{name}", found, str(valid))
    for name, valid in UNKNOWN.items():
        found = file.metadata.get(f"{kind}.{name}", valid[0])
        if found not in valid:
            raise refusal(where, f"{kind}.{name}", found, f"{valid[-1]}, or a file without it")


def positions(file: GgufFile, width: int, limit: int) -> dict[str, Any]:
    """``rope_parameters`` as transformers' configs have them."""
    made = _stated(file, limit)
    check_numbers({"rope_parameters": made}, f"model file {file.path}", called(file))
    if FACTORS in file.tensors:
        return {"rope_theta": made["rope_theta"]} | _llama3(file, width, made["rope_theta"])
    if "attention_factor" in made:
        made["attention_factor"] *= 0.1 * math.log(made["factor"]) + 1.0
        check_numbers({"rope_parameters": made}, f"model file {file.path}", called(file))
    return made


def _stated(file: GgufFile, limit: int) -> dict[str, Any]:
    """What a file says of positions by transformers' names, as yet unchecked."""
    said, kind = file.metadata, architecture(file)
    rule = said.get(f"{kind}.rope.scaling.type", "none")
    made: dict[str, Any] = {"rope_theta": short(number_of(file, "rope.freq_base", 10000.0))}
    if rule == "none" or FACTORS in file.tensors:
        return made | {"rope_type": "default"}
    made |= {"rope_type": rule, "factor": short(number_of(file, "rope.scaling.factor"))}
    if rule == "linear":
        return made
    if rule != "yarn":
        raise InputError(
            f"model file {file.path} has the RoPE scaling {shown(rule)}; valid: none, linear, yarn, or "
            f"{FACTORS}"
        )
    first = said.get(f"{kind}.rope.scaling.original_context_length") or limit
    made["original_max_position_embeddings"] = first
    for name, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if said.get(f"{kind}.rope.scaling.{theirs}") is not None:
            made[name] = short(number_of(file, f"rope.scaling.{theirs}"))
    if said.get(f"{kind}.rope.scaling.attn_factor") not in (None, 1.0):
        made["attention_factor"] = short(number_of(file, "rope.scaling.attn_factor"))
    return made


def _llama3(file: GgufFile, width: int, theta: float) -> dict[str, Any]:
    """Llama 3's rule from the factors that it gave.

    Raises:
        InputError: no such rule gives them.
    """
    refused = InputError(
        f"model file {file.path}: {FACTORS} does not follow Llama 3's rule; valid: factors that do"
    )
    if file.tensors[FACTORS].shape != (width // 2,):
        raise refused
    factors = _float(file[FACTORS]).double()
    if not bool(((factors >= 1) & (factors < 1e6)).all()):
        raise refused
    waves = 2 * math.pi * theta ** (torch.arange(0, width, 2).double() / width)
    factor = short(float(factors.max()))
    between = (factors > 1.001) & (factors < factor * 0.999)
    firsts: list[int] = []
    if bool(between.any()):
        smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        firsts.append(round(float((waves[between] * (LOW + smooth * (HIGH - LOW))).median())))
    elif bool((factors == 1).any()) and factor > 1:  # any number between the last kept and the first scaled
        least, most = float(waves[factors == 1].max()) * HIGH, float(waves[factors > 1].min()) * LOW
        firsts = [1 << bits for bits in range(3, 24) if least <= 1 << bits <= most]
    for first in firsts:
        smooth = ((first / waves - LOW) / (HIGH - LOW)).clamp(0, 1)
        if torch.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                "original_max_position_embeddings": first,
            }
    raise refused


def _float(weight: Tensor | Stored) -> Tensor:
    return weight.decode() if isinstance(weight, Stored) else weight.float()
