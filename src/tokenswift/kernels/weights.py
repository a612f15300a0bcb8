"""The weights of a decoder's layers, and their sizes, as backends read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from tokenswift.kernels.packed import Packed
from tokenswift.kv.states import Recurrence

#: greatest number of a layer's experts: a row's scores are kept on a thread's stack
MOST_EXPERTS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """How rows go through experts, in place of one MLP.

    Attributes:
        experts: how many there are.
        used: how many of them a row goes through.
        inner: width of each.
        shared: width of the expert that all rows go through; 0: there is none.
        shared_gate: whether the router has one more row, whose logit's sigmoid the shared expert's
            output is multiplied with.
        sigmoid: whether a score is a logit's sigmoid, else the softmax over all experts.
        renormalised: whether the scores of a row's experts are divided by their sum.
        biased: whether the router and the experts have biases.
        choice_bias: whether a bias is added to the scores by which experts are chosen.
    """

    experts: int
    used: int
    inner: int
    shared: int = 0
    shared_gate: bool = False
    sigmoid: bool = False
    renormalised: bool = False
    biased: bool = False
    choice_bias: bool = False

    @property
    def router_rows(self) -> int:
        """Rows of the router's weight."""
        return self.experts + self.shared_gate


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes, types and switches of a decoder's layers.

    Attributes:
        layers, hidden, inner, heads, kv_heads, width: L, D, the MLP's width, H, K and d.
        mixture: of the layers with experts; None: no layer has any.
        weights, keys: types of weights as products take them, and of keys and values: float32,
            bfloat16 or float16; keys and values also int8.
        active: type of what enters a product: bfloat16 for bfloat16 weights, else float32; int8
            (groups of 32 integers with a scale) where all weights are stored quantized.
        eps: what norms add to the mean of squares.
        scale: what products of queries and keys are multiplied with.
        cap: attention scores become ``cap * tanh(score / cap)``; 0: they stay.
        residual: what attention and MLP add to a state is multiplied with it.
        gelu: whether the MLP's activation is GeLU by its tanh, else SiLU.
        gate_limit: of a clamped SwiGLU: gates are at most this, and what they are multiplied with
            is between it and minus it, plus 1; 0: neither.
        gate_slope: of its gates: SiLU is of so many times the gate, divided by as much.
        norm_all_heads: whether norms of queries and keys are over all heads together.
        parallel: whether attention and MLP take in the same norm, of states without their mean.
        recurrence: of recurrent layers; None: there are none.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    width: int
    weights: torch.dtype
    keys: torch.dtype
    active: torch.dtype
    eps: float
    scale: float
    cap: float = 0.0
    residual: float = 1.0
    gelu: bool = False
    gate_limit: float = 0.0
    gate_slope: float = 1.0
    norm_all_heads: bool = False
    parallel: bool = False
    mixture: Mixture | None = None
    recurrence: Recurrence | None = None

    @property
    def queries(self) -> torch.dtype:
        """Type of queries: what is multiplied with the keys."""
        return active_type(self.keys)


def active_type(weights: torch.dtype) -> torch.dtype:
    """Type of what is multiplied with weights, or keys, of a type."""
    return torch.bfloat16 if weights == torch.bfloat16 else torch.float32


class MlpWeights(NamedTuple):
    """The weights of one gated MLP.

    Attributes:
        gate_up: gate, then up, (2 · inner, D).
        down: (D, inner).
        gate_up_bias, down_bias: (2 · inner,) and (D,); None: none.
    """

    gate_up: Packed
    down: Packed
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(slots=True)
class ExpertWeights:
    """The weights of a layer's experts.

    Attributes:
        router: (`Mixture.router_rows`, D), float32.
        gate_up, down: of each expert, as those of an MLP.
        router_bias: added to the router's logits, (`Mixture.router_rows`,); None: none.
        gate_up_bias, down_bias: of all experts, (E, 2 · inner) and (E, D); None: none.
        bias: added to the scores by which experts are chosen, not to those that weigh them, (E,).
        c_experts: the experts as structures of the CPU kernels, which make them once.
    """

    router: Packed
    gate_up: list[Packed]
    down: list[Packed]
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    bias: Tensor | None = None
    c_experts: object | None = None

    def packed(self) -> list[Packed]:
        """The experts' weights, without the router."""
        return [*self.gate_up, *self.down]

    def vectors(self) -> list[Tensor]:
        """All biases."""
        biases = (self.router_bias, self.gate_up_bias, self.down_bias, self.bias)
        return [bias for bias in biases if bias is not None]

    def mlp(self, expert: int) -> MlpWeights:
        """The weights of one expert."""
        return MlpWeights(
            self.gate_up[expert],
            self.down[expert],
            None if self.gate_up_bias is None else self.gate_up_bias[expert],
            None if self.down_bias is None else self.down_bias[expert],
        )


