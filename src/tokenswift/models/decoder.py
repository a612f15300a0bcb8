"""The target model: what all targets share (`BaseTarget`), and the native decoder (`NativeTarget`).

A pass of the native decoder is the embedding, one call of the backend for all layers (fused
projections over packed weights, attention over our KV caches, norms and activations), the final
norm and the LM head. Hidden states are float32, rounded to the weights' type where they enter a
product. It runs the families of `loader.config`; tests hold it against transformers' own forward. A
target keeps no state between passes, so threads may share it.
"""

from __future__ import annotations

import ctypes
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from tokenswift.config.loading import LoadConfig
from tokenswift.config.sampling import SamplingParams
from tokenswift.kernels.base import Backend, Taps, check_ids
from tokenswift.kernels.cpu.structs import TYPES
from tokenswift.kernels.weights import LayerWeights, Packed, Shape, Stored, active_type
from tokenswift.kv.cache import FullCache, KVCache, Tail, tail_room
from tokenswift.kv.memory import Arena
from tokenswift.kv.passes import FeatureStore, Pass, Segment
from tokenswift.kv.sparse import OBSERVED
from tokenswift.loader.config import activation_of
from tokenswift.loader.families import FAMILIES, GELU
from tokenswift.loader.gguf import straightened
from tokenswift.loader.layout import EMBEDDING, HEAD, NORM, Layout, head_width, layout_of
from tokenswift.loader.rope import AngleTable, Rotary
from tokenswift.loader.weights import ModuleWeights, Weights, unstored
from tokenswift.models.key_types import TOKENS as KEY_TOKENS
from tokenswift.models.key_types import needs_wide_keys, score_errors
from tokenswift.sampling.choice import Sampler
from tokenswift.sampling.penalties import NO_RULES, TextRules
from tokenswift.types import InputError, OnProgress

#: fused projections: those of the same input are one product
LINEARS = {
    "qkv": ("self_attn.q", "self_attn.k", "self_attn.v"),
    "out": ("self_attn.o",),
    "gate_up": ("mlp.gate", "mlp.up"),
    "down": ("mlp.down",),
}
PREFILL_CHUNK = 512  # rows of a prefill pass; the bits do not depend on it
#: bytes of packed weights after which freed memory is returned to the system while loading
RELEASE_EVERY = 1 << 25


