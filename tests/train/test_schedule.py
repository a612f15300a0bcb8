"""The learning rate is that of transformers' schedule, which earlier versions used, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_cosine_schedule_with_warmup

from tokenswift.train.schedule import schedule_of

PEAK = 3e-4


def rates(
    make: Callable[[Optimizer, int, int], LRScheduler], warmup: int, steps: int
) -> list[float]:
    """The learning rate of each step, and the one after the last."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule = make(optimizer, warmup, steps)
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("warmup", [0, 1, 30])
@pytest.mark.parametrize("steps", [1, 30, 97])
def test_rates_are_those_of_transformers(warmup: int, steps: int) -> None:
    found = rates(schedule_of, warmup, steps)
    assert found == rates(get_cosine_schedule_with_warmup, warmup, steps)
    assert max(found) <= PEAK
