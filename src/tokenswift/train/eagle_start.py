"""Where the training of an EAGLE-3 drafter starts: in closed form, by ridge regressions on the text.

The layer starts as a recurrence. What stands for a feature is about the base model's normed state: `fc` reads
it off the features, and what the layer makes of it and of the token's embedding is about the next state, at
every depth. The embedding comes in by attention, through one query head of each KV head that reads its own
row alone: its queries and keys are the same constant, which a product with normed embeddings can be made to
say, in the fastest pairs of dimensions, where rotary positions part rows that are a few tokens away. It goes
where states vary least. Of the MLP's units the first are linear, their gates constant; the others have random
gates, and its last product is a regression over all depths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from tokenswift.loader.rope import Rotary
from tokenswift.spec.eagle.config import FEATURES, SHARED, EagleConfig
from tokenswift.spec.eagle.reference import normed
from tokenswift.train.eagle_student import EagleStudent
from tokenswift.train.heads import norm_weight
from tokenswift.train.loss import FrozenBase

MOST = 40_000  # positions that a regression looks at
RIDGE = 0.01  # strength per row of data, in units of the normed inputs' variance
SHARP = 20.0  # score of a row's own key; those of others are lower by their distance
AMPLITUDE = 0.25  # of what embeddings add to a row, a dimension
GATE = 2.0  # of linear units


class Regression:
    """Ridge regression, fed by rows."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        self._gram = torch.zeros(inputs, inputs, dtype=torch.float32, device=device)
        self._cross = torch.zeros(inputs, outputs, dtype=torch.float32, device=device)
        self._rows = 0

    def add(self, x: Float[Tensor, "m n"], y: Float[Tensor, "m k"]) -> None:
        """Take rows in."""
        self._gram += x.T @ x
        self._cross += x.T @ y
        self._rows += len(x)

    def gram(self) -> Float[Tensor, "n n"]:
        """Of the inputs, a row's mean, with the ridge."""
        gram = self._gram / self._rows
        gram.diagonal().add_(RIDGE + 1 / self._rows)
        return gram

    def weights(self) -> Float[Tensor, "n k"]:
        """What the inputs are multiplied with."""
        return torch.linalg.solve(self.gram(), self._cross / self._rows)

    def explained(self) -> float:
        """The mean square of what it predicts, by the number."""
        return float((self.weights() * self._cross).sum()) / self._rows / self._cross.shape[1]