@dataclass(slots=True)
class RecurrentWeights:
    """What a recurrent layer has in the place of attention, besides its two projections.

    Attributes:
        taps: of the convolution of each channel, the oldest input's first, (taps, channels).
        gates: of the delta rule, strengths and decays of each head, (2 Hv, D) float32.
        rate, shift: (Hv,); a head decays by exp(rate · log(1 + exp(x + shift))).
        norm: weight of the norm of a head's output.
    """

    taps: Tensor
    gates: Packed | None = None
    rate: Tensor | None = None
    shift: Tensor | None = None
    norm: Tensor | None = None


@dataclass(slots=True)
class LayerWeights:
    """One layer: packed projections, and float32 vectors for everything else (None where there is
    none).

    Attributes:
        qkv: queries, keys and values in one, ((H + 2 K) d, D); of a recurrent layer its first
            projection, (`Recurrence.projected`, D).
        out: (D, H d); of a recurrent layer (D, `Recurrence.outputs`).
        gate_up: gate, then up, (2 · inner, D).
        down: (D, inner). Beside experts, both are those of the expert that all rows go through;
            None where there is none.
        norm, mlp_norm: weights of the RMS norms before attention and before the MLP; None where
            states enter as they are.
        out_norm, down_norm: weights of the norms of what attention and MLP add to a state.
        query_norm, key_norm: weights of the norms of each head's query and key, or of all heads'
            together.
        rope: which of the sets of angles rotates queries and keys; -1: none.
        window: newest keys that a token sees (itself included); 0 is all.
        wide_keys: whether keys, where a cache keeps whole numbers, are of 16 bits.
        second_qkv: of a drafter's layer: adds to queries, keys and values from a second input, of
            which a pass has a row for each of its states, ((H + 2 K) d, D).
        second_norm: weight of the norm of that input.
        experts: of a mixture; None: the layer has one MLP.
        sinks: a score of each head that takes part in the softmax and has no value, (H,).
        recurrent: of a recurrent layer; None: it attends.
        gate: its product's sigmoid is what attention's output is multiplied with, (H d, D).
    """

    qkv: Packed
    out: Packed
    gate_up: Packed | None
    down: Packed | None
    norm: Tensor | None
    mlp_norm: Tensor | None
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    out_norm: Tensor | None = None
    down_norm: Tensor | None = None
    rope: int = 0
    window: int = 0
    wide_keys: bool = False
    second_qkv: Packed | None = None
    second_norm: Tensor | None = None
    experts: ExpertWeights | None = None
    sinks: Tensor | None = None
    recurrent: RecurrentWeights | None = None
    gate: Packed | None = None

    def mlp(self) -> MlpWeights:
        """The weights of the layer's one MLP.

        Raises:
            ValueError: the layer has none, only experts.
        """
        if self.gate_up is None or self.down is None:
            raise ValueError("the layer has experts alone; valid: one with an MLP")
        return MlpWeights(self.gate_up, self.down, self.gate_up_bias, self.down_bias)

    def packed(self) -> list[Packed]:
        """All weights that are multiplied with, but for a router."""
        optional = (self.gate_up, self.down, self.second_qkv, self.gate)
        weights = [self.qkv, self.out, *(weight for weight in optional if weight is not None)]
        return weights if self.experts is None else [*weights, *self.experts.packed()]

    def tensors(self) -> Iterator[Tensor]:
        """Everything that passes read."""
        parts = [self] if self.recurrent is None else [self, self.recurrent]
        for part in parts:
            for field in fields(part):
                value = getattr(part, field.name)
                if isinstance(value, Tensor):
                    yield value
        if self.experts is not None:
            yield from self.experts.vectors()
        apart = [] if self.experts is None else [self.experts.router]
        if self.recurrent is not None and self.recurrent.gates is not None:
            apart.append(self.recurrent.gates)
        for weight in (*self.packed(), *apart):
            yield from (part.data for part in weight.parts)
