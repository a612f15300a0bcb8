"""Models from GGUF files: config, layout and weights, as the lean decoder takes them.

A file names its tensors and numbers in its own way, and Llama's converter turns the rows of queries and keys
round, for positions that pair neighbours. Here all of it gets the names and the order of transformers'
checkpoints; weights stay in the format of the file, whose rows are moved whole.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tokenswift.models.checkpoint import EMBEDDING, HEAD, NORM, Layout
from tokenswift.models.gguf_tokenizer import end_ids
from tokenswift.types import InputError
from tokenswift.weights.format import Stored
from tokenswift.weights.gguf import GgufFile
from tokenswift.weights.registry import BY_CODE

#: architectures that the lean decoder runs, and transformers' names for them
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
FACTORS = "rope_freqs.weight"  # what Llama 3's rule divides each frequency by
#: Llama 3's rule: wavelengths between these parts of the first model's positions are scaled in part
LOW, HIGH = 1.0, 4.0


def is_lean(file: GgufFile) -> bool:
    """Whether the lean decoder runs a file's model."""
    known = {gguf_name(name) for name in names_of(_number(file, "block_count"))} | {FACTORS}
    return architecture(file) in ARCHITECTURES and file.tensors.keys() <= known


def architecture(file: GgufFile) -> str:
    """The file's own name of its model's kind."""
    return str(file.metadata.get("general.architecture"))


def formats(file: GgufFile) -> str:
    """The types of a file's matrices, those of most weights first, for messages and records."""
    found: dict[str, int] = {}
    for entry in file.tensors.values():
        if len(entry.shape) > 1:
            found[entry.kind.lower()] = found.get(entry.kind.lower(), 0) + math.prod(entry.shape)
    return "+".join(sorted(found, key=lambda name: -found[name]))


def own_dtype(file: GgufFile, place: str = "cpu") -> str:
    """What ``dtype="auto"`` means for a file: the type of its matrices where they are float numbers, bfloat16
    where some must be unpacked or a card multiplies with weights of few bits, else float32."""
    matrices = [entry for entry in file.tensors.values() if len(entry.shape) > 1]
    kinds = {entry.kind for entry in matrices}
    if "BF16" in kinds or file.foreign() or (place != "cpu" and any(e.code in BY_CODE for e in matrices)):
        return "bfloat16"
    return "float16" if kinds == {"F16"} else "float32"


# ---- what the file says of the model -----------------------------------------------------------------------


def _number(file: GgufFile, name: str, default: Any = None) -> Any:
    """A number of the file's architecture.

    Raises:
        InputError: it is not there and there is no default.
    """
    found = file.metadata.get(f"{architecture(file)}.{name}", default)
    if isinstance(found, list):  # one for each layer: only where they are the same
        found = found[0] if len(set(found)) == 1 else None
    if found is None or isinstance(found, str | bool):
        raise InputError(
            f"model file {file.path} lacks {architecture(file)}.{name}, a number; valid: a whole model's file"
        )
    return found


def _short(value: float) -> float:
    """The shortest decimal number that is the same in float32: 1e-05 for 9.99999974e-06."""
    return next(
        short
        for digits in range(1, 18)
        if struct.pack("f", short := float(f"{value:.{digits}g}")) == struct.pack("f", value)
    )


