"""The prompt's way into the full cache, for every kind of target."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenswift.cache.select import OBSERVED
from tokenswift.interfaces import CommittingCache, Pass


def prefill_in_chunks(
    run: Callable[[Tensor, Tensor, CommittingCache, None, bool], Pass],
    tokens: list[int],
    cache: CommittingCache,
    chunk: int,
) -> Pass:
    """Run ``tokens`` in passes of ``chunk`` rows and commit them.

    Args:
        run: a pass over (tokens, positions, cache, no parents, whether its queries are wanted).

    The result holds queries and hidden states of the last `cache.select.OBSERVED` tokens, or of all.

    Raises:
        ValueError: no tokens.
    """
    hidden: list[torch.Tensor] = []
    queries: list[list[torch.Tensor]] = []
    for start in range(0, len(tokens), chunk):
        rows = torch.tensor(tokens[start : start + chunk], device=cache.data.device)
        positions = torch.arange(cache.length, cache.length + len(rows), device=cache.data.device)
        last = start + 2 * chunk > len(tokens)  # the last two chunks hold the last rows
        result = run(rows, positions, cache, None, last)
        cache.commit(tuple(range(len(rows))))
        if last:
            hidden.append(result.hidden[-OBSERVED:].clone())
            queries.append([layer[:, -OBSERVED:].clone() for layer in result.queries])
    if not hidden:
        raise ValueError("nothing to prefill")
    ends = [torch.cat(layer, dim=1)[:, -OBSERVED:] for layer in zip(*queries, strict=True)]
    return Pass(torch.cat(hidden)[-OBSERVED:], ends)
