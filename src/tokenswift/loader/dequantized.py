"""transformers' own models of what lies in other files than its own: GGUF files, unpacked in memory.

What the native decoder runs is filled from the very weights that it reads, as transformers' reader of such
files leaves out some of what they say (Llama 3's positions, a tokenizer's rule for digits). Other families go
through that reader.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokenswift.json_files import MOST_CONFIG, object_in
from tokenswift.loader._hf import making_models
from tokenswift.loader.checkpoint import FAMILIES, StoredWeights, unstored
from tokenswift.loader.gguf.file import GgufFile
from tokenswift.loader.gguf.model import (
    ARCHITECTURES,
    GgufWeights,
    architecture,
    config_of,
    is_native,
    layout_of,
    own_dtype,
)
from tokenswift.loader.gguf.tokenizer import end_ids, plain, wrapped
from tokenswift.loader.hub import line_of
from tokenswift.loader.made import RECORD
from tokenswift.loader.native import NativeConfig, completed
from tokenswift.loader.numbers import check_numbers
from tokenswift.types import InputError

logger = logging.getLogger("tokenswift")


def model_of(
    config: NativeConfig, weights: StoredWeights, dtype: torch.dtype, ends: list[int] | None = None
) -> Any:
    """A native family's model of transformers, filled with weights unpacked to a type.

    Args:
        ends: end-of-text ids, where the config does not say all.
    """
    from transformers import AutoModelForCausalLM

    with making_models():
        made = config.of_transformers()
        made.dtype = dtype
        with torch.device("meta"):  # without memory
            model: Any = AutoModelForCausalLM.from_config(made)
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # its only buffers
    filled: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        found = weights.get(name)  # a family may have biases that a file lacks: they are 0
        made = torch.zeros(parameter.shape, dtype=dtype) if found is None else unstored(found, dtype)
        filled[name] = made.to(dtype, copy=found is not None and made is found).contiguous()
    model.load_state_dict(filled, strict=False, assign=True)
    model.tie_weights()
    weights.rest()
    if ends:
        model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends
    for parameter in model.parameters():
        assert isinstance(parameter, nn.Parameter) and parameter.device.type == "cpu"
    return model.eval()


def load_file(
    name: str,
    path: Path,
    dtype: torch.dtype | None,
    device: str,
    places: Callable[[Any], dict[str, Any]] = lambda config: {},
) -> tuple[Any, Any]:
    """transformers' own model and tokenizer of a GGUF file, unpacked.

    Args:
        name: what the model was asked for by.
        dtype: None: the file's (see `gguf.own_dtype`; bfloat16 for other families).
        device: from `load.check_place`.
        places: what ``from_pretrained`` is told of places for the weights of a config; with none, all go to
            the device. To be spread they are all unpacked in memory first, in each process. A config of None
            stands for a family that transformers unpacks.
    Raises:
        InputError: the file cannot be read, or nobody here can unpack it.
    """
    file = GgufFile(path)
    if not is_native(file):
        places(None)
        return _by_transformers(name, file, dtype, device)
    kind = dtype or getattr(torch, own_dtype(file, device))
    say_foreign(name, file, kind, lambda form: device == "cpu")
    config = config_for(file)
    model = model_of(config, GgufWeights(file, layout_of(file, config), kind), kind, end_ids(file.metadata))
    if options := places(config):
        model = _spread(model, options)
    model.name_or_path = model.config._name_or_path = str(path)
    return model if options else model.to(device), tokenizer_of(file)


def _spread(model: Any, options: dict[str, Any]) -> Any:
    """A model in memory, its weights moved to their places."""
    ends = model.generation_config
    with making_models():
        made = type(model).from_pretrained(
            None, config=model.config, state_dict=model.state_dict(), dtype=model.dtype, **options
        )
    made.generation_config = ends
    return made.eval()


def config_for(file: GgufFile) -> NativeConfig:
    """The config of a native family's GGUF file: that beside it in a folder that was made here, otherwise its
    own. What others put beside such files often says no more than the family."""
    beside = file.path.parent / "config.json"
    if (file.path.parent / RECORD).is_file():
        said = object_in(beside, MOST_CONFIG, f"model folder {beside.parent}")
        check_numbers(said, f"config.json of model folder {beside.parent}")
        if said.get("model_type") in FAMILIES:
            found = completed(said["model_type"], said)
            if found is not None:
                return found
    return config_of(file)


def tokenizer_of(file: GgufFile) -> Any:
    """transformers' tokenizer of a GGUF file.

    Raises:
        InputError: its kind is not known here.
    """
    return wrapped(plain(file.metadata, file.path))


def say_foreign(
    name: str, file: GgufFile, dtype: torch.dtype, keeps: Callable[[str], bool] = lambda form: True
) -> None:
    """Say which tensors of a file are unpacked, where some are; ``keeps``: whether a format stays."""
    if foreign := file.foreign(keeps):
        logger.warning(
            "model %s: tensors of type %s are unpacked to %s, which takes more memory than the file",
            name,
            ", ".join(foreign),
            str(dtype).removeprefix("torch."),
        )


def _by_transformers(name: str, file: GgufFile, dtype: torch.dtype | None, device: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if len(file.parts) > 1:
        raise InputError(
            f"model {name}: the architecture {architecture(file)} of a split file cannot be unpacked; valid: "
            f"one file (llama.cpp's gguf-split --merge), or {', '.join(ARCHITECTURES)}"
        )
    kind = dtype or torch.bfloat16
    path, what, to = file.path, architecture(file), str(kind).removeprefix("torch.")
    logger.warning("model %s: the architecture %s is unpacked to %s by transformers", name, what, to)
    options: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        with making_models(), redirect_stderr(io.StringIO()):  # of the reader's bare progress bar
            model: Any = AutoModelForCausalLM.from_pretrained(
                path.parent,
                quantization_config=GgufConfig(gguf_file=path.name, dequantize=True),
                dtype=kind,
                **options,
            )
            try:
                tokenizer = tokenizer_of(file)
            except InputError:
                tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    except Exception as error:  # its reader's errors are of every kind
        raise InputError(
            f"model {name}: the architecture {what} cannot be unpacked ({line_of(error)}); valid: "
            f"{', '.join(ARCHITECTURES)}, and what transformers reads of GGUF files"
        ) from error
    return model.to(device).eval(), tokenizer
