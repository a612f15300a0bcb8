"""safetensors files, their index, and pickles that are wrong in one way."""

from __future__ import annotations

import json
import math
import pickle
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.malformed.folder_bytes import INDEX, WEIGHTS, Folder, Header, base, json_files, packed, places
from tests.tiny import BYTE_FAMILIES

Change = Callable[[Folder], Any]
QUERY, NORM = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.input_layernorm.weight"


def cases() -> Iterator[tuple[Callable[[Path], Path], str, str]]:
    """What to write, names, and the kind."""
    for name, family, change in _named():
        yield partial(_write, family, change), name, "safetensors"


def _write(family: str, change: Change, folder: Path) -> Path:
    made = base(family)
    change(made)
    return made.write(folder)


def _named() -> Iterator[tuple[str, str, Change]]:
    for name, change in (*_of_files(), *_of_entries(), *_of_index(), *_of_pickles()):
        yield name, "llama", change
    yield from _of_families()


def _content(make: Callable[[bytes], bytes]) -> Change:
    return lambda folder: folder.files.update({WEIGHTS: make(folder.files[WEIGHTS])})


def _header(change: Callable[[Header], Any]) -> Change:
    def make(content: bytes) -> bytes:
        made = Header.of(content)
        change(made)
        return made.bytes()

    return _content(make)


def _of_files() -> Iterator[tuple[str, Change]]:
    for what, change in places(WEIGHTS).items():
        yield f"the file {what}", change
    for size in (0, 1, 7, 8, 9, 100, 1000, -1000, -1):
        yield f"cut off at {size}", _content(lambda c, n=size: c[:n])
    for what, size in {"2^63": 1 << 63, "2^64 - 1": (1 << 64) - 1, "2^40": 1 << 40, "1": 1, "0": 0}.items():
        yield f"a header of {what} bytes", _header(lambda h, n=size: setattr(h, "size", n))
    yield "bytes behind the end", _content(lambda c: c + b"more")
    yield "a file of zeros", _content(lambda c: bytes(len(c)))
    yield "a header of 100 MB", _content(lambda c: packed(b" " * 100_000_000))
    for what, header in {
        "nothing": b"",
        "null": b"null",
        "a list": b"[]",
        "{}": b"{}",
        "no JSON": b"{'a': 1}",
        "no UTF-8": b'{"\xff": 1}',
        "lists in lists": b"[" * 100_000,
        "objects in objects": b'{"a":' * 100_000,
        "a number of 100,000 digits": b'{"a": ' + b"9" * 100_000 + b"}",
        "100,000 empty tensors": json.dumps(
            {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)}
        ).encode(),
    }.items():
        yield f"a header that is {what}", _content(lambda c, h=header: packed(h))
    for what, value in {"a number": 3, "a list": [], "of numbers": {"format": 3}, "null": None}.items():
        yield (
            f"metadata that is {what}",
            _header(lambda h, v=value: h.entries.__setitem__(0, ("__metadata__", v))),
        )
    yield "another format", _header(lambda h: h.entries.__setitem__(0, ("__metadata__", {"format": "tf"})))
    yield "no metadata", _header(lambda h: h.entries.pop(0))


