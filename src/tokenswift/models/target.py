"""The target model: a transformers causal LM run through our attention function and caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenswift.cache.full import FullCache
from tokenswift.cache.select import OBSERVED
from tokenswift.interfaces import CommittingCache, KVCache, Pass
from tokenswift.models.attention import NAME, PassContext
from tokenswift.models.load import FAMILIES, native_bfloat16
from tokenswift.models.numerics import Numerics, parse_numerics
from tokenswift.tree import ancestor_mask
from tokenswift.types import InputError

PREFILL_CHUNK = 256


class HFTarget:
    """A loaded transformers model of a supported family, ready for tree passes.

    The model object itself is left as it was: the attention function is switched only during a pass.

    Args:
        numerics: "default", "stable" (fewer near-ties) or `numerics.Numerics`.
    Raises:
        InputError: for a family whose layers we do not know.
    """

    def __init__(self, model: Any, numerics: str | Numerics = "default") -> None:
        self.numerics = parse_numerics(numerics)
        kind = getattr(model.config, "model_type", "?")
        if kind not in FAMILIES or not hasattr(model, "lm_head"):
            raise InputError(
                f"model type is {kind!r}; valid: causal language models of {', '.join(FAMILIES)}"
            )
        self.model = model
        self.body = model.model
        self.config = model.config
        weight: nn.Parameter = self.body.embed_tokens.weight
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = weight.dtype
        if numerics == "stable" and self.dtype == torch.bfloat16 and not native_bfloat16(str(self.device)):
            # emulated products give a row the same bits whatever the number of rows (docs/exactness.md)
            self.numerics = replace(self.numerics, block=0)
        self.vocab_size: int = model.lm_head.weight.shape[0]
        self.hidden_size: int = weight.shape[1]
        self.layers: int = self.config.num_hidden_layers
        self.kv_heads: int = self.config.num_key_value_heads
        self.head_dim: int = (
            getattr(self.config, "head_dim", None) or self.hidden_size // self.config.num_attention_heads
        )
        self._before_norm: Tensor | None = None
        self._hook = self.body.norm.register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._before_norm = args[0]

    def close(self) -> None:
        """Take our hook off the model."""
        self._hook.remove()

    @property
    def windows(self) -> list[int | None]:
        """Sliding window of each layer in tokens, None where a layer sees everything."""
        found = []
        for layer in self.body.layers:
            attn = layer.self_attn
            default = self.config.sliding_window if self.config.model_type == "mistral" else None
            found.append(getattr(attn, "sliding_window", default))
        return found

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads (the embedding table counted only where it is tied)."""
        total = sum(p.numel() * p.element_size() for p in self.body.layers.parameters())
        head = self.model.lm_head.weight
        return total + head.numel() * head.element_size()

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values per cached token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def rotary_frequencies(self) -> Tensor:
        """Angle per position of each pair of a head's dimensions, (d / 2,) float32."""
        return self.body.rotary_emb.inv_freq.float()

    def new_cache(self, capacity: int) -> FullCache:
        """An empty full cache for ``capacity`` tokens, scratch room included."""
        return FullCache(self.layers, self.kv_heads, self.head_dim, capacity, self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, parents: Sequence[int] | None = None
    ) -> Pass:
        """Run n tokens over ``cache`` (see `interfaces.TargetModel`); their entries go to its scratch."""
        rows = len(tokens)
        full = isinstance(cache, FullCache)
        if parents is None:
            mask = torch.ones(rows, rows, dtype=torch.bool, device=self.device).tril_()
        else:
            mask = ancestor_mask(parents, self.device)
        numerics = self.numerics if full else Numerics()  # a draft pass may round as it likes
        context = PassContext(mask, positions, cache.length, full, numerics.attention)
        before = self.config._attn_implementation
        self.config._attn_implementation = NAME
        try:
            with numerics.products():
                self.body(
                    input_ids=tokens[None],
                    position_ids=positions[None],
                    past_key_values=cache,
                    use_cache=True,
                    tokenswift_pass=context,
                )
        finally:
            self.config._attn_implementation = before
        if self._before_norm is None:
            raise RuntimeError("the model ran without its final norm")
        return Pass(self._before_norm[0], context.queries)

    @torch.inference_mode()
    def prefill(self, tokens: list[int], cache: CommittingCache) -> Pass:
        """Run the prompt in chunks of :data:`PREFILL_CHUNK` and commit it.

        The result holds the last :data:`OBSERVED` tokens' queries and hidden states (or all of fewer).
        """
        hidden: list[Tensor] = []
        queries: list[list[Tensor]] = []
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = torch.tensor(tokens[start : start + PREFILL_CHUNK], device=self.device)
            positions = torch.arange(cache.length, cache.length + len(chunk), device=self.device)
            result = self.forward(chunk, positions, cache)
            cache.commit(tuple(range(len(chunk))))
            if start + 2 * PREFILL_CHUNK > len(tokens):  # the last two chunks hold the last rows
                hidden.append(result.hidden[-OBSERVED:].clone())
                queries.append([q[:, :, -OBSERVED:].clone() for q in result.queries])
        if not hidden:
            raise ValueError("nothing to prefill")
        ends = [torch.cat(layer, dim=2)[:, :, -OBSERVED:] for layer in zip(*queries, strict=True)]
        return Pass(torch.cat(hidden)[-OBSERVED:], ends)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and LM head: (n, D) → (n, V), float32."""
        if self.numerics.head_float32:
            hidden = hidden.float()
        return self.project(self.norm(hidden))

    @torch.inference_mode()
    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm: (n, D) → (n, D)."""
        return self.body.norm(hidden)

    @torch.inference_mode()
    def project(self, normed: Tensor, rows: Tensor | None = None) -> Tensor:
        """The LM head alone: (n, D) → (n, V), float32; only its ``rows`` (m, D) → (n, m) when given."""
        if rows is not None:
            return (normed @ rows.T).float()
        with self.numerics.products():
            return self._head(normed)

    def _head(self, normed: Tensor) -> Tensor:
        head = self.model.lm_head
        if self.numerics.head_float32:
            bias = None if head.bias is None else head.bias.float()
            return F.linear(normed.float(), head.weight.float(), bias)
        return head(normed).float()

    def head_rows(self, ids: Tensor) -> Tensor:
        """The LM head's rows of some tokens, (m, D): a smaller head for drafting."""
        return self.model.lm_head.weight.detach()[ids]

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings: (n,) → (n, D)."""
        return self.body.embed_tokens(tokens)
