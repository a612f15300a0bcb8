"""Sizes of an EAGLE-3 drafter's passes, from the headers of its files."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from tokenswift.kernels.formats.registry import FORMATS
from tokenswift.roofline.passes import ITEM, Machine, Sizes, stored_bytes
from tokenswift.spec.eagle.checkpoint import open_eagle
from tokenswift.spec.eagle.config import FEATURES
from tokenswift.spec.eagle.packed import CHUNK, SCRATCH
from tokenswift.spec.eagle.resolve import place_of

#: what a pass of drafted rows multiplies with; the first pass of a step, which reads features, `fc` too
LEVEL = ("q", "k", "v", "o", "gate", "up", "down", "lm_head")


@dataclass(frozen=True, slots=True)
class EagleSizes:
    """A drafter's passes.

    Attributes:
        level: sizes of a pass over drafted rows, the LM head included.
        first: of a step's first pass, which reads what the step before accepted.
        window: tokens that a row sees.
        cache_bytes: that a text holds for it: keys and values, and features until they are read.
    """

    level: Sizes
    first: Sizes
    window: int
    cache_bytes: int


def eagle_sizes(name: str, target: Any, sizes: Sizes, machine: Machine) -> EagleSizes:
    """The passes of a drafter; of its weights nothing but names, shapes and types is read.

    Args:
        name: folder, GGUF file or hub id.
        target: the model's config, and
        sizes: its sizes on
        machine: the same.
    Raises:
        InputError: there is no such drafter, or it does not fit the model.
    """
    files, config = open_eagle(place_of(name), target)
    dtype = "float32" if sizes.whole else sizes.dtype
    low = sizes.whole and machine.keeps("q8_0", dtype)
    usual = "q8_0" if low and not config.hidden % FORMATS["q8_0"].block else dtype
    shapes, found = config.shapes(), Counter[str]()
    for part in LEVEL:
        kind = files.stored.get(part, "")
        if part == "lm_head" and part not in files.found and config.draft_vocab == config.vocab:
            # the model's own
            kind = min(sizes.weights, key=lambda kind: stored_bytes(kind, 256))
        found[kind if kind and machine.keeps(kind, dtype) else usual] += math.prod(shapes[part])
    level = Sizes(
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        width=config.head_dim,
        windows=(config.default_window,),
        weights=dict(found),
        dtype=dtype,
        whole=all(kind in FORMATS for kind in found),
    )
    found[usual] += math.prod(shapes["fc"])
    first = replace(level, weights=dict(found))
    features = config.default_window * FEATURES * config.target_hidden * ITEM["float32"]
    keys = (config.default_window + CHUNK + SCRATCH) * level.token_bytes
    return EagleSizes(level, first, config.default_window, keys + features)
