"""How heads are built and run: what one kind of them does otherwise than another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from tokenswift.speculation.heads.config import HeadsConfig


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

    def advance(
        self,
        layer: nn.ModuleDict,
        previous: Tensor,
        base: Tensor,
        embeds: Tensor | None,
        is_first: bool,
    ) -> Tensor:
        """See `Heads.advance`; all states are (m, D) and of the layer's type.

        Args:
            layer: of the head.
            is_first: it is head 0, so that ``previous`` is the base state.
        """
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

    def advance(
        self,
        layer: nn.ModuleDict,
        previous: Tensor,
        base: Tensor,
        embeds: Tensor | None,
        is_first: bool,
    ) -> Tensor:
        """See `HeadForm.advance`.

        Raises:
            ValueError: there are no embeddings.
        """
        if embeds is None:
            raise ValueError("embeds is None; conditioned heads need the drafted token's embedding")
        inputs = step_inputs(layer, previous, base, embeds, is_first)
        state = layer["linear"](inputs)
        if "inner" not in layer:
            return state
        return state + layer["outer"](torch.relu(layer["inner"](inputs)))


def step_inputs(
    layer: nn.ModuleDict, previous: Tensor, base: Tensor, embeds: Tensor, is_first: bool
) -> Tensor:
    """What the step of conditioned heads reads, (m, 3 D). The state it makes lives where the LM
    head reads (after the final norm), so no norm follows and its length can say how sure the head
    is."""
    state = layer["first_norm" if is_first else "state_norm"](previous)
    return torch.cat((state, layer["base_norm"](base), layer["embed_norm"](embeds)), dim=-1)


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
