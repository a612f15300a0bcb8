"""Any causal LM through transformers' own forward, with our attention and KV caches.

It runs a copy of the model's modules over the same tensors, with a config of its own. The user's
object is not changed, and passes share only the weights, so threads may run them at the same time.
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

from tokenswift.config.loading import LoadConfig
from tokenswift.kernels.attention import AttentionContext, Masks
from tokenswift.kernels.base import Backend
from tokenswift.kernels.batch import check_ids
from tokenswift.kernels.packed import Packed
from tokenswift.kv.passes import Pass, Segment
from tokenswift.loader.errors import refused_as
from tokenswift.loader.families import FAMILIES
from tokenswift.loader.identity import load_parameter
from tokenswift.loader.rotary import Rotary
from tokenswift.models.base import BaseTarget, HeadRows
from tokenswift.models.shaped import shaped_logits
from tokenswift.types import InputError

NAME = "tokenswift"


@dataclass(slots=True)
class PassContext:
    """State of a pass, which transformers hands to the attention function of each layer.

    Attributes:
        segment: the rows and their cache.
        backend: the backend that computes attention.
        queries: filled with the rotated queries of each layer (H, n, d).
        windows: filled with the sliding window of each layer.
        masks: masks of attention that layers share.
    """

    segment: Segment
    backend: Backend
    queries: list[Tensor] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)
    masks: Masks = field(default_factory=dict)


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
        softcap: cap of the scores (Gemma 2).
        s_aux: score of a sink for each head (gpt-oss).
    Raises:
        ValueError: when called without a pass context, that is, not through `models.generic`.
    """
    if tokenswift_pass is None:
        raise ValueError(f"attention {NAME!r} works only under tokenswift's decode loop")
    context = tokenswift_pass
    backend = context.backend
    layer = len(context.queries)
    rows = query[0].to(backend.device)  # a layer may lie on another device
    context.queries.append(rows)
    context.windows.append(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    cache = context.segment.cache
    window = (sliding_window or 0) if cache.ordered else 0
    sinks = None if s_aux is None else s_aux.to(backend.device)
    out = backend.attend(
        rows,
        AttentionContext(
            layer=layer,
            cache=cache,
            parents=context.segment.parents,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            masks=context.masks,
        ),
    )
    return out.to(query.device, query.dtype)[None], None


AttentionInterface.register(NAME, attention)


def hooks_of(model: nn.Module) -> Iterator[object]:
    """accelerate's hooks in a model, which move inputs and offloaded weights to a layer's
    device."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        if hook is not None:
            yield hook


def device_of(module: nn.Module) -> torch.device:
    """The device that a module computes on."""
    for hook in hooks_of(module):
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return next(module.parameters()).device


#: names of the final norm in transformers' models
NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


def shared_copy(model: Any, rotary: Rotary) -> Any:
    """Copy a causal LM over the same tensors, in evaluation mode, with the position embedding
    ``rotary``.

    Raises:
        InputError: the modules cannot be copied.
    """
    shared: dict[int, object] = {
        id(part): part for part in (*model.parameters(), *model.buffers(), *hooks_of(model))
    }
    with refused_as(f"model {type(model).__name__} cannot be copied", "plain modules"):
        copied = copy.deepcopy(model, shared)
    if rotary.config is not model.config:
        body = copied.model
        config = copy.deepcopy(rotary.config)
        for module in copied.modules():
            if getattr(module, "config", None) is not None:
                module.config = config
        body.rotary_emb = type(body.rotary_emb)(config=config).to(body.rotary_emb.inv_freq.device)
    return copied.eval()


class GenericTarget(BaseTarget):
    """A loaded transformers model as a target.

    Args:
        model: a causal LM whose attention uses transformers' attention interface; its layers may be
            on several devices.
        backend: the backend that computes attention.
        rotary: the rotary position embedding.

    Raises:
        InputError: the model is not built like transformers' decoders.
    """

    prefill_chunk = 256

    def __init__(self, model: Any, backend: Backend, rotary: Rotary) -> None:
        kind = model.config.model_type
        if kind in FAMILIES and FAMILIES[kind].recurrent:
            raise InputError(
                f"model type is {kind!r}, whose recurrent layers run in the native decoder alone; "
                "valid: a model that stands on one device whole, with plain modules of one type"
            )
        norm = next((name for name in NORMS if hasattr(model.model, name)), None)
        if norm is None:
            raise InputError(f"model type is {kind!r}; valid: with a final norm in its body")
        copied = shared_copy(model, rotary)
        super().__init__(copied.config, copied.lm_head.weight, rotary, backend)
        self.device = device_of(copied.lm_head)
        offloaded = any(getattr(hook, "offload", False) for hook in hooks_of(model))
        self._one_by_one = Lock() if offloaded else nullcontext()
        self.config._attn_implementation = NAME
        self.body = copied.model
        self.lm_head = copied.lm_head
        self._final = getattr(self.body, norm)
        setattr(self.body, norm, nn.Identity())  # a pass ends with the states before the final norm
        weights = (*self.body.layers.parameters(), self.lm_head.weight)
        self.held_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
        self.weight_bytes = self.held_bytes
        self.windows = self._pass(self._one_row())[1].windows

    def compute_as(self, how: LoadConfig, name: str) -> None:
        """See :meth:`BaseTarget.compute_as`: a transformers model computes in floats alone."""
        option = "dtype" if how.dtype == "int8" else "kv_cache_dtype" if how.keys else None
        if option:
            raise InputError(
                f"{option} is {getattr(how, option)!r}, but {name} runs through transformers' "
                f"own model, in "
                "floats alone; valid: auto, or floats",
                option,
            )

    def set_feature_layers(self, layers: tuple[int, ...]) -> None:
        """See :meth:`BaseTarget.set_feature_layers`; checked by a pass over one row."""
        super().set_feature_layers(layers)
        try:
            self._pass(self._one_row())
        except InputError:
            super().set_feature_layers(())
            raise

    def _one_row(self) -> Segment:
        first = torch.zeros(1, dtype=torch.long, device=self.device)
        return Segment(first, first, self.new_cache(1))

    @torch.inference_mode()
    def _pass(self, segment: Segment) -> tuple[Tensor, PassContext, Tensor | None]:
        check_ids(segment.tokens, self.vocab_size)
        context = PassContext(segment, self.backend)
        with self._one_by_one:  # offloaded weights are loaded for one pass at a time
            output = self.body(
                input_ids=segment.tokens[None].to(self.device),
                position_ids=segment.positions[None].to(self.device),
                past_key_values=segment.cache,
                use_cache=True,
                tokenswift_pass=context,
                **({"output_hidden_states": True} if self.feature_layers else {}),
            )
        features = None
        if self.feature_layers:
            if len(output.hidden_states or ()) != self.layers + 1:
                kind = self.config.model_type
                raise InputError(
                    f"eagle is given, but the layers of a model of the kind {kind} cannot be "
                    "tapped: its forward in transformers does not give their states; valid: "
                    "without eagle",
                    "eagle",
                )
            states = [
                output.hidden_states[layer][0].to(self.device).float()
                for layer in self.feature_layers
            ]
            features = torch.stack(states)
        return output.last_hidden_state[0].to(self.device), context, features

    def _run(self, segments: Sequence[Segment], keep_queries: bool = True) -> list[Pass]:
        """One pass for each segment: transformers' forward takes one sequence."""
        passes: list[Pass] = []
        for segment in segments:
            hidden, context, features = self._pass(segment)
            passes.append(Pass(hidden, context.queries, features))
        return passes

    @torch.inference_mode()
    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm: (n, D) → (n, D)."""
        with self._one_by_one:
            return self._final(hidden).to(self.device)

    def _project(self, normed: Tensor, rows: HeadRows | None) -> Tensor:
        if isinstance(rows, Packed):
            raise TypeError("rows are of another target's head; valid: those of `head_rows`")
        with self._one_by_one:
            logits = self.lm_head(normed) if rows is None else normed @ rows.T
        return shaped_logits(logits.to(self.device), self.config).float()

    def _head_rows(self, ids: Tensor) -> Tensor:
        weight = load_parameter(self.lm_head)
        return weight[ids.to(weight.device)].to(self.device)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings: (n,) → (n, D)."""
        check_ids(tokens, self.vocab_size)
        with self._one_by_one:
            return self.body.embed_tokens(tokens).to(self.device)
