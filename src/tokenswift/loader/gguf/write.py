"""A GGUF file of a lean family's model, its matrices quantised: what `gguf.model` reads, and llama.cpp.

Config and tokenizer come from a folder's files, or are copied from another GGUF file. Before a weight is
read, what the file will say is read back, and refused where the model would be another. Weights go through
one matrix at a time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tokenswift.config import check_choice
from tokenswift.files import replacing
from tokenswift.kernels.formats.format import Format, Stored
from tokenswift.kernels.formats.registry import FORMATS
from tokenswift.loader.checkpoint import (
    EMBEDDING,
    FAMILIES,
    HEAD,
    FileWeights,
    Layout,
    StoredWeights,
    weight_files,
)
from tokenswift.loader.gguf.fields import check_back, factors_of, sizes_of, type_of
from tokenswift.loader.gguf.file import ALIGNMENT, ARRAY, DENSE, TEXT, Entry, GgufFile
from tokenswift.loader.gguf.find import gguf_in
from tokenswift.loader.gguf.model import (
    ARCHITECTURES,
    FACTORS,
    GgufWeights,
    architecture,
    config_of,
    formats,
    gguf_name,
    is_lean,
    layout_of,
    layout_of_config,
    names_of,
    straight,
)
from tokenswift.loader.gguf.tokenizer import build, end_ids
from tokenswift.loader.gguf.vocabulary import vocabulary
from tokenswift.loader.load import load_config, load_tokenizer, locate
from tokenswift.loader.own_sampling import gguf_fields, named_in
from tokenswift.loader.prompts import end_tokens
from tokenswift.types import InputError, OnProgress, RunError

#: formats that can be written
KINDS = tuple(name for name in ("q8_0", "q4_0", "q4_1") if FORMATS[name].encode is not None)
FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7}  # llama.cpp's numbers for files of mostly one format
#: keys of a file that are made anew, and beginnings of those that speak of how it was made
ANEW = ("general.architecture", "general.file_type", "general.quantization_version", "general.alignment")
PASSED = ("quantize.", "split.", "GGUF.")
#: biases that files of an architecture have
BIASES = {"llama": ("q", "k", "v", "o", "gate", "up", "down"), "qwen2": ("q", "k", "v"), "qwen3": ()}
AT_ONCE = 1 << 22  # weights that are quantised together


@dataclass(frozen=True, slots=True)
class Written:
    """What was written.

    Attributes:
        path: of the file.
        bytes_in, bytes_out: of the source's weight files, and of the file.
        tensors: in the file.
        notes: lines that whoever asked should see.
    """

    path: Path
    bytes_in: int
    bytes_out: int
    tensors: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Source:
    """A model to write.

    Attributes:
        fields: what the file says besides the keys of :data:`ANEW`, with their types.
        weights: in float32, or as another GGUF file has them.
        factors: of its frequencies, by Llama 3's rule.
    """

    architecture: str
    fields: dict[str, tuple[int, Any]]
    weights: StoredWeights
    factors: Tensor | None
    bytes_in: int
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def quantize(
    src: str | Path,
    dst: str | Path,
    weights: str = "q8_0",
    head_weights: str = "q8_0",
    on_progress: OnProgress | None = None,
) -> Written:
    """Write a model to a GGUF file; one that is there is replaced.

    Args:
        src: a model of a lean family, as `load.load` takes it.
        dst: the file, whole or not there.
        weights: format of the projections, of :data:`KINDS`.
        head_weights: format of the embedding and the LM head.
        on_progress: told of the stage "quantize", in bytes of the file.
    Raises:
        InputError: the model or the formats cannot be written, or the disk does not hold the file.
        RunError: writing failed.
    """
    check_choice("weights", weights, KINDS)
    check_choice("head_weights", head_weights, KINDS)
    name, dst = str(src), Path(dst).expanduser()
    source = _source(name)
    if any(dst.exists() and dst.samefile(file) for file in source.files):
        raise InputError(f"DST {dst} is a file of the model {name}; valid: another name")
    forms = {False: FORMATS[weights], True: FORMATS[head_weights]}
    shapes = dict(_shapes(source, name, forms))
    needed = sum(-(-entry.nbytes // ALIGNMENT) * ALIGNMENT for entry in shapes.values())
    _check_space(dst, needed + _text_bytes(source))
    try:
        with replacing(dst) as part:
            _write(part, source, shapes, FILE_TYPES[weights], on_progress)
            size = part.stat().st_size
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"writing {dst} failed ({reason}); nothing of it was kept") from error
    return Written(dst, source.bytes_in, size, len(shapes), (*source.notes, *_twice(source, shapes)))


def _twice(source: _Source, shapes: dict[str, Entry]) -> Iterator[str]:
    """A line where low-bit weights of another file are quantised to another format."""
    if isinstance(source.weights, GgufWeights):
        there = source.weights.file.tensors
        codes = {(there[gguf_name(name)].code, entry.code) for name, entry in shapes.items() if entry.code}
        if any(old not in DENSE and old != new for old, new in codes):
            yield f"its weights are {formats(source.weights.file)}: what is quantised twice loses twice"


def _check_space(dst: Path, needed: int) -> None:
    place = Path(os.path.realpath(dst)).parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise InputError(
            f"DST {dst} takes {needed:,} bytes, and {free:,} are free there; valid: a disk with more, or a "
            "smaller format"
        )


def _text_bytes(source: _Source) -> int:
    """About as many bytes as the file's keys and values take."""
    lists = [value for kind, value in source.fields.values() if kind == ARRAY]
    return sum(len(str(item).encode()) + 8 for items in lists for item in items) + (1 << 16)


