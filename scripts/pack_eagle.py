"""A trained EAGLE-3 drafter as one small GGUF file: matrices in int8, without its target's weights.

python scripts/pack_eagle.py MODEL FOLDER FILE.gguf

MODEL is the target, FOLDER what `tokenswift train --kind eagle` wrote for it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tokenswift.files import replacing
from tokenswift.loader.gguf import straight
from tokenswift.loader.load import load
from tokenswift.spec.eagle.files import FLAGS, NAMES, SHARED, EagleConfig, load_eagle
from tokenswift.types import InputError

BLOCK = 32  # numbers that have a scale in common


def write(folder: Path, target: Any, file: Path) -> None:
    """Write what a training has made as a GGUF file of the architecture eagle3.

    Args:
        folder: from :func:`train.eagle.train_eagle`; its LM head is the target's.
        target: the target's config.
        file: the file to write; one that is there is replaced.
    Raises:
        InputError: the folder holds no drafter of this target.
        OSError: the file cannot be written.
    """
    weights = load_eagle(folder, target)
    config = weights.config
    with replacing(file) as part:
        writer = gguf.GGUFWriter(part, "eagle3")
        _say(writer, config)
        for name, tensor in weights.tensors.items():
            if name not in SHARED and isinstance(tensor, Tensor):
                if not NAMES.get(name, ("", ""))[1]:
                    raise InputError(f"{folder} has the tensor {name}, which is in no GGUF file")
                _add(writer, f"{NAMES[name][1]}.weight", _in_file_order(name, tensor.float(), config))
        if weights.d2t is not None:
            writer.add_tensor("d2t", weights.d2t.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _say(writer: Any, config: EagleConfig) -> None:
    """The config, as `files` reads it."""
    for name, number in {
        "context_length": config.trained,
        "embedding_length": config.hidden,
        "block_count": 1,
        "feed_forward_length": config.intermediate,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab,
        "target_hidden_size": config.target_hidden,
    }.items():
        writer.add_uint32(f"eagle3.{name}", number)
    writer.add_float32("eagle3.attention.layer_norm_rms_epsilon", config.eps)
    writer.add_float32("eagle3.rope.freq_base", config.rope["rope_theta"])
    for name in FLAGS:
        writer.add_bool(f"eagle3.{name}", getattr(config, name))
    writer.add_array("eagle3.target_layers", list(config.feature_layers))


def _in_file_order(name: str, tensor: Tensor, config: EagleConfig) -> Tensor:
    """Queries and keys with their rows in pairs of neighbours, as the architecture has them."""
    heads = {"q": config.heads, "k": config.kv_heads}.get(name)
    if heads is None:
        return tensor
    return torch.empty_like(tensor).index_copy(0, straight(len(tensor), heads), tensor)


def _add(writer: Any, name: str, tensor: Tensor) -> None:
    """A matrix in int8 where its rows are whole blocks; anything else in float32."""
    values = tensor.numpy().astype(np.float32)
    if values.ndim < 2 or values.shape[1] % BLOCK:
        writer.add_tensor(name, values)
        return
    writer.add_tensor(name, gguf.quants.quantize(values, Kind.Q8_0), raw_dtype=Kind.Q8_0)


if __name__ == "__main__":
    model, folder, file = sys.argv[1:]
    write(Path(folder), load(model, device="cpu").model.config, Path(file))
