"""GGUF files of random weights in the shapes of mixtures of experts, in Q4_K: for speeds alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

Q4_K = gguf.GGMLQuantizationType.Q4_K
F32 = gguf.GGMLQuantizationType.F32
BLOCK, BLOCK_BYTES = gguf.GGML_QUANT_SIZES[Q4_K]
#: a block's scale, and its least value's: weights are about 0.02, and their mean is 0
SCALES = np.array([7e-5, 5.25e-4], np.float16).view(np.uint8)


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
    unfinished = path.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, sizes.architecture)
    _add_numbers(writer, sizes)
    _add_tokens(writer, sizes.vocabulary)
    for name, shape, kind in _tensors(sizes):
        writer.add_tensor_info(name, *_stored(shape, kind), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(1)
    for name, shape, kind in _tensors(sizes):
        writer.write_tensor_data(_values(generator, name, shape, kind))
    writer.close()
    unfinished.rename(path)


def _add_numbers(writer: gguf.GGUFWriter, sizes: MixtureSizes) -> None:
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


def _add_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    """A vocabulary that no text is cut into."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    letters = ["a", "b", "ab"]
    writer.add_token_list([*letters, *(f"t{number}" for number in range(3, count))])
    writer.add_token_types([gguf.TokenType.NORMAL] * count)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(count - 1)


def _tensors(
    sizes: MixtureSizes,
) -> Iterator[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]]:
    """Names, shapes and types, in the order of the file."""
    hidden = sizes.hidden
    queries = sizes.heads * sizes.width
    keys = sizes.kv_heads * sizes.width
    yield "token_embd.weight", (sizes.vocabulary, hidden), Q4_K
    yield "output.weight", (sizes.vocabulary, hidden), Q4_K
    yield "output_norm.weight", (hidden,), F32
    for layer in range(sizes.layers):
        prefix = f"blk.{layer}"
        yield f"{prefix}.attn_norm.weight", (hidden,), F32
        yield f"{prefix}.ffn_norm.weight", (hidden,), F32
        for name, width in sizes.norms:
            yield f"{prefix}.{name}.weight", (width,), F32
        yield f"{prefix}.attn_q.weight", (queries, hidden), Q4_K
        yield f"{prefix}.attn_k.weight", (keys, hidden), Q4_K
        yield f"{prefix}.attn_v.weight", (keys, hidden), Q4_K
        yield f"{prefix}.attn_output.weight", (hidden, queries), Q4_K
        yield f"{prefix}.ffn_gate_inp.weight", (sizes.experts, hidden), F32
        yield f"{prefix}.ffn_gate_exps.weight", (sizes.experts, sizes.inner, hidden), Q4_K
        yield f"{prefix}.ffn_up_exps.weight", (sizes.experts, sizes.inner, hidden), Q4_K
        yield f"{prefix}.ffn_down_exps.weight", (sizes.experts, hidden, sizes.inner), Q4_K


def _stored(
    shape: tuple[int, ...], kind: gguf.GGMLQuantizationType
) -> tuple[tuple[int, ...], np.dtype[np.generic], int]:
    """The shape of a tensor's numbers or bytes, their type, and how many bytes they are."""
    if kind == F32:
        return shape, np.dtype(np.float32), 4 * int(np.prod(shape))
    in_bytes = (*shape[:-1], shape[-1] // BLOCK * BLOCK_BYTES)
    return in_bytes, np.dtype(np.uint8), int(np.prod(in_bytes))


def _values(
    generator: np.random.Generator,
    name: str,
    shape: tuple[int, ...],
    kind: gguf.GGMLQuantizationType,
) -> NDArray[np.generic]:
    if kind == F32 and "norm" in name:
        return np.ones(shape, np.float32)
    if kind == F32:
        return generator.standard_normal(shape, np.float32) * shape[-1] ** -0.5
    in_bytes, _, count = _stored(shape, kind)
    blocks = np.frombuffer(generator.bytes(count), np.uint8).copy().reshape(-1, BLOCK_BYTES)
    blocks[:, : len(SCALES)] = SCALES
    return blocks.reshape(in_bytes)
