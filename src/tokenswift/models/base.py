"""What all target models share: `BaseTarget`."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, TypedDict

import torch
from torch import Tensor

from tokenswift.config.loading import LoadConfig
from tokenswift.config.sampling import SamplingParams
from tokenswift.kernels.base import Backend
from tokenswift.kernels.packed import Packed
from tokenswift.kv.cache import FullCache, KVCache, Tail, tail_room
from tokenswift.kv.passes import FeatureStore, Pass, Segment
from tokenswift.kv.sparse import OBSERVED
from tokenswift.kv.states import Recurrence, States
from tokenswift.loader.layout import Layout, head_width
from tokenswift.loader.rotary import Rotary
from tokenswift.sampling.sampler import Sampler
from tokenswift.sampling.text_rules import NO_RULES, TextRules
from tokenswift.types import InputError, OnProgress


class ComputeIdentity(TypedDict, total=False):
    """The types that decide the tokens, besides the weights'; what is as usual is left out."""

    dtype: str
    activations: str
    kv_cache_dtype: str
    int16_keys: str


#: told of the rows of a prompt: the position of the first, and their hidden states (n, D)
OnHidden: TypeAlias = Callable[[int, Tensor], None]
#: rows of an LM head, packed for drafting by the target that they are of
HeadRows: TypeAlias = Packed | Tensor


class CachedRows(NamedTuple):
    """Rows of an LM head and the tokens that they are of."""

    ids: Tensor
    rows: HeadRows


