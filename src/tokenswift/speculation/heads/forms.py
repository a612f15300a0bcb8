"""How heads are built and run: what one kind of them does otherwise than another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokenswift.speculation.heads.config import HeadsConfig


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """What a head reads. All states are (m, D) and of its layer's type.

    Attributes:
        previous: states of the head before it; for head 0 the base states.
        base: hidden states of the base model, before its final norm.
        embeds: embeddings of the tokens drafted before its own; None for heads that read none.
        is_first: whether it is head 0.
    """

    previous: Tensor
    base: Tensor
    embeds: Tensor | None
    is_first: bool


class HeadForm:
    """How the heads of one kind are built and run. It holds no weights: those are in the *layer*
    of a head.

    Attributes:
        conditioned: all heads share one layer, a step, and each needs the embedding of the token
            drafted before its own.
    """

    conditioned = False

    def layer(self, config: HeadsConfig) -> nn.ModuleDict:
        """The parts of a head, with new weights."""
        raise NotImplementedError

    def advance(self, layer: nn.ModuleDict, inputs: HeadInputs) -> Tensor:
        """The states (m, D) of the head with this layer."""
        raise NotImplementedError

    def normed(self, layer: nn.ModuleDict, states: Tensor) -> Tensor:
        """See `Heads.normed`."""
        return states


class ConditionedForm(HeadForm):
    """Heads that see the token drafted before theirs: one step, run again for each level."""

    conditioned = True

    def layer(self, config: HeadsConfig) -> nn.ModuleDict:
        """Norms, a linear part, and a hidden layer beside it where the config has one."""
        width = config.hidden_size
        parts: dict[str, nn.Module] = {"linear": linear(3 * width, width)}
        if config.inner:
            parts["inner"] = linear(3 * width, config.inner)
            parts["outer"] = linear(config.inner, width, bias=False)
        return with_norms(config, ("first_norm", "state_norm", "base_norm", "embed_norm"), parts)

    def advance(self, layer: nn.ModuleDict, inputs: HeadInputs) -> Tensor:
        """See `HeadForm.advance`.

        Raises:
            ValueError: there are no embeddings.
        """
        columns = step_columns(layer, inputs)
        state = layer["linear"](columns)
        if "inner" not in layer:
            return state
        return state + layer["outer"](torch.relu(layer["inner"](columns)))


def step_columns(layer: nn.ModuleDict, inputs: HeadInputs) -> Tensor:
    """The columns (m, 3 D) that the matrices of conditioned heads read: all inputs, normed, side by
    side. The state they make lives where the LM head reads (after the final norm), so no norm
    follows and its length can say how sure the head is.

    Raises:
        ValueError: there are no embeddings.
    """
    if inputs.embeds is None:
        raise ValueError("embeds is None; conditioned heads need the drafted token's embedding")
    state_norm = layer["first_norm" if inputs.is_first else "state_norm"]
    parts = (
        state_norm(inputs.previous),
        layer["base_norm"](inputs.base),
        layer["embed_norm"](inputs.embeds),
    )
    return torch.cat(parts, dim=-1)


def linear(columns: int, rows: int, bias: bool = True) -> nn.Linear:
    """A linear layer in float32."""
    return nn.Linear(columns, rows, bias, dtype=torch.float32)


def with_norms(
    config: HeadsConfig, norms: Iterable[str], parts: Mapping[str, nn.Module]
) -> nn.ModuleDict:
    """A layer of norms with these names, and of other parts."""
    layer = nn.ModuleDict()
    for name in norms:
        layer[name] = nn.RMSNorm(config.hidden_size, config.eps, dtype=torch.float32)
    layer.update(parts)
    return layer
