"""What the first load of a model found out, kept in the cache folder for the next ones.

The first load reads a model through transformers, checks our forward against the model's own logits and takes
seconds for it. What the next loads need of that is a *card*: how the decoder is laid out, its rotary
frequencies, what the check found, the identity that run folders keep, end tokens, and what a stand-in for the
tokenizer is made from. With a card, weights come straight from the files.

A card belongs to the very files (names, sizes, times, content: large ones in samples), versions, sources and
kernels that it was made with, and to the type and positions that were asked for. It ends with its own digest;
one that is damaged, or says anything else than a card can say, counts as none and is made again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch

from tokenswift.files import replacing
from tokenswift.loader.checkpoint import Layout
from tokenswift.loader.identity import digest_of
from tokenswift.loader.rope import Rotary
from tokenswift.version import __version__

FORMAT = 1  # raised whenever the meaning of a card changes
WHOLE = 1 << 24  # bytes of a file up to which all of it is read for its identity
PLACES, BLOCK = 64, 1 << 14  # of a larger one: places, and bytes at each
MOST = 64  # cards that are kept, those read last
TYPES = ("float32", "bfloat16", "float16")
#: packages whose version a card depends on
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "jinja2")
#: whose sources are part of the key: how models are read and run
SOURCES = ("", "models", "loader", "loader/gguf", "kernels", "kernels/cpu", "kernels/formats", "spec/heads")


@dataclass(frozen=True, slots=True)
class Card:
    """See the module.

    Attributes:
        layout: of the decoder.
        rope: angle per position of each pair of a head's dimensions, factor of cosines and sines, and how
            many positions may be used (None: no limit).
        far: relative distance of our logits from the model's own, as the check found it.
        identity: what run folders keep of the model, the digest of its tokenizer included.
        ends: end-of-text ids.
        tokenizer: what `stand_in.StandIn` is made from; None: it takes transformers' own tokenizer.
    """

    layout: Layout
    rope: tuple[tuple[float, ...], float, int | None]
    far: float
    identity: dict[str, Any]
    ends: tuple[int, ...]
    tokenizer: dict[str, Any] | None

    @property
    def rotary(self) -> Rotary:
        """The rotary positions."""
        frequencies, scaling, limit = self.rope
        return Rotary(torch.tensor(frequencies, dtype=torch.float32), scaling, limit, None)


def key_of(folder: Path, *wishes: object) -> str:
    """The name of the card of a model folder, or of a model that is one file.

    Args:
        wishes: what else decides: type, positions, kernels.
    Raises:
        OSError: a file cannot be read.
    """
    made = hashlib.sha256(repr((FORMAT, __version__, _versions(), _sources(), wishes)).encode())
    for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
        about = path.stat()
        made.update(repr((path.name, path.is_file(), about.st_size, about.st_mtime_ns)).encode())
        if path.is_file():
            _content(path, about.st_size, made.update)
    return made.hexdigest()[:32]


def _content(path: Path, size: int, take: Callable[[bytes], object]) -> None:
    """Hand on what a file's identity is made from."""
    with path.open("rb") as file:
        if size <= WHOLE:
            take(file.read())
            return
        for place in range(PLACES):
            file.seek((size - BLOCK) * place // (PLACES - 1))
            take(file.read(BLOCK))


def _versions() -> list[str]:
    found = [f"{name} {metadata.version(name)}" for name in PACKAGES[1:]]
    return [f"torch {torch.__version__}", *found]


def _sources() -> str:
    """A digest of the sources that read and run a model."""
    made, package = hashlib.sha256(), resources.files("tokenswift")
    for name in SOURCES:
        for entry in sorted(package.joinpath(name).iterdir(), key=lambda entry: entry.name):
            if entry.name.endswith(".py"):
                made.update(entry.read_bytes())
    return made.hexdigest()


def read(folder: Path, key: str) -> Card | None:
    """The card of that name in a folder of the cache; None where there is none that can be used."""
    path = folder / f"{key}.json"
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["digest"] != digest_of(kept["card"]) or kept["key"] != key:
            return None
        made = _checked(kept["card"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    with suppress(OSError):
        _touch(path)
    return made


def write(folder: Path, key: str, card: Card) -> None:
    """Keep a card; where that cannot be done, the next load takes as long as the first."""
    said = json.loads(json.dumps(asdict(card)))
    with suppress(OSError):
        with replacing(folder / f"{key}.json") as part:
            text = json.dumps({"key": key, "card": said, "digest": digest_of(said)})
            part.write_text(text + "\n", encoding="utf-8")
            _touch(part)
        there = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in there[MOST:]:
            path.unlink()


def _touch(path: Path) -> None:
    """The cards that nobody reads go first; by our own clock, as the system stamps files in ticks."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def _checked(said: dict[str, Any]) -> Card:
    """A card from what a file says.

    Raises:
        ValueError, KeyError, TypeError: it says what no card can say.
    """
    if said.keys() != {field.name for field in fields(Card)}:
        raise ValueError("other fields")
    layout = _layout(said["layout"])
    frequencies, scaling, limit = said["rope"]
    numbers = [*frequencies, scaling, said["far"]]
    if len(frequencies) != layout.head_dim // 2 or not all(map(_is_number, numbers)):
        raise ValueError("no rotary positions")
    if limit is not None and not _is_count(limit):
        raise ValueError("no limit of positions")
    if not all(isinstance(end, int) and not isinstance(end, bool) for end in said["ends"]):
        raise ValueError("no end tokens")
    identity, tokenizer = said["identity"], said["tokenizer"]
    digests = [identity[name] for name in ("config", "weights", "tokenizer")]
    more = identity.keys() - {"config", "weights", "tokenizer", "adapter", "dtype"}
    known = all(re.fullmatch("[0-9a-f]{32}", digest) for digest in digests) and more <= {"stored"}
    known = known and isinstance(identity.get("stored", ""), str)
    if not known or identity["adapter"] is not None or identity["dtype"] not in TYPES:
        raise ValueError("no identity")
    if tokenizer is not None:
        special, template = tokenizer["special"], tokenizer["template"]
        texts = [*special, *special.values(), *([] if template is None else [template])]
        if len(tokenizer) != 2 or not all(isinstance(text, str) for text in texts):
            raise ValueError("no tokenizer")
    rope = (tuple(map(_single, frequencies)), float(scaling), limit)
    return Card(layout, rope, float(said["far"]), identity, tuple(said["ends"]), tokenizer)


def _layout(said: dict[str, Any]) -> Layout:
    made = Layout(**{**said, "windows": tuple(said["windows"])})
    counts = [getattr(made, f.name) for f in fields(Layout) if f.type == "int"]
    fits = (
        all(map(_is_count, counts))
        and all(isinstance(window, int) and window >= 0 for window in made.windows)
        and len(made.windows) == made.num_hidden_layers
        and made.num_attention_heads % made.num_key_value_heads == 0
        and made.head_dim % 2 == made.hidden_size % 2 == made.intermediate_size % 2 == 0
        and isinstance(made.model_type, str)
        and isinstance(made.tied, bool)
        and _is_number(made.eps)
        and _is_number(made.scale)
    )
    if not fits:
        raise ValueError("no layout")
    return made


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _single(value: float) -> float:
    """A number that float32 holds."""
    if struct.unpack("f", struct.pack("f", value))[0] != value:
        raise ValueError("no float32")
    return float(value)
