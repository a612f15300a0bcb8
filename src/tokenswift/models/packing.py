"""A native decoder's weights, read by name and packed for its backend (`Packing`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenswift.kernels.base import Backend
from tokenswift.kernels.formats import Stored
from tokenswift.kernels.packed import Packed
from tokenswift.kernels.weights import ExpertWeights, LayerWeights, Mixture, RecurrentWeights
from tokenswift.kv.memory import Arena
from tokenswift.kv.states import Recurrence
from tokenswift.loader.experts import (
    CHOICE_BIAS,
    DOWN,
    GATE,
    ROUTER,
    ROUTER_BIAS,
    SHARED_GATE,
    UP,
    bias_name,
    expert_name,
)
from tokenswift.loader.gguf import unpermuted
from tokenswift.loader.heads_order import halved, in_halves
from tokenswift.loader.layout import EMBEDDING, SINKS, Layout
from tokenswift.loader.recurrent import (
    DELTA_DECAY,
    DELTA_NORM,
    DELTA_RATE,
    DELTA_SHIFT,
    DELTA_STRENGTH,
    DELTA_TAPS,
    SHORT_TAPS,
)
from tokenswift.loader.weights import ModuleWeights, unstored
from tokenswift.types import InputError

#: fused projections: those of the same input are one product
LINEARS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
#: those of recurrent layers in the place of attention's
SHORT_LINEARS = {"qkv": ("conv.in_proj",), "out": ("conv.out_proj",)}
DELTA_LINEARS = {
    "qkv": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "out": ("linear_attn.out_proj",),
}
#: those of the expert that all rows go through, beside experts
SHARED_LINEARS = {
    "gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "down": ("mlp.shared_expert.down_proj",),
}
QUERY_NORM = "self_attn.q_norm"
KEY_NORM = "self_attn.k_norm"
#: bytes of packed weights after which freed memory is returned to the system while loading
RELEASE_EVERY = 1 << 25


class WeightSource(Protocol):
    """The weights of a model's files (`loader.weights.Weights`)."""

    layout: Layout
    dtype: torch.dtype
    copies: bool

    def get(self, name: str) -> Tensor | Stored | None:
        """A weight or bias by its name, in the type that is asked for; None: there is none."""
        ...

    def raw(self, name: str) -> Tensor | Stored | None:
        """A weight as the files hold it; None: there is none."""
        ...


