"""Draft heads: their sizes, where they start, and their training by the recipe.

Conditioned heads start in closed form: their linear part is a ridge regression of the base model's
*final-normed* next state (what its LM head reads) onto the step's input and its random hidden layer, one pass
over the data. Linear and Medusa heads start by saying what the base model says, as the papers' do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.spec.heads.files import save_heads
from tokenswift.spec.heads.modules import ConditionedStep, Heads, HeadsConfig
from tokenswift.train.loop import Recipe, Report, first_process
from tokenswift.train.loss import FrozenBase, Student
from tokenswift.train.options import Job
from tokenswift.train.states import HiddenStore, Windows, covering
from tokenswift.types import InputError, OnProgress

COVERAGE = 0.92  # of the training text, that the tokens worth drafting make up
MOST = 100_000  # positions that the closed form looks at
RIDGE = 0.01  # strength per row of data, in units of the normed inputs' variance


class HeadsStudent(Student):
    """Draft heads, each fed the text's own tokens before the one that it drafts."""

    ahead = 1

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.heads, self.levels = heads, heads.count

    def forward(
        self, tokens: Int[Tensor, "b L"], states: Float[Tensor, "b n W"], base: FrozenBase
    ) -> list[Float[Tensor, "r D"]]:
        """See :class:`Student`."""
        hidden = states[..., -base.width :]
        m = hidden.shape[1] - self.extra
        start = state = hidden[:, :m].flatten(0, 1)
        made = []
        for i in range(self.levels):
            embeds = base.embed(tokens[:, 1 + i : 1 + i + m].flatten()) if self.heads.conditioned else None
            state = self.heads.advance(i, state, start, embeds)
            made.append(self.heads.normed(i, state))
        return made


def heads_config(kind: str, count: int, inner: int, target: Any) -> HeadsConfig:
    """What the heads to train look like.

    Args:
        kind: "linear", "conditioned" or "medusa" (one residual block, the base model's own LM head).
        inner: width of the hidden layer (conditioned), 0 for none.
    """
    width = inner if kind == "conditioned" else 0
    eps = float(getattr(target.config, "rms_norm_eps", 1e-5))
    return HeadsConfig(kind, count, target.hidden_size, target.vocab_size, width, eps=eps)


def train_heads(
    llm: Any,
    job: Job,
    report: Report,
    on_progress: OnProgress,
    *,
    kind: str,
    count: int = 3,
    inner: int = 1024,
) -> dict[str, Any]:
    """The whole way to a heads file; returns the notes that are also written to its header.

    Args:
        llm, job, report, on_progress: see :class:`Recipe`.
        kind, count, inner: which heads; see :func:`heads_config`.
    Raises:
        InputError: an option out of range, too little data, a work folder of another training.
        RunError: the loss is not finite, the disk is full.
    """
    config = heads_config(kind, count, inner, llm.target)
    recipe = Recipe(llm, job, report, on_progress, heads=config.to_dict())
    heads = Heads(config).to(recipe.frozen.device)

    def make() -> dict[str, Tensor]:
        torch.manual_seed(job.training.seed)
        start(made := Heads(config).to(recipe.frozen.device), recipe.stores, recipe.frozen)
        return made.state_dict()

    heads.load_state_dict(recipe.started(make))
    notes = {"kind": kind, **recipe.distil(HeadsStudent(heads))}
    heads.frequent = covering(recipe.counts, COVERAGE)
    notes["drafted"] = len(heads.frequent)
    if first_process():
        save_heads(heads.eval(), job.out, recipe.base, notes=notes)
    return notes


@torch.no_grad()
def start(heads: Heads, stores: Sequence[HiddenStore], base: FrozenBase) -> None:
    """Set heads, on the base's device, to where their training starts.

    Raises:
        InputError: linear or Medusa heads, and the model's final norm is no RMS norm.
    """
    for head in heads.layers:
        if isinstance(head, ConditionedStep):
            _ridge(head, stores, base)
            continue
        for name, parameter in head.named_parameters():
            if name in ("final_norm.weight", "post_layernorm.weight"):
                parameter.copy_(norm_weight(base))
            elif "norm" not in name:
                parameter.zero_()


def norm_weight(base: FrozenBase) -> Float[Tensor, " D"]:
    """The final norm's factors, seen from outside (some families store them less one)."""
    probe = torch.linspace(-1, 2, base.width, dtype=torch.float32, device=base.device)
    weight = base.normed(torch.ones_like(probe)).float()
    want = weight * probe * probe.pow(2).mean().rsqrt()
    if not torch.allclose(base.normed(probe).float(), want, rtol=0.05, atol=0.01 * float(weight.abs().max())):
        raise InputError("the model's final norm is not an RMS norm; valid: conditioned heads")
    return weight


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


def _ridge(step: ConditionedStep, stores: Sequence[HiddenStore], base: FrozenBase) -> None:
    """The closed-form start, from at most about :data:`MOST` positions spread over the data."""
    width = step.linear.out_features
    if step.inner is not None:
        torch.nn.init.normal_(step.inner.weight, std=(3 * width) ** -0.5)
    parts = [Windows(store, 1, 512, 0) for store in stores]
    items = [(windows, k) for windows in parts for k in range(len(windows))]
    inner = 0 if step.inner is None else step.inner.out_features
    regression = Regression(3 * width + 1 + inner, width, base.device)
    for windows, k in items[:: max(1, len(items) * 512 // MOST)]:
        item = windows[k]
        n = int(item["valid"].sum())
        hidden = item["states"][: n + 1, -width:].float().to(base.device)
        embeds = base.embed(item["tokens"][1 : n + 1].to(base.device)).float()
        x = step.inputs(hidden[:-1], hidden[:-1], embeds, True)
        x[:, :width] = 0  # the state's own part starts at zero: at the first step it repeats the base
        more = [] if step.inner is None else [torch.relu(step.inner(x))]
        regression.add(torch.cat([x, x.new_ones(n, 1), *more], dim=1), base.normed(hidden[1:]).float())
    weights = regression.weights()
    step.linear.weight.copy_(weights[: 3 * width].T)
    step.linear.bias.copy_(weights[3 * width])
    if step.outer is not None:
        step.outer.weight.copy_(weights[3 * width + 1 :].T)
