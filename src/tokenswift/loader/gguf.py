"""GGUF files: what they say of a model, and their tensors, read in place.

The `gguf` package reads the same, but takes seconds for a tokenizer's texts.

Files come from anybody: what a header says is held against what the file can hold before anything
    is made of
it, and no two tensors share a byte. What would make another model of the same numbers is refused,
not passed over.

A file names its tensors and numbers in its own way, and Llama's converter turns the rows of queries
and keys round, for positions that pair neighbours. Here all of it gets the names and the order of
transformers' checkpoints; weights stay in the format of the file, whose rows are moved whole.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenswift.kernels.weights import BY_CODE, FORMATS, Stored
from tokenswift.loader.config import SAMPLING, completed
from tokenswift.loader.families import FAMILIES, FULL, SLIDING, Family
from tokenswift.loader.find import MERGED
from tokenswift.loader.layout import EMBEDDING, HEAD, NORM, Layout
from tokenswift.loader.parts import part_paths
from tokenswift.loader.schema import check_numbers, refusal
from tokenswift.loader.tokenizer import words_of
from tokenswift.loader.weights import DENSE, Entry, Weights, check_tensors, mapped, unstored
from tokenswift.types import InputError, shown

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
TEXT, ARRAY = 8, 9  # types of values; the others are numbers:
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
#: names of types by their numbers, as the file format's makers write them
KINDS = {0: "F32", 1: "F16", 30: "BF16", 26: "I32", 27: "I64"}
KINDS |= {code: form.name.upper() for code, form in BY_CODE.items()}
WEIGHTS = [name for name in KINDS.values() if name not in ("I32", "I64")]
MOST_DIMS = 4
#: what is valid where a part of a model is not named as one
PART_NAME = "a file named …-00001-of-00003.gguf, as llama.cpp names parts"
#: more than any model's file has: bytes of a header, tensors, keys, and values of all lists
#: together
MOST_HEADER, MOST_TENSORS, MOST_KEYS, MOST_VALUES = 1 << 26, 1 << 16, 1 << 16, 1 << 22


class Place(NamedTuple):
    """A tensor of a file: its shape, rows first, the name of its type, and where it is in which
    file."""

    shape: tuple[int, ...]
    kind: str
    start: int
    nbytes: int
    path: Path


class GgufFile:
    """A GGUF file, or the files of a model that is split into several (`loader.parts`).

    Args:
        path: of the file; of any part of a split one.
    Raises:
        InputError: it cannot be read, or is not a complete GGUF file of a known version; or a part
            is missing, or is none of this model's.

    Attributes:
        path: the file, the first one of several.
        where: the file, for messages.
        metadata: its values by key; numbers and texts, and lists of them. The first of several
            files has them.
        tensors: its tensors by name, those of all files.
        architecture: the file's own name of its model's kind.
    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.metadata, self.tensors = header.metadata, header.tensors
        count = self.metadata.get("split.count", 1)
        if count not in (0, 1):
            path = self._join_parts(path, count)
        self.path = path
        self.where = f"model file {path}"
        self.architecture = str(self.metadata.get("general.architecture"))

    def _join_parts(self, path: Path, count: object) -> Path:
        """Read the header of each part; returns the path of the first one.

        Args:
            count: parts, as the part at ``path`` says.
        """
        where, paths = f"model file {path}", part_paths(path)
        if count != len(paths):
            number = self.metadata.get("split.no")
            valid = f"{shown(len(paths))}, as its name says" if len(paths) > 1 else PART_NAME
            what = f"split.count is {shown(count)}, split.no is {shown(number)}"
            raise InputError(f"{where}: {what}; valid: {valid}")
        for part in paths:
            if not part.is_file():
                raise InputError(
                    f"{where} is one of {count} parts of a model, and {part.name} is not in its "
                    "folder; valid: all parts in one folder"
                )
        headers = [read_header(part) for part in paths]
        self.metadata = headers[0].metadata
        self.tensors = {}
        for number, (part, header) in enumerate(zip(paths, headers, strict=True)):
            for key, valid in {"split.no": number, "split.count": count}.items():
                if (value := header.metadata.get(key)) != valid:
                    raise refusal(f"model file {part}", key, value, str(valid))
            if twice := sorted(self.tensors.keys() & header.tensors.keys()):
                valid = "parts that share none"
                raise refusal(f"model file {part}", "a tensor of another part", twice[0], valid)
            self.tensors |= header.tensors
        total, expected = len(self.tensors), self.metadata.get("split.tensors.count")
        if expected != total or total > MOST_TENSORS:
            valid = f"{total}, the tensors of all parts, up to {MOST_TENSORS}"
            raise refusal(f"model file {paths[0]}", "split.tensors.count", expected, valid)
        return paths[0]

    def __getitem__(self, name: str) -> Tensor | Stored:
        """A tensor, as it lies in the file (:func:`mapped`)."""
        place = self.tensors[name]
        data = mapped(place.path, place.start, place.nbytes)
        if (kind := DENSE.get(place.kind)) is not None:
            return data.view(kind).view(place.shape)
        stored = Stored(FORMATS[place.kind.lower()], data.view(math.prod(place.shape[:-1]), -1))
        return stored if len(place.shape) == 2 else stored.decode().view(place.shape)

    def number(self, name: str, default: Any = None) -> Any:
        """A number of the file's architecture.

        Raises:
            InputError: it is not there and there is no default.
        """
        key = f"{self.architecture}.{name}"
        found = self.metadata.get(key, default)
        if isinstance(found, list):  # one for each layer: only where they are the same
            found = found[0] if found and all(value == found[0] for value in found) else None
        if found is None or isinstance(found, str | bool | list):
            raise InputError(f"{self.where} lacks {key}, a number; valid: a whole model's file")
        return short(found) if isinstance(found, float) else found

    def keys(self) -> dict[str, str]:
        """What the file calls the numbers of a config, behind the name of the architecture."""
        kind = ARCHITECTURES.get(self.architecture)
        return CALLED | (FAMILIES[kind].keys if kind else {})

    def called(self) -> dict[str, str]:
        """What the file calls the numbers of a config."""
        return {name: f"{self.architecture}.{theirs}" for name, theirs in self.keys().items()}

    def sampling(self) -> dict[str, Any]:
        """Settings of sampling that the file names, floats without what float32 made of them."""
        said = {
            name: self.metadata.get(f"general.sampling.{SETTINGS.get(name, name)}")
            for name in SAMPLING
        }
        floats = {name: round(value, 6) for name, value in said.items() if isinstance(value, float)}
        return {name: value for name, value in (said | floats).items() if value is not None}


