"""Closed-form starts: a head's linear part by ridge regression, one pass over the data.

Conditioned heads regress the base model's *final-normed* next state (what its LM head reads) onto the
step's input and its random hidden layer; linear heads regress it, one head after the other, onto the
normed state of the head before. Medusa heads have no closed form: they start by repeating the base.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from tokenswift.heads.modules import ConditionedStep, Heads, LinearHead, MedusaHead
from tokenswift.train.loss import FrozenBase
from tokenswift.train.store import HiddenStore, Windows

LAMBDA = 0.01  # ridge strength per row of data, in units of the normed inputs' variance


def _rows(windows: Windows, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden states (m + count, D) and tokens (m + count) of items spread over the data."""
    stride = max(1, len(windows) * windows.chunk // most)
    for k in range(0, len(windows), stride):
        item = windows[k]
        good = int(item["valid"].sum())
        n = good + windows.count
        yield item["hidden"][-n:].float(), item["tokens"][-n:]


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
def ridge_start(heads: Heads, store: HiddenStore, base: FrozenBase, most: int = 100_000) -> None:
    """Set the heads to their closed-form start, from at most about ``most`` positions."""
    if heads.kind == "medusa":
        for head in heads.layers:
            if isinstance(head, MedusaHead):
                _medusa(head, base)
        return
    windows = Windows(store, heads.count, 512, 0)
    if heads.kind == "conditioned":
        for i, step in enumerate(heads.layers):
            if isinstance(step, ConditionedStep):
                _conditioned(step, i, heads, windows, base, most)
    elif heads.kind == "linear":
        for i, head in enumerate(heads.layers):
            if isinstance(head, LinearHead):
                _linear(head, i, heads, windows, base, most)


def _conditioned(
    step: ConditionedStep, i: int, heads: Heads, windows: Windows, base: FrozenBase, most: int
) -> None:
    width = heads.config.hidden_size
    if step.inner is not None:
        torch.nn.init.normal_(step.inner.weight, std=(3 * width) ** -0.5)

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for hidden, tokens in _rows(windows, most):
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


def _linear(head: LinearHead, i: int, heads: Heads, windows: Windows, base: FrozenBase, most: int) -> None:
    head.post_layernorm.weight.copy_(base.norm_weight)

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for hidden, _ in _rows(windows, most):
            m = len(hidden) - heads.count
            previous = hidden[:m]
            for j in range(i):
                previous = heads.advance(j, previous, hidden[:m], None)
            # The state's length is free (a norm follows): aim at the previous state's length.
            target = hidden[1 + i : 1 + i + m]
            scale = previous.norm(dim=-1, keepdim=True) / target.norm(dim=-1, keepdim=True).clamp_min(1e-6)
            yield head.input_layernorm(previous), target * scale - previous

    head.linear.weight.copy_(solve(pairs()).T)


def _medusa(head: MedusaHead, base: FrozenBase) -> None:
    """Medusa's start: the base's final norm, and blocks that add nothing yet."""
    head.final_norm.weight.copy_(base.norm_weight)
    for parameter in head.blocks.parameters():
        parameter.zero_()