def config_of(file: GgufFile) -> Any:
    """The config that transformers would have of a lean family's model, a ``PretrainedConfig``.

    Raises:
        InputError: the file lacks a number, or scales positions in a way that transformers does not know.
    """
    from transformers import AutoConfig

    said = file.metadata
    window = said.get(f"{architecture(file)}.attention.sliding_window") or None
    kind = ARCHITECTURES[architecture(file)]
    if kind == "llama" and window is not None:
        kind = "mistral"
    vocab, hidden = _entry(file, EMBEDDING).shape
    heads = _number(file, "attention.head_count")
    width = said.get(f"{architecture(file)}.attention.key_length")
    width = width or said.get(f"{architecture(file)}.rope.dimension_count") or hidden // heads
    positions = _number(file, "context_length")
    own: dict[str, Any] = {"llama": {"attention_bias": "blk.0.attn_q.bias" in file.tensors}}.get(kind, {})
    if kind == "llama":
        own["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if kind == "mistral":
        own["sliding_window"] = window
    ids = {name: said.get(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in _IDS.items()}
    ends = end_ids(said)
    return AutoConfig.for_model(
        kind,
        architectures=[f"{_CLASSES[kind]}ForCausalLM"],
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=_number(file, "feed_forward_length"),
        num_hidden_layers=_number(file, "block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_number(file, "attention.head_count_kv", heads),
        head_dim=width,
        max_position_embeddings=positions,
        rms_norm_eps=_short(_number(file, "attention.layer_norm_rms_epsilon")),
        rope_parameters=_positions(file, width, positions),
        tie_word_embeddings=OUTER[HEAD] not in file.tensors,
        dtype=own_dtype(file),
        **own,
        **ids | {"eos_token_id": ends[0] if len(ends) == 1 else ends or None},
    )


_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def _positions(file: GgufFile, width: int, limit: int) -> dict[str, Any]:
    """``rope_parameters`` as transformers' configs have them."""
    said = file.metadata
    made: dict[str, Any] = {"rope_theta": _short(_number(file, "rope.freq_base", 10000.0))}
    kind = said.get(f"{architecture(file)}.rope.scaling.type", "none")
    if FACTORS in file.tensors:
        return made | _llama3(file, width, made["rope_theta"])
    if kind == "none":
        return made | {"rope_type": "default"}
    factor = _short(_number(file, "rope.scaling.factor"))
    if kind == "linear":
        return made | {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise InputError(
            f"model file {file.path} scales positions by {kind!r}; valid: none, linear, yarn, or {FACTORS}"
        )
    first = said.get(f"{architecture(file)}.rope.scaling.original_context_length") or limit
    made |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": first}
    for name in ("beta_fast", "beta_slow"):
        if (value := said.get(f"{architecture(file)}.rope.scaling.yarn_{name}")) is not None:
            made[name] = _short(value)
    if (own := said.get(f"{architecture(file)}.rope.scaling.attn_factor")) not in (None, 1.0):
        made["attention_factor"] = _short(own) * (0.1 * math.log(factor) + 1.0)
    return made


def _llama3(file: GgufFile, width: int, theta: float) -> dict[str, Any]:
    """Llama 3's rule from the factors that it gave.

    Raises:
        InputError: no such rule gives them.
    """
    factors = _float(file[FACTORS]).double()
    waves = 2 * math.pi * theta ** (torch.arange(0, width, 2).double() / width)
    factor = _short(float(factors.max()))
    between = (factors > 1.001) & (factors < factor * 0.999)
    firsts: list[int] = []
    if bool(between.any()):
        smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        firsts.append(round(float((waves[between] * (LOW + smooth * (HIGH - LOW))).median())))
    elif bool((factors == 1).any()) and factor > 1:  # any number between the last kept and the first scaled
        least, most = float(waves[factors == 1].max()) * HIGH, float(waves[factors > 1].min()) * LOW
        firsts = [1 << bits for bits in range(3, 24) if least <= 1 << bits <= most]
    for first in firsts:
        smooth = ((first / waves - LOW) / (HIGH - LOW)).clamp(0, 1)
        if len(factors) == len(waves) and torch.allclose(
            1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-4, atol=0
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                "original_max_position_embeddings": first,
            }
    raise InputError(f"model file {file.path}: {FACTORS} is not by the rule of Llama 3; valid: such factors")


def layout_of(file: GgufFile, config: Any) -> Layout:
    """What the lean decoder is made of, for a config of :func:`config_of`."""
    return layout_of_config(config, OUTER[HEAD] not in file.tensors)


def layout_of_config(config: Any, tied: bool) -> Layout:
    """What the lean decoder is made of, for a lean family's config without windows that differ by layer."""
    layers = config.num_hidden_layers
    window = config.sliding_window if config.model_type == "mistral" else 0
    return Layout(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=_width(config),
        eps=float(config.rms_norm_eps),
        scale=float(_width(config) ** -0.5),
        windows=(window or 0,) * layers,
        tied=tied,
    )


def _width(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


# ---- weights -----------------------------------------------------------------------------------------------


def names_of(layers: int) -> Iterable[str]:
    """The names, as transformers has them, of all tensors that a lean decoder can have."""
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
        dtype: the type that what is not stored in a low-bit format is given in.
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
        for name, shape in layout.shapes().items():
            if (found := _entry(file, name).shape) != shape:
                raise InputError(
                    f"model file {file.path}: tensor {gguf_name(name)} has shape {found}; valid: {shape}"
                )

    def names(self) -> list[str]:
        """The names of all tensors, in order."""
        there = names_of(self.layout.num_hidden_layers)
        return sorted(name for name in there if gguf_name(name) in self.file.tensors)

    def get(self, name: str) -> Tensor | Stored | None:
        """See `checkpoint.Weights`; matrices in a low-bit format as they are stored."""
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


def straight(rows: int, heads: int) -> Tensor:
    """Where each row of queries or keys stands in a file of the llama kind, which pairs neighbours: row i of
    the first half of a head is at 2 i there, of the second at 2 i + 1."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _float(weight: Tensor | Stored) -> Tensor:
    return weight.decode() if isinstance(weight, Stored) else weight.float()
