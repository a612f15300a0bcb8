"""Recurrent layers in plain torch: gated short convolutions, and the gated delta rule.

A row goes on from its parent's state by one chain of float32 operations, whatever the pass is: a
prompt, a token, a tree, or the replay of accepted rows. cpu_recurrent.h says the same in C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tokenswift.kernels.weights import RecurrentWeights
from tokenswift.kv.states import Recurrence

#: what is added to the squares of a head's queries and keys
EPS = 1e-6


@dataclass(slots=True)
class Trail:
    """The rows of one text in one recurrent layer.

    Attributes:
        now: the state of the committed rows, which stays.
        next: filled with that after the last row of a chain.
        log: filled with what each row feeds.
        parents: of the rows; None: a chain.
    """

    now: Float[Tensor, " state"]
    next: Float[Tensor, " state"]
    log: Float[Tensor, "n logged"]
    parents: Sequence[int] | None


def recurrent_outputs(
    projected: Float[Tensor, "n projected"],
    gates: Float[Tensor, "n gates"] | None,
    weights: RecurrentWeights,
    recurrence: Recurrence,
    trail: Trail,
    eps: float,
) -> Float[Tensor, "n outputs"]:
    """What a recurrent layer makes of a text's projected rows.

    Args:
        gates: of the delta rule, strengths and decays of each head before their activations.
        eps: of the norm of a head's output.
    """
    if gates is None:
        return _short(projected, weights, recurrence, trail)
    return _delta(projected, gates, weights, recurrence, trail, eps)


def _short(
    projected: Tensor, weights: RecurrentWeights, recurrence: Recurrence, trail: Trail
) -> Tensor:
    before, gate, inputs = projected.chunk(3, dim=-1)
    trail.log[:] = before * inputs
    seen = _inputs_seen(recurrence, trail)
    trail.next[:] = seen[-1, 1:].flatten()
    return gate * (seen * weights.taps).sum(1)


def _inputs_seen(recurrence: Recurrence, trail: Trail) -> Float[Tensor, "n taps channels"]:
    """The inputs that each row's convolution sees, its own last."""
    committed = trail.now[: recurrence.inputs].view(-1, recurrence.channels)
    rows = torch.cat([committed, trail.log[:, : recurrence.channels]])
    count = len(trail.log)
    parents = range(-1, count - 1) if trail.parents is None else trail.parents
    places: list[list[int]] = []
    first = len(committed)
    for row, parent in enumerate(parents):
        before = places[parent] if parent >= 0 else range(-1, first)
        places.append([*before[1:], first + row])
    return rows[torch.tensor(places, device=rows.device)]


def _delta(
    projected: Tensor,
    gates: Tensor,
    weights: RecurrentWeights,
    recurrence: Recurrence,
    trail: Trail,
    eps: float,
) -> Tensor:
    rate = weights.rate
    shift = weights.shift
    norm = weights.norm
    if rate is None or shift is None or norm is None:
        raise ValueError("a layer of the delta rule lacks weights; valid: rate, shift and norm")
    inputs, gate = projected.split([recurrence.channels, recurrence.outputs], -1)
    log = _LogParts(recurrence, trail.log)
    log.inputs[:] = inputs
    seen = _inputs_seen(recurrence, trail)
    convolved = F.silu((seen * weights.taps).sum(1))
    query, key, value = convolved.split([recurrence.keys, recurrence.keys, recurrence.outputs], -1)
    heads = (recurrence.key_heads, recurrence.key_width)
    query = _unit(query.unflatten(-1, heads)) * recurrence.key_width**-0.5
    log.keys[:] = _unit(key.unflatten(-1, heads)).flatten(-2)
    log.values[:] = value
    strength, decay = gates.double().chunk(2, dim=-1)
    log.strengths[:] = strength.sigmoid()
    log.decays[:] = (rate * F.softplus(decay + shift, threshold=40)).exp()
    output, last = _read_along(recurrence, trail, query)
    trail.next[:] = torch.cat([seen[-1, 1:].flatten(), last.flatten()])
    inverse = torch.rsqrt(output.pow(2).mean(-1, keepdim=True) + eps)
    gate = gate.unflatten(-1, (recurrence.value_heads, recurrence.value_width))
    return (output * inverse * norm * F.silu(gate)).flatten(-2)