# ---- where the model comes from ----------------------------------------------------------------------------


def _source(name: str) -> _Source:
    source, local = locate(name)
    if (path := gguf_in(Path(source))) is not None:
        return _from_file(name, GgufFile(path))
    folder = Path(source)
    if not folder.is_dir():  # a hub's name, and its files are in the hub's cache
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(source, local_files_only=True))
    return _from_folder(name, folder, local)


def _from_file(name: str, file: GgufFile) -> _Source:
    """Another GGUF file: what it says is copied."""
    if not is_lean(file):
        raise InputError(
            f"model {name} is of the architecture {architecture(file)}, or has tensors of its own; valid: "
            f"{', '.join(ARCHITECTURES)}"
        )
    config = config_of(file)
    build(file.metadata, file.path)
    factors = file[FACTORS] if FACTORS in file.tensors else None
    fields = {
        key: (file.kinds[key], value)
        for key, value in file.metadata.items()
        if key not in ANEW and not key.startswith(PASSED) and value != []
    }
    return _Source(
        architecture=architecture(file),
        fields=fields,
        weights=GgufWeights(file, layout_of(file, config), torch.float32),
        factors=factors.decode() if isinstance(factors, Stored) else factors,
        bytes_in=file.path.stat().st_size,
        files=(file.path,),
    )


def _from_folder(name: str, folder: Path, local: bool) -> _Source:
    """A checkpoint in transformers' format."""
    config = load_config(name, str(folder), local)
    _check_config(name, config)
    if (folder / "adapter_config.json").is_file():
        raise InputError(f"model {name} has an adapter; valid: a model that it is merged into")
    kind = "llama" if config.model_type == "mistral" else str(config.model_type)
    layout = layout_of_config(config, bool(config.tie_word_embeddings))
    weights = FileWeights(folder, layout, torch.float32)
    _check_names(name, weights, kind)
    tokenizer = load_tokenizer(name, str(folder), local)
    factors = factors_of(config)
    fields = {"general.name": (TEXT, Path(name).name), **sizes_of(config, kind, layout)}
    words = vocabulary(tokenizer, layout.vocab_size, name)
    notes = _end(words, end_tokens(_said(folder, config), tokenizer))
    words |= gguf_fields(named_in(folder))
    fields |= {key: (type_of(value), value) for key, value in words.items()}
    check_back(name, kind, fields, factors, config, layout, weights.names())
    files = tuple(weight_files(folder))
    size = sum(file.stat().st_size for file in files)
    return _Source(kind, fields, weights, factors, size, files, notes)