def _of_entries() -> Iterator[tuple[str, Change]]:
    def given(key: str, value: Any) -> Change:
        return _header(lambda h: h.entry(QUERY).update({key: value}))

    def moved(make: Callable[[int, int, int], list[Any]]) -> Change:
        def change(header: Header) -> None:
            start, end = header.entry(QUERY)["data_offsets"]
            header.entry(QUERY)["data_offsets"] = make(start, end, len(header.data))

        return _header(change)

    for what, make in {
        "negative": lambda a, b, n: [-1, b],
        "out of order": lambda a, b, n: [b, a],
        "overlapping": lambda a, b, n: [a - 64, b - 64],
        "of another tensor": lambda a, b, n: [0, b - a],
        "beyond the end": lambda a, b, n: [n, n + b - a],
        "far beyond the end": lambda a, b, n: [1 << 40, (1 << 40) + b - a],
        "of 2^64": lambda a, b, n: [a, 1 << 64],
        "of 2^64 - 1": lambda a, b, n: [(1 << 64) - 1, (1 << 64) - 1],
        "of too few bytes": lambda a, b, n: [a, b - 4],
        "of too many bytes": lambda a, b, n: [a, b + 4],
        "unaligned": lambda a, b, n: [a + 1, b + 1],
        "of fractions": lambda a, b, n: [a + 0.5, b],
        "of texts": lambda a, b, n: [str(a), str(b)],
        "of three": lambda a, b, n: [a, b, b],
        "of one": lambda a, b, n: [a],
        "of null": lambda a, b, n: [None, None],
    }.items():
        yield f"offsets {what}", moved(make)
    for kind in (
        *("F7", "I64", "I32", "I16", "I8", "U8", "BOOL", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2"),
        *("F8_E8M0", "F4", "F6_E2M3", "C64", "U64", "", None, 3, ["F32"], "f32"),
    ):
        yield f"of the type {kind!r}", given("dtype", kind)
    for what, shape in {
        "negative": [-1, 32],
        "with a zero": [0, 32],
        "empty": [],
        "of fractions": [32.0, 32.0],
        "of texts": ["32", "32"],
        "of 2^63": [1 << 63],
        "of 2^64": [1 << 64, 32],
        "of 2^32 times 2^32": [1 << 32, 1 << 32],
        "that overflows to the right size": [(1 << 62) + 32, 32],
        "of 100,000 ones": [1] * 100_000,
        "with 30 ones more": [*[1] * 30, 32, 32],
        "null": None,
        "a number": 1024,
        "lists": [[32], [32]],
    }.items():
        yield f"a shape {what}", given("shape", shape)
    for key in ("dtype", "shape", "data_offsets"):
        yield f"without {key}", _header(lambda h, k=key: h.entry(QUERY).pop(k))
    yield "an entry that is null", _header(lambda h: h.entries.__setitem__(1, (h.entries[1][0], None)))
    yield "an entry with more in it", given("strides", [1, 1])
    yield "a tensor twice", _header(lambda h: h.entries.append((QUERY, h.entry(QUERY))))
    yield (
        "a tensor twice, elsewhere",
        _header(lambda h: h.entries.append((QUERY, {**h.entry(QUERY), "data_offsets": [0, 4096]}))),
    )
    yield "a hole between tensors", _content(_with_a_hole)
    for name in ("", "\0", "x" * 1_000_000, "__metadata__", "model", "../../x", "model.layers.0"):
        shown = repr(name[:20])
        yield (
            f"a tensor called {shown}",
            _header(lambda h, n=name: h.put(n, bytes(4), dtype="F32", shape=[1])),
        )
    for count in (100, 10_000):
        yield f"{count} layers of names", _header(partial(_more_layers, count=count))


def _with_a_hole(content: bytes) -> bytes:
    made = Header.of(content)
    for _, entry in made.entries[3:]:
        entry["data_offsets"] = [place + 64 for place in entry["data_offsets"]]
    made.data += bytes(64)
    return made.bytes()


def _more_layers(made: Header, count: int) -> None:
    end = len(made.data)
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}
    made.entries += [(f"model.layers.{i}.self_attn.q_proj.weight", entry) for i in range(2, count)]


def _of_index() -> Iterator[tuple[str, Change]]:
    def sharded(change: Callable[[dict[str, Any]], Any], first: str = "a.safetensors") -> Change:
        def make(folder: Folder) -> None:
            content = folder.files.pop(WEIGHTS)
            folder.files[first] = content
            said = {"metadata": {}, "weight_map": dict.fromkeys(Header.of(content).names(), first)}
            folder.say(INDEX, change(said) or said)

        return make

    def all_in(name: Any) -> Change:
        return sharded(lambda s: s.update(weight_map=dict.fromkeys(s["weight_map"], name)))

    yield "index: as it should be", sharded(lambda s: None)
    for name in (
        *("b.safetensors", "../model/a.safetensors", "/etc/passwd", "", ".", "..", "config.json"),
        *("a.safetensors\0", "\ud800", "x/../a.safetensors", INDEX, "x" * 5000, 3, None, ["a.safetensors"]),
    ):
        yield f"index: all in {name if not isinstance(name, str) else name[:20]!r}", all_in(name)
    for what, value in {"null": None, "a list": [], "a number": 3, "empty": {}}.items():
        yield f"index: its map is {what}", sharded(lambda s, v=value: s.update(weight_map=v))
    yield "index: no map", sharded(lambda s: s.pop("weight_map") and None)
    yield "index: one tensor is nowhere", sharded(lambda s: s["weight_map"].update({QUERY: "b.safetensors"}))
    yield "index: a tensor of its own", sharded(lambda s: s["weight_map"].update(more="a.safetensors"))
    yield "index: a tensor is left out", sharded(lambda s: s["weight_map"].pop(QUERY) and None)
    yield (
        "index: 10,000 files",
        sharded(lambda s: s["weight_map"].update({f"t{i}": f"{i}.safetensors" for i in range(10_000)})),
    )
    for what, size in {"negative": -1, "of 2^70": 1 << 70, "a text": "x", "infinite": math.inf}.items():
        yield (
            f"index: a total size {what}",
            sharded(lambda s, n=size: s.update(metadata={"total_size": n, "total_parameters": n})),
        )

    def raw(content: Callable[[], bytes]) -> Change:
        def make(folder: Folder) -> None:
            sharded(lambda s: None)(folder)
            folder.files[INDEX] = content()

        return make

    whole = base()
    sharded(lambda s: None)(whole)
    for what, content in json_files(whole.files[INDEX]).items():
        yield f"index {what}", raw(content)
    for what, change in places(INDEX).items():
        yield f"index {what}", lambda f, c=change: (sharded(lambda s: None)(f), c(f))

    def twice(folder: Folder) -> None:
        sharded(lambda s: None)(folder)
        folder.files["b.safetensors"] = folder.files["a.safetensors"]
        said = folder.said(INDEX)
        said["weight_map"][QUERY] = "b.safetensors"
        folder.say(INDEX, said)

    yield "index: each tensor in two files", twice
    yield (
        "index: the only file is a link to itself",
        lambda f: (
            sharded(lambda s: None)(f),
            f.links.update({"a.safetensors": "a.safetensors"}),
        ),
    )


