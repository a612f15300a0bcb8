"""What a GGUF file says of a config of transformers, and whether `gguf.model` reads the same model of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenswift.loader.checkpoint import HEAD, Layout, head_width
from tokenswift.loader.gguf.file import ARRAY, TEXT, Entry
from tokenswift.loader.gguf.model import FACTORS, config_of, gguf_name, layout_of
from tokenswift.loader.rope import rotary_of_config
from tokenswift.types import InputError

F32, U32, BOOL = 6, 4, 7  # types of values


def type_of(value: Any) -> int:
    """The type of a value as files number them."""
    kinds = {list: ARRAY, bool: BOOL, int: U32, float: F32, str: TEXT}
    return kinds[type(value)]


def sizes_of(config: Any, kind: str, layout: Layout) -> dict[str, tuple[int, Any]]:
    """What a file says of a config."""
    rope = config.rope_parameters
    said: dict[str, Any] = {
        "vocab_size": layout.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": layout.hidden_size,
        "block_count": layout.num_hidden_layers,
        "feed_forward_length": layout.intermediate_size,
        "attention.head_count": layout.num_attention_heads,
        "attention.head_count_kv": layout.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": layout.eps,
        "attention.key_length": layout.head_dim,
        "attention.value_length": layout.head_dim,
        "rope.dimension_count": layout.head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if layout.windows[0]:
        said["attention.sliding_window"] = layout.windows[0]
    factor = float(rope.get("factor") or 1.0)
    if rope["rope_type"] in ("linear", "yarn"):
        said |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": factor}
    if rope["rope_type"] == "yarn":
        first = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        said["rope.scaling.original_context_length"] = first
        for name in ("beta_fast", "beta_slow"):
            if rope.get(name) is not None:
                said[f"rope.scaling.yarn_{name}"] = float(rope[name])
        if rope.get("attention_factor") is not None:
            said["rope.scaling.attn_factor"] = rope["attention_factor"] / (0.1 * math.log(factor) + 1.0)
    return {f"{kind}.{key}": (type_of(value), value) for key, value in said.items()}


def factors_of(config: Any) -> Tensor | None:
    """What Llama 3's rule divides each frequency by; None by another rule."""
    rope, width = config.rope_parameters, head_width(config)
    if rope["rope_type"] != "llama3":
        return None
    waves = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, width, 2).double() / width)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((rope["original_max_position_embeddings"] / waves - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).float()


class _Ahead:
    """What is read of a GGUF file that is not there yet."""

    def __init__(
        self, name: str, metadata: dict[str, Any], tensors: dict[str, Entry], factors: Tensor | None
    ) -> None:
        self.path, self.metadata, self.tensors = Path(name), metadata, tensors
        self._factors = factors

    def __getitem__(self, name: str) -> Tensor | None:
        return self._factors

    def foreign(self) -> list[str]:
        """None of its tensors' types is unknown."""
        return []


def check_back(
    name: str,
    kind: str,
    fields: dict[str, tuple[int, Any]],
    factors: Tensor | None,
    config: Any,
    layout: Layout,
    names: Iterable[str],
) -> None:
    """See that what is read of the file gives the layout and the positions of the model."""
    metadata = {"general.architecture": kind, **{key: value for key, (_, value) in fields.items()}}
    tensors = {gguf_name(n): Entry(tuple(layout.shapes().get(n, (1,))), 0, 0, 0) for n in names}
    if layout.tied:
        tensors.pop(gguf_name(HEAD), None)
    if factors is not None:
        tensors[FACTORS] = Entry(tuple(factors.shape), 0, 0, 0)
    file: Any = _Ahead(name, metadata, tensors, factors)
    wrong = "its sizes"
    try:
        found = config_of(file)
        back = layout_of(file, found)
        same = replace(back, model_type=layout.model_type, eps=layout.eps) == layout
        if same and math.isclose(back.eps, layout.eps, rel_tol=1e-7):  # a file has it in float32
            wrong = "its positions"
            ours, theirs = rotary_of_config(found), rotary_of_config(config)
            alike = torch.allclose(ours.single(), theirs.single(), rtol=1e-6, atol=0)
            if (
                alike
                and math.isclose(ours.scaling, theirs.scaling, rel_tol=1e-6)
                and ours.limit == theirs.limit
            ):
                return
    except InputError:
        wrong = "its positions"
    rope = config.rope_parameters
    raise InputError(
        f"model {name}: {wrong} would not be read back alike from a GGUF file (rope_type "
        f"{rope['rope_type']}); valid: positions that are default, linear, yarn, or by the rule of Llama 3"
    )
