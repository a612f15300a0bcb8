"""Draft heads: small modules that guess further tokens from one hidden state of the base model.

All states are hidden states *before* the base model's final norm, (m, D). From the state of
position t the base model predicts token t+1, and head i (counted from 0) predicts token t+2+i.
A head's state comes from :meth:`Heads.advance`; the base model's own LM head, applied by the
caller to :meth:`Heads.normed` of it, gives the head's logits.

Each kind is a file of its own beside this one, with a class that names its kind and implements
:meth:`Heads.step` and what else differs; ``Heads(config)`` makes the right one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tokenswift.checks import check_choice, check_integer
from tokenswift.config import check_flag, check_number
from tokenswift.method_options import HEAD_KINDS

KINDS = HEAD_KINDS


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
        check_choice("kind of heads", self.kind, KINDS)
        for name in ("count", "hidden_size", "vocab_size", "blocks"):
            check_integer(f"heads' {name}", getattr(self, name), 1)
        check_integer("heads' inner", self.inner, 0)
        check_flag("heads' own_lm_heads", self.own_lm_heads)
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


class Heads(nn.Module):
    """A set of draft heads for one base model; ``Heads(config)`` makes the class of the config's kind.

    Attributes:
        frequent: token ids worth drafting, most of the training text; None: the whole vocabulary.
        calibration: weights of `spec.adaptive.acceptance` that fit these heads; None: the library's.
        source: where they come from (a file, a folder, "… (shipped)"); "" when a program made them.
        notes: how they were trained, from their file: tokens, steps and the like.
        conditioned: a head needs the embedding of the token drafted before its own.
    """

    conditioned: ClassVar[bool] = False
    _kinds: ClassVar[dict[str, type[Heads]]] = {}

    def __init_subclass__(cls, kind: str, **more: Any) -> None:
        super().__init_subclass__(**more)
        Heads._kinds[kind] = cls

    def __new__(cls, config: HeadsConfig) -> Heads:
        return super().__new__(Heads._kinds[config.kind])  # type: ignore[arg-type]

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        self.frequent: Tensor | None = None
        self.calibration: dict[str, list[list[float]]] | None = None
        self.source = ""
        self.notes: dict[str, Any] = {}
        self.layers = nn.ModuleList(self.made(config))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_bare, (type(self), self.config), self.__dict__)

    def made(self, config: HeadsConfig) -> Iterator[nn.Module]:
        """The modules, one a head unless they share one."""
        raise NotImplementedError

    def step(self, i: int, previous: Tensor, base: Tensor, embeds: Tensor | None) -> Float[Tensor, "m D"]:
        """:meth:`advance` with everything in the heads' type."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """ "linear", "conditioned" or "medusa"."""
        return self.config.kind

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
        dtype = self.dtype
        if self.conditioned and embeds is None:
            raise ValueError("embeds is None; conditioned heads need the drafted token's embedding")
        return self.step(i, previous.to(dtype), base.to(dtype), None if embeds is None else embeds.to(dtype))

    def normed(self, i: int, states: Float[Tensor, "m D"]) -> Float[Tensor, "m D"]:
        """What the base model's LM head reads to give head i's logits."""
        return states

    def own_logits(self, i: int, states: Float[Tensor, "m D"]) -> Float[Tensor, "m V"]:
        """Head i's logits by its own LM head, float32; only where :attr:`own_lm_heads`."""
        raise ValueError(f"head {i} has no LM head of its own; use the base model's on normed()")


def _bare(cls: type[Heads], config: HeadsConfig) -> Heads:
    """An instance to be filled by a copy's or a pickle's state."""
    return cls.__new__(cls, config)