class Packing:
    """Reads the weights of a model and packs them, layer by layer.

    Args:
        weights: where they are.
        layout: which there are.
        dtype: of the values of packed weights.
        backend: the backend that they are packed for.

    Attributes:
        copied_bytes: bytes of packed copies of weights that belong to a given model.
    """

    def __init__(
        self,
        weights: WeightSource | ModuleWeights,
        layout: Layout,
        dtype: torch.dtype,
        backend: Backend,
    ) -> None:
        self._weights = weights
        self._layout = layout
        self._dtype = dtype
        self._backend = backend
        self._arena = Arena()
        self._to_release = 0
        self.copied_bytes = 0

    def packed_embedding(self) -> Tensor | Packed:
        """The embedding of a model whose head is another matrix."""
        embedding = self._weight(EMBEDDING)
        if isinstance(embedding, Stored):
            return self._backend.pack(embedding, self._dtype, self._arena)
        return embedding.to(self._backend.device, copy=not self._weights.copies)

    def _weight(self, name: str) -> Tensor | Stored:
        """A weight by its name, as the files or the model hold it."""
        weight = self._optional(name)
        if weight is None:
            raise InputError(f"the model has no weight {name}")
        return weight

    def _optional(self, name: str) -> Tensor | Stored | None:
        """A weight or bias, or None; rows of queries and keys in the order in which the kernels
        rotate them."""
        weight = self._weights.get(name)
        part = name.split(".")[-2]
        heads = {
            "q_proj": self._layout.num_attention_heads,
            "k_proj": self._layout.num_key_value_heads,
        }
        if weight is None or part not in heads:
            return weight
        if part == "q_proj" and self._layout.family.output_gate:
            weight = self._half_of_heads(weight, gates=False)
        if self._layout.rotated:
            return in_halves(weight, heads[part], self._layout.rotated)
        return unpermuted(weight, heads[part]) if self._layout.family.interleaved_rope else weight

    def _raw(self, name: str) -> Tensor | Stored:
        """A weight as the files hold it."""
        weight = self._weights.raw(name)
        if weight is None:
            raise InputError(f"the model has no weight {name}")
        return weight

    def _half_of_heads(self, weight: Tensor | Stored, gates: bool) -> Tensor | Stored:
        """The queries or the gates of a projection that has both, head by head."""
        width = self._layout.head_dim
        rows = torch.arange(len(weight)).view(-1, 2, width)[:, int(gates)].flatten()
        return weight.take(rows) if isinstance(weight, Stored) else weight[rows]

    def _output_gate(self, layer: str) -> Packed:
        """The projection of the gates of what a layer's attention gives."""
        weight = self._weights.get(f"{layer}self_attn.q_proj.weight")
        if weight is None:
            raise InputError(f"the model has no weight {layer}self_attn.q_proj.weight")
        gates = self._half_of_heads(weight, gates=True)
        return self._backend.pack(gates, self._dtype, self._arena)

    def _head_norm(self, layer: str, name: str) -> Tensor:
        """The weight of a norm of queries or keys, in the order of the heads' numbers."""
        weight = self.norm_weight(f"{layer}{name}.weight")
        rotated = self._layout.rotated
        return weight[halved(len(weight), 1, rotated)] if rotated else weight

    def norm_weight(self, name: str) -> Tensor:
        """A norm's weight for the kernels, float32."""
        weight = self._vector(self._weight(name))
        return weight + 1 if self._layout.family.plus_one else weight

    def _layer_norm(self, layer: str, name: str | None) -> Tensor | None:
        """The weight of a layer's norm; None where the family has none in this place."""
        return None if name is None else self.norm_weight(f"{layer}{name}.weight")

    def optional_vector(self, name: str) -> Tensor | None:
        """A copy of a vector for the kernels, float32; None where the model has none."""
        weight = self._optional(name)
        return None if weight is None else self._vector(weight)

    def _vector(self, weight: Tensor | Stored) -> Tensor:
        """A copy of a vector for the kernels, float32."""
        values = unstored(weight, torch.float32).detach()
        return values.to(self._backend.device, torch.float32, copy=True).contiguous()

    def packed(self, names: list[str]) -> Packed:
        """Weights of the same input, packed one below the other for the kernels; counts copied
        bytes."""
        parts = [self._weight(name) for name in names]
        packed = self._backend.pack(parts, self._dtype, self._arena)
        if self._weights.copies and (packed.panels or len(parts) > 1):
            self.copied_bytes += packed.nbytes
        return packed

    def layer(self, number: int) -> LayerWeights:
        layer = f"model.layers.{number}."
        products: dict[str, Any] = dict.fromkeys(("gate_up", "down"))
        mixture = self._layout.experts_of(number)
        recurrence = self._layout.recurrence if number in self._layout.recurrent else None
        for name, linears in linears_of(mixture, recurrence).items():
            weight, bias = self._fused([layer + linear for linear in linears])
            products |= {name: weight, f"{name}_bias": bias}
        recurrent = None if recurrence is None else self._recurrent(layer, recurrence)
        head_norms = self._layout.family.head_norms if recurrence is None else ""
        if mixture is not None:
            products["experts"] = self._experts(layer, mixture)
        family = self._layout.family
        norms = family.norms
        ropes = self._layout.ropes
        weights = LayerWeights(
            **products,
            norm=self._layer_norm(layer, norms.before_attention),
            out_norm=self._layer_norm(layer, norms.behind_attention),
            mlp_norm=self._layer_norm(layer, norms.before_mlp),
            down_norm=self._layer_norm(layer, norms.behind_mlp),
            query_norm=self._head_norm(layer, QUERY_NORM) if head_norms else None,
            key_norm=self._head_norm(layer, KEY_NORM) if head_norms else None,
            rope=ropes[number] if ropes else 0,
            window=self._layout.windows[number],
            sinks=self.optional_vector(layer + SINKS) if family.sinks else None,
            recurrent=recurrent,
            gate=self._output_gate(layer) if family.output_gate and recurrence is None else None,
        )
        self._to_release += sum(weight.nbytes for weight in weights.packed())
        if not self._weights.copies and self._to_release >= RELEASE_EVERY:
            release_free_memory()
            self._to_release = 0
        return weights

    def _recurrent(self, layer: str, recurrence: Recurrence) -> RecurrentWeights:
        """What a recurrent layer has in the place of attention, besides its two projections.

        Args:
            layer: what names of its weights begin with.
        """

        def vector(name: str) -> Tensor:
            weight = self._weights.raw(layer + name)
            if weight is None:
                raise InputError(f"the model has no weight {layer + name}")
            return self._vector(weight)

        if not recurrence.value_heads:
            taps = vector(f"{SHORT_TAPS}.weight").view(recurrence.channels, recurrence.taps)
            return RecurrentWeights(taps=taps.T.contiguous())
        taps = vector(f"{DELTA_TAPS}.weight").view(recurrence.channels, recurrence.taps)
        names = (DELTA_STRENGTH, DELTA_DECAY)
        gates = torch.cat([vector(f"{name}.weight") for name in names])
        return RecurrentWeights(
            taps=taps.T.contiguous(),
            gates=self._backend.pack(gates, torch.float32),
            # in double: the exponential of float32 is another one on other processors
            rate=-vector(DELTA_RATE).double().exp().float(),
            shift=vector(DELTA_SHIFT),
            norm=vector(f"{DELTA_NORM}.weight"),
        )

    def _experts(self, layer: str, mixture: Mixture) -> ExpertWeights:
        """A layer's experts and their router.

        Args:
            layer: what names of its weights begin with.
        """
        names = [ROUTER, SHARED_GATE] if mixture.shared_gate else [ROUTER]
        rows: list[Tensor] = []
        for name in names:
            rows.append(unstored(self._raw(layer + name), torch.float32).to(self._backend.device))
        router = self._backend.pack(torch.cat(rows), torch.float32)
        gate_up: list[Packed] = []
        down: list[Packed] = []
        for expert in range(mixture.experts):
            gate_up.append(self.packed([expert_name(layer, expert, part) for part in (GATE, UP)]))
            down.append(self.packed([expert_name(layer, expert, DOWN)]))
        experts = ExpertWeights(router=router, gate_up=gate_up, down=down)
        if mixture.choice_bias:
            experts.bias = self._vector(self._raw(layer + CHOICE_BIAS))
        if mixture.biased:
            experts.router_bias = self._vector(self._raw(layer + ROUTER_BIAS))
            experts.gate_up_bias = self._expert_biases(layer, mixture.experts, (GATE, UP))
            experts.down_bias = self._expert_biases(layer, mixture.experts, (DOWN,))
        return experts

    def _expert_biases(self, layer: str, experts: int, parts: Sequence[str]) -> Tensor:
        """The biases of some projections of all experts, side by side, (E, N)."""
        rows: list[Tensor] = []
        for expert in range(experts):
            names = [bias_name(layer, expert, part) for part in parts]
            rows.append(torch.cat([self._vector(self._weight(name)) for name in names]))
        return torch.stack(rows)

    def _fused(self, linears: list[str]) -> tuple[Packed, Tensor | None]:
        """One packed weight, and bias, for projections of the same input."""
        weights = [f"{name}.weight" for name in linears]
        biases = [self.optional_vector(f"{name}.bias") for name in linears]
        if all(bias is None for bias in biases):
            return self.packed(weights), None
        for index, name in enumerate(weights):
            if biases[index] is None:
                biases[index] = torch.zeros(len(self._weight(name)), device=self._backend.device)
        present = [bias for bias in biases if bias is not None]
        return self.packed(weights), torch.cat(present)


def linears_of(
    mixture: Mixture | None, recurrence: Recurrence | None = None
) -> dict[str, tuple[str, ...]]:
    """The fused projections of a layer, those of single experts aside.

    Args:
        recurrence: of a recurrent layer; None: it attends.
    """
    if recurrence is not None:
        mixer = DELTA_LINEARS if recurrence.value_heads else SHORT_LINEARS
        return linears_of(mixture) | mixer
    if mixture is None:
        return LINEARS
    attention = {name: LINEARS[name] for name in ("qkv", "out")}
    return attention | SHARED_LINEARS if mixture.shared else attention


def release_free_memory() -> None:
    """Let the C library give freed memory back to the system, where it can (glibc keeps much of
    it)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
