"""Makes a mixture of experts of a dense Qwen 2 model: its MLP, copied into every expert.

The router is random, and a row's scores add up to 1; the expert that all rows go through is zero.
So the mixture writes the dense model's text in float32, through all that a mixture takes::

    python tools/upcycled.py qwen2.5-coder-0.5b-q4_k_m.gguf mixture.gguf --experts 4
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import gguf
import numpy as np

MLP = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.weight")
SHARED_WIDTH = 256  # a whole block of every format
DENSE = "qwen2"
MIXTURE = "qwen2moe"


def copy_values(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    """Copy what the file says, by the name of the other architecture."""
    for name, value in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = value.types[0]
        element = value.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        if name.startswith(f"{DENSE}."):
            name = name.replace(DENSE, MIXTURE, 1)
        writer.add_key_value(name, value.contents(), kind, element)


def add_router(writer: gguf.GGUFWriter, layer: int, experts: int, hidden: int) -> None:
    """Add a random router, and a shared expert of zeros."""
    generator = np.random.default_rng(layer)
    router = generator.standard_normal((experts, hidden), np.float32) * hidden**-0.5
    writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
    writer.add_tensor(f"blk.{layer}.ffn_gate_inp_shexp.weight", np.zeros(hidden, np.float32))
    wide = np.zeros((SHARED_WIDTH, hidden), np.float32)
    writer.add_tensor(f"blk.{layer}.ffn_gate_shexp.weight", wide)
    writer.add_tensor(f"blk.{layer}.ffn_up_shexp.weight", wide)
    writer.add_tensor(f"blk.{layer}.ffn_down_shexp.weight", np.ascontiguousarray(wide.T))


def make(dense: Path, mixture: Path, experts: int, used: int) -> None:
    """Write the mixture's file.

    Raises:
        SystemExit: the file is not a dense Qwen 2's.
    """
    reader = gguf.GGUFReader(dense)
    architecture = reader.fields["general.architecture"].contents()
    if architecture != DENSE:
        raise SystemExit(f"error: {dense} is of architecture {architecture}; valid: {DENSE}")
    writer = gguf.GGUFWriter(mixture, MIXTURE)
    copy_values(reader, writer)
    hidden = int(reader.fields[f"{DENSE}.embedding_length"].contents())
    writer.add_expert_count(experts)
    writer.add_expert_used_count(used)
    writer.add_expert_weights_norm(True)
    writer.add_expert_feed_forward_length(
        int(reader.fields[f"{DENSE}.feed_forward_length"].contents())
    )
    writer.add_expert_shared_feed_forward_length(SHARED_WIDTH)
    for tensor in reader.tensors:
        match = MLP.fullmatch(tensor.name)
        if match is None:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        layer, projection = match.groups()
        copies = np.broadcast_to(tensor.data, (experts, *tensor.data.shape))
        name = f"blk.{layer}.ffn_{projection}_exps.weight"
        writer.add_tensor(name, np.ascontiguousarray(copies), raw_dtype=tensor.tensor_type)
        if projection == "gate":
            add_router(writer, int(layer), experts, hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dense", type=Path, help="GGUF file of a dense Qwen 2 model")
    parser.add_argument("mixture", type=Path, help="GGUF file to write")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--used", type=int, default=2)
    args = parser.parse_args()
    make(args.dense, args.mixture, args.experts, args.used)


if __name__ == "__main__":
    main()
