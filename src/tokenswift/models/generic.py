"""Any causal LM through transformers' own forward, with our attention and caches.

A *shared copy* of the model is made: its modules over the same tensors, with a config of its own. The
user's object is never touched, and passes share nothing but weights, so threads may run them concurrently.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from tokenswift.config import LoadConfig
from tokenswift.kernels.base import Backend, check_ids
from tokenswift.kv import Pass, Segment
from tokenswift.loader.find import refused_as
from tokenswift.loader.rope import Rotary
from tokenswift.loader.weights import whole
from tokenswift.models.decoder import BaseTarget
from tokenswift.types import InputError

NAME = "tokenswift"


@dataclass(slots=True)
class PassContext:
    """What the attention function needs to know of the pass under way, and what it notes of it.

    Attributes:
        segment: the pass's rows and their cache.
        backend: what computes attention.
        queries: filled with each layer's rotated queries (H, n, d).
        windows: filled with each layer's sliding window.
        notes: of the backend, from layer to layer.
    """

    segment: Segment
    backend: Backend
    queries: list[Tensor] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)
    notes: dict[Any, Any] = field(default_factory=dict)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    tokenswift_pass: PassContext | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention of one layer: (1, H, n, d) × (1, K, L, d) → (1, n, H, d).

    Args:
        softcap: Gemma 2's cap of the scores.
        s_aux: gpt-oss's score of a sink per head.
    Raises:
        ValueError: when called without a pass context, that is, not through `models.generic`.
    """
    if tokenswift_pass is None:
        raise ValueError(f"attention {NAME!r} works only under tokenswift's decode loop")
    context, computes = tokenswift_pass, tokenswift_pass.backend
    layer, rows = len(context.queries), query[0].to(computes.device)  # a layer may lie on another device
    context.queries.append(rows)
    context.windows.append(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    cache, parents = context.segment.cache, context.segment.parents
    window = (sliding_window or 0) if cache.ordered else 0
    sinks = None if s_aux is None else s_aux.to(computes.device)
    out = computes.attend(
        rows, layer, cache, parents, scale, window, softcap=softcap, sinks=sinks, notes=context.notes
    )
    return out.to(query.device, query.dtype)[None], None


AttentionInterface.register(NAME, attention)


def hooks_of(model: nn.Module) -> Iterator[Any]:
    """accelerate's hooks in a model, which bring a layer's inputs, and weights that lie elsewhere, to it."""
    for module in model.modules():
        if (hook := getattr(module, "_hf_hook", None)) is not None:
            yield hook


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes."""
    for hook in hooks_of(module):
        if (device := getattr(hook, "execution_device", None)) is not None:
            return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return next(module.parameters()).device


#: names of the final norm in the families' bodies
NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


def shared_copy(model: Any, rotary: Rotary) -> Any:
    """A copy of a causal LM that shares its tensors, in evaluation mode, with the positions of ``rotary``.

    Raises:
        InputError: the modules cannot be copied.
    """
    shared: dict[int, Any] = {
        id(part): part for part in (*model.parameters(), *model.buffers(), *hooks_of(model))
    }
    with refused_as(f"model {type(model).__name__} cannot be copied", "plain modules"):
        copied = copy.deepcopy(model, shared)
    if rotary.config is not model.config:
        body, config = copied.model, copy.deepcopy(rotary.config)
        for module in copied.modules():
            if getattr(module, "config", None) is not None:
                module.config = config
        body.rotary_emb = type(body.rotary_emb)(config=config).to(body.rotary_emb.inv_freq.device)
    return copied.eval()


def shaped_logits(logits: Tensor, config: Any) -> Tensor:
    """What some families do to the LM head's products."""
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / divisor
    if (factor := getattr(config, "logit_scale", None)) is not None:  # Cohere
        logits = logits * factor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma 2
        logits = cap * torch.tanh(logits / cap)
    return logits


class GenericTarget(BaseTarget):
    """A loaded transformers model, ready for tree passes.

    Args:
        model: a causal LM whose attention goes through transformers' attention interface; its weights may lie
            in several places.
        backend: what computes attention.
        rotary: its positions.

    Raises:
        InputError: for a model whose parts are not where they are in transformers' decoders.
    """

    prefill_chunk = 256

    def __init__(self, model: Any, backend: Backend, rotary: Rotary) -> None:
        norm = next((name for name in NORMS if hasattr(model.model, name)), None)
        if norm is None:
            kind = model.config.model_type
            raise InputError(f"model type is {kind!r}; valid: with a final norm in its body")
        copied = shared_copy(model, rotary)
        super().__init__(copied.config, copied.lm_head.weight, rotary, backend)
        self.device = device_of(copied.lm_head)
        offloaded = any(getattr(hook, "offload", False) for hook in hooks_of(model))
        self._one_by_one = Lock() if offloaded else nullcontext()
        self.config._attn_implementation = NAME
        self.body, self.lm_head = copied.model, copied.lm_head
        self._final = getattr(self.body, norm)
        setattr(self.body, norm, nn.Identity())  # a pass ends with the states before the final norm
        weights = (*self.body.layers.parameters(), self.lm_head.weight)
        self.weight_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
        self.windows = self._pass(self._one_row())[1].windows

    def compute_as(self, how: LoadConfig, name: str) -> None:
        """See :meth:`BaseTarget.compute_as`: transformers' own model computes in floats alone."""
        option = "dtype" if how.dtype == "int8" else "kv_cache_dtype" if how.keys else None
        if option:
            raise InputError(
                f"{option} is {getattr(how, option)!r}, but {name} runs through transformers' own model, in "
                "floats alone; valid: auto, or floats",
                option,
            )

    def tap(self, layers: tuple[int, ...]) -> None:
        """See :meth:`BaseTarget.tap`; tried out on one row."""
        super().tap(layers)
        try:
            self._pass(self._one_row())
        except InputError:
            super().tap(())
            raise

    def _one_row(self) -> Segment:
        first = torch.zeros(1, dtype=torch.long, device=self.device)
        return Segment(first, first, self.new_cache(1))

    @torch.inference_mode()
    def _pass(self, segment: Segment) -> tuple[Tensor, PassContext, Tensor | None]:
        check_ids(segment.tokens, self.vocab_size)
        context = PassContext(segment, self.backend)
        with self._one_by_one:  # weights that come and go are the pass's own
            made = self.body(
                input_ids=segment.tokens[None].to(self.device),
                position_ids=segment.positions[None].to(self.device),
                past_key_values=segment.cache,
                use_cache=True,
                tokenswift_pass=context,
                **({"output_hidden_states": True} if self.taps else {}),
            )
        features = None
        if self.taps:
            if len(made.hidden_states or ()) != self.layers + 1:
                kind = self.config.model_type
                raise InputError(
                    f"eagle is given, but the layers of a model of the kind {kind} cannot be tapped: its "
                    "forward in transformers does not give their states; valid: without eagle",
                    "eagle",
                )
            found = [made.hidden_states[layer][0].to(self.device).float() for layer in self.taps]
            features = torch.stack(found)
        return made.last_hidden_state[0].to(self.device), context, features

    def _run(self, segments: Sequence[Segment], keep: bool = True) -> list[Pass]:
        """Each segment by a pass of its own: transformers' forward takes one text."""
        made = [self._pass(segment) for segment in segments]
        return [Pass(hidden, context.queries, features) for hidden, context, features in made]

    @torch.inference_mode()
    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm: (n, D) → (n, D)."""
        with self._one_by_one:
            return self._final(hidden).to(self.device)

    def _project(self, normed: Tensor, rows: Any) -> Tensor:
        with self._one_by_one:
            logits = self.lm_head(normed) if rows is None else normed @ rows.T
        return shaped_logits(logits.to(self.device), self.config).float()

    def _gather(self, ids: Tensor) -> Tensor:
        weight = whole(self.lm_head)
        return weight[ids.to(weight.device)].to(self.device)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings: (n,) → (n, D)."""
        check_ids(tokens, self.vocab_size)
        with self._one_by_one:
            return self.body.embed_tokens(tokens).to(self.device)
