"""The native decoder: our own forward for the families of `loader.families`, over weights by name.

transformers configures and tokenises, and its forward is the reference of the tests. Here a pass is an
embedding, one call of the kernels for all layers (fused projections over packed weights, attention over our
caches, everything between them), the final norm and the LM head. Activations are float32 and rounded to the
weights' type where they enter a product. Nothing is kept between passes: threads may share a target.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from tokenswift.config import LoadConfig
from tokenswift.kernels.base import Backend, Taps, check_ids
from tokenswift.kernels.cpu.structs import TYPES
from tokenswift.kernels.formats import Stored
from tokenswift.kernels.weights import LayerWeights, Packed, Shape, active_type
from tokenswift.kv import Pass, Segment
from tokenswift.kv.full import Arena
from tokenswift.loader.config import EMBEDDING, HEAD, NORM, Layout, activation_of, head_width, layout_of
from tokenswift.loader.families import FAMILIES, GELU
from tokenswift.loader.gguf import straight
from tokenswift.loader.rope import AngleTable, Rotary
from tokenswift.loader.weights import ModuleWeights, Weights, unstored
from tokenswift.models.base import BaseTarget
from tokenswift.types import InputError, OnProgress

#: projections of the same input, which are one product, by their names in a layer
LINEARS = {
    "qkv": ("self_attn.q", "self_attn.k", "self_attn.v"),
    "out": ("self_attn.o",),
    "gate_up": ("mlp.gate", "mlp.up"),
    "down": ("mlp.down",),
}
PREFILL_CHUNK = 512  # rows of a prefill pass; the bits do not depend on it
#: bytes of packed weights after which memory is given back: the pages come again at a price
RELEASED = 1 << 25


def fits(model: Any) -> bool:
    """Whether the native decoder can run a transformers causal LM: it is as its config says, by plain layers
    of one type."""
    config, head = model.config, model.lm_head
    if config.model_type not in FAMILIES or getattr(config, "use_bidirectional_attention", None):
        return False
    layout, layers = layout_of(config), model.model.layers
    names = [name for part in LINEARS.values() for name in part]
    linears = [head, *(attrgetter(f"{name}_proj")(layer) for layer in layers for name in names)]
    norms = [getattr(layer, name) for layer in layers for name in layout.family.norms if name is not None]
    turns = [tensor for name, tensor in model.model.rotary_emb.named_buffers() if name.endswith("inv_freq")]
    return (
        activation_of(config) == layout.family.activation
        and all(type(linear) is nn.Linear and linear.in_features % 2 == 0 for linear in linears)
        and {linear.weight.dtype for linear in linears} <= {head.weight.dtype} & TYPES.keys()
        and isinstance(model.model.embed_tokens, nn.Embedding)
        and head.out_features == layout.vocab_size
        and all(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0)) == layout.eps for norm in norms)
        and all(layer.self_attn.scaling == layout.scale for layer in layers)
        and {2 * len(frequencies) for frequencies in turns} == {head_width(config)}
    )


class NativeTarget(BaseTarget):
    """A model ready for tree passes.

    Args:
        source: a transformers causal LM for which :func:`fits`, which stays as it is (what is copied is
            :attr:`copied_bytes`), or the weights of a model's files.
        backend: what computes; weights go to its device.
        rotary: its positions.
        on_progress: told of the stage "pack", in layers.
    """

    prefill_chunk = PREFILL_CHUNK
    layout: Layout

    def __init__(
        self,
        source: Any,
        backend: Backend,
        rotary: Rotary,
        on_progress: OnProgress | None = None,
    ) -> None:
        files: bool = not isinstance(source, nn.Module)
        if files:
            self._weights: Weights = source
        else:
            head, embedded = attrgetter(HEAD, EMBEDDING)(source)
            self._weights = ModuleWeights(source, layout_of(source.config, head is embedded))
        self.layout = layout = self._weights.layout
        dtype: Any = source.dtype if files else attrgetter(HEAD)(source).dtype
        sizes = torch.empty(1, 1, dtype=dtype, device=backend.device).expand(
            layout.vocab_size, layout.hidden_size
        )
        super().__init__(layout if files else source.config, sizes, rotary, backend)
        self._arena, self._unreleased = Arena(), 0
        self.head = self._packed([HEAD])
        self.head_bias = self._vector("lm_head.bias")
        self._norm, self._eps = self._norm_weight(NORM) / layout.logits, layout.eps
        # as transformers rounds it
        self._scale = float(torch.tensor(layout.embedding, dtype=dtype))
        weights: list[LayerWeights] = []
        for number in range(layout.num_hidden_layers):
            weights.append(self._layer(number))
            if on_progress is not None:
                on_progress("pack", len(weights), layout.num_hidden_layers)
        self.windows = [w.window or None for w in weights]
        self._count_entries()
        self._embedding: Tensor | Packed | None = None
        if not layout.tied:
            embedding = self._weight(EMBEDDING)
            if isinstance(embedding, Stored):
                self._embedding = backend.pack(embedding, self.dtype, self._arena)
            else:
                self._embedding = embedding.to(self.device, copy=files)
        self._weights.rest()
        del self._weights, self._arena, self._unreleased
        if files:
            release_free_memory()
        sizes = (self.layers, self.hidden_size, layout.intermediate_size)
        heads = (layout.num_attention_heads, self.kv_heads, self.head_dim)
        types = (self.dtype, self.keys, active_type(self.dtype))
        gelu, whole = layout.family.activation == GELU, layout.family.head_norms == "projection"
        switches = (layout.score_cap, layout.residual, gelu, whole, layout.family.parallel)
        shape = Shape(*sizes, *heads, *types, layout.eps, layout.scale, *switches)
        self.body: Any = backend.body(shape, weights)
        self._angles = AngleTable(rotary)
        layer_bytes = sum(t.numel() * t.element_size() for w in weights for t in w.tensors())
        self.weight_bytes = layer_bytes + self.head.nbytes

    def _weight(self, name: str) -> Tensor | Stored:
        """A weight that every native decoder has."""
        found = self._given(name)
        if found is None:
            raise InputError(f"the model has no weight {name}")
        return found

    def _given(self, name: str) -> Tensor | Stored | None:
        """A weight or bias, if there is one; rows of queries and keys as the kernels turn them."""
        found, part = self._weights.get(name), name.split(".")[-2]
        heads = {"q_proj": self.layout.num_attention_heads, "k_proj": self.layout.num_key_value_heads}
        if found is None or part not in heads or not self.layout.family.neighbours:
            return found
        rows = straight(len(found), heads[part])
        return found.take(rows) if isinstance(found, Stored) else found[rows]

    def _norm_weight(self, name: str | None) -> Any:
        """A norm's weight as the kernels read it, None where the family has none."""
        if name is None:
            return None
        made = self._copied(self._weight(name))
        return made + 1 if self.layout.family.plus_one else made

    def _copied(self, weight: Tensor | Stored) -> Tensor:
        """A vector as the kernels read it, in memory of its own."""
        made = unstored(weight, torch.float32).detach()
        return made.to(self.device, torch.float32, copy=True).contiguous()

    def _vector(self, name: str) -> Tensor | None:
        """A bias as the kernels read it, if there is one."""
        found = self._given(name)
        return None if found is None else self._copied(found)

    def _packed(self, names: list[str]) -> Packed:
        """Weights with the same input as the kernels read them, one below the other; counts what they take
        beside the model's own."""
        parts = [self._weight(name) for name in names]
        packed = self.backend.pack(parts, self.dtype, self._arena)
        if self._weights.copies and (packed.panels or len(parts) > 1):
            self.copied_bytes += packed.nbytes
        return packed

    def _layer(self, number: int) -> LayerWeights:
        layer = f"model.layers.{number}."
        products: dict[str, Any] = {}
        for name, linears in LINEARS.items():
            weight, bias = self._fused([f"{layer}{linear}_proj" for linear in linears])
            products |= {name: weight, f"{name}_bias": bias}
        family, ropes = self.layout.family, self.layout.ropes
        of_heads = ("self_attn.q_norm", "self_attn.k_norm") if family.head_norms else (None, None)
        places = ("norm", "out_norm", "mlp_norm", "down_norm", "query_norm", "key_norm")
        norms = {
            place: self._norm_weight(name and f"{layer}{name}.weight")
            for place, name in zip(places, (*family.norms, *of_heads), strict=True)
        }
        rope = ropes[number] if ropes else 0
        made = LayerWeights(**products, **norms, rope=rope, window=self.layout.windows[number])
        self._weights.rest()
        self._unreleased += sum(weight.nbytes for weight in made.packed())
        if not self._weights.copies and self._unreleased >= RELEASED:
            release_free_memory()
            self._unreleased = 0
        return made

    def _fused(self, linears: list[str]) -> tuple[Packed, Tensor | None]:
        """One packed weight (and bias) for projections of the same input."""
        weights, bias = [f"{name}.weight" for name in linears], None
        found = [self._vector(f"{name}.bias") for name in linears]
        if any(part is not None for part in found):
            pairs = zip(found, weights, strict=True)
            bias = torch.cat([self._zeros(name) if part is None else part for part, name in pairs])
        return self._packed(weights), bias

    def _zeros(self, name: str) -> Tensor:
        """The bias of a projection that has none, beside one that has."""
        return torch.zeros(len(self._weight(name)), dtype=torch.float32, device=self.device)

    @property
    def has_int8(self) -> bool:
        """Whether all products, and keys and values, can be computed in int8."""
        stored = all(weight.stored for weight in self.multiplied())
        return stored and bool(self.backend.formats) and self.backend.has_int8_keys(self.head_dim)

    def multiplied(self) -> list[Packed]:
        """The weights that products are with."""
        return [self.head, *(weight for layer in self.body.weights for weight in layer.packed())]

    def compute_as(self, how: LoadConfig, name: str) -> None:
        """See :meth:`BaseTarget.compute_as`; nothing asked for, in int8 where the weights are quantized and
        the backend is best at it. Keys with a bias have channels of very large values, which one scale for a
        narrow head loses (perplexity of Qwen 2.5 0.5B: 5% more): there they keep the dtype, unless asked."""
        asked = how.dtype == "int8"
        whole = asked or (how.dtype == "auto" and self.has_int8 and self.backend.prefers_int8)
        if whole:
            self.take_int8()
        if how.keys is not None:
            self.take_keys(how.keys, "kv_cache_dtype")
        elif whole and (asked or self.head_dim >= 128 or self.body.weights[0].qkv_bias is None):
            self.take_keys(torch.int8, "dtype")

    def take_int8(self) -> None:
        """Compute all products in int8 from now on: another model, and a faster one.

        Raises:
            InputError: a weight is not quantized, or the backend has no such products.
        """
        if not self.backend.formats:
            raise InputError(
                f"dtype is 'int8', but the {self.backend.name} backend multiplies floats alone; "
                "valid: auto, float32, bfloat16",
                "dtype",
            )
        if not all(weight.stored for weight in self.multiplied()):
            raise InputError(
                "dtype is 'int8', but not all of the model's weights are quantized in a format that the "
                f"{self.backend.name} backend multiplies; valid: auto, float32, bfloat16, or int8 with "
                "weights q8_0, q4_1 or q4_0 (quantized while loading), or with a GGUF file of such",
                "dtype",
            )
        self._run_as(active=torch.int8)
        self.whole = True

    def take_keys(self, dtype: torch.dtype, option: str) -> None:
        """Keep keys and values as ``dtype`` from now on.

        Args:
            option: that asks for it, for the message.
        Raises:
            InputError: the kernels do not have it for this model.
        """
        if dtype == torch.int8 and not self.backend.has_int8_keys(self.head_dim):
            raise InputError(
                f"{option} is 'int8', but the {self.backend.name} backend keeps no keys of heads of width "
                f"{self.head_dim} in int8; valid: auto, float32, bfloat16, or heads whose width is a "
                "multiple of 4 with compiled kernels on a CPU",
                option,
            )
        self.keys = dtype
        self._count_entries()
        self._run_as(keys=dtype)

    def _run_as(self, **types: torch.dtype) -> None:
        self.body = self.backend.body(replace(self.body.shape, **types), self.body.weights)

    # ---- passes ---------------------------------------------------------------------------------

    def _run(self, segments: Sequence[Segment], keep: bool = True) -> list[Pass]:
        body, taps = self.body, self.taps
        for segment in segments:
            segment.cache.make_room(len(segment.tokens))
        if not self.backend.on_host:  # which would trip over them later, and for good
            for segment in segments:
                check_ids(segment.tokens, self.vocab_size)
        batch = self.backend.batch(segments, body.shape)
        states = self.embed(batch.tokens).float()
        tapped = Taps(taps, states.new_empty(len(taps), *states.shape)) if taps else None
        queries = self.backend.layers(body, states, *self._angles.at(batch.positions), batch, keep, tapped)
        return batch.passes(states, queries, None if tapped is None else tapped.states)

    @torch.inference_mode()
    def norm(self, hidden: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The final norm: (n, D) → (n, D), of the type that enters products, or another."""
        active = torch.float32 if self.whole else self.body.shape.active
        return self.backend.norm(hidden, self._norm, self._eps, dtype or active)

    def _project(self, normed: Tensor, rows: Any) -> Tensor:
        if rows is not None:
            return self.backend.draft_product(normed, rows)
        active = torch.int8 if self.whole else None
        logits = self.backend.linear(normed, self.head, self.head_bias, active)
        cap = self.layout.logit_cap
        return logits if not cap else logits.div_(cap).tanh_().mul_(cap)

    def _gather(self, ids: Tensor) -> Packed:
        return self.backend.pack_for_drafts(self.backend.take(self.head, ids), self.whole)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings, multiplied as the family has it: (n,) → (n, D)."""
        embedding = self.head if self._embedding is None else self._embedding
        if isinstance(embedding, Packed):
            found = self.backend.take(embedding, tokens)
        else:
            check_ids(tokens, len(embedding))
            found = embedding[tokens]
        return found if self._scale == 1 else found * self._scale


def release_free_memory() -> None:
    """Let the C library give freed memory back to the system, where it can (glibc keeps much of it)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
