"""Whole files with bits turned, parts cut out, moved and put in twice, by seeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.malformed import gguf_cases
from tests.malformed.folder_bytes import CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS, base

SEEDS = 10
#: files, their kinds, and how many bytes of them are headers (0: all)
FILES = {
    "model.gguf": ("gguf", 12_000),
    WEIGHTS: ("safetensors", 3_000),
    CONFIG: ("config", 0),
    GENERATION: ("config", 0),
    TOKENIZER: ("tokenizer", 0),
    TOKENIZER_CONFIG: ("tokenizer", 0),
}


def _turned(content: bytearray, draw: random.Random, most: int) -> None:
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        content[draw.randrange(most)] ^= 1 << draw.randrange(8)


def _replaced(content: bytearray, draw: random.Random, most: int) -> None:
    at, size = draw.randrange(most), draw.choice((1, 4, 8, 100))
    content[at : at + size] = draw.choice((bytes(size), b"\xff" * size, draw.randbytes(size)))


def _cut_out(content: bytearray, draw: random.Random, most: int) -> None:
    at = draw.randrange(most)
    del content[at : at + draw.choice((1, 2, 8, 1000))]


def _cut_off(content: bytearray, draw: random.Random, most: int) -> None:
    del content[draw.randrange(draw.choice((most, len(content)))) :]


def _spliced(content: bytearray, draw: random.Random, most: int) -> None:
    at, start = draw.randrange(most), draw.randrange(most)
    content[at:at] = content[start : start + draw.choice((1, 8, 64, 2000))]


def _digits(content: bytearray, draw: random.Random, most: int) -> None:
    places = [at for at in range(most) if 48 <= content[at] <= 57] or [0]
    for _ in range(draw.choice((1, 2, 5))):
        content[draw.choice(places)] = draw.choice(b'0123456789-.e[]{}",:')


CHANGES = (_turned, _replaced, _cut_out, _cut_off, _spliced, _digits)


def cases() -> Iterator[tuple[Callable[[Path], Path], str, str]]:
    """What to write, names, and the kind."""
    for file, (kind, _) in FILES.items():
        for change in CHANGES:
            for seed in range(SEEDS):
                yield partial(_write, file, change, seed), f"{file}{change.__name__}, {seed}", kind


def _write(
    file: str, change: Callable[[bytearray, random.Random, int], None], seed: int, folder: Path
) -> Path:
    made = base()
    if file == "model.gguf":
        with TemporaryDirectory() as other:
            whole = gguf_cases.base().write(Path(other) / file).read_bytes()
    else:
        whole = made.files[file]
    content, draw = bytearray(whole), random.Random(f"{file} {change.__name__} {seed}")
    change(content, draw, min(FILES[file][1] or len(content), len(content)))
    if file == "model.gguf":
        (folder / file).write_bytes(content)
        return folder / file
    made.files[file] = bytes(content)
    return made.write(folder)
