"""The files of a drafter's checkpoint, as tensors by canonical names that are read one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenswift.files import MOST_CONFIG, line_of, object_in
from tokenswift.kernels.formats import BY_CODE, Stored
from tokenswift.loader.config import check_numbers
from tokenswift.loader.find import gguf_in
from tokenswift.loader.gguf import GgufFile, architecture, called, number_of, positions, short, straight
from tokenswift.loader.weights import open_weights, weight_files
from tokenswift.spec.eagle.config import EagleConfig
from tokenswift.spec.eagle.said import OTHERS, biases_of, check_kind, config_of, layers_of, unsupported
from tokenswift.types import InputError

#: maps of vocabularies, which are no weights
MAPS = ("d2t", "t2d")
#: canonical names by those of the two forms in safetensors files
OUTER = {
    "embed_tokens.weight": "embed",
    "fc.weight": "fc",
    "norm.weight": "norm",
    "lm_head.weight": "lm_head",
    "input_norm.weight": "features_norm",
    **{f"fc_norm.{part}.weight": f"fc_norm.{part}" for part in range(3)},
    **{name: name for name in MAPS},
}
_PROJECTIONS = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
INNER = {
    "input_layernorm.weight": "input_norm",
    "hidden_norm.weight": "hidden_norm",
    "post_attention_layernorm.weight": "post_norm",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    **{f"{name}.weight": ours for name, ours in _PROJECTIONS.items()},
    **{f"{name}.bias": f"{ours}_bias" for name, ours in _PROJECTIONS.items()},
}
#: what training leaves in some files and no drafting reads
ASIDE = re.compile(r"(.*rotary_emb\.inv_freq|verifier_.*)")
#: and by those of GGUF files
IN_GGUF = {
    "token_embd.weight": "embed",
    "fc.weight": "fc",
    "output_norm.weight": "norm",
    "output.weight": "lm_head",
    "enc.output_norm.weight": "features_norm",
    "blk.0.attn_norm.weight": "input_norm",
    "blk.0.attn_norm_2.weight": "hidden_norm",
    "blk.0.ffn_norm.weight": "post_norm",
    **{f"blk.0.{name}.weight": ours for name, ours in (("attn_output", "o"), ("ffn_gate", "gate"))},
    **{f"blk.0.attn_{name}.weight": name for name in ("q", "k", "v")},
    **{f"blk.0.ffn_{name}.weight": name for name in ("up", "down")},
    **{f"fc_norm.{part}.weight": f"fc_norm.{part}" for part in range(3)},
    "d2t": "d2t",
    "d2t.weight": "d2t",
}
IN_GGUF_ASIDE = ("rope_freqs.weight", "blk.0.rope_freqs.weight")
#: types of weights, and of maps, by their names in safetensors files
WEIGHTS, INTEGERS, SWITCHES = ("F32", "BF16", "F16"), ("I64", "I32"), ("BOOL", "U8", "I64", "I32")


@dataclass(frozen=True, slots=True)
class Files:
    """A checkpoint, opened.

    Attributes:
        where: it is, for messages.
        found: shape and type of each tensor by its canonical name.
        names: what the file calls it.
        get: reads one by its canonical name.
        config: of the drafter, for a target's config.
        tokens: of the tokenizer that the file holds, if any.
        absolute: whether d2t is rather ids than offsets.
        stored: formats of quantized weights, by canonical names.
    """

    where: str
    found: dict[str, tuple[tuple[int, ...], str]]
    names: dict[str, str]
    get: Callable[[str], Tensor | Stored]
    config: Callable[[Any], EagleConfig]
    tokens: list[str] | None
    absolute: bool
    stored: Mapping[str, str] = field(default_factory=dict)


def open_files(path: Path) -> Files:
    """A checkpoint's files; no weight is read yet.

    Raises:
        InputError: they cannot be read, or are no drafter's.
    """
    if (file := gguf_in(path)) is not None:
        return _gguf(GgufFile(file))
    where = f"eagle {path}"
    if not path.is_dir() or not (path / "config.json").is_file():
        raise InputError(
            f"{where} has no config.json and is not a GGUF file; valid: a drafter's folder or file"
        )
    said = object_in(path / "config.json", MOST_CONFIG, where)
    check_kind(said, where)  # what another kind says of itself is clearer than what its tensors lack
    read: dict[str, tuple[str, Callable[[], Tensor]]] = {}
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, shape, kind, get in _tensors(path, where):
        if (ours := _canonical(name)) is None:
            if ASIDE.fullmatch(name.removeprefix("model.")):
                continue
            read.setdefault(f"?{name}", (name, get))
            ours = f"?{name}"
        elif ours in read:
            raise InputError(f"{where} has two tensors {name}; valid: one of each")
        read[ours], found[ours] = (name, get), (shape, kind)

    def config(target: Any) -> EagleConfig:
        return config_of(said, found, target, where)

    names = {ours: name for ours, (name, _) in read.items()}
    return Files(where, found, names, lambda ours: read[ours][1](), config, None, False)


def _canonical(name: str) -> str | None:
    """The canonical name of a tensor of either form."""
    name = name.removeprefix("model.")
    for prefix in ("midlayer.", "layers.0."):
        if name.startswith(prefix):
            return INNER.get(name.removeprefix(prefix))
    return OUTER.get(name)


_Named = tuple[str, tuple[int, ...], str, Callable[[], Tensor]]


def _tensors(path: Path, where: str) -> Iterator[_Named]:
    """Name, shape, type and reader of each tensor of a folder."""
    single = path / "pytorch_model.bin"
    if not any(path.glob("*.safetensors")) and single.is_file():
        yield from _pickled(single, where)
        return
    for file in weight_files(path):
        opened = open_weights(file, f"{where}: file")
        for name in opened.keys():  # noqa: SIM118
            part = opened.get_slice(name)
            yield name, tuple(part.get_shape()), part.get_dtype(), _reader(opened, name)


def _reader(opened: Any, name: str) -> Callable[[], Tensor]:
    return lambda: opened.get_tensor(name)


#: names of types in safetensors files
_KINDS = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
    torch.uint8: "U8",
}


def _pickled(file: Path, where: str) -> Iterator[_Named]:
    """Plain tensors of a bin file, mapped; anything else in it is refused by torch."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # unpickling fails in many ways
        raise InputError(f"{where}: file {file.name} cannot be read as weights ({line_of(error)})") from error
    for name, tensor in content.items() if isinstance(content, dict) else ():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or not isinstance(name, str):
            raise InputError(
                f"{where}: file {file.name} holds more than plain weights; valid: tensors by name"
            )
        kind = _KINDS.get(tensor.dtype, str(tensor.dtype))
        yield name, tuple(tensor.shape), kind, tensor.clone


