"""Draft heads: their sizes, where they start, and their training by the recipe.

Conditioned heads start in closed form: their linear part is a ridge regression of the base model's
*final-normed* next state (what its LM head reads) onto the step's input and its random hidden
layer, one pass over the data. Linear and Medusa heads start by saying what the base model says, as
the papers' do.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.engine.llm import LLM
from tokenswift.speculation.heads.config import HeadsConfig
from tokenswift.speculation.heads.files import save_heads
from tokenswift.speculation.heads.modules import Heads
from tokenswift.train.distillation import FrozenBase, Student
from tokenswift.train.loop import Recipe, Report
from tokenswift.train.options import Job
from tokenswift.train.store import HiddenStore, Windows, covering
from tokenswift.train.work import working_in
from tokenswift.types import InputError, OnProgress

COVERAGE = 0.92  # of the training text, that the tokens worth drafting make up
MOST = 100_000  # positions that the closed form looks at
WINDOW = 512  # positions that it looks at together
RIDGE = 0.01  # strength per row of data, in units of the normed inputs' variance


class HeadsStudent(Student):
    """Draft heads, each fed the text's own tokens before the one that it drafts."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.heads = heads
        self.levels = heads.count

    def forward(
        self, tokens: Int[Tensor, "b L"], states: Float[Tensor, "b n W"], base: FrozenBase
    ) -> list[Float[Tensor, "r D"]]:
        """See :class:`Student`."""
        m = states.shape[1] - self.levels
        start = states[:, :m, -base.width :].flatten(0, 1)
        state = start
        normed = []
        for level in range(self.levels):
            embeds = None
            if self.heads.conditioned:
                embeds = base.embed(tokens[:, 1 + level : 1 + level + m].flatten())
            state = self.heads.advance(level, state, start, embeds)
            normed.append(self.heads.normed(level, state))
        return normed


def train_heads(
    llm: LLM,
    job: Job,
    report: Report,
    on_progress: OnProgress,
    *,
    kind: str,
    count: int = 3,
    inner: int = 1024,
) -> dict[str, object]:
    """The whole way to a heads file; returns the notes that are also written to its header.

    Args:
        llm, job, report, on_progress: see :class:`Recipe`.
        kind: "linear", "conditioned" or "medusa" (one residual block, the base model's own LM
            head).
        count: number of heads.
        inner: width of the hidden layer (conditioned), 0 for none.
    Raises:
        InputError: an option out of range, too little data or disk, a work folder of another
            training or one in use.
        RunError: the loss is not finite, the disk is full.
    """
    target = llm.target
    config = HeadsConfig(
        kind=kind,
        count=count,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        inner=inner if kind == "conditioned" else 0,
        eps=float(getattr(target.config, "rms_norm_eps", 1e-5)),
    )
    with torch.device("meta"):
        weights = sum(part.numel() for part in Heads(config).parameters())
    with working_in(job.work):
        recipe = Recipe(llm, job, report, on_progress, weights, heads=asdict(config))
        heads = Heads(config).to(recipe.frozen.device)
        heads.load_state_dict(recipe.start_weights(lambda: initial_weights(config, recipe)))
        notes = {"kind": kind, **recipe.distil(HeadsStudent(heads))}
        heads.frequent = covering(recipe.counts, COVERAGE)
        notes["drafted"] = len(heads.frequent)
        save_heads(heads.eval(), job.out, recipe.base, notes=notes)
    return notes


def initial_weights(config: HeadsConfig, recipe: Recipe) -> dict[str, Tensor]:
    """The weights that the training of heads starts from.

    Raises:
        InputError: see :func:`start`.
    """
    torch.manual_seed(recipe.job.training.seed)
    heads = Heads(config).to(recipe.frozen.device)
    start(heads, recipe.store, recipe.frozen)
    return heads.state_dict()


@torch.no_grad()
def start(heads: Heads, store: HiddenStore, base: FrozenBase) -> None:
    """Set heads, on the base's device, to where their training starts.

    Raises:
        InputError: linear or Medusa heads, and the model's final norm is no RMS norm.
    """
    if heads.conditioned:
        _fit_by_ridge(heads, store, base)
        return
    for name, parameter in heads.named_parameters():
        if name.endswith(("final_norm.weight", "post_layernorm.weight")):
            parameter.copy_(norm_weight(base))
        elif "norm" not in name:
            parameter.zero_()


def norm_weight(base: FrozenBase) -> Float[Tensor, " D"]:
    """The final norm's factors, seen from outside (some families store them less one).

    Raises:
        InputError: the norm is no RMS norm.
    """
    probe = torch.linspace(-1, 2, base.width, dtype=torch.float32, device=base.device)
    weight = base.normed(torch.ones_like(probe)).float()
    normed = base.normed(probe).float()
    expected = weight * probe * probe.pow(2).mean().rsqrt()
    if not torch.allclose(normed, expected, rtol=0.05, atol=0.01 * float(weight.abs().max())):
        raise InputError("the model's final norm is not an RMS norm; valid: conditioned heads")
    return weight


def _fit_by_ridge(heads: Heads, store: HiddenStore, base: FrozenBase) -> None:
    """The closed-form start, from at most about :data:`MOST` positions spread over the data."""
    width = base.width
    if heads.config.inner:
        torch.nn.init.normal_(heads.linear(0, "inner").weight, std=(3 * width) ** -0.5)
    windows = Windows(store, store.texts, 1, WINDOW)
    gram = torch.zeros((), dtype=torch.float32, device=base.device)
    cross = torch.zeros((), dtype=torch.float32, device=base.device)
    count = 0
    for index in range(0, len(windows), max(1, len(windows) * WINDOW // MOST)):
        item = windows[index]
        n = int(item["valid"].sum())
        hidden = item["states"][: n + 1, -width:].float().to(base.device)
        embeds = base.embed(item["tokens"][1 : n + 1].to(base.device)).float()
        x = heads.inputs(hidden[:-1], hidden[:-1], embeds, True)
        # the state's own part starts at zero: at the first step it repeats the base
        x[:, :width] = 0
        columns = [x, x.new_ones(n, 1)]
        if heads.config.inner:
            columns.append(torch.relu(heads.linear(0, "inner")(x)))
        x = torch.cat(columns, dim=1)
        gram = gram + x.T @ x
        cross = cross + x.T @ base.normed(hidden[1:]).float()
        count += n
    gram = gram / count
    gram.diagonal().add_(RIDGE + 1 / count)
    weights = torch.linalg.solve(gram, cross / count)
    heads.linear(0, "linear").weight.copy_(weights[: 3 * width].T)
    heads.linear(0, "linear").bias.copy_(weights[3 * width])
    if heads.config.inner:
        heads.linear(0, "outer").weight.copy_(weights[3 * width + 1 :].T)
