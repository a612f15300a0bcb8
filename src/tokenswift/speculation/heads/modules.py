"""Draft heads: small modules that guess further tokens from one hidden state of the model.

All states are hidden states *before* the base model's final norm, (m, D). From the state of
position t the base model predicts token t+1, and head i (counted from 0) predicts token t+2+i.
A head's state comes from :meth:`Heads.advance`; the base model's own LM head, applied by the
caller to :meth:`Heads.normed` of it, gives the head's logits.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float
from msgspec import Meta
from torch import Tensor, nn

from tokenswift.config import HEAD_KINDS
from tokenswift.kernels.base import Backend

_Size = Annotated[int, Meta(ge=1, le=1 << 20)]


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """What it takes to build a set of heads. Files' are held to the bounds that the types name.

    Attributes:
        kind: "linear", "conditioned" or "medusa".
        count: number of heads; a shared step (conditioned) drafts any number of levels.
        hidden_size: D of the base model.
        vocab_size: V of the base model.
        inner: width of the hidden layer (conditioned); 0 for none.
        eps: ε of the norms.
    """

    kind: Annotated[str, Meta(pattern=f"^({'|'.join(HEAD_KINDS)})$")]
    count: Annotated[int, Meta(ge=1, le=64)]
    hidden_size: _Size
    vocab_size: _Size
    inner: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    eps: Annotated[float, Meta(ge=0, le=1)] = 1e-5


def _layer(config: HeadsConfig) -> nn.ModuleDict:
    """The parts of a head, or of the step that conditioned heads share; linear ones have the names
    of the published checkpoints."""
    width, inner, parts = config.hidden_size, config.inner, dict[str, nn.Module]()

    def linear(columns: int, rows: int, bias: bool = True) -> nn.Linear:
        return nn.Linear(columns, rows, bias, dtype=torch.float32)

    if config.kind == "conditioned":
        norms = ("first_norm", "state_norm", "base_norm", "embed_norm")
        parts["linear"] = linear(3 * width, width)
        if inner:
            parts |= {"inner": linear(3 * width, inner), "outer": linear(inner, width, bias=False)}
    elif config.kind == "linear":
        norms, parts["linear"] = (
            ("input_layernorm", "post_layernorm"),
            linear(width, width, bias=False),
        )
    else:
        norms, parts["blocks"] = ("final_norm",), nn.ModuleList([linear(width, width)])
    return nn.ModuleDict(
        {name: nn.RMSNorm(width, config.eps, dtype=torch.float32) for name in norms} | parts
    )


class _Kernel(nn.Module):
    """A linear layer or a norm on a backend's kernels, its weights packed."""

    def __init__(self, layer: nn.Linear | nn.RMSNorm, backend: Backend, int8: bool) -> None:
        super().__init__()
        weight = layer.weight.detach()
        if isinstance(layer, nn.RMSNorm):
            factors, eps = weight.float().contiguous(), layer.eps or 0.0
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
        kind, count: of the heads; see :class:`HeadsConfig`.
        on_kernels: whether a backend's kernels compute them (see :meth:`packed`).
        conditioned: whether a head needs the embedding of the token drafted before its own.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config, self.kind, self.count = config, config.kind, config.count
        self.conditioned = config.kind == "conditioned"
        self.frequent: Tensor | None = None
        self.calibration: dict[str, list[list[float]]] | None = None
        self.source = ""
        self.notes: dict[str, Any] = {}
        self.on_kernels = False
        count = 1 if self.conditioned else config.count
        self.layers: Any = nn.ModuleList(_layer(config) for _ in range(count))

    def packed(self, backend: Backend, int8: bool) -> Heads:
        """The same heads on a backend's kernels, where it has some for them; ``int8``: of
        products."""
        weight = next(self.parameters())
        fits = weight.dtype in (torch.float32, torch.bfloat16) and weight.device == backend.device
        if not (
            fits and backend.fused and self.config.hidden_size % 2 == self.config.inner % 2 == 0
        ):
            return self
        made = copy.deepcopy(self)
        made.on_kernels = True
        for name, part in list(made.named_modules()):
            if isinstance(part, nn.Linear | nn.RMSNorm):
                above, _, own = name.rpartition(".")
                setattr(made.get_submodule(above), own, _Kernel(part, backend, int8))
        return made

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
            previous, base = previous.to(kind), base.to(kind)
            embeds = None if embeds is None else embeds.to(kind)
        layer = self.layers[0 if self.conditioned else i]
        if self.kind == "linear":
            return previous + layer["linear"](layer["input_layernorm"](previous))
        if self.kind == "medusa":  # they stand side by side: none looks at another
            state = layer["final_norm"](base)
            return state + nn.functional.silu(layer["blocks"][0](state))
        if embeds is None:
            raise ValueError("embeds is None; conditioned heads need the drafted token's embedding")
        x = self.inputs(previous, base, embeds, i == 0)
        state = layer["linear"](x)
        return state + layer["outer"](torch.relu(layer["inner"](x))) if self.config.inner else state

    def inputs(
        self, previous: Tensor, base: Tensor, embeds: Tensor, first: bool
    ) -> Float[Tensor, "m x"]:
        """What the step of conditioned heads reads. The state it makes lives where the LM head
        reads (after the final norm), so no norm follows and its length can say how sure the head
        is."""
        layer = self.layers[0]
        state = layer["first_norm" if first else "state_norm"](previous)
        return torch.cat((state, layer["base_norm"](base), layer["embed_norm"](embeds)), dim=-1)

    def normed(self, i: int, states: Float[Tensor, "m D"]) -> Float[Tensor, "m D"]:
        """What the base model's LM head reads to give head i's logits: linear ones have a norm
        each."""
        return self.layers[i]["post_layernorm"](states) if self.kind == "linear" else states
