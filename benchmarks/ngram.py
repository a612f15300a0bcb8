"""Cost of the n-gram table against the length of the text, on Zipf-like text."""

from __future__ import annotations

from typing import Any

import torch

from tokenswift.roofline.timer import once
from tokenswift.spec.drafters.lookup import NgramTable

STEP = 4  # tokens appended between lookups, as in decoding
DELAY, VOCABULARY, REPEATS = 1024, 49_152, 3  # of the repeats the best counts


def zipf_text(length: int, vocab: int, seed: int = 0) -> list[int]:
    """Tokens of Zipf's law; one in four stretches of 8 is copied from earlier, as in long outputs."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(1, vocab + 1, dtype=torch.float64)
    text = torch.multinomial(weights, length, replacement=True, generator=generator)
    for start in range(64, length - 8, 32):
        source = int(torch.randint(0, start - 8, (1,), generator=generator))
        text[start : start + 8] = text[source : source + 8].clone()
    return text.tolist()


def costs(text: list[int], k: int) -> dict[str, float]:
    """Microseconds per appended token and per lookup; the lookups of the last tenth apart."""
    table, whole = NgramTable(DELAY), NgramTable(DELAY)
    append, lookups = [], []
    for start in range(0, len(text), STEP):
        chunk = text[start : start + STEP]
        append.append(once(lambda: table.extend(chunk)))  # noqa: B023
        lookups.append(once(lambda: table.lookup(chunk[-1], k)))  # noqa: B023
    tail = lookups[int(0.9 * len(lookups)) :]
    return {
        "append_us": 1e3 * sum(append) / len(text),
        "append_bulk_us": 1e3 * once(lambda: whole.extend(text)) / len(text),
        "lookup_us": 1e3 * sum(lookups) / len(lookups),
        "lookup_last_tenth_us": 1e3 * sum(tail) / len(tail),
        "lookup_worst_us": 1e3 * max(lookups),
    }


def measure(config: dict[str, Any]) -> dict[str, Any]:
    """Figures at each of ``points`` tokens."""
    text = zipf_text(config["points"][-1], VOCABULARY)
    figures = {}
    for size in config["points"]:
        runs = [costs(text[:size], config["options"]["ngrams"]) for _ in range(REPEATS)]
        figures[str(size)] = {name: round(min(run[name] for run in runs), 3) for name in runs[0]}
    return {"figures": figures}
