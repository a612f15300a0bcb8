"""GGUF files: what they say of a model, and their tensors, read in place.

The `gguf` package reads the same, but takes seconds for a tokenizer's texts.

Files come from anybody: what a header says is held against what the file can hold before anything is made of
it, and no two tensors share a byte. What would make another model of the same numbers is refused, not passed
over.

A file names its tensors and numbers in its own way, and Llama's converter turns the rows of queries and keys
round, for positions that pair neighbours. Here all of it gets the names and the order of transformers'
checkpoints; weights stay in the format of the file, whose rows are moved whole.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenswift.kernels.weights import BY_CODE, Stored
from tokenswift.loader.config import (
    EMBEDDING,
    HEAD,
    NORM,
    Layout,
    NativeConfig,
    check_numbers,
    completed,
    refusal,
)
from tokenswift.loader.families import FAMILIES, FULL, SLIDING, Family
from tokenswift.loader.tokenizer import words_of
from tokenswift.loader.weights import StoredWeights, check_tensors, unstored
from tokenswift.types import InputError, shown

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
TEXT, ARRAY = 8, 9  # types of values; the others are numbers:
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
#: types of tensors that torch has
DENSE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
INTEGERS = {26: torch.int32, 27: torch.int64}  # no weights: maps of vocabularies
#: names of types by their numbers, as the file format's makers write them
KINDS = {0: "F32", 1: "F16", 30: "BF16", 26: "I32", 27: "I64"}
KINDS |= {code: form.name.upper() for code, form in BY_CODE.items()}
MOST_DIMS, MOST_DEPTH = 4, 4
#: more than any model's file has: bytes of a header, tensors, keys, and values of all lists together
MOST_HEADER, MOST_TENSORS, MOST_KEYS, MOST_VALUES = 1 << 26, 1 << 16, 1 << 16, 1 << 22


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file.

    Attributes:
        shape: rows first.
        code: of its type.
        start, nbytes: where it is in the file.
    """

    shape: tuple[int, ...]
    code: int
    start: int
    nbytes: int

    @property
    def kind(self) -> str:
        """The name of its type."""
        return KINDS[self.code]


