"""The contextual penalty's window along drafted paths."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor


def window_ids(
    history: list[int], paths: list[list[int]], gaps: list[int], window: int, device: torch.device
) -> tuple[Int[Tensor, "n w"] | None, list[bool]]:
    """The tokens that the penalty sees, row by row: the last ``window`` places before a position.

    Args:
        history: the text so far; only its tail is read.
        paths: drafted tokens of each row, in order, after ``history``.
        gaps: unknown tokens between a row's path and the position to predict; they hold places of
            the window but no token.
        window: W.

    Returns:
        ids padded with repetitions, and for each row whether its window is empty (its ids are then
        meaningless); ids is None when every row's is.
    """
    tail = history[-window:]
    if len(paths) == 1:  # the common case: one context, nothing to pad
        known = tail + paths[0]
        ids = known[max(0, len(known) + gaps[0] - window) :]
        return (torch.tensor([ids], device=device), [False]) if ids else (None, [True])
    deepest = max(map(len, paths))
    drops, extras, empty = [], [], []
    for path, gap in zip(paths, gaps, strict=True):
        over = max(0, len(tail) + len(path) + gap - window)  # oldest known tokens that fall out
        extra = path[max(0, over - len(tail)) :]
        filler = extra[-1] if extra else tail[-1] if tail else 0
        drops.append(min(over, len(tail)))
        extras.append(extra + [filler] * (deepest + 1 - len(extra)))
        empty.append(not extra and over >= len(tail))
    if all(empty):
        return None, empty
    added = torch.tensor(extras, device=device)
    if not tail:
        return added, empty
    shared = torch.tensor(tail, device=device).expand(len(paths), -1)
    if any(drops):
        places = torch.arange(len(tail), device=device)
        shared = torch.where(places < torch.tensor(drops, device=device)[:, None], added[:, -1:], shared)
    return torch.cat((shared, added), 1), empty