class BaseTarget(ABC):
    """A model ready for prefill and tree passes: what native decoders and transformers' own models
    share.

    Args:
        config: the transformers config.
        head: the LM head's weight, (V, D), or a stand-in with its sizes, type and device.
        rotary: the rotary position embedding.
        backend: the backend that computes.

    Attributes:
        kv_dtype: type of keys and values.
        wide_keys: of each layer, whether its keys in int8 are in fact of 16 bits.
        layout: the model's architecture for the native decoder; None: transformers' own forward
            runs.
        windows: sliding window of each layer in tokens; None: the layer sees everything.
        feature_layers: layers whose input states a pass returns as features, for an EAGLE drafter
            (the number of layers stands for the last one's output).
        weight_bytes: bytes of weights that one pass reads.
        copied_bytes: bytes of packed copies of a given model's weights.
        kv_bytes: bytes of keys and values per cached token, without layers in a tail.
        tail_bytes: bytes per token of layers in a tail (`kv.Tail`), which holds `kv.tail_room`
            tokens.
        padding: rows of the LM head without a token, (m,), which are never chosen; None: none.
        int8: whether activations are quantized to int8 for products.
    """

    prefill_chunk: int  # rows of a prefill pass
    int8 = False
    layout: Layout | None = None
    feature_layers: tuple[int, ...] = ()
    padding: Tensor | None = None

    def __init__(self, config: Any, head: Tensor, rotary: Rotary, backend: Backend) -> None:
        self.config, self.rotary, self.backend = config, rotary, backend
        self.device, self.dtype = head.device, head.dtype
        self.kv_dtype = head.dtype
        self.vocab_size, self.hidden_size = head.shape
        self.layers: int = config.num_hidden_layers
        self.kv_heads: int = (
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        )
        self.head_dim = head_width(config)
        self.weight_bytes = self.copied_bytes = 0
        self.windows: list[int | None] = [None] * self.layers
        self.wide_keys: tuple[bool, ...] = (False,) * self.layers
        self._count_entries()
        self._rows: tuple[Tensor, Any] | None = None

    # ---- passes ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        parents: Sequence[int] | None = None,
    ) -> Pass:
        """Run n tokens of one sequence (see `kv.Segment`); their entries go to the cache's scratch
        rows."""
        return self._run([Segment(tokens, positions, cache, parents)])[0]

    @torch.inference_mode()
    def forward_all(self, segments: Sequence[Segment]) -> list[Pass]:
        """Run rows of several sequences in one pass. Each one's part equals that of its own
        :meth:`forward`, bit for bit where :attr:`equal_bits` holds."""
        return self._run(segments)

    @torch.inference_mode()
    def prefill(
        self,
        tokens: list[int],
        cache: FullCache,
        on_progress: OnProgress | None = None,
        is_last: bool = True,
        features: FeatureStore | None = None,
    ) -> Pass:
        """Run tokens of the prompt in chunks of :attr:`prefill_chunk`, and commit them.

        Returns the pass over the last chunk. At the end of a prompt, that chunk is its last
        `kv.OBSERVED` tokens, or all of fewer: their queries are kept, which take more memory than
            keys.

        Args:
            on_progress: called with the stage "prompt" and tokens, before the first chunk and after
                each.
            is_last: the prompt ends with these tokens; otherwise no queries are kept.
            features: keeps the features of all tokens.

        Raises:
            ValueError: no tokens.
        """
        if not tokens:
            raise ValueError("nothing to prefill")
        report, length = on_progress or (lambda *_: None), len(tokens)
        kept = (
            max(0, length - OBSERVED) if is_last else length
        )  # the first token whose queries are kept
        report("prompt", 0, length)
        for start, end in pairwise([*range(0, kept, self.prefill_chunk), kept, length]):
            if start == end:
                continue
            rows = torch.tensor(tokens[start:end])
            positions = torch.arange(cache.length, cache.length + len(rows))
            result = self._run([Segment(rows, positions, cache)], keep_queries=start == kept)[0]
            if features is not None and result.features is not None:
                features.take(cache.length, result.features)
            cache.commit(tuple(range(len(rows))))
            report("prompt", end, length)
        return result

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and LM head: (n, D) → (n, V), float32."""
        return self.project(self.norm(hidden))

    @torch.inference_mode()
    def project(self, normed: Tensor, rows: Any = None) -> Tensor:
        """The LM head alone: (n, D) → (n, V) float32, -inf for :attr:`padding`; with ``rows`` (see
        :meth:`head_rows`) → (n, m)."""
        logits = self._project(normed, rows)
        if rows is None and self.padding is not None:
            logits.index_fill_(1, self.padding, -torch.inf)
        return logits

    @abstractmethod
    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm: (n, D) → (n, D)."""

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings: (n,) → (n, D)."""

    def head_rows(self, ids: Tensor) -> Any:
        """The LM head's rows of some tokens, packed for :meth:`project`: a smaller head for
        drafting. The largest set so far is cached."""
        kept = self._rows
        if kept is not None and torch.equal(kept[0], ids):
            return kept[1]
        rows = self._head_rows(ids)
        if kept is None or len(ids) >= len(
            kept[0]
        ):  # the frequent tokens, rather than those of a prompt
            self._rows = (ids, rows)
        return rows

    @abstractmethod
    def _run(self, segments: Sequence[Segment], keep_queries: bool = True) -> list[Pass]:
        """One pass over rows of one or several sequences, with the rows' queries where they are to
        be kept."""

    @abstractmethod
    def _project(self, normed: Tensor, rows: Any) -> Tensor:
        """The LM head's product."""

    @abstractmethod
    def _head_rows(self, ids: Tensor) -> Any:
        """Rows of the LM head, packed for drafting."""

    # ---- caches, and the choice rule -------------------------------------------------------------

    def sampler(self, params: SamplingParams, rules: TextRules = NO_RULES) -> Sampler:
        """The choice rule of one generation; ``rules``: what penalties need to know about it."""
        ranker = self.backend.ranker(params)
        return Sampler(params, self.vocab_size, self.device, ranker, self.backend.on_host, rules)

    def new_cache(self, capacity: int, whole: bool = False) -> FullCache:
        """An empty full cache for ``capacity`` tokens, scratch rows included. Layers with sliding
        windows keep their newest entries alone, in the cache's tail, unless ``whole``."""
        keeps = whole or self.layout is None or not self.backend.on_host
        windowed = 0 if keeps else self.layers - self.windows.count(None)  # layers in the tail
        if not windowed:
            return self._new_cache(capacity, self.wide_keys)
        layers = list(zip(self.wide_keys, self.windows, strict=True))
        cache = self._new_cache(capacity, [wide for wide, window in layers if window is None])
        wide_in_tail = [wide for wide, window in layers if window is not None]
        tail = self._new_cache(tail_room(self.windows, capacity), wide_in_tail)
        cache.tail = Tail(tail.entries, self.windows)
        return cache

    def _new_cache(self, capacity: int, wide_keys: Sequence[bool]) -> FullCache:
        """An empty cache for some of the layers."""
        sizes = (len(wide_keys), self.kv_heads, self.head_dim, capacity)
        return self.backend.new_cache(*sizes, self.kv_dtype, wide_keys)

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of so many tokens."""
        return tokens * self.kv_bytes + tail_room(self.windows, tokens) * self.tail_bytes

    def _count_entries(self) -> None:
        made, page = self.new_cache(16), 16
        self.kv_bytes = made.data.nbytes // page
        self.tail_bytes = made.nbytes // page - self.kv_bytes

    def check_room(self, tokens: int) -> None:
        """Check that the model has positions for so many tokens.

        Raises:
            InputError: it does not.
        """
        limit = self.rotary.limit
        if limit is not None and tokens > limit:
            raise InputError(
                f"prompt and new tokens are {tokens} tokens; valid: up to the model's {limit} "
                f"positions, "
                f"or more with rope_scaling yarn"
            )

    # ---- types, bits and other properties --------------------------------------------------------

    @abstractmethod
    def compute_as(self, how: LoadConfig, name: str) -> None:
        """Set the types of activations, keys and values to those of ``how``; called once, before
        any cache is used.

        Args:
            how: the options of loading.
            name: the model's name, for messages.
        Raises:
            InputError: the model or its backend does not support them.
        """

    @property
    def computes(self) -> str:
        """The type of computation, e.g. "float32"; "int8" where both products and attention use
        it."""
        all_int8 = self.int8 and self.kv_dtype == torch.int8
        return "int8" if all_int8 else str(self.dtype).removeprefix("torch.")

    def identity(self) -> dict[str, str]:
        """The types that decide the tokens, besides the weights': part of a run's identity."""
        types: dict[str, str] = {}
        if self.computes == "int8":
            types["dtype"] = "int8"
        else:
            if self.int8:
                types["activations"] = "int8"
            if self.kv_dtype != self.dtype:
                types["kv_cache_dtype"] = str(self.kv_dtype).removeprefix("torch.")
        if self.kv_dtype == torch.int8:
            types["int16_keys"] = ",".join(map(str, self.wide_layers)) or "none"
        return types

    @property
    def wide_layers(self) -> list[int]:
        """The layers whose keys are of 16 bits."""
        return [layer for layer, wide in enumerate(self.wide_keys) if wide]

    @property
    def equal_bits(self) -> bool:
        """Whether a row's bits depend on its own context alone, not on the other rows of its
        pass."""
        return self.layout is not None and self.backend.equal_bits

    @property
    def prefill_keeps_bits(self) -> bool:
        """Whether this holds in prefill too, however the prompt is cut into passes."""
        return self.equal_bits and self.backend.prefill_keeps_bits

    def numerics(self) -> dict[str, Any]:
        """How passes are computed, for journals: backend, processor, and whether bits are
        reproducible."""
        backend, native = self.backend, self.layout is not None
        how = "torch" if backend.build is None else "compiled kernels"
        made = {} if backend.build is None else {"compiler": backend.build}
        return {
            "equal_bits": self.equal_bits,
            "how": how if native else f"transformers' own forward, attention by {how}",
            "device": self.backend.kind,
            "processor": hashlib.sha256(self.backend.processor().encode()).hexdigest()[:16],
            **made,
        }

    def set_feature_layers(self, layers: tuple[int, ...]) -> None:
        """Set :attr:`feature_layers`.

        Raises:
            InputError: the model's forward cannot return them.
        """
        self.feature_layers = layers


class NativeTarget(BaseTarget):
    """A Llama-like decoder of ours; switches of `loader.config.Family` make it one of the supported
    families.

    Args:
        source: the weights of a model's files; or a transformers causal LM that :func:`fits`, which
            stays as it is, while its weights are copied in packed form where necessary.
        backend: the backend that computes, on its device.
        rotary: the rotary position embedding.
        on_progress: called with the stage "pack", in layers.
    """

    prefill_chunk = PREFILL_CHUNK
    layout: Layout

    def __init__(
        self, source: Any, backend: Backend, rotary: Rotary, on_progress: OnProgress | None = None
    ) -> None:
        files: bool = not isinstance(source, nn.Module)
        if files:
            self._weights: Weights | ModuleWeights = source
        else:
            head, embedded = attrgetter(HEAD, EMBEDDING)(source)
            self._weights = ModuleWeights(source, layout_of(source.config, head is embedded))
        self.layout = layout = self._weights.layout
        dtype: Any = source.dtype if files else attrgetter(HEAD)(source).dtype
        stand_in = torch.empty(1, 1, dtype=dtype, device=backend.device)
        head = stand_in.expand(layout.vocab_size, layout.hidden_size)
        super().__init__(layout if files else source.config, head, rotary, backend)
        self._arena, self._to_release = Arena(), 0
        self.head = self._packed([HEAD])
        self.head_bias = self._vector(self._optional("lm_head.bias"))
        self._embedding: Tensor | Packed | None = None
        if not layout.tied:  # as large as the head: packed while little else is in memory
            embedding = self._weight(EMBEDDING)
            if isinstance(embedding, Stored):
                self._embedding = backend.pack(embedding, self.dtype, self._arena)
            else:
                self._embedding = embedding.to(self.device, copy=files)
            del embedding  # with its part of the file
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
        del self._weights, self._arena, self._to_release
        if files:
            release_free_memory()
        sizes = (self.layers, self.hidden_size, layout.intermediate_size)
        heads = (layout.num_attention_heads, self.kv_heads, self.head_dim)
        types = (self.dtype, self.kv_dtype, active_type(self.dtype))
        gelu, whole_norms = (
            layout.family.activation == GELU,
            layout.family.head_norms == "projection",
        )
        switches = (layout.score_cap, layout.residual, gelu, whole_norms, layout.family.parallel)
        shape = Shape(*sizes, *heads, *types, layout.eps, layout.scale, *switches)
        self.body: Any = backend.body(shape, weights)
        self._angles = AngleTable(rotary)
        layer_bytes = sum(t.numel() * t.element_size() for w in weights for t in w.tensors())
        self.weight_bytes = layer_bytes + self.head.nbytes

    # ---- passes ----------------------------------------------------------------------------------

    def _run(self, segments: Sequence[Segment], keep_queries: bool = True) -> list[Pass]:
        for segment in segments:
            segment.cache.make_room(len(segment.tokens))
        if not self.backend.on_host:  # an id out of range would end the process's use of the device
            for segment in segments:
                check_ids(segment.tokens, self.vocab_size)
        batch, layers = self.backend.batch(segments, self.body.shape), self.feature_layers
        states = self.embed(batch.tokens).float()
        cos, sin = self._angles.at(batch.positions)
        taps = Taps(layers, states.new_empty(len(layers), *states.shape)) if layers else None
        queries = self.backend.layers(self.body, states, cos, sin, batch, keep_queries, taps)
        found = zip(batch.rows(), queries, strict=True)
        return [Pass(states[rows], own, taps and taps.states[:, rows]) for rows, own in found]

    @torch.inference_mode()
    def norm(self, hidden: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The final norm: (n, D) → (n, D), in ``dtype`` or the type in which products take
        states."""
        active = torch.float32 if self.int8 else self.body.shape.active
        return self.backend.norm(hidden, self._norm, self._eps, dtype or active)

    def _project(self, normed: Tensor, rows: Any) -> Tensor:
        if rows is not None:
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
            found = self.backend.take(embedding, tokens)
        else:
            check_ids(tokens, len(embedding))
            found = embedding[tokens]
        return found if self._scale == 1 else found * self._scale

    # ---- weights ---------------------------------------------------------------------------------

    def _weight(self, name: str) -> Tensor | Stored:
        """A weight by its name, as the files or the model hold it."""
        found = self._optional(name)
        if found is None:
            raise InputError(f"the model has no weight {name}")
        return found

    def _optional(self, name: str) -> Tensor | Stored | None:
        """A weight or bias, or None; rows of queries and keys in the order in which the kernels
        rotate them."""
        found, part = self._weights.get(name), name.split(".")[-2]
        heads = {
            "q_proj": self.layout.num_attention_heads,
            "k_proj": self.layout.num_key_value_heads,
        }
        if found is None or part not in heads or not self.layout.family.neighbours:
            return found
        return straightened(found, heads[part])

    def _norm_weight(self, name: str | None) -> Any:
        """A norm's weight for the kernels; None where the family has none."""
        if name is None:
            return None
        made = self._vector(self._weight(name))
        return made + 1 if self.layout.family.plus_one else made

    def _vector(self, found: Tensor | Stored | None) -> Any:
        """A copy of a vector for the kernels, float32; None for None."""
        if found is None:
            return None
        made = unstored(found, torch.float32).detach()
        return made.to(self.device, torch.float32, copy=True).contiguous()

    def _packed(self, names: list[str]) -> Packed:
        """Weights of the same input, packed one below the other for the kernels; counts copied
        bytes."""
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
        self._to_release += sum(weight.nbytes for weight in made.packed())
        if not self._weights.copies and self._to_release >= RELEASE_EVERY:
            release_free_memory()
            self._to_release = 0
        return made

    def _fused(self, linears: list[str]) -> tuple[Packed, Tensor | None]:
        """One packed weight, and bias, for projections of the same input."""
        weights, bias = [f"{name}.weight" for name in linears], None
        found = [self._vector(self._optional(f"{name}.bias")) for name in linears]
        if any(part is not None for part in found):
            sizes = [len(self._weight(name)) for name in weights]
            pairs = zip(found, sizes, strict=True)  # zeros for those without a bias
            bias = torch.cat(
                [self._norm.new_zeros(size) if part is None else part for part, size in pairs]
            )
        return self._packed(weights), bias

    def compute_as(self, how: LoadConfig, name: str) -> None:
        """See :meth:`BaseTarget.compute_as`. With dtype "auto", int8 where the weights are
        quantized and the backend multiplies them; then keys and values, too, are whole numbers."""
        weights = self.body.weights
        stored = all(
            each.stored for each in (self.head, *(w for layer in weights for w in layer.packed()))
        )
        whole_keys = self.backend.has_int8_keys(self.head_dim)
        self.int8 = how.dtype == "int8" or (how.dtype == "auto" and stored and whole_keys)
        if self.int8 and not stored:
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
        asked = how.kv_cache_dtype
        whole = asked in ("int8", "int16") or (asked == "auto" and self.int8)
        self._set_wide_keys((False,) * self.layers)
        if not whole:
            self.kv_dtype = how.keys or self.dtype
            return
        kept = self.backend.has_wide_keys if asked == "int16" else self.backend.has_int8_keys
        if not kept(width):
            option = "dtype" if asked == "auto" else "kv_cache_dtype"
            raise InputError(
                f"{option} is {getattr(how, option)!r}, but the {self.backend.name} backend keeps "
                f"no keys of heads of width {width} as whole numbers; valid: auto, float32, "
                "bfloat16, or heads whose width is a multiple of 4 (up to 512 for int16) with "
                "compiled kernels on a CPU",
                option,
            )
        if asked == "auto":
            wide = [needs_wide_keys(error) for error in self._score_errors()]
            if any(wide) and not self.backend.has_wide_keys(width):
                self.kv_dtype = torch.float32
                return
        else:
            wide = [asked == "int16"] * self.layers
        self.kv_dtype = torch.int8
        self._set_wide_keys(tuple(wide))

    @contextmanager
    def computing(self, how: LoadConfig) -> Iterator[None]:
        """Within it, passes compute as they would with other options, over caches that are made
        within it. Nothing else may use the model meanwhile."""
        wide_keys = self.wide_keys
        before = (self.int8, self.kv_dtype, self.body)
        self.compute_as(how, "")
        try:
            yield
        finally:
            self.int8, self.kv_dtype, self.body = before
            self._set_wide_keys(wide_keys)
            self._count_entries()

    def _set_wide_keys(self, wide_keys: tuple[bool, ...]) -> None:
        self.wide_keys = wide_keys
        for layer, wide in zip(self.body.weights, wide_keys, strict=True):
            layer.wide_keys = wide

    def _score_errors(self) -> list[float]:
        """What keys in int8 would add to attention scores, by layer (`models.key_types`)."""
        body = self.body
        shape = replace(body.shape, keys=torch.float32)
        self.body = self.backend.body(shape, body.weights)
        sizes = (self.layers, self.kv_heads, self.head_dim, KEY_TOKENS)
        cache = self.backend.new_cache(*sizes, torch.float32)
        try:
            return score_errors(self, cache, shape.scale)
        finally:
            self.body = body