class GgufFile:
    """A GGUF file.

    Raises:
        InputError: it cannot be read, or is not a complete GGUF file of a known version.

    Attributes:
        metadata: its values by key; numbers and texts, and lists of them.
        tensors: its tensors by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        try:
            read = _Reader(self._mapped())
        except OSError as error:
            raise InputError(f"model file {path} cannot be read ({error.strerror or error})") from error
        except InputError as error:
            raise InputError(f"model file {path}: {error}") from None
        except (ValueError, struct.error, RecursionError, OverflowError, MemoryError) as error:
            raise InputError(
                f"model file {path} is not a complete GGUF file ({error}); valid: GGUF, version 2 or 3, "
                "little-endian"
            ) from error
        self.metadata, self.tensors = read.metadata, read.tensors
        if self.metadata.get("split.count", 0) not in (0, 1):
            valid = "one file, which llama.cpp's llama-gguf-split --merge makes of them"
            raise InputError(f"model file {path} is one part of several of a model; valid: {valid}")

    def __getitem__(self, name: str) -> Tensor | Stored:
        """A tensor, as it lies in the file."""
        entry = self.tensors[name]
        data = torch.frombuffer(self._mapped(), dtype=torch.uint8, offset=entry.start, count=entry.nbytes)
        if (kind := DENSE.get(entry.code) or INTEGERS.get(entry.code)) is not None:
            return data.view(kind).view(entry.shape)
        stored = Stored(BY_CODE[entry.code], data.view(math.prod(entry.shape[:-1]), -1))
        return stored if len(entry.shape) == 2 else stored.decode().view(entry.shape)

    def rest(self) -> None:
        """Let go of the mapping: what was read leaves the process with the last tensor of it."""
        self._map = None

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            with self.path.open("rb") as file:
                # a private mapping: nothing that is done to a tensor reaches the file
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._map


class _Reader:
    """Reads what stands before the tensors."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._values = data, 4, 0
        self._end = min(len(data), MOST_HEADER)
        if data[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}")
        tensors, values = self._number("Q"), self._number("Q")
        if tensors > MOST_TENSORS or values > MOST_KEYS:
            raise ValueError(f"{tensors} tensors and {values} keys, at most {MOST_TENSORS} and {MOST_KEYS}")
        self.metadata: dict[str, Any] = {}
        for _ in range(values):
            key = self._text()
            if key in self.metadata:
                raise ValueError(f"it has the key {shown(key)} twice")
            self.metadata[key] = self._value(self._number("I"))
        found = [self._tensor() for _ in range(tensors)]
        aligned = self.metadata.get("general.alignment", ALIGNMENT)
        if type(aligned) is not int or aligned < 8 or aligned & (aligned - 1):
            raise ValueError(f"alignment {shown(aligned)}, a power of two from 8 on is valid")
        start = -(-self._at // aligned) * aligned
        self.tensors: dict[str, Entry] = {}
        for name, shape, code, offset in found:
            nbytes = _nbytes(name, shape, code)
            if offset % aligned:
                raise ValueError(f"tensor {shown(name)} begins at {offset}, no multiple of {aligned}")
            if start + offset + nbytes > len(data):
                raise ValueError(f"it ends before the end of tensor {shown(name)}")
            if name in self.tensors:
                raise ValueError(f"it has the tensor {shown(name)} twice")
            self.tensors[name] = Entry(shape, code, start + offset, nbytes)
        self._check_apart()

    def _check_apart(self) -> None:
        """No two tensors share bytes: else a small file could hold any number of large ones."""
        order = sorted(self.tensors.items(), key=lambda item: item[1].start)
        for (before, first), (name, second) in pairwise(order):
            if first.start + first.nbytes > second.start:
                raise ValueError(f"tensors {shown(before)} and {shown(name)} overlap")

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._data, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return value

    def _text(self) -> str:
        return self._texts(1)[0]

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
        self._at = at
        self._check_place()
        return found

    def _check_place(self) -> None:
        if self._at > self._end:
            raise ValueError(
                f"it ends within a text or list, or its header has more than {MOST_HEADER} bytes"
            )

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == TEXT:
            return self._text()
        if kind == ARRAY and depth < MOST_DEPTH:
            kind, count = self._number("I"), self._number("Q")
            self._values += count
            if self._values > MOST_VALUES:
                raise ValueError(f"lists of {self._values} values, at most {MOST_VALUES}")
            if kind == TEXT:
                return self._texts(count)
            if kind not in NUMBERS:
                return [self._value(kind, depth + 1) for _ in range(count)]
            start = self._at
            self._at += count * struct.calcsize(f"<{NUMBERS[kind]}")
            self._check_place()
            return list(struct.unpack_from(f"<{count}{NUMBERS[kind]}", self._data, start))
        if kind not in NUMBERS:
            raise ValueError(f"a value of type {kind}")
        return self._number(NUMBERS[kind])

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = self._text(), self._number("I")
        if not 0 < dims <= MOST_DIMS:
            raise ValueError(f"tensor {shown(name)} has {dims} dimensions")
        shape = tuple(self._number("Q") for _ in range(dims))[::-1]
        return name, shape, self._number("I"), self._number("Q")


def _nbytes(name: str, shape: tuple[int, ...], code: int) -> int:
    """Bytes of a tensor."""
    if code not in KINDS:
        raise InputError(
            f"tensor {shown(name)} is of type {code}, which is not known here; valid: a file in another, "
            "such as Q4_K_M (llama.cpp's llama-quantize makes one)"
        )
    if (count := math.prod(shape)) == 0:
        raise ValueError(f"tensor {shown(name)} has shape {shape}")
    if (form := BY_CODE.get(code)) is None:
        return count * (DENSE | INTEGERS)[code].itemsize
    if shape[-1] % form.block:
        raise ValueError(f"tensor {shown(name)} has rows of {shape[-1]} numbers in blocks of {form.block}")
    return count // form.block * form.nbytes


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
UNKNOWN: dict[str, tuple[Any, ...]] = {"attention.causal": (True,), "use_parallel_residual": (False,)}
UNKNOWN |= dict.fromkeys(("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias"), (0,))
UNKNOWN |= dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "expert_count"), (0,))
UNKNOWN |= dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale", "rope.scale_linear"), (0, 1))
UNKNOWN["rope.scaling.attn_factor"] = (0, 1)