def short(value: float) -> float:
    """The shortest decimal number that is the same in float32: 1e-05 for 9.99999974e-06."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))


def read_header(path: Path) -> Header:
    """The values and the tensors of one file, a whole model's or a part of one.

    Raises:
        InputError: it cannot be read, or is not a complete GGUF file of a known version.
    """
    where = f"model file {path}"
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = Header(data, path)
    except OSError as error:
        raise InputError(f"{where} cannot be read ({error.strerror or error})") from error
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except (ValueError, struct.error, RecursionError, OverflowError, MemoryError) as error:
        raise InputError(
            f"{where} is not a complete GGUF file ({error}); valid: GGUF, version 2 or 3, "
            "little-endian"
        ) from error
    return header


class Header:
    """What stands before the tensors of a file.

    Attributes:
        metadata: values by key.
        tensors: by name.
    """

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._at, self._values = data, 4, 0
        self._end = min(len(data), MOST_HEADER)
        if data[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}")
        tensors, values = self._number("Q"), self._number("Q")
        if tensors > MOST_TENSORS or values > MOST_KEYS:
            raise ValueError(
                f"{tensors} tensors and {values} keys, at most {MOST_TENSORS} and {MOST_KEYS}"
            )
        self.metadata: dict[str, Any] = {}
        for _ in range(values):
            (key,) = self._texts(1)
            if key in self.metadata:
                raise ValueError(f"it has the key {shown(key)} twice")
            self.metadata[key] = self._value(self._number("I"))
        found = [self._tensor() for _ in range(tensors)]
        aligned = self.metadata.get("general.alignment", ALIGNMENT)
        if type(aligned) is not int or aligned < 8 or aligned & (aligned - 1):
            raise ValueError(f"alignment {shown(aligned)}, a power of two from 8 on is valid")
        start = -(-self._at // aligned) * aligned
        # in order and apart: else a small file could hold any number of large tensors
        self.tensors: dict[str, Place] = {}
        end = 0
        for offset, name, shape, code in sorted(found):
            nbytes = _nbytes(name, shape, code)
            if name in self.tensors or offset < end or offset % aligned:
                raise ValueError(
                    f"tensor {shown(name)} is there twice, overlaps another or is not aligned"
                )
            if (end := offset + nbytes) > len(data) - start:
                raise ValueError(f"it ends before the end of tensor {shown(name)}")
            self.tensors[name] = Place(shape, KINDS[code], start + offset, nbytes, path)

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._data, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return value

    def _texts(self, count: int) -> list[str]:
        """Texts in a row: a vocabulary is most of a header."""
        data, end, at, found = self._data, self._end, self._at, []
        size_of = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = at + 8
            at = start + size_of(data, at)[0]
            if at > end:
                break
            found.append(data[start:at].decode("utf-8", "replace"))
        self._go_on(at - self._at)
        return found

    def _go_on(self, size: int) -> None:
        self._at += size
        if self._at > self._end:
            raise ValueError(
                f"it ends within a text or list, or its header exceeds {MOST_HEADER} bytes"
            )

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._texts(1)[0]
        if kind == ARRAY:
            kind, count = self._number("I"), self._number("Q")
            self._values += count
            if self._values > MOST_VALUES:
                raise ValueError(f"lists of {self._values} values, at most {MOST_VALUES}")
            if kind == TEXT:
                return self._texts(count)
            if kind not in NUMBERS:
                raise ValueError(f"a list of values of type {kind}")
            start = self._at
            self._go_on(count * struct.calcsize(f"<{NUMBERS[kind]}"))
            return list(struct.unpack_from(f"<{count}{NUMBERS[kind]}", self._data, start))
        if kind not in NUMBERS:
            raise ValueError(f"a value of type {kind}")
        return self._number(NUMBERS[kind])

    def _tensor(self) -> tuple[int, str, tuple[int, ...], int]:
        (name,), dims = self._texts(1), self._number("I")
        if not 0 < dims <= MOST_DIMS:
            raise ValueError(f"tensor {shown(name)} has {dims} dimensions")
        shape = tuple(self._number("Q") for _ in range(dims))[::-1]
        code = self._number("I")
        return self._number("Q"), name, shape, code


def _nbytes(name: str, shape: tuple[int, ...], code: int) -> int:
    """Bytes of a tensor."""
    if code not in KINDS:
        raise InputError(
            f"tensor {shown(name)} is of type {code}, which is not known here; valid: a file in "
            f"another, "
            "such as Q4_K_M (llama.cpp's llama-quantize makes one)"
        )
    if (count := math.prod(shape)) == 0:
        raise ValueError(f"tensor {shown(name)} has shape {shape}")
    if (form := BY_CODE.get(code)) is None:
        return count * DENSE[KINDS[code]].itemsize
    if shape[-1] % form.block:
        raise ValueError(
            f"tensor {shown(name)} has rows of {shape[-1]} numbers in blocks of {form.block}"
        )
    return count // form.block * form.nbytes


#: what files call settings of sampling, where it is not `config.SamplingParams`' name
SETTINGS = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
FACTORS = "rope_freqs.weight"  # what Llama 3's rule divides each frequency by
#: Llama 3's rule: wavelengths between these parts of the first model's positions are scaled in part
LOW, HIGH, TRAINED = 1.0, 4.0, 8192
#: what files call a config's numbers, behind the name of the architecture
CALLED = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "rope_parameters.rope_theta": "rope.freq_base",
    "rope_parameters.factor": "rope.scaling.factor",
    "rope_parameters.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope_parameters.beta_slow": "rope.scaling.yarn_beta_slow",
    "rope_parameters.original_max_position_embeddings": "rope.scaling.original_context_length",
}
#: parameters of YaRN that may be left out
YARN = ("beta_fast", "beta_slow", "original_max_position_embeddings")
#: keys that would make another model of the numbers above, and the values with which they do not
UNKNOWN: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
}
UNKNOWN |= dict.fromkeys(
    ("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias"), (0,)
)
UNKNOWN |= dict.fromkeys(
    ("attn_logit_softcapping", "final_logit_softcapping", "expert_count"), (0,)
)
UNKNOWN |= dict.fromkeys(
    ("logit_scale", "embedding_scale", "residual_scale", "rope.scale_linear"), (0, 1)
)
#: architectures that the native decoder runs, and transformers' names for them
ARCHITECTURES = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}
OUTER = {EMBEDDING: "token_embd.weight", NORM: "output_norm.weight", HEAD: "output.weight"}
INNER = {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
INNER |= {f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"}
INNER |= {"self_attn.o_proj": "attn_output"}
INNER |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
#: norms of a layer in the order of `config.Family.norms`
NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
#: fields that say whether a model has biases, and tensors that say so in files
BIASES = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}


def positions(file: GgufFile, width: int) -> dict[str, Any]:
    """``rope_parameters`` as transformers' configs have them; of YaRN what the file says.

    Raises:
        InputError: the file scales positions in a way that is not known here.
    """
    key = f"{file.architecture}.rope.scaling"
    rule = "none" if FACTORS in file.tensors else file.metadata.get(f"{key}.type", "none")
    if rule not in ("none", "linear", "yarn"):
        raise refusal(file.where, f"{key}.type", rule, f"none, linear, yarn, or tensor {FACTORS}")
    made: dict[str, Any] = {"rope_theta": file.number("rope.freq_base", 10000.0)}
    made["rope_type"] = "default" if rule == "none" else rule
    if rule != "none":
        made["factor"] = file.number("rope.scaling.factor")
    if rule == "yarn":
        given = {name: file.number(CALLED[f"rope_parameters.{name}"], 0) for name in YARN}
        made |= {name: value for name, value in given.items() if value}
    if (scale := file.number("rope.scaling.attn_factor", 1)) not in (0, 1):
        if rule != "yarn" or file.architecture != "olmo2":  # elsewhere it means something else
            raise refusal(file.where, f"{key}.attn_factor", scale, "1, or a file without it")
        made["attention_factor"] = scale
    check_numbers({"rope_parameters": made}, file.where, file.called())
    return made | (_llama3(file, width, made["rope_theta"]) if FACTORS in file.tensors else {})


def _llama3(file: GgufFile, width: int, theta: float) -> dict[str, Any]:
    """Llama 3's rule from the factors that it gave.

    Raises:
        InputError: no such rule gives them.
    """
    factors = unstored(file[FACTORS], torch.float32).double()
    if factors.shape == (width // 2,) and bool(((factors >= 1) & (factors < 1e6)).all()):
        factor = short(float(factors.max()))
        waves = 2 * math.pi * theta ** (torch.arange(0, width, 2).double() / width)
        smooth = ((TRAINED / waves - LOW) / (HIGH - LOW)).clamp(0, 1)
        if torch.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-4, atol=0):
            made = {"rope_type": "llama3", "factor": factor, "low_freq_factor": LOW}
            return made | {"high_freq_factor": HIGH, "original_max_position_embeddings": TRAINED}
    raise InputError(
        f"{file.where}: {FACTORS} does not follow Llama 3's rule; valid: factors that do"
    )


def own_dtype(file: GgufFile, place: str = "cpu") -> str:
    """What ``dtype="auto"`` means for a file: the type of its matrices where they are float
    numbers, bfloat16 where a card multiplies with quantized weights, else float32."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if "BF16" in kinds or (place != "cpu" and kinds - DENSE.keys()):
        return "bfloat16"
    return "float16" if kinds == {"F16"} else "float32"


