"""What is ranked, rows of logits with the places of a text that they predict, and what a ranking is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenswift.types import check_tokens


class Ranked(NamedTuple):
    """The best candidates of one row, best first.

    Attributes:
        tokens: token ids.
        values: scores that decide, noise included where it was asked for.
        shares: probabilities under the row's processed distribution.
    """

    tokens: list[int]
    values: list[float]
    shares: list[float]


class Subset:
    """Tokens that rows of logits are limited to, as the column numbers of those rows.

    Args:
        ids: token id of each column, (S,), no id twice.
        vocab_size: V.
    Raises:
        InputError: an id that is not below V.
    """

    def __init__(self, ids: Int[Tensor, " S"], vocab_size: int) -> None:
        known = ids.cpu()
        if len(known):
            check_tokens((int(known.min()), int(known.max())), vocab_size)
        self.ids = ids
        self.vocab_size = vocab_size
        self.ids32 = known.to(torch.int32).contiguous()
        self.place = torch.full((vocab_size,), -1, dtype=torch.int32)  # column of each token; -1: none
        self.place[self.ids32.long()] = torch.arange(len(ids), dtype=torch.int32)

    def spread(self, logits: Float[Tensor, "n S"]) -> Float[Tensor, "n V"]:
        """The rows over the whole vocabulary, -inf for tokens outside."""
        rows = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        rows[:, self.ids] = logits
        return rows


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Rows of logits, each with its context and the position that it predicts; all lists have n entries.

    Attributes:
        logits: one row a position.
        history: the text that every context begins with.
        paths: known tokens of each row after ``history``; tokens between them and the position are
            unknown, take their place in the penalty window and are not penalised.
        positions: of the tokens that the rows predict.
        widths: how many candidates each row has at most.
        coupled: rank by processed score plus the position's noise (which the target will use too; Daliri
            et al. 2024), else by processed score.
        subset: the tokens that the columns stand for; None: all of the vocabulary.
        shares: also find the candidates' probabilities.
        masks: of each row what a grammar allows (see :func:`allowed_tokens`), None for any token; none at
            all where there is no grammar. Tokens that are not allowed count as -inf before anything else,
            except in a row in whose subset nothing is allowed.
    """

    logits: Float[Tensor, "n S"]
    history: list[int]
    paths: list[list[int]]
    positions: list[int]
    widths: list[int]
    coupled: bool
    subset: Subset | None = None
    shares: bool = True
    masks: Sequence[Int[Tensor, " w"] | None] = ()

    def masked(self) -> Float[Tensor, "n S"]:
        """The logits with -inf where the masks do not allow a token."""
        if not any(mask is not None for mask in self.masks):
            return self.logits
        logits, subset = self.logits, self.subset
        vocab_size = logits.shape[1] if subset is None else subset.vocab_size
        whole = torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32)
        words = torch.stack([whole if mask is None else mask for mask in self.masks])
        allowed = allowed_tokens(words.to(logits.device), vocab_size)
        if subset is not None:
            allowed = allowed[:, subset.ids]
            allowed |= ~allowed.any(-1, keepdim=True)
        return torch.where(allowed, logits, logits.new_full((), -torch.inf))

    def one(self, row: int) -> LogitRows:
        """That row alone."""
        at = slice(row, row + 1)
        return replace(
            self,
            logits=self.logits[at],
            paths=self.paths[at],
            positions=self.positions[at],
            widths=self.widths[at],
            masks=self.masks[at],
        )


def allowed_tokens(masks: Int[Tensor, "n w"], vocab_size: int) -> Bool[Tensor, "n V"]:
    """Masks as one truth value a token: bit t % 32 of word t // 32 is that of token t."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    return (masks[..., None] >> bits & 1).bool().flatten(1)[:, :vocab_size]


class Ranker(Protocol):
    """Temperature, filters, noise and the best in one call; see `kernels.cpu.backend`."""

    def rank(self, rows: LogitRows) -> list[Ranked] | int:
        """The rows' candidates, or the first row whose logits hold NaN or no finite maximum."""
        ...


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
    tail = np.array(history[-window:], np.int64)
    rows = []
    for path, gap in zip(paths, gaps, strict=True):
        known = np.concatenate([tail, np.array(path, np.int64)])
        rows.append(known[max(0, len(known) + gap - window) :])
    empty, widest = [not len(row) for row in rows], max(map(len, rows))
    if not widest:
        return None, empty
    ids = np.zeros((len(rows), widest), np.int64)
    for padded, row in zip(ids, rows, strict=True):
        padded[: len(row)] = row
        padded[len(row) :] = row[-1] if len(row) else 0
    return torch.from_numpy(ids).to(device, non_blocking=True), empty
