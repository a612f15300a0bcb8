"""GGUF files that are wrong in one way."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.gguf_files import QuantType, small, write
from tests.malformed.gguf_bytes import ARRAY, BOOL, F32, F64, I32, I64, TEXT, U32, U64, Draft, Value

Change = Callable[[Draft], Any]
Found = tuple[Callable[[Path], Path], str, str]

FAMILIES = ("llama", "qwen2", "qwen3")
NUMBERS = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
)
VALUES = {
    "0": Value(U32, 0),
    "1": Value(U32, 1),
    "3": Value(U32, 3),
    "-1": Value(I32, -1),
    "2^19": Value(U32, 1 << 19),
    "2^31": Value(U32, 1 << 31),
    "2^64 - 1": Value(U64, (1 << 64) - 1),
    "infinite": Value(F32, math.inf),
    "no number": Value(F64, math.nan),
    "1e300": Value(F64, 1e300),
    "a text": Value(TEXT, "many"),
    "a list": Value(ARRAY, [2, 3], U32),
    "an empty list": Value(ARRAY, [], U32),
    "true": Value(BOOL, True),
}
IDS = {
    "V": Value(U32, 260),
    "2^31": Value(U32, 1 << 31),
    "-1": Value(I32, -1),
    "-2^63": Value(I64, -(1 << 63)),
    "a text": Value(TEXT, "</s>"),
    "1.5": Value(F32, 1.5),
    "a list": Value(ARRAY, [1], U32),
}
WORDS = "tokenizer.ggml."


@cache
def base(family: str = "llama", stored: str = "q8_0") -> Draft:
    """A whole file of a family."""
    kinds = {"": QuantType.Q8_0} if stored == "q8_0" else {}
    with TemporaryDirectory() as folder:
        write(Path(folder) / "model.gguf", small(family), kinds)
        return Draft.of(Path(folder) / "model.gguf")


def sentencepiece() -> Draft:
    """A whole file whose tokenizer is sentencepiece's BPE."""
    made = base().copy()
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"]
    kinds = [2, 3, 3, *[6] * 256, 1]
    for name, value in {
        "model": Value(TEXT, "llama"),
        "tokens": Value(ARRAY, tokens, TEXT),
        "token_type": Value(ARRAY, kinds, I32),
        "scores": Value(ARRAY, [0.0] * len(tokens), F32),
        "unknown_token_id": Value(U32, 0),
        "bos_token_id": Value(U32, 1),
        "eos_token_id": Value(U32, 2),
        "padding_token_id": None,
        "merges": None,
        "pre": None,
    }.items():
        made.set(WORDS + name, value)
    return made


def cases() -> Iterator[Found]:
    """What to write, names, and the kind."""
    for name, make in _named():
        yield partial(_write, make), name, "gguf"


def _write(make: Callable[[], Draft], folder: Path) -> Path:
    return make().write(folder / "model.gguf")


def _changed(change: Change, family: str = "llama", stored: str = "q8_0") -> Callable[[], Draft]:
    def make() -> Draft:
        made = base(family, stored).copy()
        change(made)
        return made

    return make


def _named() -> Iterator[tuple[str, Callable[[], Draft]]]:
    yield from _of_numbers()
    yield from _of_positions()
    yield from _of_vocabulary()
    yield from _of_tensors()
    yield from _of_headers()


