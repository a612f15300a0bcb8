"""Conditioned heads on a backend's kernels: the same arithmetic as `modules`, with packed weights.

The base state's share of a step's products is the same for every level of a draft, so it is made once and
enters the products as a bias.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.backends.base import Backend
from tokenswift.backends.weights import Packed
from tokenswift.heads.conditioned import ConditionedStep
from tokenswift.heads.modules import Heads


class PackedStep:
    """One conditioned step, its weights packed; safe to share between threads.

    Args:
        step: the step.
        backend: the model's.
    """

    def __init__(self, step: ConditionedStep, backend: Backend) -> None:
        self.backend, self._replays = backend, backend.replays()
        self.width = step.linear.out_features
        self.dtype = step.linear.weight.dtype
        weight, bias = step.linear.weight.detach(), step.linear.bias.detach()
        self.outer: Packed | None = None
        if step.inner is not None and step.outer is not None:
            weight = torch.cat((weight, step.inner.weight.detach()))
            bias = torch.cat((bias, step.inner.bias.detach()))
            self.outer = backend.pack(step.outer.weight.detach())
        state, base, embed = weight.split(self.width, dim=1)
        self.moving = backend.pack(torch.cat((state, embed), dim=1))
        self.fixed = backend.pack(base.contiguous())
        self.bias = bias.float().contiguous()
        norms = (step.first_norm, step.state_norm, step.base_norm, step.embed_norm)
        self.norms = [(norm.weight.detach().float().contiguous(), norm.eps) for norm in norms]

    def _norm(self, which: int, states: Tensor) -> Tensor:
        return self.backend.norm(states, *self.norms[which], self.dtype)

    def begin(self, base: Float[Tensor, "1 D"]) -> Float[Tensor, " N"]:
        """What the base state adds to the first products."""
        return self.backend.linear(self._norm(2, base), self.fixed, self.bias)[0]

    def level(
        self, states: Float[Tensor, "m D"], share: Tensor, embeds: Float[Tensor, "m D"], first: bool
    ) -> Float[Tensor, "m D"]:
        """The next states, float32; ``share`` from :meth:`begin`, ``first``: the states are the base's."""
        work = partial(self._level, 0 if first else 1)
        return self._replays.rows(first, work, states, embeds, all_rows=[share])

    def _level(self, norm: int, states: Tensor, embeds: Tensor, share: Tensor) -> Tensor:
        x = torch.cat((self._norm(norm, states), self._norm(3, embeds)), dim=1)
        made = self.backend.linear(x, self.moving, share)
        if self.outer is None:
            return made
        inner = made[:, self.width :].relu_().to(self.dtype)
        return self.backend.linear(inner, self.outer) + made[:, : self.width]


def packed_steps(heads: Heads, backend: Backend) -> list[PackedStep] | None:
    """The heads' steps, packed once; None where the heads or the backend are of another kind."""
    if not heads.conditioned or not backend.fused or heads.config.hidden_size % 2:
        return None
    if next(heads.parameters()).device != backend.device or heads.dtype not in (
        torch.float32,
        torch.bfloat16,
    ):
        return None
    # training and loading move a weight's version on; tensors of inference mode have none
    state = [(id(w), None if w.is_inference() else w._version) for w in heads.parameters()]
    kept = heads.__dict__.get("_packed")
    if kept is None or kept[:2] != (backend, state):
        steps = [layer for layer in heads.layers if isinstance(layer, ConditionedStep)]
        kept = heads.__dict__["_packed"] = (backend, state, [PackedStep(step, backend) for step in steps])
    return kept[2]
