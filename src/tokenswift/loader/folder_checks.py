"""What the files of a checkpoint folder say, looked at before transformers makes anything of them.

Sizes are bounded by what the files hold: of the native families each weight has its place in a table of names
and shapes (`checkpoint.Layout`), of others the numbers of all weights together are counted.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenswift.files import MOST_CONFIG, MOST_TOKENIZER, line_of, object_in
from tokenswift.loader.config import (
    EMBEDDING,
    OTHERS,
    ROPES,
    SIZES,
    VALID,
    check_numbers,
    layout_of,
    refusal,
)
from tokenswift.loader.rope import merged
from tokenswift.loader.weights import FLOATS, check_tensors, headers
from tokenswift.types import InputError

#: what other families call the numbers of the schema
ALSO = {
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "num_blocks": "num_hidden_layers",
    "decoder_layers": "num_hidden_layers",
    "encoder_layers": "num_hidden_layers",
    "num_decoder_layers": "num_hidden_layers",
    "num_encoder_layers": "num_hidden_layers",
    "num_nextn_predict_layers": "num_hidden_layers",
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "n_inner": "intermediate_size",
    "ffn_dim": "intermediate_size",
    "moe_intermediate_size": "intermediate_size",
    "n_head": "num_attention_heads",
    "num_experts": "num_attention_heads",
    "num_local_experts": "num_attention_heads",
    "n_routed_experts": "num_attention_heads",
}
#: entries of a list of a config, or letters of a text
MOST_PLACES = 4096
#: an integer in a list of a config
MOST_LISTED = 1 << 20
#: numbers of a model that a byte of its files may hold: those of one bit
PER_BYTE = 8
#: files of tokenizers that transformers reads, and those of them that hold an object
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
OBJECTS = ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "chat_template.json")


def check_said(name: str, path: Path, families: tuple[str, ...]) -> dict[str, Any]:
    """What a config.json says; one with numbers that no model has is refused before a config is made of it.

    Args:
        name: the model's, for messages.
        families: that the native decoder runs.
    Raises:
        InputError: naming the value, and what is valid.
    """
    where = f"config.json of model {name}"
    said = merged(object_in(path, MOST_CONFIG, f"model {name}"), where)
    if (sampling := path.parent / "generation_config.json").exists():
        object_in(sampling, MOST_CONFIG, f"model {name}")
    if said.get("model_type") in families:
        check_numbers(said, where)
    else:
        _check_bounds(said, where)
    return said


def _check_bounds(said: Mapping[str, Any], where: str, depth: int = 0) -> None:
    """Integers of any family's config, and of the configs in it."""
    for name, value in said.items():
        known = ALSO.get(name, name)
        if type(value) is int and known in VALID and known not in ("rms_norm_eps", "rope_theta"):
            try:
                check_numbers({known: value} if value else {}, where)
            except InputError:
                raise refusal(where, name, value, VALID[known]) from None
        elif isinstance(value, str | list) and len(value) > MOST_PLACES:  # kinds of layers, for one
            raise refusal(where, name, value, f"up to {MOST_PLACES:,} entries or letters")
        elif isinstance(value, list) and _greatest(value) > MOST_LISTED:  # how often a layer is repeated
            raise refusal(where, name, value, f"numbers up to {MOST_LISTED:,} in a list")
        elif isinstance(value, Mapping) and depth < 4:
            _check_bounds(value, where, depth + 1)


def _greatest(value: object, depth: int = 0) -> int:
    """The greatest integer in lists of lists."""
    if isinstance(value, list) and depth < 8:
        return max((_greatest(one, depth + 1) for one in value[:MOST_PLACES]), default=0)
    return value if type(value) is int else 0


def check_config(name: str, config: Any, families: tuple[str, ...]) -> None:
    """Refuse a native family's config with numbers that no model has, those that it leaves out included.

    Raises:
        InputError: naming the value, and what is valid.
    """
    if config.model_type not in families:
        return
    fields = {field: getattr(config, field) for field in (*SIZES, *OTHERS, *ROPES) if hasattr(config, field)}
    check_numbers({"head_dim": None, **fields}, f"config.json of model {name}")


def check_weights(name: str, folder: Path, config: Any, families: tuple[str, ...]) -> None:
    """See that the weights of a config are those of the files, before any of them is made.

    Raises:
        InputError: one is missing or of another shape or type, or there are more than the files hold.
    """
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    if any(folder.glob("*.safetensors")):
        try:
            found = headers(folder)
        except InputError as error:
            raise InputError(f"model {name}: its weights cannot be loaded ({error})") from error
    plain = not getattr(config, "quantization_config", None)
    if config.model_type in families and plain and EMBEDDING in found:
        layout = layout_of(config)
        table = layout.shapes().keys() | layout.biases().keys()
        there = {key: value for key, value in found.items() if key in table}
        check_tensors(layout, there, FLOATS, f"model {name}", "weight")
        return
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    numbers = numbers_of(name, config)
    if numbers > PER_BYTE * size:
        raise InputError(
            f"model {name}: its weights do not fit its config.json, which asks for {numbers:,} numbers of "
            f"files with {size:,} bytes; valid: the config of these weights"
        )


def numbers_of(name: str, config: Any) -> int:
    """Numbers of a config's model, which is made without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    except Exception as error:  # a family's own code
        raise InputError(
            f"model {name}: its config.json does not describe a causal language model ({line_of(error)}); "
            "valid: causal language models with rotary positions, such as Llama, Qwen or Mistral"
        ) from error
    return sum(part.numel() for part in model.parameters())


def check_tokenizer_files(name: str, folder: Path) -> None:
    """Refuse files of a tokenizer that are larger than any model's, or none.

    Raises:
        InputError: naming the file.
    """
    for file in TOKENIZERS:
        path = folder / file
        if path.exists() and not path.is_file():
            raise InputError(f"model {name}: its {file} is not a regular file; valid: one that is")
        if path.is_file() and (size := path.stat().st_size) > MOST_TOKENIZER:
            raise InputError(f"model {name}: its {file} has {size:,} bytes; valid: up to {MOST_TOKENIZER:,}")
        if path.is_file() and file in OBJECTS:
            object_in(path, MOST_CONFIG, f"model {name}")