def _said(folder: Path, config: Any) -> Any:
    """What `loader.prompts.end_tokens` looks at of a model."""
    from transformers import GenerationConfig

    found = None
    if (folder / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return SimpleNamespace(config=config, generation_config=found)


def _check_config(name: str, config: Any) -> None:
    """Refuse what the lean decoder does not run, or files cannot say."""
    kind, act = config.model_type, getattr(config, "hidden_act", "silu")
    reason = ""
    if kind not in FAMILIES:
        reason = f"is of the type {kind}"
    elif act != "silu":
        reason = f"has the activation {act}"
    elif kind != "mistral" and "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        reason = "has layers with a sliding window"
    if reason:
        raise InputError(
            f"model {name} {reason}, which is not written; valid: plain models of the types "
            f"{', '.join(FAMILIES)}"
        )


def _check_names(name: str, weights: FileWeights, kind: str) -> None:
    """Refuse weights that a file has no place for."""
    known = set(_known(weights.layout, kind)) | ({HEAD} if weights.layout.tied else set())
    for there in weights.names():
        if there not in known and not there.endswith("rotary_emb.inv_freq"):
            raise InputError(
                f"model {name} has the weight {there}, which GGUF files of {kind} do not hold; valid: a "
                "model without it"
            )


def _known(layout: Layout, kind: str) -> Iterator[str]:
    """Names of the weights that a file can have, in its order."""
    there = layout.shapes()
    biases = tuple(f".{name}_proj.bias" for name in BIASES[kind])
    norms = (".q_norm.weight", ".k_norm.weight") if kind == "qwen3" else ()
    for name in names_of(layout.num_hidden_layers):
        if name in there or name.endswith((*biases, *norms)):
            yield name


def _end(words: dict[str, Any], ends: set[int]) -> tuple[str, ...]:
    """Number the ids that end a text which the reader would not know of; what is still another, in words."""
    for name in ("eos", "eot", "eom"):
        missing = sorted(ends - set(end_ids(words)))
        if missing and f"tokenizer.ggml.{name}_token_id" not in words:
            words[f"tokenizer.ggml.{name}_token_id"] = missing[0]
    found = set(end_ids(words))
    tokens = words["tokenizer.ggml.tokens"]
    more, less = (", ".join(tokens[at] for at in sorted(part)) for part in (found - ends, ends - found))
    return tuple(
        f"texts from the file {what}"
        for what in (f"also end at {more}" if more else "", f"do not end at {less}" if less else "")
        if what
    )


# ---- the file ----------------------------------------------------------------------------------------------


def _shapes(source: _Source, name: str, forms: dict[bool, Format]) -> Iterator[tuple[str, Entry]]:
    """The tensors of the file by their names in transformers, or :data:`FACTORS`, in the file's order."""
    weights = source.weights
    there, layout = set(weights.names()), weights.layout
    sizes = layout.shapes()
    if source.factors is not None:
        yield FACTORS, Entry(tuple(source.factors.shape), 0, 0, 4 * len(source.factors))
    for weight in names_of(layout.num_hidden_layers):
        if weight not in there or (weight == HEAD and layout.tied):
            continue
        shape = sizes.get(weight) or _vector(weights, weight)
        if len(shape) == 1:
            yield weight, Entry(shape, 0, 0, 4 * shape[0])
            continue
        form = forms[weight in (EMBEDDING, HEAD)]
        if shape[1] % form.block:
            raise InputError(
                f"model {name}: {weight} has {shape[1]} columns; valid for {form.name}: a multiple of "
                f"{form.block}"
            )
        yield weight, Entry(shape, form.code, 0, shape[0] * form.row_bytes(shape[1]))


def _vector(weights: StoredWeights, name: str) -> tuple[int, ...]:
    found = weights.get(name)
    assert found is not None
    return tuple(found.shape)


def _write(
    path: Path, source: _Source, shapes: dict[str, Entry], file_type: int, on_progress: OnProgress | None
) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, source.architecture)
    with closing(writer):
        for key, (kind, value) in source.fields.items():
            if kind == ARRAY:
                writer.add_array(key, value)
            else:
                writer.add_key_value(key, value, gguf.GGUFValueType(kind))
        writer.add_file_type(file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for name, entry in shapes.items():
            kind = gguf.GGMLQuantizationType(entry.code)
            number = np.dtype(np.float32)
            writer.add_tensor_info(
                name if name == FACTORS else gguf_name(name),
                entry.shape,
                number,
                entry.nbytes,
                raw_dtype=kind,
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done, total = 0, sum(entry.nbytes for entry in shapes.values())
        for name, entry in shapes.items():
            if on_progress is not None:
                on_progress("quantize", done, total)
            writer.write_tensor_data(_data(source, name, entry).numpy())
            done += entry.nbytes
            source.weights.rest()
        if on_progress is not None:
            on_progress("quantize", total, total)


def _data(source: _Source, name: str, entry: Entry) -> Tensor:
    """A tensor as the file holds it: float32, or bytes of blocks; rows in the file's order."""
    if name == FACTORS:
        assert source.factors is not None
        return source.factors.float().contiguous()
    found, layout = source.weights.get(name), source.weights.layout
    assert found is not None
    made = (
        encoded(found, FORMATS[next(n for n in KINDS if FORMATS[n].code == entry.code)])
        if entry.code
        else None
    )
    if made is None:
        assert isinstance(found, Tensor)
        made = found.float()
        _check_finite(made, name)
    heads = {".q_proj.": layout.num_attention_heads, ".k_proj.": layout.num_key_value_heads}
    turned = next((count for part, count in heads.items() if part in name), 0)
    if source.architecture == "llama" and turned:
        made = made[straight(len(made), turned).argsort()]
    return made.contiguous()


def encoded(weight: Tensor | Stored, form: Format) -> Tensor:
    """The blocks of a matrix (N, K), (N, bytes of a row); those of the same format as they are."""
    if isinstance(weight, Stored) and weight.format is form:
        return weight.blocks
    assert form.encode is not None
    rows, columns = weight.shape
    made = torch.empty(rows, form.row_bytes(columns), dtype=torch.uint8)
    step = max(1, AT_ONCE // columns)
    for start in range(0, rows, step):
        some = slice(start, start + step)
        part = (
            Stored(weight.format, weight.blocks[some]).decode()
            if isinstance(weight, Stored)
            else weight[some]
        )
        part = part.float()
        _check_finite(part, "a matrix")
        made[some] = form.encode(part)
    return made


def _check_finite(part: Tensor, name: str) -> None:
    if not bool(part.isfinite().all()):
        raise InputError(
            f"the model's weights have numbers that are not finite ({name}); valid: a whole model"
        )