@torch.no_grad()
def started(config: EagleConfig, base: FrozenBase, data: Any, depths: int, seed: int) -> dict[str, Tensor]:
    """The weights that training starts from, float32, on the base's device.

    Args:
        data: a dataset of `store.PairedWindows`, with ``depths`` further states and no tokens before.
        depths: tokens of a chain.
    Raises:
        InputError: the base model's final norm is no RMS norm.
    """
    made, found = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, shape in config.shapes().items():
        if name in SHARED:
            continue
        drawn = torch.randn(shape, generator=made, dtype=torch.float32)
        drawn *= config.hidden**-0.5 if name in ("gate", "up") else 0.02
        found[name] = (drawn if len(shape) > 1 else torch.ones_like(drawn)).to(base.device)
    for name in ("o", "down"):
        found[name].zero_()
    every = max(1, len(data) * len(data[0]["valid"]) // MOST)
    chosen = [
        {name: value.to(base.device) for name, value in data[k].items()} for k in range(0, len(data), every)
    ]
    found["norm"] = norm_weight(base) * _recurrence(config, base, found, chosen)
    student = EagleStudent(config, found, depths)
    _linear_units(student, base, chosen)
    for levels in sorted({1, depths}):
        _last_product(student, base, chosen, levels)
    return student.tensors()


def _recurrence(
    config: EagleConfig, base: FrozenBase, found: dict[str, Tensor], items: Sequence[Any]
) -> float:
    """Set `fc` and attention; how long a predicted state is, a dimension, where a true one is 1."""
    wide, d, eps = config.hidden, config.head_dim, config.eps
    state = Regression(FEATURES * config.target_hidden, wide, base.device)  # of features
    after = Regression(2 * wide, wide, base.device)  # of the state and an embedding
    constant = Regression(wide, 1, base.device)  # of an embedding
    for item in items:
        m = int(item["valid"].sum())
        parts = item["features"][:m].float().chunk(FEATURES, dim=-1)
        embeds = _unit(base.embed(item["tokens"][1 : m + 1]).float(), eps)
        hidden = _unit(item["hidden"][: m + 1].float(), eps)
        state.add(torch.cat([_unit(part, eps) for part in parts], dim=-1), hidden[:-1])
        after.add(torch.cat((hidden[:-1], embeds), dim=-1), hidden[1:])
        constant.add(embeds, torch.ones_like(embeds[:, :1]))
    gram, rank = after.gram(), min(wide // 2, len(found["v"]))
    _, axes = torch.linalg.eigh(gram[:wide, :wide])  # those in which states vary least are the first
    found["fc"].copy_((state.weights() @ axes[:, rank:] @ axes[:, rank:].T).T)
    gram = gram[wide:, wide:]
    root = torch.linalg.cholesky(gram)
    u, s, _ = torch.linalg.svd(root.T @ after.weights()[wide:])  # what of embeddings matters most
    inner = torch.linalg.solve_triangular(root.T, (u * s)[:, :rank], upper=True)
    found["v"][:rank, :wide] = inner.T * (AMPLITUDE / float((inner * (gram @ inner)).sum(0).sqrt().mean()))
    pairs = _pairs(config.rotary(), config.trained)
    same = constant.weights().T * (SHARP * d**0.5 / pairs) ** 0.5
    for head in range(config.kv_heads):
        first, part = head * d * (config.heads // config.kv_heads), axes[:, :rank][:, head * d : head * d + d]
        found["o"][:, first : first + part.shape[1]] = part
        found["k"][head * d : head * d + pairs, :wide] = same
        found["q"][first : first + pairs, :wide] = same
    return after.explained() ** 0.5


def _unit(x: Float[Tensor, "*m D"], eps: float) -> Float[Tensor, "*m D"]:
    return normed(x, x.new_ones(x.shape[-1]), eps)


def _pairs(rotary: Rotary, window: int) -> int:
    """In how many of the fastest pairs of dimensions a constant key outdoes the window's others by most."""
    cos, _ = rotary.angles(torch.arange(1, max(2, window)))
    means = cos.cumsum(-1) / torch.arange(1, cos.shape[1] + 1)
    return int(torch.exp(SHARP * (means - 1)).sum(0).argmin()) + 1


def _before_mlp(
    student: EagleStudent, base: FrozenBase, items: Sequence[Any], levels: int
) -> Iterator[tuple[Float[Tensor, "m D"], Float[Tensor, "m D"], Float[Tensor, "m D"]]]:
    """Rows before the MLP, the same normed, and the states to predict, of so many depths."""
    t, eps = student.tensors(), student.config.eps
    for item in items:
        m, states = int(item["valid"].sum()), _unit(item["hidden"].float(), eps)
        chain = student.chain(item["tokens"][None], item["features"][None], base)
        for i, (seen, residual, _) in enumerate(islice(chain, levels)):
            rows = (residual + F.linear(seen.flatten(-2), t["o"]))[0, :m]
            yield rows, normed(rows, t["post_norm"], eps), states[1 + i : 1 + i + m]


def _linear_units(student: EagleStudent, base: FrozenBase, items: Sequence[Any]) -> None:
    """Make the MLP's first units linear: their gates say the same of all rows."""
    t, wide = student.tensors(), student.config.hidden
    constant = Regression(wide, 1, base.device)
    for _, x, _ in _before_mlp(student, base, items, 1):
        constant.add(x, torch.ones_like(x[:, :1]))
    units = min(wide, len(t["gate"]) // 2)
    t["gate"][:units] = constant.weights().T * GATE
    t["up"][:units] = torch.eye(wide, dtype=torch.float32, device=base.device)[:units]


def _last_product(student: EagleStudent, base: FrozenBase, items: Sequence[Any], levels: int) -> None:
    """Set the MLP's last product, from so many depths."""
    t = student.tensors()
    rest = Regression(student.config.intermediate, student.config.hidden, base.device)
    for rows, x, states in _before_mlp(student, base, items, levels):
        rest.add(F.silu(F.linear(x, t["gate"])) * F.linear(x, t["up"]), states - rows)
    t["down"].copy_(rest.weights().T)
