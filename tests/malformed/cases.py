"""Models that are wrong in one way, by name, and GGUF files with bytes of their header changed, by
seed."""

from __future__ import annotations

import math
import os
import pickle
import random
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load, save

from tests.gguf_files import QuantType, small, write
from tests.malformed.folder_bytes import (
    CONFIG,
    GENERATION,
    INDEX,
    TOKENIZER,
    TOKENIZER_CONFIG,
    WEIGHTS,
    Folder,
    edited,
    packed,
    plain_folder,
)
from tests.malformed.gguf_bytes import ARRAY, F64, I32, TEXT, U32, U64, Draft, Value

QUERY = "model.layers.0.self_attn.q_proj.weight"
NORM, OTHER_NORM = (f"model.layers.{number}.input_layernorm.weight" for number in range(2))
WORDS = "tokenizer.ggml."


@dataclass(frozen=True, slots=True)
class Case:
    """A model that is wrong in one way.

    Attributes:
        kind: of the file that is wrong: "gguf", "safetensors", "config", "tokenizer".
        name: what is wrong, unique within the kind.
        write: writes the model into an empty folder; gives the path to load.
    """

    kind: str
    name: str
    write: Callable[[Path], Path]

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def corpus() -> Iterator[Case]:
    """All cases that have a name."""
    for name, change in GGUF.items():
        yield Case("gguf", name, partial(_write_gguf, change))
    for of, changes in {
        "safetensors": SAFETENSORS,
        "config": CONFIGS,
        "tokenizer": TOKENIZERS,
    }.items():
        for name, make in changes.items():
            yield Case(of, name, partial(_write_folder, make))


def fuzz(seeds: range) -> Iterator[Case]:
    """GGUF files with bytes of their header turned, replaced, cut out or put in twice."""
    for seed in seeds:
        yield Case("gguf", f"seed {seed}", partial(_write_changed, seed))


@cache
def plain_gguf() -> Draft:
    """A complete file."""
    with TemporaryDirectory() as folder:
        write(Path(folder) / "model.gguf", small(), {"": QuantType.Q8_0})
        return Draft.of(Path(folder) / "model.gguf")


def _write_gguf(change: Callable[[Draft], object], folder: Path) -> Path:
    draft = deepcopy(plain_gguf())
    change(draft)
    return draft.write(folder / "model.gguf")


def _write_folder(change: Callable[[Folder], object], folder: Path) -> Path:
    changed = deepcopy(plain_folder())
    change(changed)
    return changed.write(folder)


def _write_changed(seed: int, folder: Path) -> Path:
    path = plain_gguf().write(folder / "model.gguf")
    content = bytearray(path.read_bytes())
    draw = random.Random(seed)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(12_000)
        size = draw.choice((1, 4, 8, 100))
        match draw.randrange(5):
            case 0:
                content[at] ^= 1 << draw.randrange(8)
            case 1:
                content[at : at + size] = draw.choice(
                    (bytes(size), b"\xff" * size, draw.randbytes(size))
                )
            case 2:
                del content[at : at + size]
            case 3:
                content[at:at] = content[draw.randrange(12_000) :][:size]
            case _:
                del content[draw.randrange(at, len(content)) :]
    path.write_bytes(content)
    return path


def put(key: str, value: Value | None) -> Callable[[Draft], object]:
    """A change of a key's value; None takes it out."""
    return lambda d: d.set(key, value)


def entry(**changed: object) -> Callable[[Draft], object]:
    """A change of fields of the second tensor's entry."""

    def change(draft: Draft) -> None:
        for name, value in changed.items():
            setattr(draft.tensors[1][1], name, value)

    return change


def _value(value: Value) -> Callable[[Draft], object]:
    return lambda d: d.values.append(("x", value))


def _nested(draft: Draft) -> None:
    content = Value(ARRAY, [], U32).packed()
    for _ in range(5000):
        content = struct.pack("<IQ", ARRAY, 1) + content
    draft.values.append(("x", Value(ARRAY, content)))


