"""Models from GGUF files: config, layout and weights, as the native decoder takes them.

A file names its tensors and numbers in its own way, and Llama's converter turns the rows of queries and keys
round, for positions that pair neighbours. Here all of it gets the names and the order of transformers'
checkpoints; weights stay in the format of the file, whose rows are moved whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tokenswift.kernels.formats.format import Stored
from tokenswift.kernels.formats.registry import BY_CODE, FORMATS
from tokenswift.loader import native
from tokenswift.loader.checkpoint import EMBEDDING, HEAD, NORM, Layout, check_tensors
from tokenswift.loader.gguf import MERGED
from tokenswift.loader.gguf.file import GgufFile, unpacks
from tokenswift.loader.gguf.stated import (
    CALLED,
    FACTORS,
    architecture,
    called,
    check_meant,
    number_of,
    positions,
    short,
)
from tokenswift.loader.gguf.tokenizer import check_words, end_ids
from tokenswift.loader.native import NativeConfig, completed
from tokenswift.loader.numbers import check_numbers, refusal
from tokenswift.types import InputError

#: architectures that the native decoder runs, and transformers' names for them
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
OUTER = {EMBEDDING: "token_embd.weight", NORM: "output_norm.weight", HEAD: "output.weight"}
INNER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def is_native(file: GgufFile) -> bool:
    """Whether the native decoder runs a file's model.

    Raises:
        InputError: it says of its architecture what no model's file says.
    """
    if file.metadata.get("general.type", "model") == "adapter":
        raise InputError(f"model file {file.path} holds an adapter; valid: {MERGED}")
    if architecture(file) not in ARCHITECTURES:
        return False
    layers = number_of(file, "block_count")
    check_numbers({"num_hidden_layers": layers}, f"model file {file.path}", called(file))
    known = {gguf_name(name) for name in names_of(layers)} | {FACTORS}
    return file.tensors.keys() <= known


def formats(file: GgufFile) -> str:
    """The types of a file's matrices, those of most weights first, for messages and records."""
    found: dict[str, int] = {}
    for entry in file.tensors.values():
        if len(entry.shape) > 1:
            found[entry.kind.lower()] = found.get(entry.kind.lower(), 0) + math.prod(entry.shape)
    return "+".join(sorted(found, key=lambda name: -found[name]))


def own_dtype(file: GgufFile, place: str = "cpu") -> str:
    """What ``dtype="auto"`` means for a file: the type of its matrices where they are float numbers, bfloat16
    where some must be unpacked or a card multiplies with quantized weights, else float32."""
    matrices = [entry for entry in file.tensors.values() if len(entry.shape) > 1]
    kinds = {entry.kind for entry in matrices}
    if "BF16" in kinds or file.foreign() or (place != "cpu" and any(e.code in BY_CODE for e in matrices)):
        return "bfloat16"
    return "float16" if kinds == {"F16"} else "float32"


# ---- what the file says of the model -----------------------------------------------------------------------