def called(file: GgufFile) -> dict[str, str]:
    """What a file calls the numbers of a config."""
    own = FAMILIES[ARCHITECTURES[architecture(file)]].keys if architecture(file) in ARCHITECTURES else {}
    return {name: f"{architecture(file)}.{theirs}" for name, theirs in {**CALLED, **own}.items()}


def number_of(file: GgufFile, name: str, default: Any = None) -> Any:
    """A number of the file's architecture.

    Raises:
        InputError: it is not there and there is no default.
    """
    found = file.metadata.get(f"{architecture(file)}.{name}", default)
    if isinstance(found, list):  # one for each layer: only where they are the same
        same = found and all(value == found[0] for value in found)
        found = found[0] if same else None
    if found is None or isinstance(found, str | bool | list):
        raise InputError(
            f"model file {file.path} lacks {architecture(file)}.{name}, a number; valid: a whole model's file"
        )
    return found


def short(value: float) -> float:
    """The shortest decimal number that is the same in float32: 1e-05 for 9.99999974e-06."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))


def architecture(file: GgufFile) -> str:
    """The file's own name of its model's kind."""
    return str(file.metadata.get("general.architecture"))


def check_meant(file: GgufFile, hidden: int, width: int, family: Family) -> None:
    """Refuse what a file says besides that would make another model of it.

    Raises:
        InputError: naming the key, and what is valid.
    """
    valid = {
        **{name: one for name, one in UNKNOWN.items() if name not in family.keys.values()},
        "attention.sliding_window_pattern": (family.full_every,),
        "embedding_length": (hidden,),
        "attention.value_length": (width,),
        "rope.dimension_count": (width,),  # less: a part of each head is turned
    }
    for name, values in valid.items():
        key = f"{architecture(file)}.{name}"
        if (found := file.metadata.get(key, values[0])) not in values:
            raise refusal(f"model file {file.path}", key, found, f"{values[-1]}, or a file without it")


def positions(file: GgufFile, width: int, limit: int) -> dict[str, Any]:
    """``rope_parameters`` as transformers' configs have them.

    Raises:
        InputError: the file scales positions in a way that is not known here.
    """
    where, key = f"model file {file.path}", f"{architecture(file)}.rope.scaling.type"
    rule = "none" if FACTORS in file.tensors else file.metadata.get(key, "none")
    if rule not in ("none", "linear", "yarn"):
        raise refusal(where, key, rule, f"none, linear, yarn, or tensor {FACTORS}")
    made: dict[str, Any] = {"rope_theta": short(number_of(file, "rope.freq_base", 10000.0))}
    made["rope_type"] = "default" if rule == "none" else rule
    if rule != "none":
        made["factor"] = short(number_of(file, "rope.scaling.factor"))
    if rule == "yarn":
        more = {name: number_of(file, CALLED[f"rope_parameters.{name}"], 0) for name in YARN}
        made |= {
            name: short(value) if isinstance(value, float) else value for name, value in more.items() if value
        }
        made.setdefault(YARN[-1], limit)
    check_numbers({"rope_parameters": made}, where, called(file))
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
        f"model file {file.path}: {FACTORS} does not follow Llama 3's rule; valid: factors that do"
    )


#: architectures that the native decoder runs, and transformers' names for them
ARCHITECTURES = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}
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
}
#: norms of a layer in the order of `families.Family.norms`
NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")


def formats(file: GgufFile) -> str:
    """The types of a file's matrices, those of most weights first, for messages and records."""
    found: Counter[str] = Counter()
    for entry in file.tensors.values():
        if len(entry.shape) > 1:
            found[entry.kind.lower()] += math.prod(entry.shape)
    return "+".join(name for name, _ in found.most_common())