def _infinite_scales(draft: Draft) -> None:
    tensor = draft.tensor("blk.0.ffn_up.weight")
    tensor.data = b"".join(
        b"\0\x7c" + tensor.data[at + 2 : at + 34] for at in range(0, len(tensor.data), 34)
    )


GGUF: dict[str, Callable[[Draft], object]] = {
    "other magic": lambda d: setattr(d, "magic", b"FUGG"),
    "2^63 tensors": lambda d: setattr(d, "counts", (1 << 63, None)),
    "only 1,000 bytes": lambda d: setattr(d, "cut", 1000),
    "a key twice": lambda d: d.values.append(d.values[0]),
    "a key that is no UTF-8": lambda d: d.values.append((b"\xff\xfe", Value(U32, 1))),
    "a value of type 2^32 - 1": _value(Value((1 << 32) - 1, b"")),
    "lists in lists in lists": _nested,
    "alignment 2^31": put("general.alignment", Value(U32, 1 << 31)),
    "an architecture of control characters": put(
        "general.architecture", Value(TEXT, "\x1b[31mred\n")
    ),
    "no layers": put("llama.block_count", Value(U32, 0)),
    "2^64 - 1 layers": put("llama.block_count", Value(U64, (1 << 64) - 1)),
    "heads that are a text": put("llama.attention.head_count", Value(TEXT, "many")),
    "an epsilon that is NaN": put("llama.attention.layer_norm_rms_epsilon", Value(F64, math.nan)),
    "no dimensions": entry(dims=()),
    "no rows": entry(dims=(256, 0)),
    "2^32 rows of 2^32": entry(dims=(1 << 32, 1 << 32)),
    "an offset of 1": entry(offset=1),
    "an offset of 2^63": entry(offset=1 << 63),
    "a tensor twice": lambda d: d.tensors.append(d.tensors[1]),
    "no tensors": lambda d: setattr(d, "tensors", []),
    "infinite scales": _infinite_scales,
    "no tokens": put(WORDS + "tokens", None),
    "tokens that are all the same": put(WORDS + "tokens", Value(ARRAY, ["a"] * 260, TEXT)),
    "tokens of unknown kinds": put(WORDS + "token_type", Value(ARRAY, [99] * 260, I32)),
    "merges of unknown tokens": put(WORDS + "merges", Value(ARRAY, ["qq ww"], TEXT)),
    "a part of 65,535": put("split.count", Value(U32, 65_535)),
    "a broken chat template": put("tokenizer.chat_template", Value(TEXT, "{% if")),
}


def _content(make: Callable[[bytes], bytes]) -> Callable[[Folder], object]:
    return lambda folder: folder.files.update({WEIGHTS: make(folder.files[WEIGHTS])})


def _query(**fields: object) -> Callable[[Folder], object]:
    return _content(lambda c: edited(c, lambda header: header[QUERY].update(fields)))


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Folder], object]:
    """Other tensors, honestly written."""

    def make(content: bytes) -> bytes:
        change(tensors := load(content))
        return save(tensors)

    return _content(make)


def _all_in(name: str) -> Callable[[Folder], object]:
    """An index that names one file for all tensors."""

    def make(folder: Folder) -> None:
        names = load(folder.files[WEIGHTS])
        folder.files["a.safetensors"] = folder.files.pop(WEIGHTS)
        folder.put_object(INDEX, {"metadata": {}, "weight_map": dict.fromkeys(names, name)})

    return make


