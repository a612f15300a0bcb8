"""The learning rate from the first step to the last."""

from __future__ import annotations

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def share_of_peak(step: int, warmup: int, steps: int) -> float:
    """It rises evenly during the warm-up, then falls to zero as a cosine does."""
    if step < warmup:
        return step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return (1 + math.cos(math.pi * done)) / 2


def schedule_of(optimizer: Optimizer, warmup: int, steps: int) -> LambdaLR:
    """A schedule whose peak is the optimizer's own learning rate."""
    return LambdaLR(optimizer, partial(share_of_peak, warmup=warmup, steps=steps))