def fits(model: Any) -> bool:
    """Whether the native decoder can run a transformers causal LM: its modules are plain layers of
    one type, as its config says."""
    config, head = model.config, model.lm_head
    if config.model_type not in FAMILIES or getattr(config, "use_bidirectional_attention", None):
        return False
    layout, layers = layout_of(config), model.model.layers
    names = [name for part in LINEARS.values() for name in part]
    linears = [head, *(attrgetter(f"{name}_proj")(layer) for layer in layers for name in names)]
    norms = [
        getattr(layer, name) for layer in layers for name in layout.family.norms if name is not None
    ]
    turns = [
        tensor
        for name, tensor in model.model.rotary_emb.named_buffers()
        if name.endswith("inv_freq")
    ]
    return (
        activation_of(config) == layout.family.activation
        and all(type(linear) is nn.Linear and linear.in_features % 2 == 0 for linear in linears)
        and {linear.weight.dtype for linear in linears} <= {head.weight.dtype} & TYPES.keys()
        and isinstance(model.model.embed_tokens, nn.Embedding)
        and head.out_features == layout.vocab_size
        and all(
            getattr(norm, "variance_epsilon", getattr(norm, "eps", 0)) == layout.eps
            for norm in norms
        )
        and all(layer.self_attn.scaling == layout.scale for layer in layers)
        and {2 * len(frequencies) for frequencies in turns} == {head_width(config)}
    )


def release_free_memory() -> None:
    """Let the C library give freed memory back to the system, where it can (glibc keeps much of
    it)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
