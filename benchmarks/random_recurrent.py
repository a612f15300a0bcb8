"""GGUF files of random weights in the shapes of models with recurrent layers, in Q4_K: for speeds
alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf

from benchmarks.random_gguf import F32, RandomTensor, write_random_file

LINEAR = "qwen35"
#: of every model: the width of heads of the delta rule, and taps of its convolution
HEAD = 128
TAPS = 4
#: taps of LFM2's convolution
SHORT_TAPS = 3


@dataclass(frozen=True, slots=True)
class RecurrentSizes:
    """The sizes of a model, whose embedding is its head, too.

    Attributes:
        architecture: what the file calls it.
        layers, hidden, inner, heads, kv_heads, width: L, D, width of the MLP, H, K and d.
        vocabulary: V.
        attending: layers with attention; the others are recurrent.
        key_heads, value_heads: of the delta rule; 0 of short convolutions.
    """

    architecture: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    width: int
    vocabulary: int
    attending: tuple[int, ...]
    key_heads: int = 0
    value_heads: int = 0


def _qwen35(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, value_heads: int
) -> RecurrentSizes:
    """A size of Qwen3.5, whose every fourth layer attends."""
    return RecurrentSizes(
        architecture=LINEAR,
        layers=layers,
        hidden=hidden,
        inner=inner,
        heads=heads,
        kv_heads=kv_heads,
        width=256,
        vocabulary=248_320,
        attending=tuple(range(3, layers, 4)),
        key_heads=16,
        value_heads=value_heads,
    )


SHAPES = {
    "qwen3.5-0.8b": _qwen35(24, 1024, 3584, heads=8, kv_heads=2, value_heads=16),
    "qwen3.5-2b": _qwen35(24, 2048, 6144, heads=8, kv_heads=2, value_heads=16),
    "qwen3.5-4b": _qwen35(32, 2560, 9216, heads=16, kv_heads=4, value_heads=32),
    "lfm2-1.2b": RecurrentSizes(
        architecture="lfm2",
        layers=16,
        hidden=2048,
        inner=8192,
        heads=32,
        kv_heads=8,
        width=64,
        vocabulary=65_536,
        attending=(2, 5, 8, 10, 12, 14),
    ),
}


def write_random(path: Path, sizes: RecurrentSizes) -> None:
    """Write a file, one tensor in memory at a time."""
    write_random_file(
        path,
        sizes.architecture,
        partial(_add_numbers, sizes),
        sizes.vocabulary,
        list(_tensors(sizes)),
    )


def _add_numbers(sizes: RecurrentSizes, writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(65_536)
    writer.add_embedding_length(sizes.hidden)
    writer.add_block_count(sizes.layers)
    writer.add_feed_forward_length(sizes.inner)
    writer.add_head_count(sizes.heads)
    writer.add_key_length(sizes.width)
    writer.add_value_length(sizes.width)
    writer.add_layer_norm_rms_eps(1e-6)
    if sizes.architecture != LINEAR:
        heads = [sizes.kv_heads * (layer in sizes.attending) for layer in range(sizes.layers)]
        writer.add_head_count_kv(heads)
        writer.add_rope_dimension_count(sizes.width)
        writer.add_rope_freq_base(1e6)
        writer.add_shortconv_l_cache(SHORT_TAPS)
        return
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_rope_dimension_count(sizes.width // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_rope_freq_base(1e7)
    writer.add_ssm_conv_kernel(TAPS)
    writer.add_ssm_state_size(HEAD)
    writer.add_ssm_group_count(sizes.key_heads)
    writer.add_ssm_time_step_rank(sizes.value_heads)
    writer.add_ssm_inner_size(sizes.value_heads * HEAD)
    writer.add_full_attention_interval(sizes.attending[0] + 1)


def _tensors(sizes: RecurrentSizes) -> Iterator[RandomTensor]:
    """Names, shapes and types, in the order of the file."""
    is_linear = sizes.architecture == LINEAR
    hidden = sizes.hidden
    yield RandomTensor("token_embd.weight", (sizes.vocabulary, hidden))
    yield RandomTensor(
        "output_norm.weight" if is_linear else "token_embd_norm.weight", (hidden,), F32
    )
    for layer in range(sizes.layers):
        prefix = f"blk.{layer}"
        yield RandomTensor(f"{prefix}.attn_norm.weight", (hidden,), F32)
        mlp_norm = "post_attention_norm" if is_linear else "ffn_norm"
        yield RandomTensor(f"{prefix}.{mlp_norm}.weight", (hidden,), F32)
        if layer in sizes.attending:
            yield from _attention(prefix, sizes)
        elif is_linear:
            yield from _delta(prefix, sizes)
        else:
            yield RandomTensor(f"{prefix}.shortconv.conv.weight", (hidden, SHORT_TAPS), F32)
            yield RandomTensor(f"{prefix}.shortconv.in_proj.weight", (3 * hidden, hidden))
            yield RandomTensor(f"{prefix}.shortconv.out_proj.weight", (hidden, hidden))
        yield RandomTensor(f"{prefix}.ffn_gate.weight", (sizes.inner, hidden))
        yield RandomTensor(f"{prefix}.ffn_up.weight", (sizes.inner, hidden))
        yield RandomTensor(f"{prefix}.ffn_down.weight", (hidden, sizes.inner))


def _attention(prefix: str, sizes: RecurrentSizes) -> Iterator[RandomTensor]:
    """Qwen3.5's queries stand beside gates of the output."""
    hidden = sizes.hidden
    queries = sizes.heads * sizes.width
    keys = sizes.kv_heads * sizes.width
    gated = 2 if sizes.architecture == LINEAR else 1
    yield RandomTensor(f"{prefix}.attn_q.weight", (gated * queries, hidden))
    yield RandomTensor(f"{prefix}.attn_k.weight", (keys, hidden))
    yield RandomTensor(f"{prefix}.attn_v.weight", (keys, hidden))
    yield RandomTensor(f"{prefix}.attn_output.weight", (hidden, queries))
    yield RandomTensor(f"{prefix}.attn_q_norm.weight", (sizes.width,), F32)
    yield RandomTensor(f"{prefix}.attn_k_norm.weight", (sizes.width,), F32)


def _delta(prefix: str, sizes: RecurrentSizes) -> Iterator[RandomTensor]:
    hidden = sizes.hidden
    values = sizes.value_heads * HEAD
    channels = 2 * sizes.key_heads * HEAD + values
    yield RandomTensor(f"{prefix}.attn_qkv.weight", (channels, hidden))
    yield RandomTensor(f"{prefix}.attn_gate.weight", (values, hidden))
    yield RandomTensor(f"{prefix}.ssm_out.weight", (hidden, values))
    yield RandomTensor(f"{prefix}.ssm_beta.weight", (sizes.value_heads, hidden), F32)
    yield RandomTensor(f"{prefix}.ssm_alpha.weight", (sizes.value_heads, hidden), F32)
    yield RandomTensor(f"{prefix}.ssm_conv1d.weight", (channels, TAPS), F32)
    yield RandomTensor(f"{prefix}.ssm_norm.weight", (HEAD,), F32)
    yield RandomTensor(f"{prefix}.ssm_a", (sizes.value_heads,), F32)
    yield RandomTensor(f"{prefix}.ssm_dt.bias", (sizes.value_heads,), F32)
