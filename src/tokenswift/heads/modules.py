"""Draft heads: small modules that guess further tokens from one hidden state of the base model.

All states are hidden states *before* the base model's final norm, (m, D). From the state of
position t the base model predicts token t+1, and head i (counted from 0) predicts token t+2+i.
A head's state comes from :meth:`Heads.advance`; the base model's own LM head, applied by the
caller to :meth:`Heads.normed` of it, gives the head's logits.

Kinds:

- ``linear``, the paper's: ``h_i = h_{i-1} + Linear_i(RMSNorm_in,i(h_{i-1}))``.
- ``conditioned``: the step also sees the embedding of the token drafted before the head's own. With
  x the normed previous state, base state and embedding side by side,
  ``h_i = A x + B relu(C x + b) + c``; by default all heads share one step after the first norm,
  so a file serves any number of heads.
- ``medusa``: Medusa-1's residual blocks on the base model's final state, optionally with LM heads
  of their own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tokenswift.config import check_choice, check_integer

KINDS = ("linear", "conditioned", "medusa")


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """What it takes to build a set of heads.

    Attributes:
        kind: "linear", "conditioned" or "medusa".
        count: number of heads; conditioned heads that share their step may be asked for more.
        hidden_size: D of the base model.
        vocab_size: V of the base model.
        inner: width of the hidden layer (conditioned; 0 for none), or residual blocks per head (medusa).
        steps: distinct modules (conditioned); heads beyond the last one use it again.
        eps: ε of the norms.
        own_lm_heads: each head has an LM head of its own (medusa).
    """

    kind: str
    count: int
    hidden_size: int
    vocab_size: int
    inner: int = 0
    steps: int = 1
    eps: float = 1e-5
    own_lm_heads: bool = False

    def __post_init__(self) -> None:
        check_choice("kind of heads", self.kind, KINDS)
        for name in ("count", "hidden_size", "vocab_size", "steps"):
            check_integer(f"heads' {name}", getattr(self, name), 1)
        check_integer("heads' inner", self.inner, 0)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        return asdict(self)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32, as Llama's."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, states: Float[Tensor, "*m D"]) -> Float[Tensor, "*m D"]:
        """The states, each divided by its root mean square, times the weights."""
        wide = states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(self.weight.dtype)


class LinearHead(nn.Module):
    """One head of the paper; the names are those of the published checkpoints."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.input_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.post_layernorm = RMSNorm(config.hidden_size, config.eps)
        nn.init.zeros_(self.linear.weight)

    def forward(self, previous: Tensor, base: Tensor, embeds: Tensor | None) -> Tensor:
        return previous + self.linear(self.input_layernorm(previous))


class ConditionedStep(nn.Module):
    """One conditioned head, or all of them when they share it.

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
        self.linear = nn.Linear(3 * width, width)
        self.inner = nn.Linear(3 * width, config.inner) if config.inner else None
        self.outer = nn.Linear(config.inner, width, bias=False) if config.inner else None
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


class MedusaHead(nn.Module):
    """One Medusa-1 head: ``x + SiLU(Linear(x))`` blocks on the final-normed base state."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.final_norm = RMSNorm(width, config.eps)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(max(1, config.inner)))
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False) if config.own_lm_heads else None

    def forward(self, previous: Tensor, base: Tensor, embeds: Tensor | None) -> Tensor:
        state = self.final_norm(base)
        for block in self.blocks:
            state = state + nn.functional.silu(block(state))
        return state


class Heads(nn.Module):
    """A set of draft heads for one base model."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        #: token ids worth drafting, most of the training text; None: the whole vocabulary
        self.frequent: Tensor | None = None
        #: weights of `drafting.calibration` that fit these heads; None: the library's
        self.calibration: dict[str, list[list[float]]] | None = None
        if config.kind == "linear":
            self.layers = nn.ModuleList(LinearHead(config) for _ in range(config.count))
        elif config.kind == "medusa":
            self.layers = nn.ModuleList(MedusaHead(config) for _ in range(config.count))
        else:
            self.layers = nn.ModuleList(ConditionedStep(config) for _ in range(config.steps))

    @property
    def kind(self) -> str:
        """ "linear", "conditioned" or "medusa"."""
        return self.config.kind

    @property
    def count(self) -> int:
        """Number of heads."""
        return self.config.count

    @property
    def conditioned(self) -> bool:
        """True when a head needs the embedding of the token drafted before its own."""
        return self.config.kind == "conditioned"

    @property
    def own_lm_heads(self) -> bool:
        """True when the heads have LM heads of their own; see :meth:`logits`."""
        return self.config.own_lm_heads

    @property
    def dtype(self) -> torch.dtype:
        """The type that the heads compute in."""
        return next(self.parameters()).dtype

    def with_count(self, count: int) -> Heads:
        """The same heads, more or fewer of them; more only where the last one is shared."""
        shared = self.conditioned
        most = "any number" if shared else f"1 to {self.count}"
        check_integer("number of heads", count, 1, most)
        if not shared and count > self.count:
            check_integer("number of heads", count, count + 1, most)
        if count == self.count:
            return self
        steps = min(self.config.steps, count) if shared else 1
        fewer = Heads(replace(self.config, count=count, steps=steps)).to(dtype=self.dtype)
        fewer.load_state_dict({k: v for k, v in self.state_dict().items() if k in fewer.state_dict()})
        fewer.frequent = self.frequent
        return fewer.to(next(self.parameters()).device).eval()

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
        dtype = self.dtype
        previous, base = previous.to(dtype), base.to(dtype)
        if self.conditioned:
            if embeds is None:
                raise ValueError("embeds is None; conditioned heads need the drafted token's embedding")
            layer = self.layers[min(i, len(self.layers) - 1)]
            return layer(previous, base, embeds.to(dtype), i == 0)
        return self.layers[i](previous, base, None)

    def normed(self, i: int, states: Float[Tensor, "m D"]) -> Float[Tensor, "m D"]:
        """What the base model's LM head reads to give head i's logits."""
        if self.kind == "linear":
            return self.layers[i].post_layernorm(states)  # type: ignore[operator]
        return states

    def own_logits(self, i: int, states: Float[Tensor, "m D"]) -> Float[Tensor, "m V"]:
        """Head i's logits by its own LM head, float32; only where :attr:`own_lm_heads`."""
        lm_head = self.layers[i].lm_head
        if not isinstance(lm_head, nn.Linear):
            raise ValueError(f"head {i} has no LM head of its own; use the base model's on normed()")
        return lm_head(states).float()