class _Runs:
    """Unpickled, it ends the process."""

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os._exit, (77,)


def _of_pickles() -> Iterator[tuple[str, Change]]:
    def instead(name: str, content: bytes) -> Change:
        def make(folder: Folder) -> None:
            folder.files.pop(WEIGHTS)
            folder.files[name] = content

        return make

    for name in ("pytorch_model.bin", "model.bin", "consolidated.00.pth"):
        yield f"{name} runs code", instead(name, pickle.dumps(_Runs()))
        yield f"{name} is of zeros", instead(name, bytes(5000))
    yield "pytorch_model.bin is empty", instead("pytorch_model.bin", b"")
    yield "pytorch_model.bin is a dictionary", instead("pytorch_model.bin", pickle.dumps({QUERY: 1}))
    yield "pytorch_model.bin is not a zip", instead("pytorch_model.bin", b"PK\x03\x04" + bytes(5000))


def _of_families() -> Iterator[tuple[str, str, Change]]:
    def resized(name: str, make: Callable[[list[int]], list[int]]) -> Callable[[Header], Any]:
        def change(header: Header) -> None:
            shape = make(header.entry(name)["shape"])
            header.put(name, bytes(4 * math.prod(shape)), shape=shape)

        return change

    def filled(name: str, number: float) -> Callable[[Header], Any]:
        return lambda h: h.put(name, struct.pack("<f", number) * (len(h.tensor(name)) // 4))

    def whole_numbers(name: str) -> Callable[[Header], Any]:
        return lambda h: h.put(name, h.tensor(name), dtype="I32")

    for family in BYTE_FAMILIES:
        names = [n for n in Header.of(base(family).files[WEIGHTS]).names() if "layers.1" not in n]
        for name in names:
            for what, change in {
                "is missing": lambda h, n=name: h.put(n, None),
                "has a row less": resized(name, lambda s: [s[0] - 1, *s[1:]]),
                "has a row more": resized(name, lambda s: [s[0] + 1, *s[1:]]),
                "has other columns": resized(name, lambda s: [*s[:-1], s[-1] + 2]),
                "has a dimension more": resized(name, lambda s: [*s, 1]),
                "has one number": resized(name, lambda s: [1]),
                "is of whole numbers": whole_numbers(name),
            }.items():
                yield f"{family} {name} {what}", family, _header(change)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"):
            for count in (1, 32, 4096):
                full = f"model.layers.0.{name}.bias"
                yield (
                    f"{family} {full} of {count}",
                    family,
                    _header(lambda h, n=full, c=count: h.put(n, bytes(4 * c), dtype="F32", shape=[c])),
                )
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            full = f"model.layers.0.{name}.weight"
            for count in (1, 8, 4096):
                yield (
                    f"{family} {full} of {count}",
                    family,
                    _header(lambda h, n=full, c=count: h.put(n, bytes(4 * c), dtype="F32", shape=[c])),
                )
        for name in ("model.embed_tokens.weight", NORM, "model.norm.weight", QUERY):
            for what, number in {"NaN": math.nan, "infinite": math.inf, "huge": 3e38, "zero": 0.0}.items():
                yield f"{family} {name} is {what}", family, _header(filled(name, number))
