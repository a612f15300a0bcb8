"""The tokens that drafts may consist of, and the LM head over them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tokenswift.models.base import BaseTarget
from tokenswift.sampling.ranking import Subset


class DraftVocabulary:
    """A model's LM head over some tokens.

    Args:
        model: whose LM head.
        size: tokens of the target; those that the model has no row for are never drafted.
        parts: sets of token ids (m,) that have nothing in common; none: all tokens.

    Attributes:
        subset: the tokens that the columns of logits stand for; None for all.
    """

    def __init__(self, model: BaseTarget, size: int, *parts: Tensor) -> None:
        self.model, self.size = model, size
        parts = tuple(ids[ids < min(size, model.vocab_size)] for ids in parts)
        kept = [ids.to(model.device) for ids in parts if len(ids)]
        self.rows = [model.head_rows(ids) for ids in kept]
        self.subset = Subset(torch.cat(kept), size) if kept else None

    def project(self, normed: Tensor) -> Tensor:
        """Normalised states (m, D) → logits (m, S) float32, a column for each token of the subset."""
        if self.subset is None:
            logits = self.model.project(normed)
            more = self.size - logits.shape[1]
            return nn.functional.pad(logits, (0, more), value=-torch.inf).contiguous() if more else logits
        parts = [self.model.project(normed, rows) for rows in self.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm, then :meth:`project`."""
        return self.project(self.model.norm(hidden))


def draft_vocabulary(
    model: BaseTarget, frequent: Tensor | None, prompt: list[int], size: int
) -> DraftVocabulary:
    """Frequent tokens and the prompt's; everything when no frequent tokens are known."""
    if frequent is None:
        return DraftVocabulary(model, size)
    own = torch.tensor(prompt, dtype=torch.long).unique()
    return DraftVocabulary(model, size, frequent, own[~torch.isin(own, frequent.cpu())])
