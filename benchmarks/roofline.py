"""Floors: the least time that a pass takes, from bytes that are read and operations that are computed.

A pass of n rows over L cached tokens multiplies n states with every weight of the layers and the LM head (two
operations a weight and row, each weight read once), and n queries a head with the keys that they see (four
operations a row, head, key and dimension, all keys and values read once). Either part takes at least its
bytes by the bandwidth, or its operations by the arithmetic, whichever is more. Embeddings, norms, positions,
activations and the choice of tokens are left out. Method: Williams, Waterman and Patterson, "Roofline" (CACM
2009).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.clock import times
from tokenswift.kernels.formats import FORMATS
from tokenswift.kv.full import large_empty
from tokenswift.loader.config import head_width
from tokenswift.loader.find import gguf_in, locate
from tokenswift.loader.gguf import GgufFile, config_of
from tokenswift.loader.load import load_config, numbers_of

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
READ = 2048  # rows of a pass that reads a prompt on a card
BLOCK = 1 << 29  # bytes read to measure bandwidth, more than caches hold
SECONDS, RUNS = 0.1, 5  # that the calls of a figure take, about, and how many there are at least


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of a model decides what its passes read and compute.

    Attributes:
        hidden, heads, kv_heads, width, layers: D, H, K, d and the number of layers.
        weights: how many weights a row is multiplied with, by what they are stored as: a type of
            :data:`ITEM` or a quantized format.
        dtype: of keys and values, and of products.
    """

    hidden: int
    heads: int
    kv_heads: int
    width: int
    layers: int
    weights: Mapping[str, int]
    dtype: str

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass reads."""
        return sum(stored_bytes(kind, count) for kind, count in self.weights.items())

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token, of all layers."""
        return 2 * self.layers * self.kv_heads * self.width * ITEM[self.dtype]


@dataclass(frozen=True, slots=True)
class Card:
    """An accelerator by its maker's figures.

    Attributes:
        bandwidth: bytes of memory that it reads in a second.
        arithmetic: operations in a second by type of product.
    """

    name: str
    bandwidth: float
    arithmetic: Mapping[str, float]


def _published(name: str, gigabytes: float, float32: float, half: float) -> Card:
    """A card by GB/s and TFLOPS of dense products that are summed in float32, as NVIDIA publishes them."""
    types = {"float32": float32 * 1e12, "bfloat16": half * 1e12, "float16": half * 1e12}
    return Card(name, gigabytes * 1e9, types)


CARDS = {
    "h100": _published("NVIDIA H100 SXM 80 GB", 3350, 67, 989.5),
    "h200": _published("NVIDIA H200 SXM 141 GB", 4800, 67, 989.5),
    "a100": _published("NVIDIA A100 SXM 80 GB", 2039, 19.5, 312),
    "4090": _published("NVIDIA GeForce RTX 4090", 1008, 82.6, 165.2),
    "l40s": _published("NVIDIA L40S", 864, 91.6, 362.05),
}


def stored_bytes(kind: str, count: int) -> int:
    """Bytes of ``count`` numbers stored as ``kind``."""
    if kind in ITEM:
        return count * ITEM[kind]
    return count * FORMATS[kind].nbytes // FORMATS[kind].block


def floor(sizes: Sizes, card: Card, rows: int, context: int) -> float:
    """The least seconds of a pass of ``rows`` rows of one text over ``context`` cached tokens."""
    rate = card.arithmetic[sizes.dtype]
    worked = 2 * sum(sizes.weights.values()) * rows
    attended = 4 * context * sizes.layers * sizes.heads * sizes.width * rows
    products = max(sizes.weight_bytes / card.bandwidth, worked / rate)
    return products + max(context * sizes.token_bytes / card.bandwidth, attended / rate)


def read_seconds(sizes: Sizes, card: Card, prompt: int) -> float:
    """The least seconds of the prefill of some tokens, in passes of at most :data:`READ` rows."""
    rows = min(prompt, READ)
    return prompt / rows * floor(sizes, card, rows, prompt // 2)


def sizes_of(name: str, dtype: str) -> Sizes:
    """The sizes of a model on a card, from its config.json or the header of its GGUF file; it is fetched.

    Raises:
        InputError: there is no such model, or its config makes none.
    """
    source = locate(name)
    path = gguf_in(source)
    config: Any = load_config(name, source) if path is None else config_of(GgufFile(path))
    full = config if path is None else config.of_transformers()
    count = numbers_of(name, full) - (0 if full.tie_word_embeddings else full.vocab_size * full.hidden_size)
    return _sizes(config, head_width(config), {"bfloat16" if dtype == "auto" else dtype: count})


def _sizes(config: Any, width: int, weights: Mapping[str, int]) -> Sizes:
    heads = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    (dtype,) = weights
    return Sizes(config.hidden_size, heads, shared, width, config.num_hidden_layers, weights, dtype)


def weights_of(target: Any) -> Counter[str]:
    """How many weights of a loaded model a row is multiplied with, by what they are stored as."""
    found: Counter[str] = Counter()
    if target.layout is None:
        found[str(target.dtype).removeprefix("torch.")] = target.weight_bytes // target.dtype.itemsize
        return found
    for weight in (target.head, *(w for layer in target.body.weights for w in layer.packed())):
        for part in weight.parts:
            kind = str(part.data.dtype).removeprefix("torch.") if part.format is None else part.format.name
            found[kind] += part.rows * weight.columns
    return found


def bandwidth(device: torch.device) -> float:
    """Bytes of memory that all threads, or an accelerator, read in a second."""
    block = large_empty(BLOCK // 4, dtype=torch.float32, device=device).fill_(1.0)
    return BLOCK / least(block.sum)


def arithmetic(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Operations in a second of torch's product of two square matrices."""
    square = torch.randn(side, side, device=device, dtype=dtype)
    return 2 * side**3 / least(lambda: square @ square)


@torch.inference_mode()
def least(work: Callable[[], object]) -> float:
    """Seconds of the fastest call after a first one."""
    return min(times(work, RUNS, SECONDS)) / 1e3
