"""A GGUF file of random weights in the shape of an 8B model, to measure how fast such a model would be.

python bench/shape.py OUT.gguf [--weights q8_0] [--layers 32] [--width 4096]

It has the tokenizer of the default model, with tokens that no text has up to a vocabulary of 128,256.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

from tokenswift.loader.embedded import GGUF, ensure
from tokenswift.loader.find import cache_dir
from tokenswift.loader.gguf import GgufFile

VOCABULARY, WIDTH = 128_256, 128  # tokens, and dimensions of a head
STEP = 1 << 20  # blocks that are drawn together


def shapes(layers: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors: four query heads to a key head, an MLP of 3.5 times the width."""
    yield "token_embd.weight", (VOCABULARY, width)
    yield "output.weight", (VOCABULARY, width)
    yield "output_norm.weight", (width,)
    for layer in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", (width,)
        for name, rows in (("attn_q", width), ("attn_k", width // 4), ("attn_v", width // 4)):
            yield f"blk.{layer}.{name}.weight", (rows, width)
        yield f"blk.{layer}.attn_output.weight", (width, width)
        for name in ("ffn_gate", "ffn_up"):
            yield f"blk.{layer}.{name}.weight", (width * 7 // 2, width)
        yield f"blk.{layer}.ffn_down.weight", (width, width * 7 // 2)


def blocks(shape: tuple[int, ...], kind: str, draw: np.random.Generator, size: float) -> np.ndarray:
    """Random blocks of 32 whose numbers have about the size of one over the root of the columns."""
    nbytes, deviation = {"q8_0": (34, 73.0), "q4_0": (18, 4.6), "q4_1": (20, 4.6)}[kind]
    rows, columns = shape
    made = np.empty((rows * columns // 32, nbytes), np.uint8)
    for start in range(0, len(made), STEP):
        part = made[start : start + STEP]
        part[:] = np.frombuffer(draw.bytes(part.size), np.uint8).reshape(part.shape)
    scale = size / (columns**0.5 * deviation)
    made[:, :2] = np.array([scale], np.float16).view(np.uint8)
    if kind == "q4_1":
        made[:, 2:4] = np.array([-7.5 * scale], np.float16).view(np.uint8)
    return made.reshape(rows, -1)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="random weights in the shape of an 8B model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--weights", default="q8_0", choices=("q8_0", "q4_0", "q4_1"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    args = parser.parse_args()
    said = GgufFile(ensure(cache_dir()) / GGUF)
    part = args.out.with_suffix(".partial")
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_context_length(131_072)
    writer.add_embedding_length(args.width)
    writer.add_block_count(args.layers)
    writer.add_feed_forward_length(args.width * 7 // 2)
    writer.add_head_count(args.width // WIDTH)
    writer.add_head_count_kv(args.width // WIDTH // 4)
    writer.add_key_length(WIDTH)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in said.metadata.items():
        if key == "tokenizer.ggml.tokens":
            value = [*value, *(f"<unused {i}>" for i in range(VOCABULARY - len(value)))]
        elif key == "tokenizer.ggml.token_type":
            value = [*value, *[5] * (VOCABULARY - len(value))]
        if isinstance(value, list):
            writer.add_array(key, value)
        elif key.startswith("tokenizer."):
            kind = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}[type(value)]
            kind(key, value)
    draw = np.random.default_rng(1)
    for name, shape in shapes(args.layers, args.width):
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        data = blocks(shape, args.weights, draw, 4.0 if name == "output.weight" else 1.0)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[args.weights.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(args.out)


if __name__ == "__main__":
    main()
