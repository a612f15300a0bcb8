"""The prompt's way into the full cache, for every kind of target."""

from __future__ import annotations

import torch

from tokenswift.cache.select import OBSERVED
from tokenswift.interfaces import CommittingCache, Pass, TargetModel


def prefill_in_chunks(model: TargetModel, tokens: list[int], cache: CommittingCache, chunk: int) -> Pass:
    """Run ``tokens`` in passes of ``chunk`` rows and commit them.

    The result holds queries and hidden states of the last `cache.select.OBSERVED` tokens, or of all.

    Raises:
        ValueError: no tokens.
    """
    hidden: list[torch.Tensor] = []
    queries: list[list[torch.Tensor]] = []
    for start in range(0, len(tokens), chunk):
        rows = torch.tensor(tokens[start : start + chunk], device=model.device)
        positions = torch.arange(cache.length, cache.length + len(rows), device=model.device)
        result = model.forward(rows, positions, cache)
        cache.commit(tuple(range(len(rows))))
        if start + 2 * chunk > len(tokens):  # the last two chunks hold the last rows
            hidden.append(result.hidden[-OBSERVED:].clone())
            queries.append([layer[:, -OBSERVED:].clone() for layer in result.queries])
    if not hidden:
        raise ValueError("nothing to prefill")
    ends = [torch.cat(layer, dim=1)[:, -OBSERVED:] for layer in zip(*queries, strict=True)]
    return Pass(torch.cat(hidden)[-OBSERVED:], ends)
