"""Draft heads: small modules that guess further tokens from one hidden state of the model.

All states are hidden states *before* the base model's final norm, (m, D). From the state of
position t the base model predicts token t+1, and head i (counted from 0) predicts token t+2+i.
A head's state comes from :meth:`Heads.advance`; the base model's own LM head, applied by the
caller to :meth:`Heads.normed` of it, gives the head's logits.
"""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tokenswift.kernels.base import Backend
from tokenswift.speculation.heads.config import HeadsConfig
from tokenswift.speculation.heads.forms import ConditionedForm, HeadForm, HeadInputs, step_columns
from tokenswift.speculation.heads.rivals import LinearForm, MedusaForm

#: by kind, what its heads do otherwise than others
FORMS: dict[str, HeadForm] = {
    "conditioned": ConditionedForm(),
    "linear": LinearForm(),
    "medusa": MedusaForm(),
}


class _Kernel(nn.Module):
    """A linear layer or a norm on a backend's kernels, its weights packed."""

    def __init__(self, layer: nn.Linear | nn.RMSNorm, backend: Backend, int8: bool) -> None:
        super().__init__()
        weight = layer.weight.detach()
        if isinstance(layer, nn.RMSNorm):
            factors = weight.float().contiguous()
            eps = layer.eps or 0.0
            self._run = lambda states: backend.norm(states, factors, eps, weight.dtype)
        else:
            packed = backend.pack_for_drafts(weight, int8)
            bias = None if layer.bias is None else layer.bias.detach().float().contiguous()
            self._run = lambda states: backend.draft_product(states, packed, bias)

    def forward(self, states: Tensor) -> Tensor:
        return self._run(states)


class Heads(nn.Module):
    """A set of draft heads for one base model: conditioned ones share a step, others have a layer
    each.

    Attributes:
        frequent: token ids worth drafting, most of the training text; None: the whole vocabulary.
        calibration: weights of `speculation.calibration` that fit these heads; None: the library's.
        source: where they come from (a file, a folder, "… (shipped)"); "" when a program made them.
        notes: how they were trained, from their file: tokens, steps and the like.
        kind: see :class:`HeadsConfig`.
        count: number of heads.
        on_kernels: whether a backend's kernels compute them (see :meth:`packed`).
        conditioned: whether a head needs the embedding of the token drafted before its own.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        self.kind = config.kind
        self.count = config.count
        self.form = FORMS[config.kind]
        self.conditioned = self.form.conditioned
        self.frequent: Tensor | None = None
        self.calibration: dict[str, list[list[float]]] | None = None
        self.source = ""
        self.notes: dict[str, object] = {}
        self.on_kernels = False
        count = 1 if self.conditioned else config.count
        self.layers = nn.ModuleList(self.form.layer(config) for _ in range(count))

    def layer(self, i: int) -> nn.ModuleDict:
        """The parts of head i; all conditioned heads share them."""
        layer = self.layers[0 if self.conditioned else i]
        if not isinstance(layer, nn.ModuleDict):
            raise TypeError(f"layer {i} is a {type(layer).__name__}; valid: a ModuleDict")
        return layer

    def linear(self, i: int, name: str) -> nn.Linear:
        """A linear layer of head i, by its name.

        Raises:
            TypeError: the part is another one, or computed by kernels.
        """
        part = self.layer(i)[name]
        if not isinstance(part, nn.Linear):
            raise TypeError(f"{name} is a {type(part).__name__}; valid: a linear layer")
        return part

    def packed(self, backend: Backend, int8: bool) -> Heads:
        """The same heads on a backend's kernels, where it has some for them; ``int8``: of
        products."""
        weight = next(self.parameters())
        even = self.config.hidden_size % 2 == 0 and self.config.inner % 2 == 0
        computable = weight.dtype in (torch.float32, torch.bfloat16) and even
        if not (computable and backend.fused and weight.device == backend.device):
            return self
        heads = copy.deepcopy(self)
        heads.on_kernels = True
        for name, part in list(heads.named_modules()):
            if isinstance(part, nn.Linear | nn.RMSNorm):
                parent, _, child = name.rpartition(".")
                setattr(heads.get_submodule(parent), child, _Kernel(part, backend, int8))
        return heads

    def advance(
        self,
        i: int,
        previous: Float[Tensor, "m D"],
        base: Float[Tensor, "m D"],
        embeds: Float[Tensor, "m D"] | None,
    ) -> Float[Tensor, "m D"]:
        """State of head i from the state of the head before it.

        Args:
            i: the head, counted from 0.
            previous: state of head i-1; for i = 0 the base state itself.
            base: hidden state of the base model (before its final norm).
            embeds: input embedding of the token just before the one that head i predicts
                (conditioned heads only; others ignore it).
        """
        if not self.on_kernels:  # which take any type
            kind = next(self.parameters()).dtype
            previous = previous.to(kind)
            base = base.to(kind)
            embeds = None if embeds is None else embeds.to(kind)
        return self.form.advance(self.layer(i), HeadInputs(previous, base, embeds, is_first=i == 0))

    def inputs(
        self, previous: Tensor, base: Tensor, embeds: Tensor, first: bool
    ) -> Float[Tensor, "m x"]:
        """The columns that conditioned heads read, see `forms.step_columns`."""
        return step_columns(self.layer(0), HeadInputs(previous, base, embeds, is_first=first))

    def normed(self, i: int, states: Float[Tensor, "m D"]) -> Float[Tensor, "m D"]:
        """What the base model's LM head reads to give head i's logits."""
        return self.form.normed(self.layer(i), states)