class _Runs:
    """Unpickled, it ends the process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (77,)


def _pickled(folder: Folder) -> None:
    folder.files.pop(WEIGHTS)
    folder.files["pytorch_model.bin"] = pickle.dumps(_Runs())


def _instead(make: Callable[[Path], object]) -> Callable[[Folder], object]:
    """Something else in place of the weights."""
    return lambda f: f.last.append(
        lambda folder: ((folder / WEIGHTS).unlink(), make(folder / WEIGHTS))
    )


SAFETENSORS: dict[str, Callable[[Folder], object]] = {
    "the file is a pipe": _instead(os.mkfifo),
    "the file is a link to /dev/zero": _instead(lambda path: path.symlink_to("/dev/zero")),
    "cut off in the data": _content(lambda c: c[:-1000]),
    "a header of 2^64 - 1 bytes": _content(lambda c: b"\xff" * 8 + c[8:]),
    "a header of 100 MB": _content(lambda c: packed(b" " * 100_000_000)),
    "a header of lists in lists": _content(lambda c: packed(b"[" * 100_000)),
    "offsets out of order": _query(data_offsets=[4096, 0]),
    "a shape that overflows to the right size": _query(shape=[(1 << 62) + 32, 32]),
    "a negative shape": _query(shape=[-1, 32]),
    "a tensor twice": _content(lambda c: c.replace(NORM.encode(), OTHER_NORM.encode(), 1)),
    "a tensor is missing": _tensors(lambda t: t.pop(QUERY)),
    "a norm of one number": _tensors(lambda t: t.update({NORM: torch.ones(1)})),
    "weights that are NaN": _tensors(lambda t: t[QUERY].fill_(math.nan)),
    "an index of files that are not there": _all_in("b.safetensors"),
    "a pickle that runs code": _pickled,
}


def _config(**fields: object) -> Callable[[Folder], object]:
    return lambda folder: folder.set(CONFIG, **fields)


def _rope(**fields: object) -> Callable[[Folder], object]:
    return _config(
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, **fields}
    )


CONFIGS: dict[str, Callable[[Folder], object]] = {
    "no layers": _config(num_hidden_layers=0),
    "a width of 10^400": _config(hidden_size=10**400),
    "heads that do not divide the width": _config(num_attention_heads=5, head_dim=None),
    "everything large": _config(hidden_size=1 << 20, intermediate_size=1 << 20, vocab_size=1 << 20),
    "layers without end, of a family that is not known": _config(
        model_type="xlstm", num_blocks=10**7
    ),
    "a classifier": _config(architectures=["LlamaForSequenceClassification"]),
    "an architecture with code of its own": _config(
        auto_map={"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.Config"}
    ),
    "a type of model that is a path": _config(model_type="../x"),
    "quantization by nothing known": _config(quantization_config={"quant_method": "nothing"}),
    "positions by an infinite factor": _rope(factor=math.inf),
    "positions by a rule of no name": _rope(rope_type=None),
    "settings of generation that are NaN": lambda f: f.set(
        GENERATION, temperature=math.nan, do_sample=True
    ),
    "ends of texts beyond the rows": lambda f: f.set(GENERATION, eos_token_id=[1 << 63]),
}


def _vocabulary(**fields: object) -> Callable[[Folder], object]:
    def make(folder: Folder) -> None:
        stated = folder.object_in(TOKENIZER)
        stated["model"].update(fields)
        folder.put_object(TOKENIZER, stated)

    return make


def _template(template: str) -> Callable[[Folder], object]:
    def make(folder: Folder) -> None:
        folder.files["chat_template.jinja"] = template.encode()

    return make


TOKENIZERS: dict[str, Callable[[Folder], object]] = {
    "no JSON": lambda f: f.files.update({TOKENIZER: f.files[TOKENIZER][:500]}),
    "an empty vocabulary": _vocabulary(vocab={}),
    "an added token beyond the rows": lambda f: f.set(
        TOKENIZER, added_tokens=[{"id": 1 << 32, "content": "<new>", "special": True}]
    ),
    "an id beyond in what it adds": lambda f: f.set(
        TOKENIZER,
        post_processor={"type": "BertProcessing", "sep": ["a", 1 << 31], "cls": ["b", 300]},
    ),
    "a tokenizer with code of its own": lambda f: f.set(
        TOKENIZER_CONFIG, auto_map={"AutoTokenizer": ["code.T", "code.T"]}
    ),
    "added tokens that are a number": lambda f: f.set(TOKENIZER_CONFIG, added_tokens_decoder=5),
    "a template that asks for classes": _template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "a template of parentheses": _template("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}"),
}
