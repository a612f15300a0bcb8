"""Conditioned heads on a backend's kernels: the same arithmetic as `modules`, with packed weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.kernels.base import Backend
from tokenswift.kernels.weights import Packed
from tokenswift.spec.heads.modules import ConditionedStep, Heads


class PackedStep:
    """One conditioned step, its weights packed; safe to share between threads.

    Args:
        step: the step.
        backend: the model's.
        int8: whether the model's products are in int8; so are these then.
    """

    def __init__(self, step: ConditionedStep, backend: Backend, int8: bool) -> None:
        self.backend = backend
        weight, bias, outer = step.linear.weight.detach(), step.linear.bias.detach(), None
        if step.inner is not None and step.outer is not None:
            weight = torch.cat((weight, step.inner.weight.detach()))
            bias = torch.cat((bias, step.inner.bias.detach()))
            outer = backend.pack_for_drafts(step.outer.weight.detach(), int8)
        self._first, self._outer = backend.pack_for_drafts(weight, int8), outer
        self._bias, self._dtype = bias.float().contiguous(), step.linear.weight.dtype
        self._eps = step.first_norm.eps
        self._first_norm, self._state_norm, *self._norms = (
            norm.weight.detach().float().contiguous()
            for norm in (step.first_norm, step.state_norm, step.base_norm, step.embed_norm)
        )

    def level(
        self,
        states: Float[Tensor, "m D"],
        base: Float[Tensor, "1 D"],
        embeds: Float[Tensor, "m D"],
        first: bool,
        heads: Sequence[Packed],
    ) -> tuple[Float[Tensor, "m D"], Float[Tensor, "m S"]]:
        """The next states and their logits by rows of the LM head; ``first``: the states are the base's."""
        backend, norm = self.backend, self._first_norm if first else self._state_norm
        given = zip((states, base.expand(len(states), -1), embeds), (norm, *self._norms), strict=True)
        x = torch.cat([backend.norm(rows, weight, self._eps, self._dtype) for rows, weight in given], dim=1)
        made = backend.draft_product(x, self._first, self._bias)
        width = states.shape[1]
        states = made[:, :width]
        if self._outer is not None:
            states = states + backend.draft_product(made[:, width:].relu().to(self._dtype), self._outer)
        logits = [backend.draft_product(states, head) for head in heads]
        return states, torch.cat(logits, dim=1) if logits else states[:, :0]


def packed_steps(heads: Heads, backend: Backend, int8: bool) -> list[PackedStep] | None:
    """The heads' steps, packed once; None where the heads or the backend are of another kind."""
    if not heads.conditioned or not backend.fused or heads.config.hidden_size % 2:
        return None
    if next(heads.parameters()).device != backend.device or heads.dtype not in (
        torch.float32,
        torch.bfloat16,
    ):
        return None
    # training and loading move a weight's version on; tensors of inference mode have none
    versions = [(id(w), None if w.is_inference() else w._version) for w in heads.parameters()]
    state = [int8, *versions]
    kept = heads.__dict__.get("_packed")
    if kept is None or kept[:2] != (backend, state):
        steps = [layer for layer in heads.layers if isinstance(layer, ConditionedStep)]
        kept = heads.__dict__["_packed"] = (
            backend,
            state,
            [PackedStep(step, backend, int8) for step in steps],
        )
    return kept[2]
