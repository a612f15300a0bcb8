"""What both kinds of target share: sizes, caches, the prompt's way in, the LM head's rows."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tokenswift.config import LoadConfig, SamplingParams
from tokenswift.kernels.base import Backend
from tokenswift.kv import FeatureStore, KVCache, Pass, Segment
from tokenswift.kv.full import FullCache, Tail, tail_room
from tokenswift.kv.select import OBSERVED
from tokenswift.loader.config import Layout, head_width
from tokenswift.loader.rope import Rotary
from tokenswift.sampling.choice import Sampler
from tokenswift.sampling.penalties import NO_RULES, TextRules
from tokenswift.types import InputError, OnProgress


class BaseTarget(ABC):
    """A model ready for tree passes: what native decoders and transformers' own models share.

    Args:
        config: the transformers config.
        head: the LM head's weight, (V, D): sizes, type and device are its.
        rotary: the model's positions.
        backend: what computes.
        kv_heads: heads of keys and values computed here; None: all of the config's.

    Attributes:
        keys: type of keys and values.
        layout: what the native decoder knows of the model; None where transformers' own forward runs.
        windows: sliding window of each layer in tokens, None where it sees everything.
        taps: layers whose entering states a pass gives as features (their number: what leaves the last one),
            for a drafter that reads them; none at first.
        weight_bytes: bytes of weights that one pass reads.
        copied_bytes: bytes that copies of weights take beside the model's own.
        kv_bytes: bytes of keys and values per cached token, but for those in a tail.
        tail_bytes: of layers in a tail (`kv.full.Tail`), which holds `kv.full.tail_room` tokens.
        unnamed: rows of the LM head that no token names, (m,): padding, which is never chosen; None: none is.
        whole: whether products take activations as int8.
    """

    prefill_chunk: int  # rows of a prefill pass
    whole = False
    layout: Layout | None = None
    taps: tuple[int, ...] = ()
    unnamed: Tensor | None = None

    def __init__(self, config: Any, head: Tensor, rotary: Rotary, backend: Backend) -> None:
        self.config, self.rotary, self.backend = config, rotary, backend
        self.device, self.dtype = head.device, head.dtype
        self.keys = head.dtype
        self.vocab_size, self.hidden_size = head.shape
        self.layers: int = config.num_hidden_layers
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim = head_width(config)
        self.weight_bytes = self.copied_bytes = 0
        self.windows: list[int | None] = [None] * self.layers
        self._count_entries()
        self._rows: tuple[Tensor, Any] | None = None

    def tap(self, layers: tuple[int, ...]) -> None:
        """Have passes give the states that enter these layers from now on; see :attr:`taps`.

        Raises:
            InputError: the model's forward does not give them.
        """
        self.taps = layers

    def leave_out(self, rows: Sequence[int]) -> None:
        """Have these rows of the LM head never be chosen; see :attr:`unnamed`."""
        self.unnamed = torch.tensor(rows, device=self.device) if rows else None

    @abstractmethod
    def compute_as(self, how: LoadConfig, name: str) -> None:
        """Compute in int8, and keep keys and values, as is asked for; called once, before the first pass
        whose outcome counts.

        Args:
            name: of the model, for messages.
        Raises:
            InputError: the model or its backend cannot.
        """

    @property
    def computes(self) -> str:
        """What is computed in, e.g. "float32"; "int8" where products and attention are."""
        whole = self.whole and self.keys == torch.int8
        return "int8" if whole else str(self.dtype).removeprefix("torch.")

    def identity(self) -> dict[str, str]:
        """What of the arithmetic decides the tokens, where it is not that of the weights' type."""
        if self.computes == "int8":
            return {"dtype": "int8"}
        made = {"activations": "int8"} if self.whole else {}
        kept = {"kv_cache_dtype": str(self.keys).removeprefix("torch.")}
        return made if self.keys == self.dtype else made | kept

    def _count_entries(self) -> None:
        made, page = self.new_cache(16), 16
        self.kv_bytes = made.data.nbytes // page
        self.tail_bytes = made.nbytes // page - self.kv_bytes

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of a text."""
        return tokens * self.kv_bytes + tail_room(self.windows, tokens) * self.tail_bytes

    @property
    def equal_bits(self) -> bool:
        """Whether a row's bits depend on its own context alone, not on the other rows of a pass."""
        return self.layout is not None and self.backend.equal_bits

    @property
    def prefill_keeps_bits(self) -> bool:
        """Whether a prompt's rows have them, too, in whatever passes it is read."""
        return self.equal_bits and self.backend.prefill_keeps_bits

    @property
    def rotary_frequencies(self) -> Tensor:
        """Angle per position of each pair of a head's dimensions, (d / 2,) float32."""
        return self.rotary.single()

    def sampler(self, params: SamplingParams, rules: TextRules = NO_RULES) -> Sampler:
        """The choice rule for one generation with this model; ``rules`` of its text."""
        ranker = self.backend.ranker(params)
        return Sampler(params, self.vocab_size, self.device, ranker, self.backend.on_host, rules)

    def new_cache(self, capacity: int, whole: bool = False) -> FullCache:
        """An empty full cache for ``capacity`` tokens, scratch room included; ``whole``: all entries
        of layers with windows are kept, too."""
        keeps = whole or self.layout is None or not self.backend.on_host
        apart = 0 if keeps else self.layers - self.windows.count(None)
        sizes = (self.kv_heads, self.head_dim)
        cache = self.backend.new_cache(self.layers - apart, *sizes, capacity, self.keys)
        if apart:
            room = tail_room(self.windows, capacity)
            cache.tail = Tail(self.backend.new_cache(apart, *sizes, room, self.keys).entries, self.windows)
        return cache

    def check_room(self, tokens: int) -> None:
        """See that so many positions are within the model's.

        Raises:
            InputError: they are not.
        """
        limit = self.rotary.limit
        if limit is not None and tokens > limit:
            raise InputError(
                f"prompt and new tokens are {tokens} tokens; valid: up to the model's {limit} positions, "
                f"or more with rope_scaling yarn"
            )

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, parents: Sequence[int] | None = None
    ) -> Pass:
        """Run n tokens over ``cache`` (see `kv.Segment`); their entries go to its scratch."""
        return self._run([Segment(tokens, positions, cache, parents)])[0]

    @torch.inference_mode()
    def forward_all(self, segments: Sequence[Segment]) -> list[Pass]:
        """Run rows of several texts in one pass: each text's part is what
        :meth:`forward` alone gives, bit for bit where `equal_bits` holds."""
        return self._run(segments)

    @torch.inference_mode()
    def prefill(
        self,
        tokens: list[int],
        cache: FullCache,
        on_progress: OnProgress | None = None,
        ends: bool = True,
        features: FeatureStore | None = None,
    ) -> Pass:
        """Run the prompt in chunks of :attr:`prefill_chunk` and commit it.

        The result holds queries and hidden states of the last `kv.select.OBSERVED` tokens, or of all; they
        are a chunk of their own, since the queries of a long one take more memory than its keys.

        Args:
            on_progress: told of the stage "prompt", in tokens, before the first chunk and after each.
            ends: the prompt ends with these tokens; otherwise no queries are kept.
            features: takes those of all rows.

        Raises:
            ValueError: no tokens.
        """
        if not tokens:
            raise ValueError("nothing to prefill")
        report, length = on_progress or _ignore, len(tokens)
        kept = max(0, length - OBSERVED) if ends else length  # the first token whose queries are wanted
        report("prompt", 0, length)
        for start, end in pairwise([*range(0, kept, self.prefill_chunk), kept, length]):
            if start == end:
                continue
            rows = torch.tensor(tokens[start:end])
            positions = torch.arange(cache.length, cache.length + len(rows))
            result = self._run([Segment(rows, positions, cache)], keep=start == kept)[0]
            if features is not None and result.features is not None:
                features.take(cache.length, result.features)
            cache.commit(tuple(range(len(rows))))
            report("prompt", end, length)
        return result

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and LM head: (n, D) → (n, V), float32."""
        return self.project(self.norm(hidden))

    def head_rows(self, ids: Tensor) -> Any:
        """The LM head's rows of some tokens: a smaller head for drafting, in the form that :meth:`project`
        takes. The most rows asked for are kept: asking again for the same ones costs nothing."""
        kept = self._rows
        if kept is not None and torch.equal(kept[0], ids):
            return kept[1]
        rows = self._gather(ids)
        if kept is None or len(ids) >= len(kept[0]):  # the frequent tokens, not a prompt's few others
            self._rows = (ids, rows)
        return rows

    def numerics(self) -> dict[str, Any]:
        """How passes are computed, and whether prefill, decoding and trees agree in every bit."""
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

    @abstractmethod
    def _run(self, segments: Sequence[Segment], keep: bool = True) -> list[Pass]:
        """One pass; ``keep``: its queries are wanted."""

    @abstractmethod
    def _gather(self, ids: Tensor) -> Any:
        """Rows of the LM head."""

    @abstractmethod
    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm: (n, D) → (n, D)."""

    @torch.inference_mode()
    def project(self, normed: Tensor, rows: Any = None) -> Tensor:
        """The LM head alone: (n, D) → (n, V), float32, -inf for :attr:`unnamed` tokens; only its ``rows`` →
        (n, m) when given."""
        logits = self._project(normed, rows)
        if rows is None and self.unnamed is not None:
            logits.index_fill_(1, self.unnamed, -torch.inf)
        return logits

    @abstractmethod
    def _project(self, normed: Tensor, rows: Any) -> Tensor:
        """The LM head's product."""

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings: (n,) → (n, D)."""


def _ignore(stage: str, done: int, total: int) -> None:
    """Nobody wants to know."""
