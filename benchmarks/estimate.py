"""What a row will take at the least on a card, by its maker's figures; nothing is downloaded for the paper's
models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.needs import MODELS
from benchmarks.roofline import Card, Sizes, floor, read_seconds, sizes_of
from tokenswift.config import tree_nodes


def sizes_for(config: Mapping[str, Any]) -> tuple[Sizes, int]:
    """The sizes of a row's model, and the numbers of an embedding that is no LM head as well.

    Raises:
        InputError: the model's config cannot be had.
    """
    known = MODELS.get(config["model"])
    if known is None:
        return sizes_of(config["model"], config["dtype"]), 0
    s = known["sizes"]
    own, shared = s["heads"] * s["width"], s["kv_heads"] * s["width"]
    layer = 2 * s["hidden"] * (own + shared) + 3 * s["hidden"] * s["inner"]
    words = s["hidden"] * s["vocabulary"]
    dtype = "bfloat16" if config["dtype"] == "auto" else config["dtype"]
    same = {name: s[name] for name in ("hidden", "heads", "kv_heads", "width")}
    weights = {dtype: s["layers"] * layer + words}
    sizes = Sizes(**same, layers=s["layers"], weights=weights, dtype=dtype)
    return sizes, 0 if s.get("tied") else words


def estimate(config: Mapping[str, Any], card: Card) -> tuple[int, float]:
    """Bytes and seconds that a row takes at the least: it decodes plainly and by its strategy in turns.

    Memory is that of weights, of three caches (of the prompt, and of either side) and of the draft's; heads
    and draft models come on top. Time is the floor of reading the prompt, of plain steps, and of the
    strategy's steps if all that a step drafts is right.
    """
    sizes, embedded = sizes_for(config)
    options, new = config["options"], config["points"][-1]
    prompt = config["prefill"]
    if config["reach"] == "text":
        prompt, new = prompt + new - min(config["measured"], new), min(config["measured"], new)
    number = sizes.token_bytes // (2 * sizes.kv_heads * sizes.width * sizes.layers)
    budget = min(options.get("budget") or 0, prompt + new)
    memory = sizes.weight_bytes + number * embedded
    memory += (prompt + 2 * (prompt + new) + budget) * sizes.token_bytes
    middle, tree = prompt + new // 2, options.get("tree")
    plain = floor(sizes, card, 1, middle)
    depth = len(tree) if tree else options.get("gamma") or 4
    rows = tree_nodes(tree) if tree else 1 + depth
    step = floor(sizes, card, rows, middle)
    if options.get("draft") == "partial":
        step += floor(sizes, card, 1, budget)
    drafted = plain if config["strategy"] == "autoregressive" else step / (depth + 1)
    return memory, read_seconds(sizes, card, prompt) + new * (plain + drafted)