def config_of(file: GgufFile) -> SimpleNamespace:
    """The config of a native family's model.

    Raises:
        InputError: the file holds an adapter, is of another architecture, lacks a number, or scales
            positions in a way that is not known here.
    """
    kind = file.metadata.get("general.type", "model")
    if kind == "adapter":
        raise InputError(f"{file.where} holds an adapter; valid: {MERGED}")
    if kind != "model":
        raise refusal(file.where, "general.type", kind, "model")
    if file.architecture not in ARCHITECTURES:
        valid = f"{', '.join(ARCHITECTURES)}, or the model in transformers' format"
        raise InputError(
            f"{file.where}: the architecture {file.architecture} cannot be run; valid: {valid}"
        )
    numbers, said = _numbers(file), file.metadata
    hidden, width, layers = (
        numbers[name] for name in ("hidden_size", "head_dim", "num_hidden_layers")
    )
    kind = ARCHITECTURES[file.architecture]
    kind = (
        {"llama": "mistral", "olmo2": "olmo3"}.get(kind, kind)
        if "sliding_window" in numbers
        else kind
    )
    family = FAMILIES[kind]
    _check_meant(file, numbers, family)
    ends = words_of(said, file.path, numbers["vocab_size"]).ends()
    widest = hidden // numbers["num_attention_heads"]
    usual = {
        "query_pre_attn_scalar": widest if family.largest == layers else width,
        "attention_multiplier": width**-0.5,
        "tie_word_embeddings": OUTER[HEAD] not in file.tensors,
        "bos_token_id": said.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        **{name: f"blk.0.{part}.bias" in file.tensors for name, part in BIASES.items()},
    }
    own = {
        name: value
        for name, value in (usual | numbers).items()
        if name in {*family.usual, "head_dim"}
    }
    rope = positions(file, width)
    if len(family.bases) > 1:  # a file says at most the base of layers with windows
        base = rope["rope_theta"] if len(set(family.bases)) == 1 else family.bases[1]
        local = {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", base)}
        check_numbers({"rope_parameters": local}, file.where, file.called())
        rope = {FULL: rope, SLIDING: local}
    made = completed(kind, own | {"rope_parameters": rope, "dtype": own_dtype(file)})
    if made is None:  # of Llama, a width that its heads do not divide
        raise InputError(
            f"{file.where}: its sizes are not those of a {kind} model; valid: a sound file"
        )
    return made


def _numbers(file: GgufFile) -> dict[str, Any]:
    """The sizes of a model by transformers' names, within their ranges; without those that are 0:
    none."""
    embedding = file.tensors.get(OUTER[EMBEDDING])
    if embedding is None or len(embedding.shape) != 2:
        raise InputError(
            f"{file.where} lacks tensor {OUTER[EMBEDDING]}, a matrix; valid: a whole model's file"
        )
    own = FAMILIES[ARCHITECTURES[file.architecture]].keys
    usual: dict[str, Any] = dict.fromkeys((*own, "head_dim", "sliding_window"), 0)
    usual["num_key_value_heads"] = file.number(CALLED["num_attention_heads"])
    numbers: dict[str, Any] = dict(zip(("vocab_size", "hidden_size"), embedding.shape, strict=True))
    left = {*numbers, *({"rms_norm_eps"} if "layer_norm_eps" in own else ())}
    for name, key in file.keys().items():
        if "." not in name and name not in left:
            value = file.number(key, usual.get(name))
            if value or name not in usual:
                numbers[name] = value
    check_numbers({"head_dim": None} | numbers, file.where, file.called())
    return {"head_dim": numbers["hidden_size"] // numbers["num_attention_heads"]} | numbers


def _check_meant(file: GgufFile, numbers: Mapping[str, Any], family: Family) -> None:
    """Refuse what a file says besides that would make another model of it.

    Raises:
        InputError: naming the key, and what is valid.
    """
    every, width = family.full_every, numbers["head_dim"]
    slides = [every == 0 or (n + 1) % every != 0 for n in range(numbers["num_hidden_layers"])]
    valid = {
        **{name: one for name, one in UNKNOWN.items() if name not in family.keys.values()},
        "attention.sliding_window_pattern": (slides, every),
        "embedding_length": (numbers["hidden_size"],),
        "attention.value_length": (width,),
        "rope.dimension_count": (width,),  # less: a part of each head is turned
    }
    for name, values in valid.items():
        key = f"{file.architecture}.{name}"
        if (found := file.metadata.get(key, values[0])) not in values:
            raise refusal(file.where, key, found, f"{values[-1]}, or a file without it")
    for name in ("hidden_size", "intermediate_size"):
        if numbers[name] % 2:
            raise refusal(file.where, file.called()[name], numbers[name], "an even number")


# ---- weights -------------------------------------------------------------------------------------


def weights_of(file: GgufFile, layout: Layout, dtype: torch.dtype, kind: str) -> Weights:
    """Weights of a GGUF file: matrices in a quantized format as they are stored, rows in the order
    of transformers' checkpoints, and norms as there, where files have what they multiply by.

    Args:
        layout: which weights there must be.
        dtype, kind: as of `weights.Weights`.
    Raises:
        InputError: tensors are missing, of other shapes or types, or none of the family's.
    """
    called, family = names_of(layout.num_hidden_layers, layout.family), layout.family
    back = {theirs: name for name, theirs in called.items()}
    heads = {"q_proj": layout.num_attention_heads, "k_proj": layout.num_key_value_heads}
    found: dict[str, Entry] = {}
    for theirs, tensor in file.tensors.items():
        if theirs != FACTORS:
            name = back.get(theirs, theirs)
            turned = heads.get(name.split(".")[-2]) if family.turned and "." in name else None
            minus = family.plus_one and name.endswith("norm.weight")
            found[name] = Entry(
                theirs, tensor.shape, tensor.kind, partial(read_tensor, file, theirs, turned, minus)
            )
    shapes = layout.shapes()
    zero = [name for name in shapes if name.endswith("o_proj.bias")]  # where there is none
    check_tensors(found, shapes, WEIGHTS, file.where, zero)
    return Weights(layout, dtype, found, kind)


def names_of(layers: int, family: Family) -> dict[str, str]:
    """What a file calls each tensor that a family's decoder can have, by its name in
    transformers."""
    norms = zip(family.norms, NORMS, strict=True)
    found, inner = dict(OUTER), INNER | {name: theirs for name, theirs in norms if name is not None}
    for number in range(layers):
        for name, theirs in inner.items():
            for end in ("weight", "bias") if name.endswith("_proj") else ("weight",):
                found[f"model.layers.{number}.{name}.{end}"] = f"blk.{number}.{theirs}.{end}"
    return found


def read_tensor(
    file: GgufFile, name: str, heads: int | None, minus: bool = False
) -> Tensor | Stored:
    """A tensor with its rows in transformers' order.

    Args:
        heads: of queries or keys whose rows pair neighbours; None: the order is the file's.
        minus: the file has added 1 to it.
    """
    found = file[name]
    if minus:
        return unstored(found, torch.float32) - 1
    return found if heads is None else straightened(found, heads)


def straightened(weight: Tensor | Stored, heads: int) -> Tensor | Stored:
    """Queries' or keys' weight whose rows pair neighbours, with these rows in transformers'
    order."""
    rows = straight(len(weight), heads)
    return weight.take(rows) if isinstance(weight, Stored) else weight[rows]


def straight(rows: int, heads: int) -> Tensor:
    """Where each row of queries or keys stands in a file of the llama kind, which pairs neighbours:
    row i of the first half of a head is at 2 i there, of the second at 2 i + 1."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)
