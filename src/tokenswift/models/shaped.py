"""What some families do to logits after the LM head."""

from __future__ import annotations

import torch
from torch import Tensor


def shaped_logits(logits: Tensor, config: object) -> Tensor:
    """Scale or cap logits as a model's config says."""
    divisor: float | None = getattr(config, "logits_scaling", None)  # Granite
    factor: float | None = getattr(config, "logit_scale", None)  # Cohere
    cap: float | None = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    if divisor is not None:
        logits = logits / divisor
    if factor is not None:
        logits = logits * factor
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits
