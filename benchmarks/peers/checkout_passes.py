"""Passes of one checkout: run by `benchmarks.pairs`, which puts the checkout's sources before all
other modules.

    python checkout_passes.py MODEL LOADING

LOADING is JSON, options of `LLM`. Prints how many bytes of KV cache a token takes, then for each
line of JSON on its input, [context, rows], the milliseconds of a pass of so many rows behind a
context. Only what earlier versions have, too, may be called here.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

import torch

from tokenswift import LLM

if TYPE_CHECKING:  # an earlier version may have them elsewhere
    from tokenswift.kv.cache import FullCache
    from tokenswift.models.base import BaseTarget

CHUNK = 512  # tokens of the context in a pass
REPEATS = 3  # passes that are timed together


def filled_cache(target: BaseTarget, context: int) -> FullCache:
    """A KV cache of a context's length, with room for a pass behind it."""
    cache = target.new_cache(context + 64)
    ids = [11 + 37 * i % 5000 for i in range(CHUNK)]
    for start in range(0, context, CHUNK):
        count = min(CHUNK, context - start)
        positions = torch.arange(start, start + count)
        with torch.inference_mode():
            target.forward(torch.tensor(ids[:count]), positions, cache)
        cache.commit(tuple(range(count)))
    return cache


def main() -> None:
    """Answer lines until the input ends."""
    loading = json.loads(sys.argv[2])
    target = LLM(sys.argv[1], device="cpu", eagle=None, heads=None, **loading).target
    print(json.dumps(target.kv_bytes), flush=True)
    caches: dict[int, FullCache] = {}  # of one context at a time
    for line in sys.stdin:
        context, rows = json.loads(line)
        if context not in caches:
            caches.clear()
            caches[context] = filled_cache(target, context)
        cache = caches[context]
        tokens = torch.tensor(list(range(20, 20 + rows)))
        positions = torch.arange(rows) + context
        with torch.inference_mode():
            start = time.perf_counter()
            for _ in range(REPEATS):
                target.logits(target.forward(tokens, positions, cache).hidden)
            seconds = (time.perf_counter() - start) / REPEATS
        print(json.dumps(1e3 * seconds), flush=True)


if __name__ == "__main__":
    main()
