"""The learning rate is that of transformers' schedule, which earlier versions used, to the bit."""

from __future__ import annotations

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup

from tokenswift.train.schedule import schedule_of

PEAK = 3e-4


def rates(make: object, warmup: int, steps: int) -> list[float]:
    """The learning rate of each step, and the one after the last."""
    assert callable(make)
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
