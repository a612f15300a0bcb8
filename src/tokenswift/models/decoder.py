"""The lean decoder: our own forward for Llama, Qwen2, Qwen3 and Mistral, over the weights of a loaded model.

transformers loads, configures and tokenises, and its forward is the reference of the tests. Here a pass is an
embedding, one call of the kernels for all layers (fused projections over packed weights, attention over our
caches, everything between them), the final norm and the LM head. Activations are float32 and rounded to the
weights' type where they enter a product. Nothing is kept between passes: threads may share a target.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokenswift.interfaces import KVCache, Pass
from tokenswift.kernels.native import TYPES, NativeKernels
from tokenswift.kernels.reference import TorchKernels
from tokenswift.kernels.weights import LayerWeights, Packed, Shape
from tokenswift.models.base import BaseTarget, head_width
from tokenswift.models.rope import Rotary
from tokenswift.types import OnProgress

#: model types that the lean decoder runs
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
PREFILL_CHUNK = 512  # rows of a prefill pass; the bits do not depend on it


def unfit(model: Any) -> str | None:
    """Why the lean decoder cannot run a transformers causal LM; None when it can."""
    config = model.config
    if config.model_type not in FAMILIES:
        return f"its type is {config.model_type}"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"its activation is {config.hidden_act}"
    if type(model.lm_head) is not nn.Linear or type(model.model.embed_tokens) is not nn.Embedding:
        return "its embedding or LM head is no plain layer"
    for layer in model.model.layers:
        attn, mlp = layer.self_attn, layer.mlp
        linears = (
            attn.q_proj,
            attn.k_proj,
            attn.v_proj,
            attn.o_proj,
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
        )
        if any(type(linear) is not nn.Linear for linear in linears):
            return "its projections are no plain linear layers"
        if any(linear.weight.dtype != model.lm_head.weight.dtype for linear in linears):
            return "its weights have several types"
        if any(linear.in_features % 2 for linear in linears):
            return "a projection has an odd width"
    if model.lm_head.weight.dtype not in TYPES:
        return f"its weights are {model.lm_head.weight.dtype}"
    if 2 * len(getattr(model.model.rotary_emb, "inv_freq", ())) != head_width(config):
        return "its rotary embedding turns a part of each head"
    return None


class LeanTarget(BaseTarget):
    """A model on the CPU, ready for tree passes (implements `interfaces.DraftModel`).

    Args:
        model: a transformers causal LM for which :func:`unfit` is None.
        kernels: compiled kernels or the torch path.
        rotary: its positions.
        take: replace the model's own weights by empty ones as they are packed, so that they exist once;
            :meth:`give_back` restores them. Otherwise the model is left alone and the packed copies cost
            :attr:`copied_bytes`.
        on_progress: told of the stage "pack", in layers.
    """

    prefill_chunk = PREFILL_CHUNK

    def __init__(
        self,
        model: Any,
        kernels: NativeKernels | TorchKernels,
        rotary: Rotary,
        take: bool = False,
        on_progress: OnProgress | None = None,
    ) -> None:
        super().__init__(model.config, model.lm_head.weight, rotary)
        config, body = model.config, model.model
        self.kernels = kernels
        self._take = take
        tied = model.lm_head.weight is body.embed_tokens.weight
        self.head = self._packed(model.lm_head.weight)
        self._head_bias = _vector(model.lm_head.bias)
        self._release(model.lm_head, self.head.unpack)
        if tied:
            self._release(body.embed_tokens, lambda: model.lm_head.weight)
        self._norm, self._eps = _copied(body.norm.weight), float(body.norm.variance_epsilon)
        weights: list[LayerWeights] = []
        for layer in body.layers:
            weights.append(self._layer(layer))
            if on_progress is not None:
                on_progress("pack", len(weights), len(body.layers))
        self.windows = [w.window or None for w in weights]
        if self._take:  # what is left shares the checkpoint's mapped file, which would stay in memory
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            release_free_memory()
        self._embedding: Tensor | None = None if tied else body.embed_tokens.weight.detach()
        first = body.layers[0]
        shape = Shape(
            layers=self.layers,
            hidden=self.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=self.kv_heads,
            width=self.head_dim,
            dtype=self.dtype,
            eps=float(first.input_layernorm.variance_epsilon),
            scale=float(first.self_attn.scaling),
        )
        self.body: Any = kernels.body(shape, weights)
        layer_bytes = sum(t.numel() * t.element_size() for w in weights for t in w.tensors())
        self.weight_bytes = layer_bytes + self.head.nbytes

    def _packed(self, weight: Tensor, fused: bool = False) -> Packed:
        """A weight as the kernels read it; counts what it takes beside the model's own."""
        packed = Packed(weight, self.kernels.panels)
        if not self._take and (self.kernels.panels or fused):
            self.copied_bytes += packed.nbytes
        return packed

    def _layer(self, layer: Any) -> LayerWeights:
        attn, mlp = layer.self_attn, layer.mlp
        qkv, qkv_bias = self._fused(attn.q_proj, attn.k_proj, attn.v_proj)
        out, out_bias = self._fused(attn.o_proj)
        gate_up, gate_up_bias = self._fused(mlp.gate_proj, mlp.up_proj)
        down, down_bias = self._fused(mlp.down_proj)
        if self._take:
            release_free_memory()
        norms = [getattr(attn, name, None) for name in ("q_norm", "k_norm")]
        window = getattr(attn, "sliding_window", None)
        if self.config.model_type == "mistral":
            window = getattr(self.config, "sliding_window", None)
        return LayerWeights(
            qkv=qkv,
            out=out,
            gate_up=gate_up,
            down=down,
            norm=_copied(layer.input_layernorm.weight),
            mlp_norm=_copied(layer.post_attention_layernorm.weight),
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            query_norm=_vector(norms[0].weight) if norms[0] is not None else None,
            key_norm=_vector(norms[1].weight) if norms[1] is not None else None,
            window=window or 0,
        )

    def _fused(self, first: nn.Linear, *others: nn.Linear) -> tuple[Packed, Tensor | None]:
        """One packed weight (and bias) for projections of the same input."""
        linears = (first, *others)
        whole = torch.cat([linear.weight for linear in linears]) if others else first.weight
        packed, at = self._packed(whole, fused=bool(others)), 0
        bias = None
        if any(linear.bias is not None for linear in linears):
            parts = [
                torch.zeros(len(x.weight)) if x.bias is None else x.bias.detach().float() for x in linears
            ]
            bias = torch.cat(parts)
        for linear in linears:
            rows = slice(at, at + linear.out_features)
            self._release(linear, lambda rows=rows: packed.unpack()[rows].contiguous())
            at += linear.out_features
        return packed, bias

    def _release(self, module: nn.Module, restore: Callable[[], Tensor]) -> None:
        """Let go of a module's weight, if it may be taken."""
        if self._take:
            module.weight = nn.Parameter(torch.empty(0, dtype=self.dtype), requires_grad=False)
            self._taken.append((module, restore))

    # ---- passes ---------------------------------------------------------------------------------

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        parents: Sequence[int] | None,
        keep: bool = True,
    ) -> Pass:
        states = self.embed(tokens).float()
        cos, sin = self.rotary.angles(positions)
        return Pass(states, self.kernels.layers(self.body, states, cos, sin, cache, parents, keep))

    @torch.inference_mode()
    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm: (n, D) → (n, D), of the type that enters products."""
        return self.kernels.norm(hidden, self._norm, self._eps, self.body.shape.active)

    @torch.inference_mode()
    def project(self, normed: Tensor, rows: Any = None) -> Tensor:
        """The LM head alone: (n, D) → (n, V), float32; only its ``rows`` → (n, m) when given."""
        if rows is not None:
            return self.kernels.linear(normed, rows)
        return self.kernels.linear(normed, self.head, self._head_bias)

    def _gather(self, ids: Tensor) -> Packed:
        return Packed(self.head.take(ids), self.kernels.panels)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings: (n,) → (n, D)."""
        return self.head.take(tokens) if self._embedding is None else self._embedding[tokens]


def release_free_memory() -> None:
    """Let the C library give freed memory back to the system, where it can (glibc keeps much of it)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _copied(weight: Tensor) -> Tensor:
    """A norm weight as the kernels read it, in memory of its own."""
    return weight.detach().to(torch.float32, copy=True).contiguous()


def _vector(weight: Tensor | None) -> Tensor | None:
    """A bias or norm weight as the kernels read it, if there is one."""
    return None if weight is None else _copied(weight)
