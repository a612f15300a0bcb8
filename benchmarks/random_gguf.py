"""GGUF files of random weights in Q4_K: for speeds alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

Q4_K = gguf.GGMLQuantizationType.Q4_K
F32 = gguf.GGMLQuantizationType.F32
BLOCK, BLOCK_BYTES = gguf.GGML_QUANT_SIZES[Q4_K]
#: a block's scale, and its least value's: weights are about 0.02, and their mean is 0
SCALES = np.array([7e-5, 5.25e-4], np.float16).view(np.uint8)


class RandomTensor(NamedTuple):
    """A tensor of a file: its name, its shape as torch has it, and its type."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType = Q4_K


def file_of(folder: Path, shape: str, write: Callable[[Path], None]) -> Path:
    """The file of a shape, written if it is not there."""
    path = folder / f"{shape}-q4_k.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write(path)
    return path


def write_random_file(
    path: Path,
    architecture: str,
    add_numbers: Callable[[gguf.GGUFWriter], None],
    vocabulary: int,
    tensors: Sequence[RandomTensor],
) -> None:
    """Write a file, one tensor in memory at a time.

    Args:
        add_numbers: adds what the file says of the model's sizes.
        vocabulary: how many tokens it has, into which no text is cut.
    """
    unfinished = path.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, architecture)
    add_numbers(writer)
    _add_tokens(writer, vocabulary)
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, *_stored(tensor), tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(1)
    for tensor in tensors:
        writer.write_tensor_data(_values(generator, tensor))
    writer.close()
    unfinished.rename(path)


def _add_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    """A vocabulary that no text is cut into."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    letters = ["a", "b", "ab"]
    writer.add_token_list([*letters, *(f"t{number}" for number in range(3, count))])
    writer.add_token_types([gguf.TokenType.NORMAL] * count)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(count - 1)


def _stored(tensor: RandomTensor) -> tuple[tuple[int, ...], np.dtype[np.generic], int]:
    """The shape of a tensor's numbers or bytes, their type, and how many bytes they are."""
    shape = tensor.shape
    if tensor.kind == F32:
        return shape, np.dtype(np.float32), 4 * int(np.prod(shape))
    in_bytes = (*shape[:-1], shape[-1] // BLOCK * BLOCK_BYTES)
    return in_bytes, np.dtype(np.uint8), int(np.prod(in_bytes))


def _values(generator: np.random.Generator, tensor: RandomTensor) -> NDArray[np.generic]:
    """Norms of 1, rates of decay below 0, and random numbers else."""
    shape = tensor.shape
    if tensor.kind == F32 and "norm" in tensor.name:
        return np.ones(shape, np.float32)
    if tensor.kind == F32:
        numbers = generator.standard_normal(shape, np.float32) * shape[-1] ** -0.5
        return -np.abs(numbers) if tensor.name.endswith("ssm_a") else numbers
    in_bytes, _, count = _stored(tensor)
    blocks = np.frombuffer(generator.bytes(count), np.uint8).copy().reshape(-1, BLOCK_BYTES)
    blocks[:, : len(SCALES)] = SCALES
    return blocks.reshape(in_bytes)