def config_of(file: GgufFile) -> NativeConfig:
    """The config of a native family's model.

    Raises:
        InputError: the file lacks a number, or scales positions in a way that is not known here.
    """
    said, kind, where = file.metadata, ARCHITECTURES[architecture(file)], f"model file {file.path}"
    window = said.get(f"{architecture(file)}.attention.sliding_window") or None
    if kind == "llama" and window is not None:
        kind = "mistral"
    shape = _entry(file, EMBEDDING).shape
    if len(shape) != 2:
        raise InputError(f"{where}: tensor {OUTER[EMBEDDING]} has shape {shape}; valid: a matrix")
    check_words(said, shape[0], file.path)
    heads = number_of(file, "attention.head_count")
    numbers: dict[str, Any] = {
        "vocab_size": shape[0],
        "hidden_size": shape[1],
        "intermediate_size": number_of(file, "feed_forward_length"),
        "num_hidden_layers": number_of(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number_of(file, "attention.head_count_kv", heads),
        "head_dim": said.get(f"{architecture(file)}.attention.key_length") or None,
        "max_position_embeddings": number_of(file, "context_length"),
        "rms_norm_eps": short(number_of(file, "attention.layer_norm_rms_epsilon")),
    }
    check_numbers(numbers | {"sliding_window": window}, where, called(file))
    numbers["head_dim"] = width = numbers["head_dim"] or shape[1] // heads
    check_meant(file, shape[1], width)
    own: dict[str, Any] = {}
    if kind == "llama":
        own["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if kind in ("llama", "qwen3"):
        own["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if kind == "mistral":
        own["sliding_window"] = window
    rope = positions(file, width, numbers["max_position_embeddings"])
    ids = {name: said.get(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in _IDS.items()}
    if ids["pad_token_id"] not in range(shape[0]):  # the only one that may have no row
        ids["pad_token_id"] = None
    ends = end_ids(said)
    if kind == "llama" and shape[1] % heads:  # transformers has no such model
        raise refusal(
            where, f"{architecture(file)}.{CALLED['hidden_size']}", shape[1], f"a multiple of {heads}"
        )
    made = completed(
        kind,
        {
            "architectures": [f"{_CLASSES[kind]}ForCausalLM"],
            "rope_parameters": rope,
            "tie_word_embeddings": OUTER[HEAD] not in file.tensors,
            "dtype": own_dtype(file),
            **numbers,
            **own,
            **ids | {"eos_token_id": ends[0] if len(ends) == 1 else ends or None},
        },
    )
    if made is None:
        raise InputError(f"{where}: its sizes are not those of a {kind} model; valid: a sound file")
    return made


_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def layout_of(file: GgufFile, config: Any) -> Layout:
    """What the native decoder is made of, for a config of :func:`config_of`."""
    return native.layout_of(config, OUTER[HEAD] not in file.tensors)


# ---- weights -----------------------------------------------------------------------------------------------


def names_of(layers: int) -> Iterable[str]:
    """The names, as transformers has them, of all tensors that a native decoder can have."""
    yield from OUTER
    for number in range(layers):
        for name in INNER:
            yield f"model.layers.{number}.{name}.weight"
            if name.endswith("_proj"):
                yield f"model.layers.{number}.{name}.bias"


def gguf_name(name: str) -> str:
    """The file's name of a weight."""
    if name in OUTER:
        return OUTER[name]
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    inner, _, end = rest.rpartition(".")
    return f"blk.{number}.{INNER.get(inner, inner)}.{end}"


def _entry(file: GgufFile, name: str) -> Any:
    found = file.tensors.get(gguf_name(name))
    if found is None:
        raise InputError(f"model file {file.path} lacks tensor {gguf_name(name)}")
    return found


class GgufWeights:
    """Weights of a GGUF file, read in place (implements `checkpoint.Weights`).

    Args:
        file: of the model.
        layout: which weights there must be.
        dtype: the type that what is not stored in a quantized format is given in.
    Raises:
        InputError: tensors are missing, or of other shapes.

    Attributes:
        dtype, device: of the tensors.
    """

    device = torch.device("cpu")

    def __init__(self, file: GgufFile, layout: Layout, dtype: torch.dtype) -> None:
        self.file, self.layout, self.copies, self.dtype = file, layout, False, dtype
        self.folder = file.path
        self._turned = architecture(file) == "llama"
        check_table(file, layout)

    def names(self) -> list[str]:
        """The names of all tensors, in order."""
        there = names_of(self.layout.num_hidden_layers)
        return sorted(name for name in there if gguf_name(name) in self.file.tensors)

    def get(self, name: str) -> Tensor | Stored | None:
        """See `checkpoint.Weights`; matrices in a quantized format as they are stored."""
        if name == HEAD and self.layout.tied:
            name = EMBEDDING
        return self[name] if gguf_name(name) in self.file.tensors else None

    def __getitem__(self, name: str) -> Tensor | Stored:
        """A weight, its rows in the order of transformers' checkpoints."""
        found = self.file[gguf_name(name)]
        heads = {".q_proj": self.layout.num_attention_heads, ".k_proj": self.layout.num_key_value_heads}
        turned = next((count for end, count in heads.items() if f"{end}." in name), 0)
        rows = straight(len(found), turned) if self._turned and turned else None
        if isinstance(found, Stored):
            return found if rows is None else Stored(found.format, found.blocks[rows])
        return (found if rows is None else found[rows]).to(self.dtype)

    def packed(self, name: str, restore: Callable[[], Tensor]) -> None:
        """See `checkpoint.Weights`."""

    def rest(self) -> None:
        """See `checkpoint.Weights`: what was read of the file leaves the process."""
        self.file.rest()

    def done(self) -> list[tuple[nn.Module, Callable[[], Tensor]]]:
        """See `checkpoint.Weights`."""
        self.rest()
        return []


def check_table(file: GgufFile, layout: Layout) -> None:
    """Hold a file's tensors against the table of its model's family, before any is read.

    Raises:
        InputError: tensors are missing, of other shapes or types, or none of the family's; or a width is odd,
            which the kernels do not take.
    """
    where, kind = f"model file {file.path}", architecture(file)
    for name in ("hidden_size", "intermediate_size"):
        if getattr(layout, name) % 2:
            raise refusal(where, f"{kind}.{CALLED[name]}", getattr(layout, name), "an even number")
    check_words(file.metadata, layout.vocab_size, file.path)
    there = {name: file.tensors.get(gguf_name(name)) for name in names_of(layout.num_hidden_layers)}
    found = {name: (entry.shape, entry.kind) for name, entry in there.items() if entry is not None}
    types = [*TYPES, *sorted({e.kind for e in file.tensors.values() if unpacks(e.code)} - set(TYPES))]
    check_tensors(layout, found, types, where, "tensor", gguf_name)


#: types of tensors that need no other package
TYPES = ("F32", "F16", "BF16", *(name.upper() for name in FORMATS))


def straight(rows: int, heads: int) -> Tensor:
    """Where each row of queries or keys stands in a file of the llama kind, which pairs neighbours: row i of
    the first half of a head is at 2 i there, of the second at 2 i + 1."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)
