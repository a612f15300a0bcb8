"""Starts of heads: in closed form, one pass over the data, or at what the base model says.

A head's linear part is set by ridge regression, where the base model lies. Conditioned heads regress the
base model's *final-normed* next state (what its LM head reads) onto the step's input and its random hidden
layer; linear heads regress it, one head after the other, onto the normed state of the head before. Medusa
heads have no closed form: they start by repeating the base.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.spec.heads.conditioned import ConditionedStep
from tokenswift.spec.heads.linear import LinearHead
from tokenswift.spec.heads.medusa import MedusaHead
from tokenswift.spec.heads.modules import Heads
from tokenswift.train.loss import FrozenBase
from tokenswift.train.store import HiddenStore, Windows
from tokenswift.types import InputError

LAMBDA = 0.01  # ridge strength per row of data, in units of the normed inputs' variance


def _rows(
    stores: Sequence[HiddenStore], count: int, most: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden states (m + count, D) and tokens (m + count) of items spread over the data."""
    parts = [Windows(store, count, 512, 0) for store in stores]
    items = [(windows, k) for windows in parts for k in range(len(windows))]
    for windows, k in items[:: max(1, len(items) * 512 // most)]:
        item = windows[k]
        n = int(item["valid"].sum()) + count
        yield item["hidden"][-n:].float().to(device), item["tokens"][-n:].to(device)


def solve(pairs: Iterator[tuple[Tensor, Tensor]]) -> Float[Tensor, "X Y"]:
    """Ridge solution W of x W ≈ y over pairs (x, y), accumulated in float32 blocks."""
    gram = cross = None
    rows = 0
    for x, y in pairs:
        gram = x.T @ x if gram is None else gram.addmm_(x.T, x)
        cross = x.T @ y if cross is None else cross.addmm_(x.T, y)
        rows += len(x)
    assert gram is not None and cross is not None
    gram.diagonal().add_(LAMBDA * rows + 1.0)
    return torch.linalg.solve(gram, cross)


@torch.no_grad()
def ridge_start(heads: Heads, stores: Sequence[HiddenStore], base: FrozenBase, most: int = 100_000) -> None:
    """Set the heads to their closed-form start, from at most about ``most`` positions.

    Args:
        heads: on the base's device.
    """
    if heads.kind == "medusa":
        zero_start(heads, base)
        return
    for i, head in enumerate(heads.layers):
        if isinstance(head, ConditionedStep):
            _conditioned(head, i, heads, stores, base, most)
        elif isinstance(head, LinearHead):
            _linear(head, i, heads, stores, base, most)


@torch.no_grad()
def zero_start(heads: Heads, base: FrozenBase) -> None:
    """Set linear and Medusa heads to a start at which they say what the base model says.

    Raises:
        InputError: conditioned heads, which have none.
    """
    for head in heads.layers:
        if isinstance(head, MedusaHead):
            head.final_norm.weight.copy_(norm_weight(base))
            for parameter in head.blocks.parameters():
                parameter.zero_()
        elif isinstance(head, LinearHead):
            head.post_layernorm.weight.copy_(norm_weight(base))
            head.linear.weight.zero_()
        else:
            raise InputError(f"start is 'zero', which {heads.kind} heads have not; valid: ridge")


def norm_weight(base: FrozenBase) -> Float[Tensor, " D"]:
    """The final norm's factors, seen from outside (some families store them less one).

    Raises:
        InputError: the norm is no RMS norm.
    """
    width = base.rows.shape[1]
    probe = torch.linspace(-1, 2, width, dtype=torch.float32, device=base.device)
    weight = base.normed(torch.ones_like(probe)).float()
    want = weight * probe * probe.pow(2).mean().rsqrt()
    if not torch.allclose(base.normed(probe).float(), want, rtol=0.05, atol=0.01 * float(weight.abs().max())):
        raise InputError("the model's final norm is no RMS norm; valid: conditioned heads")
    return weight


def _conditioned(
    step: ConditionedStep,
    i: int,
    heads: Heads,
    stores: Sequence[HiddenStore],
    base: FrozenBase,
    most: int,
) -> None:
    width = heads.config.hidden_size
    if step.inner is not None:
        torch.nn.init.normal_(step.inner.weight, std=(3 * width) ** -0.5)

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for hidden, tokens in _rows(stores, heads.count, most, base.device):
            m = len(hidden) - heads.count
            start = hidden[:m]
            x = step.inputs(start, start, base.embed(tokens[1 + i : 1 + i + m]).float(), True)
            x[:, :width] = 0  # the state's own part starts at zero: at the first step it repeats the base
            parts = [x, x.new_ones(m, 1)]
            if step.inner is not None:
                parts.append(torch.relu(step.inner(x)))
            yield torch.cat(parts, dim=1), base.normed(hidden[1 + i : 1 + i + m]).float()

    weights = solve(pairs())
    step.linear.weight.copy_(weights[: 3 * width].T)
    step.linear.bias.copy_(weights[3 * width])
    if step.outer is not None:
        step.outer.weight.copy_(weights[3 * width + 1 :].T)


def _linear(
    head: LinearHead,
    i: int,
    heads: Heads,
    stores: Sequence[HiddenStore],
    base: FrozenBase,
    most: int,
) -> None:
    head.post_layernorm.weight.copy_(norm_weight(base))

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for hidden, _ in _rows(stores, heads.count, most, base.device):
            m = len(hidden) - heads.count
            previous = hidden[:m]
            for j in range(i):
                previous = heads.advance(j, previous, hidden[:m], None)
            # The state's length is free (a norm follows): aim at the previous state's length.
            target = hidden[1 + i : 1 + i + m]
            scale = previous.norm(dim=-1, keepdim=True) / target.norm(dim=-1, keepdim=True).clamp_min(1e-6)
            yield head.input_layernorm(previous), target * scale - previous

    head.linear.weight.copy_(solve(pairs()).T)