def own_dtype(file: GgufFile, place: str = "cpu") -> str:
    """What ``dtype="auto"`` means for a file: the type of its matrices where they are float numbers, bfloat16
    where a card multiplies with quantized weights, else float32."""
    codes = {entry.code for entry in file.tensors.values() if len(entry.shape) > 1}
    kinds = {KINDS[code] for code in codes}
    if "BF16" in kinds or (place != "cpu" and not codes.isdisjoint(BY_CODE)):
        return "bfloat16"
    return "float16" if kinds == {"F16"} else "float32"


# ---- what the file says of the model -----------------------------------------------------------------------


#: fields that say whether a model has biases, and tensors that say so in files
BIASES = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}


def config_of(file: GgufFile) -> NativeConfig:
    """The config of a native family's model.

    Raises:
        InputError: the file is of another architecture, lacks a number, or scales positions in a way that is
            not known here.
    """
    where, said = f"model file {file.path}", file.metadata
    if architecture(file) not in ARCHITECTURES:
        valid = f"{', '.join(ARCHITECTURES)}, or the model in transformers' format"
        raise InputError(f"{where}: the architecture {architecture(file)} cannot be run; valid: {valid}")
    numbers = _numbers(file)
    hidden, width = numbers["hidden_size"], numbers["head_dim"]
    kind = ARCHITECTURES[architecture(file)]
    kind = {"llama": "mistral", "olmo2": "olmo3"}.get(kind, kind) if "sliding_window" in numbers else kind
    family = FAMILIES[kind]
    check_meant(file, hidden, width, family)
    largest = family.largest == numbers["num_hidden_layers"]
    ends = words_of(said, file.path, numbers["vocab_size"]).ends()
    usual = {
        "query_pre_attn_scalar": hidden // numbers["num_attention_heads"] if largest else width,
        "attention_multiplier": width**-0.5,
        "tie_word_embeddings": OUTER[HEAD] not in file.tensors,
        "bos_token_id": said.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        **{name: f"blk.0.{part}.bias" in file.tensors for name, part in BIASES.items()},
    }
    own = {name: value for name, value in (usual | numbers).items() if name in {*family.usual, "head_dim"}}
    rope = _bases(file, family, width, numbers["max_position_embeddings"])
    made = completed(kind, own | {"rope_parameters": rope, "dtype": own_dtype(file)})
    if made is None:  # of Llama, a width that its heads do not divide
        raise InputError(f"{where}: its sizes are not those of a {kind} model; valid: a sound file")
    return made


def _bases(file: GgufFile, family: Family, width: int, limit: int) -> dict[str, Any]:
    """:func:`positions`, for each kind of layers where a family's have their own: a file says those of layers
    that see everything, and at most the base of the others."""
    found = positions(file, width, limit)
    if len(family.bases) == 1:
        return found
    usual = found["rope_theta"] if len(set(family.bases)) == 1 else family.bases[1]
    local = {"rope_type": "default", "rope_theta": short(number_of(file, "rope.freq_base_swa", usual))}
    check_numbers({"rope_parameters": local}, f"model file {file.path}", called(file))
    return {FULL: found, SLIDING: local}


