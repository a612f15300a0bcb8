"""Sizes of a model: from its config.json or the header of its GGUF file alone, or once it is loaded."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokenswift.kernels.formats.registry import BY_CODE, FORMATS
from tokenswift.kernels.weights import STORED_IN
from tokenswift.loader._hf import making_models
from tokenswift.loader.checkpoint import EMBEDDING, FAMILIES, HEAD, head_width
from tokenswift.loader.find import header_of
from tokenswift.loader.gguf import gguf_in
from tokenswift.loader.gguf.file import GgufFile
from tokenswift.loader.gguf.model import (
    ARCHITECTURES,
    FACTORS,
    architecture,
    config_of,
    gguf_name,
    is_native,
    own_dtype,
)
from tokenswift.loader.hub import line_of
from tokenswift.loader.load import load_config
from tokenswift.loader.rope import RopeScaling, check_rope, context_limit, scaled_config
from tokenswift.roofline.passes import Machine, Sizes
from tokenswift.types import InputError

#: what configs call the number of experts of a layer
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def sizes_of(
    name: str,
    dtype: str = "auto",
    weights: str = "stored",
    whole: bool = False,
    scaling: RopeScaling | None = None,
    machine: Machine | None = None,
    kv_cache_dtype: str = "auto",
) -> Sizes:
    """The sizes of a model by its name; nothing of its weights is read or fetched.

    Args:
        name, dtype, weights, kv_cache_dtype: as `LLM` has them.
        whole: products take activations in int8, whatever the rest is in.
        scaling: a wish for YaRN.
        machine: that it runs on; None: the CPU's kernels, which keep all formats.
    Raises:
        InputError: there is no such model, its config does not say enough, or which weights a pass reads
            depends on the text (mixtures of experts).
    """
    keeps, on_cpu = (_kept, True) if machine is None else (machine.keeps, machine.device == "cpu")
    asked, dtype = dtype, "float32" if dtype == "int8" else dtype
    with header_of(name) as (source, local):
        path = gguf_in(Path(source))
        if path is None:
            config = load_config(name, source, local)
            if weights != "stored" and config.model_type not in FAMILIES:
                raise InputError(
                    f"weights is {weights!r}, but model {name} runs through transformers' own model; "
                    "valid: stored"
                )
            own, stored = _own_dtype(name, config) if dtype == "auto" else dtype, {"": _weights(name, config)}
        else:
            file = _header(path, name)
            config, own, stored = (
                config_of(file),
                own_dtype(file, "cpu" if machine is None else machine.device) if dtype == "auto" else dtype,
                _stored(file),
            )
    found: Counter[str] = Counter()
    for kind, count in stored.items():
        kind = kind if weights == "stored" else weights
        found[kind if keeps(kind, own) else own] += count
    width, quantized = head_width(config), all(kind in FORMATS for kind in found)
    if (whole or asked == "int8") and not (quantized and on_cpu):
        raise InputError(
            "dtype is 'int8', but not all of the model's weights are quantized, or it is for a card; valid: "
            "auto, float32, bfloat16, or int8 on a CPU with weights q8_0, q4_1 or q4_0, or with a GGUF file "
            "of such"
        )
    if asked == "int8" or (asked == "auto" and not whole and quantized and on_cpu and width % 4 == 0):
        whole, kv_cache_dtype = True, "int8" if kv_cache_dtype == "auto" else kv_cache_dtype
    check_rope(config)
    return Sizes(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        width=width,
        windows=_windows(config),
        weights=dict(found),
        dtype=own,
        whole=whole,
        limit=context_limit(scaled_config(config, scaling)),
        keys="" if kv_cache_dtype in ("auto", own) else kv_cache_dtype,
        inner=config.intermediate_size if config.model_type in FAMILIES else 0,
    )


def config_at(name: str) -> Any:
    """A model's config, from its config.json or the header of its GGUF file.

    Raises:
        InputError: there is no such model, or its header makes none.
    """
    with header_of(name) as (source, local):
        path = gguf_in(Path(source))
        return load_config(name, source, local) if path is None else config_of(_header(path, name))


def _header(path: Path, name: str) -> GgufFile:
    """The header of a model's GGUF file, which may be cut off behind it."""
    file = GgufFile(path, whole=False)
    if not is_native(file):
        raise InputError(
            f"model {name}: the architecture is {architecture(file)!r}, or has parts that are not "
            f"known here; valid: {', '.join(ARCHITECTURES)}, or a transformers checkpoint"
        )
    factors = file.tensors.get(FACTORS)
    if factors is not None and factors.start + factors.nbytes > path.stat().st_size:
        del file.tensors[FACTORS]  # cut off: positions are not what sizes depend on
    return file


def sizes_of_target(target: Any) -> Sizes:
    """The sizes of a loaded model (a `models.base.BaseTarget`)."""
    dtype = _name(target.dtype)
    found: Counter[str] = Counter()
    if target.layout is None:
        found[dtype] = target.weight_bytes // target.dtype.itemsize
    else:
        for weight in (target.head, *(w for layer in target.body.weights for w in layer.packed())):
            for part in weight.parts:
                kind = _name(part.data.dtype) if part.format is None else part.format.name
                found[kind] += part.rows * weight.columns
    return Sizes(
        hidden=target.hidden_size,
        heads=target.config.num_attention_heads,
        kv_heads=target.kv_heads,
        width=target.head_dim,
        windows=tuple(window or 0 for window in target.windows),
        weights=dict(found),
        dtype=dtype,
        whole=target.whole,
        limit=target.rotary.limit,
        keys="" if target.keys == target.dtype else _name(target.keys),
        inner=0 if target.layout is None else target.layout.intermediate_size,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kept(kind: str, dtype: str) -> bool:
    """What the CPU's kernels keep in memory as it is stored (`kernels.weights.Packed`)."""
    low = kind in FORMATS and getattr(torch, dtype) in STORED_IN
    return low or (kind, dtype) == ("bfloat16", "float32")


def _own_dtype(name: str, config: Any) -> str:
    """What ``dtype="auto"`` means for a checkpoint."""
    if not isinstance(config.dtype, torch.dtype):
        raise InputError(
            f"dtype is 'auto', but the config.json of {name} names none; valid: float32, bfloat16"
        )
    return _name(config.dtype)


def _windows(config: Any) -> tuple[int, ...]:
    """Newest keys that a token sees, by layer; 0 is all."""
    window, count = getattr(config, "sliding_window", None) or 0, config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * count
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _weights(name: str, config: Any) -> int:
    """Weights that a row is multiplied with: those of all linear layers of transformers' model, made without
    memory."""
    from transformers import AutoModelForCausalLM

    try:
        with making_models(), torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a family's own code
        raise InputError(f"model {name}: its config.json makes no model ({line_of(error)})") from error
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    embedded = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding))
    matrices = sum(part.numel() for part in model.parameters() if part.ndim > 1)
    if matrices > linear + embedded or any(getattr(config, experts, None) for experts in EXPERTS):
        raise InputError(
            f"model {name} (type {config.model_type}) has weights that a pass reads in part; valid: models "
            "without experts"
        )
    return linear


def _stored(file: GgufFile) -> Counter[str]:
    """Weights of a GGUF file that a row is multiplied with, by format; "" for what becomes floats."""
    head = gguf_name(HEAD)
    found: Counter[str] = Counter()
    for name, entry in file.tensors.items():
        if len(entry.shape) == 2 and (name != gguf_name(EMBEDDING) or head not in file.tensors):
            form = BY_CODE.get(entry.code)
            found["" if form is None else form.name] += math.prod(entry.shape)
    return found
