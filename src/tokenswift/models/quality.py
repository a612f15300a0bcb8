"""How well a number type writes: what passes hold of a text's tokens, beside float32.

The measure is perplexity: exp of the mean of −log p of each token of a text, all of them read as
the text has them. A ratio of 1.002 says that the text became .2% less likely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.kv.cache import FullCache
from tokenswift.kv.passes import Pass

ROWS = 256  # of a pass


class Reader(Protocol):
    """A model that reads texts."""

    def new_cache(self, capacity: int, keep_all: bool = False) -> FullCache:
        """An empty cache."""
        ...

    def forward(self, tokens: Tensor, positions: Tensor, cache: FullCache) -> Pass:
        """Run tokens of a chain."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of rows."""
        ...


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a model held of a text's last tokens.

    Attributes:
        losses: −log of each token's probability, in nats.
        choices: the most probable token at each place.
    """

    losses: Float[Tensor, " n"]
    choices: Int[Tensor, " n"]


@dataclass(frozen=True, slots=True)
class Quality:
    """How a kind of pass compares with a reference over some texts.

    Attributes:
        perplexity: of all judged tokens.
        ratio: over the reference's.
        error: the ratio's standard error, as tokens are a sample of what may be written.
        same_choice: share of places with the reference's most probable token.
        worst: how much less likely the text's own token became at the worst place, in nats.
        tokens: how many were judged.
    """

    perplexity: float
    ratio: float
    error: float
    same_choice: float
    worst: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"perplexity {self.ratio:.4f} times that of float32 (standard error {self.error:.4f}) "
            f"over {self.tokens:,} tokens, the same most probable token at {self.same_choice:.1%} "
            f"of the places, at worst {self.worst:.2f} nats less likely"
        )


def compared(judgements: Sequence[Judgement], reference: Sequence[Judgement]) -> Quality:
    """Judgements of texts against a reference's judgements of the same texts."""
    losses = torch.cat([judgement.losses for judgement in judgements])
    expected = torch.cat([judgement.losses for judgement in reference])
    choices = torch.cat([judgement.choices for judgement in judgements])
    wanted = torch.cat([judgement.choices for judgement in reference])
    risen = losses - expected
    return Quality(
        perplexity=float(losses.mean().exp()),
        ratio=float(risen.mean().exp()),
        error=float(risen.std()) / math.sqrt(len(risen)),
        same_choice=float((choices == wanted).double().mean()),
        worst=float(risen.max()),
        tokens=len(risen),
    )


@torch.inference_mode()
def judged(model: Reader, ids: Sequence[int], count: int) -> Judgement:
    """Read a text in passes of :data:`ROWS` rows, and judge its last ``count`` tokens."""
    cache = model.new_cache(len(ids))
    tokens = torch.tensor(ids)
    first = len(ids) - count - 1  # the row before the first judged token
    losses = []
    choices = []
    for start in range(0, len(ids) - 1, ROWS):
        end = min(start + ROWS, len(ids) - 1)
        hidden = model.forward(tokens[start:end], torch.arange(start, end), cache).hidden
        cache.commit(tuple(range(end - start)))
        begin = max(start, first)
        if begin >= end:
            continue
        logits = model.logits(hidden[begin - start :]).double()
        losses.append(F.cross_entropy(logits, tokens[begin + 1 : end + 1], reduction="none"))
        choices.append(logits.argmax(-1))
    return Judgement(torch.cat(losses), torch.cat(choices))
