"""How often a drafter names what its model wrote, in texts that it has not learnt from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import default_collate

from tokenswift.train.distillation import FrozenBase, Student
from tokenswift.train.store import Windows

MOST = 64  # items that are looked at, spread over what is held out
COUNTS = ("the next token", "the next two", "the next three", "the next four", "the next five")


@torch.no_grad()
def agreement(student: Student, base: FrozenBase, unseen: Windows) -> list[float]:
    """Of the places of texts, the shares whose next token, next two tokens, and so on, a student
    names; [] without places.

    Args:
        student: what drafts.
        base: of its model, with the tokens that it can name.
        unseen: items of texts that were held out.
    """
    hits = torch.zeros(student.levels)
    places = 0
    is_training = student.training
    student.eval()
    for item in range(0, len(unseen), max(1, -(-len(unseen) // MOST))):
        batch = default_collate([unseen[item]])
        tokens = batch["tokens"].to(base.device)
        right = batch["valid"].to(base.device)
        width = right.shape[1]
        places += int(right.sum())
        rows = student(tokens, batch["states"].to(base.device), base)
        for level, normed in enumerate(rows):
            named = base.subset[base.logits(normed).argmax(-1)].view(right.shape)
            right = right & (named == tokens[:, 2 + level : 2 + level + width])
            hits[level] += right.sum().cpu()
    student.train(is_training)
    return (hits / places).tolist() if places else []


def in_words(shares: Sequence[float]) -> str:
    """What a drafter names, for somebody who waits for one."""
    parts = [f"{name} at {share:.0%}" for name, share in zip(COUNTS, shares, strict=False)]
    parts[0] += " of the places"
    return ", ".join(parts)
