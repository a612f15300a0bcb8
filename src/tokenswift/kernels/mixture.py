"""Mixtures of experts: which experts a row goes through, and what they add up to.

docs/exactness.md says what every backend computes; this is that in torch. A softmax over the
chosen experts alone, as some families have it, is the softmax over all of them, renormalised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.kernels.weights import ExpertWeights, Mixture, MlpWeights

#: a gated MLP: its input, (n, D), and its weights
GatedMlp = Callable[[Tensor, MlpWeights], Tensor]


@dataclass(frozen=True, slots=True)
class Routes:
    """Where the rows of a pass go.

    Attributes:
        experts: of each row, ascending.
        weights: what the outputs of these experts are multiplied with, float32.
    """

    experts: Int[Tensor, "n k"]
    weights: Float[Tensor, "n k"]


def routes_of(
    logits: Float[Tensor, "n E"], mixture: Mixture, bias: Float[Tensor, " E"] | None = None
) -> Routes:
    """The experts with the highest scores; of equal ones the first.

    Args:
        logits: of the router, float32.
        bias: added to the scores by which experts are chosen, not to those that weigh them.
    """
    weights = logits.sigmoid() if mixture.sigmoid else logits.softmax(-1)
    scores = weights if mixture.sigmoid else logits
    if bias is not None:
        scores = scores + bias
    ranking = scores.sort(dim=-1, descending=True, stable=True).indices
    experts = ranking[:, : mixture.used].sort(dim=-1).values
    weights = weights.gather(1, experts)
    if mixture.renormalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routes(experts, weights)


def mixed_outputs(
    inputs: Float[Tensor, "n D"], routes: Routes, weights: ExpertWeights, mlp: GatedMlp
) -> Float[Tensor, "n D"]:
    """The weighted outputs of each row's experts, added in the order of their numbers.

    Args:
        inputs: what enters products.
    """
    total = torch.zeros(inputs.shape, dtype=torch.float32, device=inputs.device)
    for expert in routes.experts.unique().tolist():
        rows, places = (routes.experts == expert).nonzero(as_tuple=True)
        output = mlp(inputs[rows], weights.mlp(expert))
        total[rows] += routes.weights[rows, places, None] * output
    return total
