"""Heads of published methods, to compare with: the paper's linear heads, and Medusa's. They stand
here and not in `speculation.rivals`, since all that drafts with heads is built on this package."""

from __future__ import annotations

from torch import Tensor, nn

from tokenswift.speculation.heads.config import HeadsConfig
from tokenswift.speculation.heads.forms import HeadForm, HeadInputs, linear, with_norms


class LinearForm(HeadForm):
    """The paper's linear heads, each on the state of the one before; parts have the names of the
    published checkpoints."""

    def layer(self, config: HeadsConfig) -> nn.ModuleDict:
        """Two norms and a square matrix."""
        width = config.hidden_size
        parts = {"linear": linear(width, width, bias=False)}
        return with_norms(config, ("input_layernorm", "post_layernorm"), parts)

    def advance(self, layer: nn.ModuleDict, inputs: HeadInputs) -> Tensor:
        """See `HeadForm.advance`."""
        states = inputs.previous
        return states + layer["linear"](layer["input_layernorm"](states))

    def normed(self, layer: nn.ModuleDict, states: Tensor) -> Tensor:
        """Each head has a norm of its own before the LM head."""
        return layer["post_layernorm"](states)


class MedusaForm(HeadForm):
    """Medusa's heads (Cai et al. 2024), which stand side by side: none looks at another."""

    def layer(self, config: HeadsConfig) -> nn.ModuleDict:
        """A norm and a residual block."""
        width = config.hidden_size
        parts = {"blocks": nn.ModuleList([linear(width, width)])}
        return with_norms(config, ("final_norm",), parts)

    def advance(self, layer: nn.ModuleDict, inputs: HeadInputs) -> Tensor:
        """See `HeadForm.advance`."""
        state = layer["final_norm"](inputs.base)
        block = layer.get_submodule("blocks.0")
        return state + nn.functional.silu(block(state))
