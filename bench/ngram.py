"""Cost of the n-gram table against the length of the text, on Zipf-like text. Prints one JSON line last.

Usage: python bench/ngram.py [--delay 1024] [--k 20] [--vocab 49152] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from tokenswift.ngram import NgramTable

SIZES = (1_000, 10_000, 100_000)
STEP = 4  # tokens appended between lookups, as in decoding


def zipf_text(length: int, vocab: int, seed: int = 0) -> list[int]:
    """Tokens of Zipf's law; one in four stretches of 8 is copied from earlier, as in long outputs."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(1, vocab + 1, dtype=torch.float64)
    text = torch.multinomial(weights, length, replacement=True, generator=generator)
    for start in range(64, length - 8, 32):
        source = int(torch.randint(0, start - 8, (1,), generator=generator))
        text[start : start + 8] = text[source : source + 8].clone()
    return text.tolist()


def measure(text: list[int], delay: int, k: int) -> dict[str, float]:
    """Microseconds per appended token and per lookup; the lookups of the last tenth apart."""
    table = NgramTable(delay)
    append = lookup = tail = worst = 0.0
    lookups = late = 0
    for start in range(0, len(text), STEP):
        chunk = text[start : start + STEP]
        begin = time.perf_counter()
        table.extend(chunk)
        between = time.perf_counter()
        table.lookup(chunk[-1], k)
        end = time.perf_counter()
        append += between - begin
        lookup += end - between
        worst = max(worst, end - between)
        lookups += 1
        if start >= 0.9 * len(text):
            tail += end - between
            late += 1
    whole = NgramTable(delay)
    begin = time.perf_counter()
    whole.extend(text)
    bulk = time.perf_counter() - begin
    return {
        "append_us": 1e6 * append / len(text),
        "append_bulk_us": 1e6 * bulk / len(text),
        "lookup_us": 1e6 * lookup / lookups,
        "lookup_last_tenth_us": 1e6 * tail / late,
        "lookup_worst_us": 1e6 * worst,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay", type=int, default=1024)
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--repeats", type=int, default=3, help="the best of this many runs is printed")
    args = parser.parse_args()
    text = zipf_text(max(SIZES), args.vocab)
    results: dict[str, dict[str, float]] = {}
    for size in SIZES:
        runs = [measure(text[:size], args.delay, args.k) for _ in range(args.repeats)]
        results[str(size)] = {name: round(min(run[name] for run in runs), 3) for name in runs[0]}
        print(f"{size:>7} tokens: " + ", ".join(f"{n} {v:.2f}" for n, v in results[str(size)].items()))
    print(json.dumps({"bench": "ngram", "delay": args.delay, "k": args.k, "tokens": results}))


if __name__ == "__main__":
    main()
