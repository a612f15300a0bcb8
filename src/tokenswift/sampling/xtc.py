"""XTC, "exclude top choices": at some places the likeliest tokens are left out.

At a share of the places, ``xtc_probability``, of all tokens with a probability of at least
``xtc_threshold`` only the least likely stays (and what ties with it); where fewer than two are so
likely, nothing changes. It is the last filter: probabilities are those that temperature and the
other filters have left. (In llama.cpp's usual order the temperature comes after it.) Which places
these are is decided by seed and position, like all noise, so it is the same for every strategy.
"""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor, where

from tokenswift.config.sampling import SamplingParams
from tokenswift.sampling.noise import uniform


def excludes(params: SamplingParams, position: int) -> bool:
    """Whether the likeliest tokens are left out at a position."""
    if params.greedy or not params.xtc_probability:
        return False
    return uniform(params.seed, position) < params.xtc_probability


def exclude_top(scores: Float[Tensor, "n V"], threshold: float) -> Float[Tensor, "n V"]:
    """-inf for all tokens of at least this probability but the least likely of them."""
    cut = scores.logsumexp(-1, keepdim=True) + math.log(threshold)
    likely = scores >= cut
    none = scores.new_full((), math.inf)
    least_likely = where(likely, scores, none).amin(-1, keepdim=True)
    return where(scores > least_likely, scores.new_full((), -math.inf), scores)