def _of_numbers() -> Iterator[tuple[str, Callable[[], Draft]]]:
    for key in NUMBERS:
        for what, value in VALUES.items():
            yield f"{key} is {what}", _changed(lambda d, k=key, v=value: d.set(f"llama.{k}", v))
        yield f"{key} is missing", _changed(lambda d, k=key: d.set(f"llama.{k}", None))
    for family in ("phi3", "gemma2", "grok", "", "\x1b[31mred\n"):
        yield (
            f"architecture {family!r}",
            _changed(lambda d, f=family: d.set("general.architecture", Value(TEXT, f))),
        )

    def other(made: Draft, key: str, value: Value) -> None:
        made.values = [
            (name.replace("llama.", "phi3.", 1) if isinstance(name, str) else name, v)
            for name, v in made.values
        ]
        made.set("general.architecture", Value(TEXT, "phi3")).set(f"phi3.{key}", value)

    for key in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count"):
        for what in ("0", "2^31", "a text", "infinite"):
            yield (
                f"unpacked by transformers, {key} is {what}",
                _changed(lambda d, k=key, w=what: other(d, k, VALUES[w])),
            )

    def wide(made: Draft, width: int) -> None:
        made.set("llama.attention.key_length", Value(U32, width))
        made.set("llama.attention.value_length", Value(U32, width))
        made.set("llama.rope.dimension_count", Value(U32, width))
        made.set("llama.attention.head_count", Value(U32, 1))
        made.set("llama.attention.head_count_kv", Value(U32, 1))
        for layer in (0, 1):
            for name in ("attn_q", "attn_k", "attn_v"):
                entry = made.tensor(f"blk.{layer}.{name}.weight")
                entry.dims, entry.data = (256, width), bytes(256 // 32 * 34 * width)
            entry = made.tensor(f"blk.{layer}.attn_output.weight")
            entry.dims, entry.data = (width, 256), bytes(256 // 32 * 34 * width)

    yield "heads of width 2^15, all there", _changed(lambda d: wide(d, 1 << 15))


def _of_positions() -> Iterator[tuple[str, Callable[[], Draft]]]:
    for rule in ("linear", "yarn", "none", "dynamic", 7):
        for what in ("0", "-1", "infinite", "no number", "1e300", "a text", "a list"):
            value = Value(F32, -2.0) if what == "-1" else VALUES[what]
            said = Value(U32, rule) if isinstance(rule, int) else Value(TEXT, rule)
            yield (
                f"{rule} positions, their factor is {what}",
                _changed(
                    lambda d, s=said, v=value: d.set("llama.rope.scaling.type", s).set(
                        "llama.rope.scaling.factor", v
                    )
                ),
            )

    def yarn(made: Draft, key: str, value: Value) -> None:
        made.set("llama.rope.scaling.type", Value(TEXT, "yarn"))
        made.set("llama.rope.scaling.factor", Value(F32, 4.0))
        made.set(f"llama.rope.scaling.{key}", value)

    for key in ("original_context_length", "yarn_beta_fast", "yarn_beta_slow", "attn_factor"):
        for what in ("-1", "infinite", "no number", "a text", "a list", "2^64 - 1"):
            yield (
                f"yarn positions, {key} is {what}",
                _changed(lambda d, k=key, w=what: yarn(d, k, VALUES[w])),
            )
    for what, numbers in {
        "of zeros": [0.0] * 32,
        "of NaN": [math.nan] * 32,
        "infinite": [math.inf] * 32,
        "negative": [-1.0] * 32,
        "too few": [1.0] * 3,
        "at random": [1.0 + i * i % 7 for i in range(32)],
        "huge": [1.0] * 30 + [1e38] * 2,
    }.items():
        data = struct.pack(f"<{len(numbers)}f", *numbers)
        yield (
            f"rope_freqs {what}",
            _changed(lambda d, b=data: d.add("rope_freqs.weight", (len(b) // 4,), b)),
        )
    for key, value in {
        "attention.scale": Value(F32, 3.0),
        "attention.clamp_kqv": Value(F32, 1.0),
        "rope.scale_linear": Value(F32, 2.0),
        "expert_count": Value(U32, 8),
        "logit_scale": Value(F32, 0.5),
    }.items():
        yield f"{key} is given", _changed(lambda d, k=key, v=value: d.set(f"llama.{k}", v))


def _of_vocabulary() -> Iterator[tuple[str, Callable[[], Draft]]]:
    for key in ("bos", "eos", "eot", "unknown", "padding"):
        for what, value in IDS.items():
            yield (
                f"{key}_token_id is {what}",
                _changed(lambda d, k=key, v=value: d.set(f"{WORDS}{k}_token_id", v)),
            )

    def words(name: str, value: Value | None) -> Callable[[], Draft]:
        return _changed(lambda d: d.set(WORDS + name, value))

    whole = dict(base().values)
    tokens, kinds = whole[WORDS + "tokens"].value, whole[WORDS + "token_type"].value

    def more(made: Draft, count: int) -> None:
        made.set(WORDS + "tokens", Value(ARRAY, [*tokens, *(f"t{i}" for i in range(count))], TEXT))
        made.set(WORDS + "token_type", Value(ARRAY, [*kinds, *[1] * count], I32))

    for count in (1, 140, 1 << 16):
        yield f"{count} tokens more than rows", _changed(lambda d, n=count: more(d, n))
    yield "2^21 tokens", _changed(lambda d: more(d, 1 << 21))
    yield "no tokens", words("tokens", None)
    yield "an empty list of tokens", words("tokens", Value(ARRAY, [], TEXT))
    yield "tokens are numbers", words("tokens", Value(ARRAY, [1, 2], U32))
    yield "tokens are a text", words("tokens", Value(TEXT, "abc"))
    yield "tokens are lists", words("tokens", Value(ARRAY, [], ARRAY, 0))
    yield "all tokens are the same", words("tokens", Value(ARRAY, ["a"] * 260, TEXT))
    yield "tokens are not UTF-8", words("tokens", Value(ARRAY, [b"\xff\xfe"] * 260, TEXT))
    yield "tokens hold zeros", words("tokens", Value(ARRAY, [f"\0{i}" for i in range(260)], TEXT))
    yield "a token of 59,800 characters", words("tokens", Value(ARRAY, ["a" * 59_800, *tokens[1:]], TEXT))
    yield "an empty token", words("tokens", Value(ARRAY, ["", *tokens[1:]], TEXT))
    for name, value in {
        "fewer": Value(ARRAY, kinds[:5], I32),
        "of texts": Value(ARRAY, ["a"] * 260, TEXT),
        "of unknown kinds": Value(ARRAY, [99] * 260, I32),
        "all special": Value(ARRAY, [3] * 260, I32),
        "all user-defined": Value(ARRAY, [4] * 260, I32),
    }.items():
        yield f"kinds of tokens {name}", words("token_type", value)
    for name, value in {
        "without a space": Value(ARRAY, ["ab"], TEXT),
        "of three parts": Value(ARRAY, ["a b c"], TEXT),
        "of unknown tokens": Value(ARRAY, ["qq ww"], TEXT),
        "whose union is not a token": Value(ARRAY, ["a b"], TEXT),
        "of numbers": Value(ARRAY, [1], U32),
        "that are empty": Value(ARRAY, [""], TEXT),
        "that are a text": Value(TEXT, "a b"),
    }.items():
        yield f"merges {name}", words("merges", value)
    for name in ("model", "pre"):
        for value in (Value(TEXT, "other"), Value(U32, 1), Value(TEXT, "")):
            yield f"tokenizer's {name} is {value.value!r}", words(name, value)
    yield "chat template is a number", _changed(lambda d: d.set("tokenizer.chat_template", Value(U32, 1)))
    yield (
        "chat template is broken",
        _changed(lambda d: d.set("tokenizer.chat_template", Value(TEXT, "{% if"))),
    )
    yield "add_bos_token is a text", words("add_bos_token", Value(TEXT, "x"))

    def piece(**changed: Value | None) -> Callable[[], Draft]:
        def make() -> Draft:
            made = sentencepiece()
            for name, value in changed.items():
                made.set(WORDS + name, value)
            return made

        return make

    said = dict(sentencepiece().values)
    pieces = said[WORDS + "tokens"].value
    yield "sentencepiece, as it should be", piece()
    yield "sentencepiece, no scores", piece(scores=None)
    yield "sentencepiece, few scores", piece(scores=Value(ARRAY, [0.0], F32))
    yield "sentencepiece, scores are NaN", piece(scores=Value(ARRAY, [math.nan] * 260, F32))
    yield "sentencepiece, scores are texts", piece(scores=Value(ARRAY, ["x"] * 260, TEXT))
    yield "sentencepiece, no kinds", piece(token_type=None)
    yield "sentencepiece, unknown beyond", piece(unknown_token_id=Value(U32, 260))
    yield (
        "sentencepiece, tokens of 59,800 characters",
        piece(tokens=Value(ARRAY, [*pieces[:-8], *("a" * (59_800 + i) for i in range(8))], TEXT)),
    )
    yield (
        "sentencepiece, tokens of 4,000 characters",
        piece(tokens=Value(ARRAY, [*pieces[:60], *("a" * (3800 + i) for i in range(200))], TEXT)),
    )
    yield "sentencepiece, no bytes", piece(token_type=Value(ARRAY, [1] * 260, I32))


def _of_tensors() -> Iterator[tuple[str, Callable[[], Draft]]]:
    there = [name for name, _ in base("qwen3").tensors if not name.startswith("blk.1.")]
    changes: dict[str, Callable[[Draft, str], Any]] = {
        "is missing": lambda d, n: setattr(d, "tensors", [t for t in d.tensors if t[0] != n]),
        "is there twice": lambda d, n: d.tensors.append((n, d.tensor(n))),
        "has a row less": lambda d, n: _sized(d, n, rows=-1),
        "has a row more": lambda d, n: _sized(d, n, rows=32),
        "has a dimension more": lambda d, n: _sized(d, n, more=(1,)),
        "has other columns": lambda d, n: _sized(d, n, columns=32),
        "is of type I8": lambda d, n: setattr(d.tensor(n), "code", 24),
        "is of type Q4_0": lambda d, n: setattr(d.tensor(n), "code", 2),
        "is of type 4096": lambda d, n: setattr(d.tensor(n), "code", 4096),
        "lies on the first": lambda d, n: setattr(d.tensor(n), "offset", 0),
    }
    for name in there:
        for what, change in changes.items():
            yield f"qwen3 {name} {what}", _changed(lambda d, c=change, n=name: c(d, n), "qwen3")
    single: dict[str, Change] = {
        "no dimensions": lambda d: setattr(d.tensors[0][1], "dims", ()),
        "five dimensions": lambda d: setattr(d.tensors[0][1], "dims", (1, 1, 1, 256, 260)),
        "2^32 - 1 dimensions": lambda d: setattr(d.tensors[0][1], "dims", (1,) * 1000),
        "no rows": lambda d: setattr(d.tensors[0][1], "dims", (256, 0)),
        "no columns": lambda d: setattr(d.tensors[0][1], "dims", (0, 256)),
        "2^63 rows": lambda d: setattr(d.tensors[0][1], "dims", (256, 1 << 63)),
        "2^32 rows of 2^32": lambda d: setattr(d.tensors[0][1], "dims", (1 << 32, 1 << 32)),
        "an offset of 1": lambda d: setattr(d.tensors[1][1], "offset", 1),
        "an offset of 2^63": lambda d: setattr(d.tensors[1][1], "offset", 1 << 63),
        "an offset at the end": lambda d: setattr(d.tensors[1][1], "offset", 1 << 20),
        "all at one place": lambda d: [setattr(t, "offset", 0) for _, t in d.tensors],
        "none at all": lambda d: setattr(d, "tensors", []),
    }
    for what, change in single.items():
        yield f"tensors: {what}", _changed(change)
    for family in FAMILIES:
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            for count in (1, 7, 255, 4096):
                yield (
                    f"{family}, bias of {name} of {count} numbers",
                    _changed(lambda d, n=name, c=count: _biased(d, f"blk.0.{n}.bias", c), family),
                )
        for name in ("attn_q_norm", "attn_k_norm"):
            for count in (1, 32, 63, 4096):
                yield (
                    f"{family}, {name} of {count} numbers",
                    _changed(lambda d, n=name, c=count: _biased(d, f"blk.0.{n}.weight", c), family),
                )
    for what, number in {"NaN": math.nan, "infinite": math.inf, "huge": 3e38}.items():
        for name in (
            "token_embd.weight",
            "blk.0.attn_norm.weight",
            "output_norm.weight",
            "blk.1.ffn_up.weight",
        ):

            def fill(made: Draft, name: str = name, number: float = number) -> None:
                entry = made.tensor(name)
                entry.data = struct.pack("<f", number) * (len(entry.data) // 4)

            yield f"{name} is {what}", _changed(fill, stored="f32")

        def scales(made: Draft, number: float = number) -> None:
            entry = made.tensor("blk.0.ffn_up.weight")
            scale = struct.pack("<e", min(number, 60000.0) if number < math.inf else number)
            entry.data = b"".join(
                scale + entry.data[at + 2 : at + 34] for at in range(0, len(entry.data), 34)
            )

        yield f"scales of blk.0.ffn_up.weight are {what}", _changed(scales)


def _sized(made: Draft, name: str, rows: int = 0, columns: int = 0, more: tuple[int, ...] = ()) -> None:
    entry = made.tensor(name)
    dims = list(entry.dims)
    dims[-1] += rows
    dims[0] = columns or dims[0]
    entry.dims = (*dims, *more)


def _biased(made: Draft, name: str, count: int) -> None:
    made.tensors = [entry for entry in made.tensors if entry[0] != name]
    made.add(name, (count,), struct.pack(f"<{count}f", *[0.5] * count))


def _of_headers() -> Iterator[tuple[str, Callable[[], Draft]]]:
    changes: dict[str, Change] = {
        "other magic": lambda d: setattr(d, "magic", b"FUGG"),
        "version 1": lambda d: setattr(d, "version", 1),
        "version 2^32 - 1": lambda d: setattr(d, "version", (1 << 32) - 1),
        "2^63 tensors": lambda d: setattr(d, "counts", (1 << 63, None)),
        "2^63 keys": lambda d: setattr(d, "counts", (None, 1 << 63)),
        "2^20 tensors": lambda d: setattr(d, "counts", (1 << 20, None)),
        "60,000 keys": lambda d: setattr(d, "counts", (None, 60_000)),
        "a tensor more than there are": lambda d: setattr(d, "counts", (len(d.tensors) + 1, None)),
        "a key more than there are": lambda d: setattr(d, "counts", (None, len(d.values) + 1)),
        "a key less than there are": lambda d: setattr(d, "counts", (None, len(d.values) - 1)),
        "a key twice": lambda d: d.values.append(d.values[0]),
        "an empty key": lambda d: d.values.append(("", Value(U32, 1))),
        "a key of 2^17 bytes": lambda d: d.values.append(("k" * (1 << 17), Value(U32, 1))),
        "a key that is not UTF-8": lambda d: d.values.append((b"\xff\xfe", Value(U32, 1))),
        "a value of type 13": lambda d: d.values.append(("x", Value(13, b"abcdefgh"))),
        "a value of type 2^32 - 1": lambda d: d.values.append(("x", Value((1 << 32) - 1, b""))),
        "a text of 2^63 bytes": lambda d: (
            d.values.append(("x", Value(13, b"")))
            or d.values.append(("y", Value(99, struct.pack("<Q", 1 << 63))))
        ),
        "a list of 2^63 numbers": lambda d: d.values.append(("x", Value(ARRAY, [], U32, 1 << 63))),
        "a list of 2^63 texts": lambda d: d.values.append(("x", Value(ARRAY, [], TEXT, 1 << 63))),
        "a list of 2^63 lists": lambda d: d.values.append(("x", Value(ARRAY, [], ARRAY, 1 << 63))),
        "a list of type 77": lambda d: d.values.append(("x", Value(ARRAY, [], 77, 5))),
        "a list of ten million bytes": lambda d: d.values.append(("x", Value(ARRAY, [], 0, 10_000_000))),
        "lists in lists in lists": lambda d: d.values.append(("x", _nested(5000))),
        "a hundred thousand lists": lambda d: d.values.append(
            ("x", Value(ARRAY, [Value(ARRAY, [], U32).packed()] * 0, ARRAY, 100_000))
        ),
    }
    for what, change in changes.items():
        yield f"header: {what}", _changed(change)
    for aligned in (0, 1, 3, 24, 64, 1 << 31):
        yield (
            f"header: alignment {aligned}",
            _changed(lambda d, a=aligned: d.set("general.alignment", Value(U32, a))),
        )
    yield "header: alignment is a text", _changed(lambda d: d.set("general.alignment", Value(TEXT, "32")))
    yield "header: alignment is true", _changed(lambda d: d.set("general.alignment", Value(BOOL, True)))
    for cut in (0, 1, 4, 7, 23, 24, 31, 40, 100, 1000, 3000, 5000, 8000, 20_000, 300_000):
        yield f"header: only {cut} bytes", _changed(lambda d, c=cut: setattr(d, "cut", c))
    for seed in range(40):
        yield f"header: bytes changed, {seed}", partial(_noise, seed)


def _nested(depth: int) -> Value:
    made = Value(ARRAY, [], U32)
    for _ in range(depth):
        inner = made.packed()
        made = Value(99, struct.pack("<IQ", ARRAY, 1) + inner)
    made.kind = 99
    return _Raw(ARRAY, made.value)


class _Raw(Value):
    """Bytes as they are, under a kind."""

    def packed(self) -> bytes:
        return bytes(self.value)


class _Noisy(Draft):
    """A file with some bytes of its header changed."""

    seed = 0

    def write(self, path: Path) -> Path:
        super().write(path)
        content, dice = bytearray(path.read_bytes()), random.Random(self.seed)
        for _ in range(1 + self.seed % 5):
            content[dice.randrange(24, 7000)] = dice.randrange(256)
        path.write_bytes(bytes(content))
        return path


def _noise(seed: int) -> Draft:
    whole = base().copy()
    made = _Noisy(whole.values, whole.tensors)
    made.seed = seed
    return made
