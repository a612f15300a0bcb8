"""Processors of a row of logits: the contextual penalty, temperature, and filters."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.config.sampling import SamplingParams


def repetition_penalty(
    logits: Float[Tensor, "n V"], ids: Int[Tensor, "n w"], theta: float
) -> Float[Tensor, "n V"]:
    """Positive logits of the given tokens ÷ θ, negative ones × θ; repeated ids count once.

    Args:
        ids: token ids to penalise in each row; repeat an id to pad.
    """
    values = logits.gather(1, ids)
    return logits.scatter(1, ids, torch.where(values < 0, values * theta, values / theta))


def _at_least(
    scores: Float[Tensor, "n V"], threshold: Float[Tensor, "n 1"]
) -> Float[Tensor, "n V"]:
    """Scores with everything below the row's threshold set to -inf (NaN stays NaN)."""
    # on a CPU 10 times as fast as masked_fill() with a scalar, which is not vectorised
    return torch.where(scores < threshold, scores.new_full((), -math.inf), scores)


def top_k(scores: Float[Tensor, "n V"], k: int) -> Float[Tensor, "n V"]:
    """Keep the k largest scores of each row and whatever ties with the k-th."""
    if k >= scores.shape[-1]:
        return scores
    return _at_least(scores, scores.topk(k, dim=-1).values[:, -1:])


def top_p(scores: Float[Tensor, "n V"], p: float) -> Float[Tensor, "n V"]:
    """Keep each row's smallest set of most likely tokens whose probability reaches p (and ties).

    A token stays when the tokens before it hold less than p.
    """
    best = scores.sort(dim=-1, descending=True).values
    peak = best[:, :1]
    total = (scores - peak).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    mass = (best - peak).to(torch.float64).exp_() / total
    before = mass.cumsum(-1) - mass
    last = (before < p).sum(-1, keepdim=True).sub_(1).clamp_(min=0)
    return _at_least(scores, best.gather(1, last))


def min_p(scores: Float[Tensor, "n V"], p: float) -> Float[Tensor, "n V"]:
    """Keep tokens at least p times as likely as the row's best one."""
    return _at_least(scores, scores.amax(-1, keepdim=True) + math.log(p))


def eta(scores: Float[Tensor, "n V"], epsilon: float) -> Float[Tensor, "n V"]:
    """Keep tokens whose probability is at least min(ε, √ε · exp(-entropy)) (Hewitt et al. 2022)."""
    total = scores.logsumexp(-1, keepdim=True)
    entropy = torch.special.entr((scores - total).exp()).sum(-1, keepdim=True)
    cut = torch.clamp(0.5 * math.log(epsilon) - entropy, max=math.log(epsilon))
    return _at_least(scores, torch.minimum(scores.amax(-1, keepdim=True), total + cut))


def processed(scores: Float[Tensor, "n V"], params: SamplingParams) -> Float[Tensor, "n V"]:
    """Penalised logits → log-scores up to a constant: temperature, then the filters in their order.

    With ``greedy`` the logits stay as they are. Training uses this too, for its teacher's
    distribution.
    """
    if params.greedy:
        return scores
    if params.temperature != 1:
        scores = scores / params.temperature
    if params.top_k:
        scores = top_k(scores, params.top_k)
    if params.top_p < 1:
        scores = top_p(scores, params.top_p)
    if params.min_p:
        scores = min_p(scores, params.min_p)
    if params.eta_cutoff:
        scores = eta(scores, params.eta_cutoff)
    return scores