class BaseTarget(ABC):
    """A model ready for prefill and tree passes: what native decoders and transformers' own models
    share.

    Args:
        config: the config: transformers', whose fields go by the family, or a `Layout`.
        head: the LM head's weight, (V, D), or a stand-in with its sizes, type and device.
        rotary: the rotary position embedding.
        backend: the backend that computes.

    Attributes:
        kv_dtype: type of keys and values.
        wide_keys: of each layer that attends, whether its keys in int8 are in fact of 16 bits.
        layout: the model's architecture for the native decoder; None: transformers' own forward
            runs.
        windows: sliding window of each layer that attends, in tokens; None: it sees everything.
        recurrence: sizes of layers that are recurrent, and keep a state rather than entries; None:
            there are none.
        feature_layers: layers whose input states a pass returns as features, for an EAGLE drafter
            (the number of layers stands for the last one's output).
        weight_bytes: bytes of weights that a pass over one row reads.
        held_bytes: bytes of all weights of its layers and LM head; those of a mixture of experts
            are more than a pass reads.
        copied_bytes: bytes of packed copies of a given model's weights.
        kv_bytes: bytes of keys and values per cached token, without layers in a tail.
        tail_bytes: bytes per token of layers in a tail (`Tail`), which holds `tail_room`
            tokens.
        state_bytes: bytes of the states of recurrent layers, whatever the text's length.
        padding: rows of the LM head without a token, (m,), which are never chosen; None: none.
        int8: whether activations are quantized to int8 for products.
    """

    prefill_chunk: int  # rows of a prefill pass
    int8 = False
    layout: Layout | None = None
    feature_layers: tuple[int, ...] = ()
    padding: Tensor | None = None
    recurrence: Recurrence | None = None
    state_bytes = 0

    def __init__(self, config: Any, head: Tensor, rotary: Rotary, backend: Backend) -> None:
        self.config = config
        self.rotary = rotary.to(backend.device)
        self.backend = backend
        self.device = head.device
        self.dtype = head.dtype
        self.kv_dtype = head.dtype
        self.vocab_size, self.hidden_size = head.shape
        self.layers: int = config.num_hidden_layers
        kv_heads: int | None = getattr(config, "num_key_value_heads", None)
        self.kv_heads = kv_heads or config.num_attention_heads
        self.head_dim = head_width(config)
        self.weight_bytes = 0
        self.held_bytes = 0
        self.copied_bytes = 0
        self.windows: list[int | None] = [None] * self.layers
        self.wide_keys: tuple[bool, ...] = (False,) * self.layers
        self._count_entries()
        self._cached_rows: CachedRows | None = None

    def bytes_read(self, rows: float) -> float:
        """Bytes of weights that a pass over so many rows is expected to read: of a mixture of
        experts more the more rows there are, as if each row's were chosen by lot."""
        return self.weight_bytes

    # ---- passes ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        parents: Sequence[int] | None = None,
    ) -> Pass:
        """Run n tokens of one sequence (see `Segment`); their entries go to the cache's scratch
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
        on_hidden: OnHidden | None = None,
    ) -> Pass:
        """Run tokens of the prompt in chunks of :attr:`prefill_chunk`, and commit them.

        Returns the pass over the last chunk. At the end of a prompt, that chunk is its last
        `OBSERVED` tokens, or all of fewer: their queries are kept, which take more memory than
        keys.

        Args:
            on_progress: called with the stage "prompt" and tokens, before the first chunk and after
                each.
            is_last: the prompt ends with these tokens; otherwise no queries are kept.
            features: keeps the features of all tokens.
            on_hidden: called after each chunk with the position of its first token, and the hidden
                states of its rows.

        Raises:
            ValueError: no tokens.
        """
        if not tokens:
            raise ValueError("nothing to prefill")
        report = on_progress or (lambda *_: None)
        length = len(tokens)
        observed_start = max(0, length - OBSERVED) if is_last else length
        report("prompt", 0, length)
        borders = [*range(0, observed_start, self.prefill_chunk), observed_start, length]
        for start, end in pairwise(borders):
            if start == end:
                continue
            rows = torch.tensor(tokens[start:end])
            positions = torch.arange(cache.length, cache.length + len(rows))
            segment = Segment(rows, positions, cache)
            result = self._run([segment], keep_queries=start == observed_start)[0]
            if features is not None and result.features is not None:
                features.take(cache.length, result.features)
            if on_hidden is not None:
                on_hidden(cache.length, result.hidden)
            cache.commit(tuple(range(len(rows))))
            cache.mark()
            report("prompt", end, length)
        return result

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and LM head: (n, D) → (n, V), float32."""
        return self.project(self.norm(hidden))

    @torch.inference_mode()
    def project(self, normed: Tensor, rows: HeadRows | None = None) -> Tensor:
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

    def head_rows(self, ids: Tensor) -> HeadRows:
        """The LM head's rows of some tokens, packed for :meth:`project`: a smaller head for
        drafting. The largest set so far is cached."""
        cached = self._cached_rows
        if cached is not None and torch.equal(cached.ids, ids):
            return cached.rows
        rows = self._head_rows(ids)
        # the frequent tokens, rather than those of a prompt
        if cached is None or len(ids) >= len(cached.ids):
            self._cached_rows = CachedRows(ids, rows)
        return rows

    @abstractmethod
    def _run(self, segments: Sequence[Segment], keep_queries: bool = True) -> list[Pass]:
        """One pass over rows of one or several sequences, with the rows' queries where they are to
        be kept."""

    @abstractmethod
    def _project(self, normed: Tensor, rows: HeadRows | None) -> Tensor:
        """The LM head's product."""

    @abstractmethod
    def _head_rows(self, ids: Tensor) -> HeadRows:
        """Rows of the LM head, packed for drafting."""

    # ---- caches, and the choice rule -------------------------------------------------------------

    def sampler(self, params: SamplingParams, rules: TextRules = NO_RULES) -> Sampler:
        """The choice rule of one generation; ``rules``: what penalties need to know about it."""
        ranker = self.backend.ranker(params)
        return Sampler(params, self.vocab_size, self.device, ranker, self.backend.on_host, rules)

    def new_cache(self, capacity: int, keep_all: bool = False, is_long: bool = False) -> FullCache:
        """An empty full cache.

        Args:
            capacity: tokens that it holds, scratch rows included.
            keep_all: layers with sliding windows keep all entries; otherwise their newest ones
                alone, in the cache's tail.
            is_long: of a text with the frequencies of long texts (`Rotary.is_long`).
        """
        cache = self._cache_with_tail(capacity, keep_all)
        cache.is_long = is_long
        if self.recurrence is not None:
            layers = self.layers - len(self.windows)
            cache.states = self.backend.new_states(self.recurrence, layers)
        return cache

    def _cache_with_tail(self, capacity: int, keep_all: bool) -> FullCache:
        keeps = keep_all or self.layout is None or not self.backend.on_host
        windowed = 0 if keeps else len(self.windows) - self.windows.count(None)  # in the tail
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
        return self.backend.new_cache(
            layers=len(wide_keys),
            kv_heads=self.kv_heads,
            width=self.head_dim,
            capacity=capacity,
            dtype=self.kv_dtype,
            wide_keys=wide_keys,
        )

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of so many tokens, and of states."""
        tail_bytes = tail_room(self.windows, tokens) * self.tail_bytes
        return tokens * self.kv_bytes + tail_bytes + self.state_bytes

    def _count_entries(self) -> None:
        page = 16
        cache = self._cache_with_tail(page, keep_all=False)
        self.kv_bytes = cache.data.nbytes // page
        self.tail_bytes = cache.nbytes // page - self.kv_bytes
        if self.recurrence is not None:
            self.state_bytes = States.most_bytes(self.recurrence, self.layers - len(self.windows))

    def check_room(self, tokens: int) -> None:
        """Check that the model has positions for so many tokens.

        Raises:
            InputError: it does not.
        """
        limit = self.rotary.limit
        if limit is not None and tokens > limit:
            raise InputError(
                f"prompt and new tokens are {tokens} tokens; valid: up to the model's {limit} "
                "positions, or more with rope_scaling yarn"
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

    def identity(self) -> ComputeIdentity:
        """The types that decide the tokens, besides the weights': part of a run's identity."""
        types = ComputeIdentity()
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

    def numerics(self) -> dict[str, bool | int | float | str | None]:
        """How passes are computed, for journals: backend, processor, and whether bits are
        reproducible."""
        backend = self.backend
        kernels = "torch" if backend.build is None else "compiled kernels"
        if self.layout is None:
            kernels = f"transformers' own forward, attention by {kernels}"
        numerics: dict[str, bool | int | float | str | None] = {
            "equal_bits": self.equal_bits,
            "how": kernels,
            "device": backend.kind,
            "processor": hashlib.sha256(backend.processor().encode()).hexdigest()[:16],
        }
        if backend.build is not None:
            numerics["compiler"] = backend.build
        return numerics

    def set_feature_layers(self, layers: tuple[int, ...]) -> None:
        """Set :attr:`feature_layers`.

        Raises:
            InputError: the model's forward cannot return them.
        """
        self.feature_layers = layers
