"""What a ranking of candidates is, and which tokens its rows of logits stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
    """

    def __init__(self, ids: Int[Tensor, " S"], vocab_size: int) -> None:
        self.ids = ids
        self.vocab_size = vocab_size
        self.ids32 = ids.to("cpu", torch.int32).contiguous()
        self.place = torch.full((vocab_size,), -1, dtype=torch.int32)  # column of each token; -1: none
        self.place[self.ids32.long()] = torch.arange(len(ids), dtype=torch.int32)

    def spread(self, logits: Float[Tensor, "n S"]) -> Float[Tensor, "n V"]:
        """The rows over the whole vocabulary, -inf for tokens outside."""
        rows = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        rows[:, self.ids] = logits
        return rows


class Ranker(Protocol):
    """The choice rule in one call; see `backends.cpu.choose`."""

    def rank(
        self,
        logits: Float[Tensor, "n S"],
        history: list[int],
        paths: Sequence[Sequence[int]],
        positions: Sequence[int],
        widths: Sequence[int],
        coupled: bool,
        subset: Subset | None,
        shares: bool,
    ) -> list[Ranked] | int:
        """The rows' candidates, or the first row whose logits hold NaN or no finite maximum."""
        ...