def _read_along(
    recurrence: Recurrence, trail: Trail, query: Float[Tensor, "n Hk k"]
) -> tuple[Float[Tensor, "n H v"], Float[Tensor, "H k v"]]:
    """What each row's queries read from the matrices of heads after it, and those after the last
    row. The log holds all that the rows feed."""
    committed = trail.now[recurrence.inputs :].view(
        recurrence.value_heads, recurrence.key_width, recurrence.value_width
    )
    query = _for_values(recurrence, query)
    parents = range(-1, len(query) - 1) if trail.parents is None else trail.parents
    matrices: dict[int, Tensor] = {-1: committed}
    outputs: list[Tensor] = []
    for row, parent in enumerate(parents):
        matrices[row] = _stepped(recurrence, matrices[parent], trail.log[row])
        outputs.append((matrices[row] * query[row, ..., None]).sum(-2))
        if trail.parents is None:
            del matrices[parent]
    return torch.stack(outputs), matrices[len(query) - 1]


class _LogParts:
    """The parts of rows of the delta rule's log, (…, logged)."""

    def __init__(self, recurrence: Recurrence, log: Tensor) -> None:
        heads = recurrence.value_heads
        sizes = [recurrence.channels, recurrence.keys, recurrence.outputs, heads, heads]
        self.inputs, self.keys, self.values, self.decays, self.strengths = log.split(sizes, -1)


def _unit(vectors: Tensor) -> Tensor:
    """Vectors of length 1."""
    return vectors * torch.rsqrt(vectors.pow(2).sum(-1, keepdim=True) + EPS)


def _for_values(
    recurrence: Recurrence, vectors: Float[Tensor, "*n Hk k"]
) -> Float[Tensor, "*n H k"]:
    """For each head of values the vector of its head of keys."""
    heads = torch.arange(recurrence.value_heads, device=vectors.device)
    if recurrence.tiled:
        heads = heads % recurrence.key_heads
    else:
        heads = heads // (recurrence.value_heads // recurrence.key_heads)
    return vectors.index_select(-2, heads)


def _stepped(
    recurrence: Recurrence, matrices: Float[Tensor, "*layers H k v"], log: Tensor
) -> Float[Tensor, "*layers H k v"]:
    """The matrices of heads after a row: they decay, then move towards its values along its
    keys."""
    parts = _LogParts(recurrence, log)
    keys = parts.keys.unflatten(-1, (recurrence.key_heads, recurrence.key_width))
    keys = _for_values(recurrence, keys)[..., None]
    values = parts.values.unflatten(-1, (recurrence.value_heads, recurrence.value_width))
    decayed = matrices * parts.decays[..., None, None]
    step = (values - (decayed * keys).sum(-2)) * parts.strengths[..., None]
    return decayed + keys * step[..., None, :]


def replay(
    recurrence: Recurrence,
    states: Float[Tensor, "layers state"],
    log: Float[Tensor, "layers n logged"],
    nodes: Sequence[int],
) -> None:
    """See `kv.states.Replay`."""
    sizes = [recurrence.inputs, recurrence.state - recurrence.inputs]
    inputs, matrices = states.split(sizes, -1)
    shape = (recurrence.value_heads, recurrence.key_width, recurrence.value_width)
    moved = matrices.unflatten(-1, shape)
    for node in nodes:
        row = log[:, node]
        inputs.copy_(
            torch.cat([inputs, row[:, : recurrence.channels]], -1)[:, recurrence.channels :]
        )
        if recurrence.value_heads:
            moved = _stepped(recurrence, moved, row)
    matrices.copy_(moved.flatten(1))
