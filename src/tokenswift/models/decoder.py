"""The native decoder (`NativeTarget`).

A pass of the native decoder is the embedding, one call of the backend for all layers (fused
projections over packed weights, attention over our KV caches, norms and activations), the final
norm and the LM head. Hidden states are float32, rounded to the weights' type where they enter a
product. It runs `loader.families`; tests hold it against transformers' own forward. A target
keeps no state between passes, so threads may share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter

import torch
from torch import Tensor, nn

from tokenswift.config.loading import LoadConfig
from tokenswift.kernels.base import Backend
from tokenswift.kernels.batch import Batch, LayerFeatures, LayerPass, check_ids
from tokenswift.kernels.packed import Packed
from tokenswift.kernels.weights import LayerWeights, Shape, active_type
from tokenswift.kv.passes import Pass, Segment
from tokenswift.loader.family import GELU
from tokenswift.loader.layout import EMBEDDING, HEAD, NORM, Layout, layout_of
from tokenswift.loader.rotary import AngleTable, Rotary
from tokenswift.loader.weights import ModuleWeights
from tokenswift.models.base import BaseTarget, HeadRows
from tokenswift.models.key_types import TOKENS as KEY_TOKENS
from tokenswift.models.key_types import needs_wide_keys, score_errors
from tokenswift.models.packing import Packing, WeightSource, release_free_memory
from tokenswift.types import InputError, OnProgress

PREFILL_CHUNK = 512  # rows of a prefill pass; the bits do not depend on it


class NativeTarget(BaseTarget):
    """A Llama-like decoder of ours; switches of a `Family` make it one of the supported
    families.

    Args:
        source: the weights of a model's files; or a transformers causal LM that `fits.fits`, which
            stays as it is, while its weights are copied in packed form where necessary.
        backend: the backend that computes, on its device.
        rotary: the rotary position embedding.
        on_progress: called with the stage "pack", in layers.
    """

    prefill_chunk = PREFILL_CHUNK
    layout: Layout

    def __init__(
        self,
        source: WeightSource | nn.Module,
        backend: Backend,
        rotary: Rotary,
        on_progress: OnProgress | None = None,
    ) -> None:
        from_files = not isinstance(source, nn.Module)
        config, layout, dtype, read = _opened(source)
        self.layout = layout
        stand_in = torch.empty(1, 1, dtype=dtype, device=backend.device)
        head = stand_in.expand(layout.vocab_size, layout.hidden_size)
        super().__init__(config, head, rotary, backend)
        packing = Packing(read, layout, dtype, backend)
        self.head = packing.packed([HEAD])
        self.head_bias = packing.optional_vector("lm_head.bias")
        # as large as the head: packed while little else is in memory
        self._embedding = None if layout.tied else packing.packed_embedding()
        self._norm = packing.norm_weight(NORM) / layout.logits
        self._eps = layout.eps
        # as transformers rounds it
        self._scale = float(torch.tensor(layout.embedding, dtype=dtype))
        weights = _packed_layers(packing, layout.num_hidden_layers, on_progress)
        attending = [layer for layer in weights if layer.recurrent is None]
        self.windows = [layer.window or None for layer in attending]
        self.wide_keys = (False,) * len(attending)
        self.recurrence = layout.recurrence
        self._count_entries()
        self.copied_bytes = packing.copied_bytes
        del packing, read
        if from_files:
            release_free_memory()
        self.body = backend.body(self._shape(), weights)
        long = self.rotary.of_long()
        self._angles = AngleTable(self.rotary)
        self._long_angles = None if long is None else AngleTable(long)
        self._count_bytes(weights)

    def _count_bytes(self, weights: Sequence[LayerWeights]) -> None:
        """Count the bytes of the packed weights: all, those of experts, and those a row reads."""
        layer_bytes = sum(tensor.nbytes for layer in weights for tensor in layer.tensors())
        self.held_bytes = layer_bytes + self.head.nbytes
        self._expert_bytes = sum(
            weight.nbytes
            for layer in weights
            if layer.experts is not None
            for weight in layer.experts.packed()
        )
        self.weight_bytes = round(self.bytes_read(1))

    def bytes_read(self, rows: float) -> float:
        """See :meth:`BaseTarget.bytes_read`."""
        mixture = self.layout.mixture
        if mixture is None:
            return self.held_bytes
        left_out = (1 - mixture.used / mixture.experts) ** rows
        return self.held_bytes - left_out * self._expert_bytes

    # ---- passes ----------------------------------------------------------------------------------

    def _run(self, segments: Sequence[Segment], keep_queries: bool = True) -> list[Pass]:
        for segment in segments:
            segment.cache.make_room(len(segment.tokens))
        if not self.backend.on_host:  # an id out of range would end the process's use of the device
            for segment in segments:
                check_ids(segment.tokens, self.vocab_size)
        batch = self.backend.batch(segments, self.body.shape)
        layers = self.feature_layers
        states = self.embed(batch.tokens).float()
        cos, sin = self._angles_of(batch)
        features = None
        if layers:
            features = LayerFeatures(layers, states.new_empty(len(layers), *states.shape))
        layer_pass = LayerPass(
            batch=batch,
            states=states,
            cos=cos,
            sin=sin,
            keep_queries=keep_queries,
            features=features,
            query_scale=self._query_scale(batch),
        )
        queries = self.backend.layers(self.body, layer_pass)
        passes: list[Pass] = []
        for rows, segment_queries in zip(batch.rows(), queries, strict=True):
            row_features = None if features is None else features.states[:, rows]
            passes.append(Pass(states[rows], segment_queries, row_features))
        return passes

    def _angles_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all rows, each by the frequencies of its text."""
        cos, sin = self._angles.at(batch.positions)
        if self._long_angles is None:
            return cos, sin
        for rows, segment in zip(batch.rows(), batch.segments, strict=True):
            if segment.cache.is_long:
                cos[rows], sin[rows] = self._long_angles.at(batch.positions[rows])
        return cos, sin

    def _query_scale(self, batch: Batch) -> Tensor | None:
        scale = self.rotary.query_scale
        return None if scale is None else scale.at(batch.positions)

    @torch.inference_mode()
    def norm(self, hidden: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The final norm: (n, D) → (n, D), in ``dtype`` or the type in which products take
        states."""
        active = torch.float32 if self.int8 else self.body.shape.active
        return self.backend.norm(hidden, self._norm, self._eps, dtype or active)

    def _project(self, normed: Tensor, rows: HeadRows | None) -> Tensor:
        if rows is not None:
            if not isinstance(rows, Packed):
                raise TypeError("rows are of another target's head; valid: those of `head_rows`")
            return self.backend.draft_product(normed, rows)
        active = torch.int8 if self.int8 else None
        logits = self.backend.linear(normed, self.head, self.head_bias, active)
        cap = self.layout.logit_cap
        return logits if not cap else logits.div_(cap).tanh_().mul_(cap)

    def _head_rows(self, ids: Tensor) -> Packed:
        if self.int8 and self.head.panels:
            return self.head.select(ids)
        return self.backend.pack_for_drafts(self.backend.take(self.head, ids), self.int8)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings, scaled where the family does so: (n,) → (n, D)."""
        embedding = self.head if self._embedding is None else self._embedding
        if isinstance(embedding, Packed):
            states = self.backend.take(embedding, tokens)
        else:
            check_ids(tokens, len(embedding))
            states = embedding[tokens]
        return states if self._scale == 1 else states * self._scale

    # ---- weights ---------------------------------------------------------------------------------

    def _shape(self) -> Shape:
        """Sizes and switches of the layers, for the kernels."""
        layout = self.layout
        return Shape(
            layers=self.layers,
            hidden=self.hidden_size,
            inner=layout.intermediate_size,
            heads=layout.num_attention_heads,
            kv_heads=self.kv_heads,
            width=self.head_dim,
            weights=self.dtype,
            keys=self.kv_dtype,
            active=active_type(self.dtype),
            eps=layout.eps,
            scale=layout.scale,
            cap=layout.score_cap,
            residual=layout.residual,
            gelu=layout.family.activation == GELU,
            gate_limit=layout.gate_limit,
            gate_slope=layout.gate_slope,
            norm_all_heads=layout.family.head_norms == "projection",
            parallel=layout.family.parallel,
            mixture=layout.mixture,
            recurrence=layout.recurrence,
        )

    def compute_as(self, how: LoadConfig, name: str) -> None:
        """See :meth:`BaseTarget.compute_as`. With dtype "auto", int8 where the weights are
        quantized and the backend multiplies them; then keys and values, too, are whole numbers."""
        weights = self.body.weights
        is_quantized = self.head.stored and all(
            weight.stored for layer in weights for weight in layer.packed()
        )
        has_int8_keys = self.backend.has_int8_keys(self.head_dim)
        chooses_int8 = how.dtype == "auto" and is_quantized and has_int8_keys
        self.int8 = how.dtype == "int8" or chooses_int8
        if self.int8 and not is_quantized:
            raise InputError(
                "dtype is 'int8', but not all of the model's weights are quantized in a format "
                f"that the {self.backend.name} backend multiplies; valid: auto, float32, bfloat16, "
                "or on a CPU int8 with weights q8_0, q4_1 or q4_0 (quantized while loading), or "
                "with a GGUF file of such",
                "dtype",
            )
        active = torch.int8 if self.int8 else active_type(self.body.shape.weights)
        self.body = self.backend.body(replace(self.body.shape, active=active), weights)
        self._set_key_types(how)
        self.body = self.backend.body(replace(self.body.shape, keys=self.kv_dtype), weights)
        self._count_entries()

    def _set_key_types(self, how: LoadConfig) -> None:
        """Set the type of keys and values, and which layers' keys are of 16 bits.

        Raises:
            InputError: the backend keeps no such keys of heads of this width.
        """
        width = self.head_dim
        option_value = how.kv_cache_dtype
        self._set_wide_keys((False,) * len(self.windows))
        if option_value not in ("int8", "int16") and not (option_value == "auto" and self.int8):
            self.kv_dtype = how.keys or self.dtype
            return
        backend = self.backend
        has_keys = backend.has_wide_keys if option_value == "int16" else backend.has_int8_keys
        if not has_keys(width):
            option = "dtype" if option_value == "auto" else "kv_cache_dtype"
            raise InputError(
                f"{option} is {getattr(how, option)!r}, but the {self.backend.name} backend keeps "
                f"no keys of heads of width {width} as whole numbers; valid: auto, float32, "
                "bfloat16, or heads whose width is a multiple of 4 (up to 512 for int16) with "
                "compiled kernels on a CPU",
                option,
            )
        if option_value == "auto":
            wide = [needs_wide_keys(error) for error in self._score_errors()]
            if any(wide) and not self.backend.has_wide_keys(width):
                self.kv_dtype = torch.float32
                return
        else:
            wide = [option_value == "int16"] * len(self.windows)
        self.kv_dtype = torch.int8
        self._set_wide_keys(tuple(wide))

    @contextmanager
    def computing(self, how: LoadConfig) -> Iterator[None]:
        """Within it, passes compute as they would with other options, over caches that are made
        within it. Nothing else may use the model meanwhile."""
        int8 = self.int8
        kv_dtype = self.kv_dtype
        body = self.body
        wide_keys = self.wide_keys
        self.compute_as(how, "")
        try:
            yield
        finally:
            self.int8 = int8
            self.kv_dtype = kv_dtype
            self.body = body
            self._set_wide_keys(wide_keys)
            self._count_entries()

    def _set_wide_keys(self, wide_keys: tuple[bool, ...]) -> None:
        self.wide_keys = wide_keys
        attending = [layer for layer in self.body.weights if layer.recurrent is None]
        for layer, wide in zip(attending, wide_keys, strict=True):
            layer.wide_keys = wide

    def _score_errors(self) -> list[float]:
        """What keys in int8 would add to attention scores, by layer (`models.key_types`)."""
        body = self.body
        shape = replace(body.shape, keys=torch.float32)
        self.body = self.backend.body(shape, body.weights)
        cache = self.backend.new_cache(
            layers=len(self.windows),
            kv_heads=self.kv_heads,
            width=self.head_dim,
            capacity=KEY_TOKENS,
            dtype=torch.float32,
        )
        if self.recurrence is not None:
            layers = self.layers - len(self.windows)
            cache.states = self.backend.new_states(self.recurrence, layers)
        try:
            return score_errors(self, cache, shape.scale)
        finally:
            self.body = body


def _opened(
    source: WeightSource | nn.Module,
) -> tuple[object, Layout, torch.dtype, WeightSource | ModuleWeights]:
    """The config of a model, its layout, the type of its weights, and what reads them."""
    if not isinstance(source, nn.Module):
        return source.layout, source.layout, source.dtype, source
    config = attrgetter("config")(source)
    head: Tensor = attrgetter(HEAD)(source)
    layout = layout_of(config, head is attrgetter(EMBEDDING)(source))
    return config, layout, head.dtype, ModuleWeights(source, layout)


def _packed_layers(
    packing: Packing, count: int, on_progress: OnProgress | None
) -> list[LayerWeights]:
    """The packed weights of all layers; ``on_progress`` is called with the stage "pack"."""
    weights: list[LayerWeights] = []
    for number in range(count):
        weights.append(packing.layer(number))
        if on_progress is not None:
            on_progress("pack", len(weights), count)
    return weights
