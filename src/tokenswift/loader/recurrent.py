"""Recurrent layers in configs and files: their sizes, weights, and families' own names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tokenswift.kv.states import Recurrence
from tokenswift.loader.family import CONVOLUTION, FULL, LINEAR, Family

#: weights of a short convolution, LFM2's
SHORT_IN = "conv.in_proj"
SHORT_TAPS = "conv.conv"
SHORT_OUT = "conv.out_proj"
#: weights of the gated delta rule, Qwen3.5's
DELTA_INPUTS = "linear_attn.in_proj_qkv"
DELTA_GATE = "linear_attn.in_proj_z"
DELTA_STRENGTH = "linear_attn.in_proj_b"
DELTA_DECAY = "linear_attn.in_proj_a"
DELTA_TAPS = "linear_attn.conv1d"
DELTA_OUT = "linear_attn.out_proj"
DELTA_NORM = "linear_attn.norm"
DELTA_RATE = "linear_attn.A_log"
DELTA_SHIFT = "linear_attn.dt_bias"
#: the first matrix of a recurrent layer, by which models are told apart
FIRST_MATRICES = (f"{SHORT_IN}.weight", f"{DELTA_OUT}.weight")


def recurrence_of(config: object, family: Family, hidden: int) -> Recurrence | None:
    """Sizes of a model's recurrent layers; None: its family has none."""

    def number(name: str) -> int:
        return int(getattr(config, name))

    if family.recurrent == CONVOLUTION:
        return Recurrence(taps=number("conv_L_cache"), channels=hidden)
    if family.recurrent != LINEAR:
        return None
    keys = number("linear_num_key_heads") * number("linear_key_head_dim")
    values = number("linear_num_value_heads") * number("linear_value_head_dim")
    return Recurrence(
        taps=number("linear_conv_kernel_dim"),
        channels=2 * keys + values,
        key_heads=number("linear_num_key_heads"),
        value_heads=number("linear_num_value_heads"),
        key_width=number("linear_key_head_dim"),
        value_width=number("linear_value_head_dim"),
        tiled=bool(getattr(config, "linear_heads_tiled", False)),
    )


def recurrent_shapes(recurrence: Recurrence, hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that a recurrent layer has in the place of attention."""
    taps = (recurrence.channels, 1, recurrence.taps)
    heads = recurrence.value_heads
    if not heads:
        return {
            f"{SHORT_IN}.weight": (3 * hidden, hidden),
            f"{SHORT_TAPS}.weight": taps,
            f"{SHORT_OUT}.weight": (hidden, hidden),
        }
    return {
        f"{DELTA_INPUTS}.weight": (recurrence.channels, hidden),
        f"{DELTA_GATE}.weight": (recurrence.outputs, hidden),
        f"{DELTA_STRENGTH}.weight": (heads, hidden),
        f"{DELTA_DECAY}.weight": (heads, hidden),
        f"{DELTA_TAPS}.weight": taps,
        f"{DELTA_OUT}.weight": (hidden, recurrence.outputs),
        f"{DELTA_NORM}.weight": (recurrence.value_width,),
        DELTA_RATE: (heads,),
        DELTA_SHIFT: (heads,),
    }


def layer_kinds(fields: Mapping[str, object], family: Family, layers: int) -> list[str] | None:
    """Which layers are recurrent, where a config says it otherwise than layer by layer; None: it
    does not."""
    attending = fields.get("full_attn_idxs")
    if isinstance(attending, Sequence):
        return [FULL if layer in attending else family.recurrent for layer in range(layers)]
    every = fields.get("full_attention_interval", 4)
    if family.recurrent == LINEAR and isinstance(every, int) and every > 0:
        return [FULL if (layer + 1) % every == 0 else family.recurrent for layer in range(layers)]
    return None


def mlp_width(config: object, stated: int) -> int:
    """The width of an MLP, for which LFM2's configs may state another number."""
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return stated
    width = int(2 * stated / 3)
    multiplier = getattr(config, "block_ffn_dim_multiplier", None)
    if multiplier is None:
        return width
    multiple = int(getattr(config, "block_multiple_of", 256))
    return -(-int(multiplier * width) // multiple) * multiple


def in_groups(name: str, weight: Tensor, recurrence: Recurrence) -> Tensor:
    """A weight of a layer whose heads of values take those of keys in turns (`Recurrence.tiled`),
    with its heads in groups, as checkpoints and transformers have them; others as they are."""
    before = 2 * recurrence.keys

    def grouped(part: Tensor, width: int) -> Tensor:
        turns = part.unflatten(0, (-1, recurrence.key_heads, width))
        return turns.transpose(0, 1).flatten(0, 2)

    if DELTA_INPUTS in name or DELTA_TAPS in name:
        return torch.cat([weight[:before], grouped(weight[before:], recurrence.value_width)])
    if DELTA_GATE in name:
        return grouped(weight, recurrence.value_width)
    if DELTA_OUT in name:
        return grouped(weight.T, recurrence.value_width).T
    if any(part in name for part in (DELTA_STRENGTH, DELTA_DECAY, DELTA_RATE, DELTA_SHIFT)):
        return grouped(weight, 1)
    return weight


# ---- names ---------------------------------------------------------------------------------------


def _replaced(name: str, parts: Mapping[str, str]) -> str:
    for old, new in parts.items():
        name = re.sub(rf"(?<![^.]){re.escape(old)}(?![^.])", new, name)
    return name


def our_name(name: str, family: Family) -> str:
    """What a weight is called here, by its name in the family's checkpoints."""
    return _replaced(name, family.names) if family.names else name


def their_name(name: str, family: Family) -> str:
    """A weight's name in the family's checkpoints."""
    return _replaced(name, {ours: theirs for theirs, ours in family.names.items()})


def renamed(named: Iterator[tuple[str, Tensor]], family: Family) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a model of transformers by their names here."""
    for name, tensor in named:
        yield our_name(name, family), tensor