def _numbers(file: GgufFile) -> dict[str, Any]:
    """The sizes of a model by transformers' names, within their ranges; without those that are 0: none."""
    where, embedding = f"model file {file.path}", file.tensors.get(OUTER[EMBEDDING])
    if embedding is None or len(embedding.shape) != 2:
        raise InputError(f"{where} lacks tensor {OUTER[EMBEDDING]}, a matrix; valid: a whole model's file")
    own = FAMILIES[ARCHITECTURES[architecture(file)]].keys
    usual: dict[str, Any] = dict.fromkeys((*own, "head_dim", "sliding_window"), 0)
    usual["num_key_value_heads"] = number_of(file, CALLED["num_attention_heads"])
    numbers: dict[str, Any] = dict(zip(("vocab_size", "hidden_size"), embedding.shape, strict=True))
    left = {*numbers, *({"rms_norm_eps"} if "layer_norm_eps" in own else ())}
    for name, key in {**CALLED, **own}.items():
        if "." not in name and name not in left:
            value = number_of(file, key, usual.get(name))
            if value or name not in usual:
                numbers[name] = short(value) if isinstance(value, float) else value
    check_numbers({"head_dim": None} | numbers, where, called(file))
    return {"head_dim": numbers["hidden_size"] // numbers["num_attention_heads"]} | numbers


# ---- weights -----------------------------------------------------------------------------------------------


def names_of(layers: int, kind: str) -> dict[str, str]:
    """What a file calls each tensor that a family's decoder can have, by its name in transformers."""
    norms = zip(FAMILIES[kind].norms, NORMS, strict=True)
    found, inner = dict(OUTER), INNER | {name: theirs for name, theirs in norms if name is not None}
    for number in range(layers):
        for name, theirs in inner.items():
            for end in ("weight", "bias") if name.endswith("_proj") else ("weight",):
                found[f"model.layers.{number}.{name}.{end}"] = f"blk.{number}.{theirs}.{end}"
    return found


class GgufWeights(StoredWeights):
    """Weights of a GGUF file, read in place.

    Args:
        file: of the model.
        layout: which weights there must be.
        dtype: the type that what is not stored in a quantized format is given in.
    Raises:
        InputError: tensors are missing, of other shapes or types, or none of the family's; or a width is odd,
            which the kernels do not take.
    """

    def __init__(self, file: GgufFile, layout: Layout, dtype: torch.dtype) -> None:
        self.file, self.layout, self.dtype, self.folder = file, layout, dtype, file.path
        self._called = names_of(layout.num_hidden_layers, layout.model_type)
        where = f"model file {file.path}"
        for name in ("hidden_size", "intermediate_size"):
            if getattr(layout, name) % 2:
                raise refusal(where, called(file)[name], getattr(layout, name), "an even number")
        back = {theirs: name for name, theirs in self._called.items()}
        found = {
            back.get(one, one): (entry.shape, entry.kind)
            for one, entry in file.tensors.items()
            if one != FACTORS
        }
        types = [KINDS[code] for code in (*DENSE, *BY_CODE)]
        check_tensors(layout, found, types, where, "tensor", lambda name: self._called.get(name, name))

    def names(self) -> list[str]:
        """See `weights.StoredWeights`."""
        return sorted(name for name, one in self._called.items() if one in self.file.tensors)

    def values(self) -> Iterator[tuple[str, Tensor | Stored]]:
        """See `weights.StoredWeights`."""
        return ((name, found) for name in self.names() if (found := self.get(name)) is not None)

    def get(self, name: str) -> Tensor | Stored | None:
        """See `weights.Weights`; matrices in a quantized format as they are stored, rows in the order of
        transformers' checkpoints, and norms as there, where files have what they multiply by."""
        name, family = EMBEDDING if name == HEAD and self.layout.tied else name, self.layout.family
        if self._called.get(name) not in self.file.tensors:
            return None
        found = self.file[self._called[name]]
        if family.plus_one and name.endswith("norm.weight"):
            found = unstored(found, torch.float32) - 1
        heads = {".q_proj": self.layout.num_attention_heads, ".k_proj": self.layout.num_key_value_heads}
        turned = next((count for end, count in heads.items() if f"{end}." in name), 0)
        rows = straight(len(found), turned) if family.turned and turned else None
        if isinstance(found, Stored):
            return found if rows is None else found.take(rows)
        return (found if rows is None else found[rows]).to(self.dtype)

    def rest(self) -> None:
        """See `weights.Weights`."""
        self.file.rest()


def straight(rows: int, heads: int) -> Tensor:
    """Where each row of queries or keys stands in a file of the llama kind, which pairs neighbours: row i of
    the first half of a head is at 2 i there, of the second at 2 i + 1."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)
