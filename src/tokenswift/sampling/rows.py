"""Rows of logits, and what ranks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenswift.checks import check_tokens


class Ranked(NamedTuple):
    """The best candidates of one row, best first.

    Attributes:
        tokens: token ids.
        values: the scores ranked by, noise included.
        probs: their probabilities under the row's processed distribution.
    """

    tokens: list[int]
    values: list[float]
    probs: list[float]


class Contexts(NamedTuple):
    """What stands before the token that each of n rows predicts.

    Attributes:
        history: tokens that every context begins with.
        paths: each row's further tokens.
        positions: the position that each row predicts; None: the one after its context.
    """

    history: list[int]
    paths: list[list[int]]
    positions: list[int] | None = None

    def predicted(self) -> list[int]:
        """The position that each row predicts."""
        if self.positions is not None:
            return self.positions
        return [len(self.history) + len(path) for path in self.paths]


class Subset:
    """Some tokens of the vocabulary, which are the columns of rows of logits (n, S).

    Args:
        ids: token id of each column, (S,), no id twice.
        vocab_size: V.
    Raises:
        InputError: an id that is not below V.

    Attributes:
        ids: the ids, on the device where the logits are.
        ids32: the ids on the host, int32.
        columns: (V,) on the host, int32: the column of each token; -1 for tokens without one.
    """

    def __init__(self, ids: Int[Tensor, " S"], vocab_size: int) -> None:
        host_ids = ids.cpu()
        if len(host_ids):
            check_tokens((int(host_ids.min()), int(host_ids.max())), vocab_size)
        self.ids = ids
        self.vocab_size = vocab_size
        self.ids32 = host_ids.to(torch.int32).contiguous()
        self.columns = torch.full((vocab_size,), -1, dtype=torch.int32)
        self.columns[host_ids.long()] = torch.arange(len(ids), dtype=torch.int32)

    def full_rows(self, logits: Float[Tensor, "n S"]) -> Float[Tensor, "n V"]:
        """The rows over the whole vocabulary, -inf for all other tokens."""
        rows = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        rows[:, self.ids] = logits
        return rows


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Rows of logits, each with its context and the position that it predicts.

    All lists have n entries.

    Attributes:
        logits: one row for each position.
        history: tokens that every context begins with.
        paths: each row's further context. Tokens between it and the position are unknown: they take
            up room in the penalty window, and are not penalised.
        positions: positions of the predicted tokens.
        widths: candidates wanted from each row, at most.
        noise: weight of the position's noise in what ranks, beside the processed score: the
            target's choice has 1, and so have drafts that are coupled with it (Daliri et al. 2024),
            or less; 0: none.
        subset: the tokens that the columns stand for; None: the whole vocabulary.
        with_probs: also return the candidates' probabilities.
        masks: for each row the tokens that a grammar allows (see :func:`allowed_tokens`), or None
            for all; empty without a grammar. Other tokens count as -inf, unless the mask leaves
            nothing of a subset.
    """

    logits: Float[Tensor, "n S"]
    history: list[int]
    paths: list[list[int]]
    positions: list[int]
    widths: list[int]
    noise: float
    subset: Subset | None = None
    with_probs: bool = True
    masks: Sequence[Int[Tensor, " w"] | None] = ()

    def masked(self) -> Float[Tensor, "n S"]:
        """The logits, -inf for tokens that the masks do not allow."""
        if not any(mask is not None for mask in self.masks):
            return self.logits
        logits = self.logits
        subset = self.subset
        vocab_size = logits.shape[1] if subset is None else subset.vocab_size
        all_allowed = torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32)
        words = torch.stack([all_allowed if mask is None else mask for mask in self.masks])
        allowed = allowed_tokens(words.to(logits.device), vocab_size)
        if subset is not None:
            allowed = allowed[:, subset.ids]
            allowed |= ~allowed.any(-1, keepdim=True)
        return torch.where(allowed, logits, logits.new_full((), -torch.inf))

    def contexts(self) -> Contexts:
        """The context of each row."""
        return Contexts(self.history, self.paths, self.positions)

    def one(self, row: int) -> LogitRows:
        """A single row of them."""
        only = slice(row, row + 1)
        return replace(
            self,
            logits=self.logits[only],
            paths=self.paths[only],
            positions=self.positions[only],
            widths=self.widths[only],
            masks=self.masks[only],
        )


def allowed_tokens(masks: Int[Tensor, "n w"], vocab_size: int) -> Bool[Tensor, "n V"]:
    """Unpack bit masks: token t is bit t % 32 of word t // 32, w = ⌈V / 32⌉."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    return (masks[..., None] >> bits & 1).bool().flatten(1)[:, :vocab_size]


class Ranker(Protocol):
    """Temperature, filters, noise and top candidates in one call: compiled in
    `kernels.cpu.backend`."""

    def rank(self, rows: LogitRows) -> list[Ranked] | int:
        """Candidates of each row, or the number of the first row that holds NaN or has no finite
        maximum."""
        ...

    def best(self, logits: Float[Tensor, "n V"], most: int) -> list[tuple[list[int], list[float]]]:
        """See `Sampler.best`; where a row has fewer finite logits, the list ends in -inf."""
        ...