# ---- GGUF --------------------------------------------------------------------------------------------------


def _gguf(file: GgufFile) -> Files:
    """A GGUF file of the architecture eagle3; queries and keys get the order of transformers' rows."""
    where, kind = f"eagle {file.path}", architecture(file)
    if kind != "eagle3":
        other = next((what for part, what in OTHERS.items() if part in kind.lower().replace("-", "")), None)
        if other is not None or kind == "eagle":
            raise unsupported(where, other or "an EAGLE-1 or EAGLE-2")
        raise InputError(f"{where} has the architecture {kind!r}; valid: eagle3")
    names = {IN_GGUF.get(name, f"?{name}"): name for name in file.tensors if name not in IN_GGUF_ASIDE}
    found = {}
    for ours, name in names.items():
        entry = file.tensors[name]
        fits = entry.kind in INTEGERS if ours in MAPS else entry.kind not in INTEGERS
        found[ours] = (entry.shape, entry.kind if ours in MAPS or not fits else "F32")
    heads = {"q": number_of(file, "attention.head_count")}
    heads["k"] = number_of(file, "attention.head_count_kv", heads["q"])

    def get(ours: str) -> Tensor | Stored:
        read = file[names[ours]]
        if ours not in heads:
            return read
        rows = straight(len(read), heads[ours])
        return read.take(rows) if isinstance(read, Stored) else read[rows]

    def config(target: Any) -> EagleConfig:
        return _gguf_config(file, found, target, where)

    tokens = file.metadata.get("tokenizer.ggml.tokens")
    formats = {ours: BY_CODE.get(file.tensors[name].code) for ours, name in names.items()}
    stored = {ours: form.name for ours, form in formats.items() if form is not None}
    return Files(where, found, names, get, config, tokens if isinstance(tokens, list) else None, True, stored)


def _gguf_config(file: GgufFile, found: dict[str, Any], target: Any, where: str) -> EagleConfig:
    said, heads = file.metadata, number_of(file, "attention.head_count")
    numbers = {
        "hidden_size": number_of(file, "embedding_length"),
        "intermediate_size": number_of(file, "feed_forward_length"),
        "num_hidden_layers": number_of(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number_of(file, "attention.head_count_kv", heads),
        "head_dim": said.get("eagle3.attention.key_length") or None,
        "max_position_embeddings": number_of(file, "context_length"),
        "rms_norm_eps": short(number_of(file, "attention.layer_norm_rms_epsilon")),
        "vocab_size": number_of(file, "vocab_size", len(said.get("tokenizer.ggml.tokens") or ())),
        "sliding_window": said.get("eagle3.attention.sliding_window") or None,
    }
    check_numbers(numbers, where, called(file))
    if numbers["num_hidden_layers"] != 1:
        raise InputError(f"{where}: eagle3.block_count is {numbers['num_hidden_layers']}; valid: 1")
    width, vocab = numbers["head_dim"] or numbers["hidden_size"] // heads, numbers["vocab_size"]
    wide = number_of(file, "target_hidden_size", target.hidden_size)
    check_numbers({"hidden_size": wide}, where, {"hidden_size": "eagle3.target_hidden_size"})
    ids = said.get("eagle3.target_layers", said.get("eagle3.extract_layers"))
    shape = found.get("d2t", found.get("lm_head", ((vocab,), "")))[0]
    return EagleConfig(
        hidden=numbers["hidden_size"],
        target_hidden=wide,
        heads=heads,
        kv_heads=numbers["num_key_value_heads"],
        head_dim=width,
        intermediate=numbers["intermediate_size"],
        eps=numbers["rms_norm_eps"],
        rope=positions(file, width, numbers["max_position_embeddings"]),
        vocab=vocab,
        draft_vocab=shape[0],
        feature_layers=layers_of(ids, target, where),
        trained=numbers["max_position_embeddings"],
        norm_before_residual=said.get("eagle3.norm_before_residual") is True,
        norm_before_fc=said.get("eagle3.norm_before_fc") is True,
        fc_norm=said.get("eagle3.fc_norm") is True or "fc_norm.0" in found,
        norm_output=said.get("eagle3.norm_output") is True,
        window=numbers["sliding_window"],
        **biases_of(found),
    )
