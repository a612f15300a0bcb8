"""Any causal LM through transformers' own forward, with our attention and caches.

A *shadow* of the model is made: a copy of its modules that shares every tensor, with a config of its own. The
user's object is never touched, and passes share nothing but weights, so threads may run them side by side.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokenswift.cache.full import FullCache
from tokenswift.interfaces import CommittingCache, KVCache, Pass
from tokenswift.kernels.native import NativeKernels
from tokenswift.kernels.reference import TorchKernels
from tokenswift.models.attention import NAME, PassContext
from tokenswift.models.decoder import head_width
from tokenswift.models.prefill import prefill_in_chunks
from tokenswift.models.rope import Rotary
from tokenswift.types import InputError

PREFILL_CHUNK = 256  # rows of a prefill pass
#: names of the final norm in the families' bodies
NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


def shadow_of(model: Any, rotary: Rotary) -> Any:
    """A copy of a causal LM that shares its tensors, in evaluation mode, with the positions of ``rotary``.

    Raises:
        InputError: the modules cannot be copied.
    """
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    try:
        shadow = copy.deepcopy(model, shared)
    except Exception as error:  # modules may hold anything
        raise InputError(
            f"model {type(model).__name__} cannot be copied ({error}); valid: plain modules"
        ) from error
    if rotary.config is not model.config:
        body = shadow.model
        for module in shadow.modules():
            if getattr(module, "config", None) is not None:
                module.config = rotary.config
        body.rotary_emb = type(body.rotary_emb)(config=rotary.config).to(body.rotary_emb.inv_freq.device)
    return shadow.eval()


class GenericTarget:
    """A loaded transformers model, ready for tree passes (implements `interfaces.DraftModel`).

    Args:
        model: a causal LM whose attention goes through transformers' attention interface.
        kernels: what computes attention on the CPU.
        rotary: its positions.
    Raises:
        InputError: for a model whose parts are not where they are in transformers' decoders.
    """

    def __init__(self, model: Any, kernels: NativeKernels | TorchKernels, rotary: Rotary) -> None:
        kind = getattr(model.config, "model_type", "?")
        norm = next((name for name in NORMS if hasattr(getattr(model, "model", None), name)), None)
        if norm is None or not hasattr(model, "lm_head"):
            raise InputError(
                f"model type is {kind!r}: its body, final norm or LM head is not where decoders have it"
            )
        self.rotary, self.kernels = rotary, kernels
        shadow = shadow_of(model, rotary)
        self.config = shadow.config = copy.deepcopy(shadow.config)
        for module in shadow.modules():
            if hasattr(module, "config"):
                module.config = self.config
        self.config._attn_implementation = NAME
        self.body, self.lm_head = shadow.model, shadow.lm_head
        self._final = getattr(self.body, norm)
        setattr(self.body, norm, nn.Identity())  # a pass ends with the states before the final norm
        weight: Tensor = self.body.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.vocab_size: int = self.lm_head.weight.shape[0]
        self.hidden_size: int = weight.shape[1]
        self.layers: int = self.config.num_hidden_layers
        self.kv_heads: int = (
            getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        )
        self.head_dim = head_width(self.config)
        head = self.lm_head.weight
        #: bytes of weights that one pass reads (the embedding table counted only where it is tied)
        self.weight_bytes: int = sum(p.numel() * p.element_size() for p in self.body.layers.parameters())
        self.weight_bytes += head.numel() * head.element_size()
        self.copied_bytes = 0
        self._rows: tuple[Tensor, Tensor] | None = None
        #: bytes of keys and values per cached token
        self.kv_bytes = 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize
        self.windows: list[int | None] = [None] * self.layers
        self.windows = self._run(torch.zeros(1, dtype=torch.long), torch.zeros(1), self.new_cache(1), None)[
            1
        ].windows

    def _run(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, parents: Sequence[int] | None
    ) -> tuple[Tensor, PassContext]:
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        context = PassContext(cache, positions, parents, self.kernels)
        with torch.inference_mode():
            made = self.body(
                input_ids=tokens[None],
                position_ids=positions.long()[None],
                past_key_values=cache,
                use_cache=True,
                tokenswift_pass=context,
            )
        return made.last_hidden_state[0], context

    @property
    def rotary_frequencies(self) -> Tensor:
        """Angle per position of each pair of a head's dimensions, (d / 2,) float32."""
        if self.rotary.frequencies is None:
            raise InputError("the model has several sets of rotary frequencies; valid: one for all layers")
        return self.rotary.frequencies

    def new_cache(self, capacity: int) -> FullCache:
        """An empty full cache for ``capacity`` tokens, scratch room included."""
        return FullCache(self.layers, self.kv_heads, self.head_dim, capacity, self.dtype, self.device)

    def give_back(self) -> None:
        """Nothing was taken from the model."""

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, parents: Sequence[int] | None = None
    ) -> Pass:
        """Run n tokens over ``cache`` (see `interfaces.TargetModel`); their entries go to its scratch."""
        hidden, context = self._run(tokens, positions, cache, parents)
        return Pass(hidden, context.queries)

    def prefill(self, tokens: list[int], cache: CommittingCache) -> Pass:
        """Run the prompt in chunks and commit it; the result holds its last rows (`models.prefill`)."""
        return prefill_in_chunks(
            lambda tokens, positions, cache, parents, keep: self.forward(tokens, positions, cache, parents),
            tokens,
            cache,
            PREFILL_CHUNK,
        )

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and LM head: (n, D) → (n, V), float32."""
        return self.project(self.norm(hidden))

    @torch.inference_mode()
    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm: (n, D) → (n, D)."""
        return self._final(hidden)

    @torch.inference_mode()
    def project(self, normed: Tensor, rows: Any = None) -> Tensor:
        """The LM head alone: (n, D) → (n, V), float32; only its ``rows`` (m, D) → (n, m) when given."""
        logits = self.lm_head(normed) if rows is None else normed @ rows.T
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / divisor
        if (factor := getattr(self.config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * factor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:  # Gemma 2
            logits = cap * torch.tanh(logits / cap)
        return logits.float()

    def head_rows(self, ids: Tensor) -> Tensor:
        """The LM head's rows of some tokens, (m, D): a smaller head for drafting. The most rows asked for are
        kept: asking again with the same tensor costs nothing."""
        kept = self._rows
        if kept is not None and kept[0] is ids:
            return kept[1]
        rows = self.lm_head.weight.detach()[ids.to(self.device)]
        if kept is None or len(ids) >= len(kept[0]):
            self._rows = (ids, rows)
        return rows

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings: (n,) → (n, D)."""
        return self.body.embed_tokens(tokens)
