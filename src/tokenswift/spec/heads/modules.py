"""Draft heads: small modules that guess further tokens from one hidden state of the base model.

All states are hidden states *before* the base model's final norm, (m, D). From the state of
position t the base model predicts token t+1, and head i (counted from 0) predicts token t+2+i.
A head's state comes from :meth:`Heads.advance`; the base model's own LM head, applied by the
caller to :meth:`Heads.normed` of it, gives the head's logits.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tokenswift.checks import check_choice, check_integer
from tokenswift.config import HEAD_KINDS, check_flag, check_number
from tokenswift.types import InputError


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """What it takes to build a set of heads.

    Attributes:
        kind: "linear", "conditioned" or "medusa".
        count: number of heads; a shared step (conditioned) drafts any number of levels.
        hidden_size: D of the base model.
        vocab_size: V of the base model.
        inner: width of the hidden layer (conditioned); 0 for none.
        eps: ε of the norms.
        own_lm_heads: each head has an LM head of its own (medusa).
        blocks: residual blocks of each head (medusa).
    """

    kind: str
    count: int
    hidden_size: int
    vocab_size: int
    inner: int = 0
    eps: float = 1e-5
    own_lm_heads: bool = False
    blocks: int = 1

    def __post_init__(self) -> None:
        check_choice("kind of heads", self.kind, HEAD_KINDS)
        for name in ("count", "hidden_size", "vocab_size", "blocks"):
            check_integer(f"heads' {name}", getattr(self, name), 1)
        check_integer("heads' inner", self.inner, 0)
        if check_flag("heads' own_lm_heads", self.own_lm_heads) and self.kind != "medusa":
            raise InputError(f"heads' own_lm_heads is True for {self.kind} heads; valid: medusa ones alone")
        eps = self.eps if type(self.eps) in (int, float) else -1.0
        check_number("heads' eps", self.eps, "0 to 1", 0 <= eps <= 1)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        return asdict(self)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32, as Llama's."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float32))
        self.eps = eps

    def forward(self, states: Float[Tensor, "*m D"]) -> Float[Tensor, "*m D"]:
        """The states, each divided by its root mean square, times the weights."""
        wide = states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(self.weight.dtype)


class ConditionedStep(nn.Module):
    """All conditioned heads: one step that they share.

    The state it makes lives where the LM head reads (after the final norm), so no norm follows and
    its length can say how sure the head is.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.first_norm = RMSNorm(width, config.eps)  # of the base model's own state, as `previous`
        self.state_norm = RMSNorm(width, config.eps)  # of a head's state, as `previous`
        self.base_norm = RMSNorm(width, config.eps)
        self.embed_norm = RMSNorm(width, config.eps)
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
        self.input_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.post_layernorm = RMSNorm(config.hidden_size, config.eps)
        nn.init.zeros_(self.linear.weight)

    def forward(self, previous: Tensor) -> Tensor:
        return previous + self.linear(self.input_layernorm(previous))


class MedusaHead(nn.Module):
    """One Medusa-1 head: ``x + SiLU(Linear(x))`` blocks on the final-normed base state."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.final_norm = RMSNorm(width, config.eps)
        self.blocks = nn.ModuleList(
            nn.Linear(width, width, dtype=torch.float32) for _ in range(config.blocks)
        )
        self.lm_head = (
            nn.Linear(width, config.vocab_size, bias=False, dtype=torch.float32)
            if config.own_lm_heads
            else None
        )

    def forward(self, base: Tensor) -> Tensor:
        state = self.final_norm(base)
        for block in self.blocks:
            state = state + nn.functional.silu(block(state))
        return state


LAYERS = {"conditioned": ConditionedStep, "linear": LinearHead, "medusa": MedusaHead}


class Heads(nn.Module):
    """A set of draft heads for one base model: conditioned ones share a step, others have a layer each.

    Attributes:
        frequent: token ids worth drafting, most of the training text; None: the whole vocabulary.
        calibration: weights of `spec.chances` that fit these heads; None: the library's.
        source: where they come from (a file, a folder, "… (shipped)"); "" when a program made them.
        notes: how they were trained, from their file: tokens, steps and the like.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        self.frequent: Tensor | None = None
        self.calibration: dict[str, list[list[float]]] | None = None
        self.source = ""
        self.notes: dict[str, Any] = {}
        count = 1 if self.conditioned else config.count
        self.layers = nn.ModuleList(LAYERS[config.kind](config) for _ in range(count))

    @property
    def kind(self) -> str:
        """ "linear", "conditioned" or "medusa"."""
        return self.config.kind

    @property
    def conditioned(self) -> bool:
        """Whether a head needs the embedding of the token drafted before its own."""
        return self.config.kind == "conditioned"

    @property
    def count(self) -> int:
        """Number of heads."""
        return self.config.count

    @property
    def own_lm_heads(self) -> bool:
        """True when the heads have LM heads of their own; see :meth:`own_logits`."""
        return self.config.own_lm_heads

    @property
    def dtype(self) -> torch.dtype:
        """The type that the heads compute in."""
        return next(self.parameters()).dtype

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
        previous, base = previous.to(self.dtype), base.to(self.dtype)
        if not self.conditioned:  # Medusa's stand side by side: none looks at another
            return self.layers[i](base if self.kind == "medusa" else previous)
        if embeds is None:
            raise ValueError("embeds is None; conditioned heads need the drafted token's embedding")
        return self.layers[0](previous, base, embeds.to(self.dtype), i == 0)

    def normed(self, i: int, states: Float[Tensor, "m D"]) -> Float[Tensor, "m D"]:
        """What the base model's LM head reads to give head i's logits: linear ones have a norm each."""
        layer = self.layers[i] if self.kind == "linear" else None
        return layer.post_layernorm(states) if isinstance(layer, LinearHead) else states

    def own_logits(self, i: int, states: Float[Tensor, "m D"]) -> Float[Tensor, "m V"]:
        """Head i's logits by its own LM head, float32; only where :attr:`own_lm_heads`."""
        lm_head = getattr(self.layers[i], "lm_head", None)
        if not isinstance(lm_head, nn.Linear):
            raise ValueError(f"head {i} has no LM head of its own; use the base model's on normed()")
        return lm_head(states).float()
