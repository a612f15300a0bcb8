"""The identity of a base model: a sample of its weights, compared with a tolerance."""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLE_SIZE = 256  # values taken of a weight
TOLERANCE = 0.01  # greatest relative distance of two samples of one base; a bf16 cast gives 0.002


def sample_of(weight: Tensor) -> Tensor:
    """Values of a weight at fixed places, (256,) float32 on the CPU."""
    flat = weight.detach().reshape(-1)
    steps = torch.linspace(0.02, 0.98, SAMPLE_SIZE, dtype=torch.float64)
    indices = (steps * (flat.numel() - 1)).long().to(flat.device)
    return flat[indices].float().cpu()


def distance(one: Tensor, other: Tensor) -> float:
    """Relative distance of two samples of one size; 0 for equal ones."""
    return float((one - other).norm() / one.norm().clamp_min(1e-9))
