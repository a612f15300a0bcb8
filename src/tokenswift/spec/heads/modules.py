"""Draft heads: small modules that guess further tokens from one hidden state of the base model.

All states are hidden states *before* the base model's final norm, (m, D). From the state of
position t the base model predicts token t+1, and head i (counted from 0) predicts token t+2+i.
A head's state comes from :meth:`Heads.advance`; the base model's own LM head, applied by the
caller to :meth:`Heads.normed` of it, gives the head's logits.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float
from msgspec import Meta
from torch import Tensor, nn

from tokenswift.config import HEAD_KINDS
from tokenswift.kernels.base import Backend

_Size = Annotated[int, Meta(ge=1, le=1 << 32)]


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
    count: _Size
    hidden_size: _Size
    vocab_size: _Size
    inner: Annotated[int, Meta(ge=0, le=1 << 32)] = 0
    eps: Annotated[float, Meta(ge=0, le=1)] = 1e-5

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        return asdict(self)


def _norm(config: HeadsConfig) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden_size, config.eps, dtype=torch.float32)


class ConditionedStep(nn.Module):
    """All conditioned heads: one step that they share.

    The state it makes lives where the LM head reads (after the final norm), so no norm follows and
    its length can say how sure the head is.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.first_norm = _norm(config)  # of the base model's own state, as `previous`
        self.state_norm = _norm(config)  # of a head's state, as `previous`
        self.base_norm, self.embed_norm = _norm(config), _norm(config)
        self.linear = nn.Linear(3 * width, width, dtype=torch.float32)
        self.inner = nn.Linear(3 * width, config.inner, dtype=torch.float32) if config.inner else None
        self.outer = nn.Linear(config.inner, width, bias=False, dtype=torch.float32) if config.inner else None
        if self.outer is not None:
            nn.init.zeros_(self.outer.weight)

    def inputs(self, previous: Tensor, base: Tensor, embeds: Tensor, first: bool) -> Tensor:
        """The step's input x, (m, 3 D)."""
        state = self.first_norm(previous) if first else self.state_norm(previous)
        return torch.cat((state, self.base_norm(base), self.embed_norm(embeds)), dim=-1)

    def forward(self, previous: Tensor, base: Tensor, embeds: Tensor, first: bool) -> Tensor:
        x = self.inputs(previous, base, embeds, first)
        state = self.linear(x)
        if self.inner is not None and self.outer is not None:
            state = state + self.outer(torch.relu(self.inner(x)))
        return state


class LinearHead(nn.Module):
    """One head of the paper; the names are those of the published checkpoints."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.hidden_size, config.hidden_size, bias=False, dtype=torch.float32)
        self.input_layernorm, self.post_layernorm = _norm(config), _norm(config)
        nn.init.zeros_(self.linear.weight)

    def forward(self, previous: Tensor) -> Tensor:
        return previous + self.linear(self.input_layernorm(previous))


class MedusaHead(nn.Module):
    """One Medusa-1 head: a block ``x + SiLU(Linear(x))`` on the final-normed base state."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.final_norm = _norm(config)
        self.blocks = nn.ModuleList([nn.Linear(config.hidden_size, config.hidden_size, dtype=torch.float32)])

    def forward(self, base: Tensor) -> Tensor:
        state = self.final_norm(base)
        return state + nn.functional.silu(self.blocks[0](state))


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


LAYERS = {"conditioned": ConditionedStep, "linear": LinearHead, "medusa": MedusaHead}


class Heads(nn.Module):
    """A set of draft heads for one base model: conditioned ones share a step, others have a layer each.

    Attributes:
        frequent: token ids worth drafting, most of the training text; None: the whole vocabulary.
        calibration: weights of `spec.chances` that fit these heads; None: the library's.
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
        self.layers = nn.ModuleList(LAYERS[config.kind](config) for _ in range(count))

    @property
    def dtype(self) -> torch.dtype:
        """The type that the heads compute in."""
        return next(self.parameters()).dtype

    def packed(self, backend: Backend, int8: bool) -> Heads:
        """The same heads on a backend's kernels, where it has some for them; ``int8``: of products."""
        weight = next(self.parameters())
        fits = weight.dtype in (torch.float32, torch.bfloat16) and weight.device == backend.device
        if not (fits and backend.fused and self.config.hidden_size % 2 == 0):
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
            kind = self.dtype
            previous, base = previous.to(kind), base.to(kind)
            embeds = None if embeds is None else embeds.to(kind)
        if not self.conditioned:  # Medusa's stand side by side: none looks at another
            return self.layers[i](base if self.kind == "medusa" else previous)
        if embeds is None:
            raise ValueError("embeds is None; conditioned heads need the drafted token's embedding")
        return self.layers[0](previous, base, embeds, i == 0)

    def normed(self, i: int, states: Float[Tensor, "m D"]) -> Float[Tensor, "m D"]:
        """What the base model's LM head reads to give head i's logits: linear ones have a norm each."""
        layer = self.layers[i] if self.kind == "linear" else None
        return layer.post_layernorm(states) if isinstance(layer, LinearHead) else states
