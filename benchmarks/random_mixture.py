"""GGUF files of random weights in the shapes of mixtures of experts, in Q4_K: for speeds alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf

from benchmarks.random_gguf import F32, RandomTensor, write_random_file


@dataclass(frozen=True, slots=True)
class MixtureSizes:
    """The sizes of a mixture, by the names of GGUF's keys.

    Attributes:
        architecture: what the file calls it.
        layers, hidden, heads, kv_heads, width: L, D, H, K and d.
        experts, used, inner: experts, how many a row goes through, and their width.
        vocabulary: V.
        norms: widths of the norms of queries and keys, by their tensors.
        multipliers: further numbers.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    width: int
    experts: int
    used: int
    inner: int
    vocabulary: int
    norms: tuple[tuple[str, int], ...] = ()
    multipliers: tuple[tuple[str, float], ...] = ()


SHAPES = {
    # 12 of the 48 layers of Qwen3-30B-A3B
    "qwen3-30b-a3b-12": MixtureSizes(
        architecture="qwen3moe",
        layers=12,
        hidden=2048,
        heads=32,
        kv_heads=4,
        width=128,
        experts=128,
        used=8,
        inner=768,
        vocabulary=151_936,
        norms=(("attn_q_norm", 128), ("attn_k_norm", 128)),
    ),
    "olmoe-7b-a1b": MixtureSizes(
        architecture="olmoe",
        layers=16,
        hidden=2048,
        heads=16,
        kv_heads=16,
        width=128,
        experts=64,
        used=8,
        inner=1024,
        vocabulary=50_304,
        norms=(("attn_q_norm", 2048), ("attn_k_norm", 2048)),
    ),
    "granite-3b-a800m": MixtureSizes(
        architecture="granitemoe",
        layers=32,
        hidden=1536,
        heads=24,
        kv_heads=8,
        width=64,
        experts=40,
        used=8,
        inner=512,
        vocabulary=49_152,
        multipliers=(
            ("embedding_scale", 12.0),
            ("residual_scale", 0.22),
            ("attention.scale", 0.015625),
            ("logit_scale", 6.0),
        ),
    ),
    # for a try
    "tiny": MixtureSizes(
        architecture="qwen3moe",
        layers=2,
        hidden=256,
        heads=4,
        kv_heads=2,
        width=64,
        experts=8,
        used=2,
        inner=256,
        vocabulary=1024,
        norms=(("attn_q_norm", 64), ("attn_k_norm", 64)),
    ),
}


def write_random(path: Path, sizes: MixtureSizes) -> None:
    """Write a file, one tensor in memory at a time."""
    write_random_file(
        path,
        sizes.architecture,
        partial(_add_numbers, sizes),
        sizes.vocabulary,
        list(_tensors(sizes)),
    )


def _add_numbers(sizes: MixtureSizes, writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(32_768)
    writer.add_embedding_length(sizes.hidden)
    writer.add_block_count(sizes.layers)
    writer.add_feed_forward_length(sizes.inner)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_key_length(sizes.width)
    writer.add_value_length(sizes.width)
    writer.add_rope_dimension_count(sizes.width)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(sizes.experts)
    writer.add_expert_used_count(sizes.used)
    writer.add_expert_feed_forward_length(sizes.inner)
    for key, value in sizes.multipliers:
        writer.add_float32(f"{sizes.architecture}.{key}", value)


def _tensors(sizes: MixtureSizes) -> Iterator[RandomTensor]:
    """Names, shapes and types, in the order of the file."""
    hidden = sizes.hidden
    queries = sizes.heads * sizes.width
    keys = sizes.kv_heads * sizes.width
    yield RandomTensor("token_embd.weight", (sizes.vocabulary, hidden))
    yield RandomTensor("output.weight", (sizes.vocabulary, hidden))
    yield RandomTensor("output_norm.weight", (hidden,), F32)
    for layer in range(sizes.layers):
        prefix = f"blk.{layer}"
        yield RandomTensor(f"{prefix}.attn_norm.weight", (hidden,), F32)
        yield RandomTensor(f"{prefix}.ffn_norm.weight", (hidden,), F32)
        for name, width in sizes.norms:
            yield RandomTensor(f"{prefix}.{name}.weight", (width,), F32)
        yield RandomTensor(f"{prefix}.attn_q.weight", (queries, hidden))
        yield RandomTensor(f"{prefix}.attn_k.weight", (keys, hidden))
        yield RandomTensor(f"{prefix}.attn_v.weight", (keys, hidden))
        yield RandomTensor(f"{prefix}.attn_output.weight", (hidden, queries))
        yield RandomTensor(f"{prefix}.ffn_gate_inp.weight", (sizes.experts, hidden), F32)
        yield RandomTensor(f"{prefix}.ffn_gate_exps.weight", (sizes.experts, sizes.inner, hidden))
        yield RandomTensor(f"{prefix}.ffn_up_exps.weight", (sizes.experts, sizes.inner, hidden))
        yield RandomTensor(f"{prefix}.ffn_down_exps.weight", (sizes.experts, hidden, sizes.inner))
