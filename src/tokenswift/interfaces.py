"""What the decode loop needs of a model, a cache and a strategy. No implementation here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenswift.config import SamplingParams
from tokenswift.types import DraftTree, OnProgress, Step, Stopped


@dataclass(slots=True)
class Pass:
    """The outcome of one model pass over n tokens.

    Attributes:
        hidden: hidden states *before* the final norm (what the draft heads start from).
        queries: by layer, the rotated queries (H, n, d), for the partial cache's importance.
        features: the states that enter the layers of the model's ``taps``; None where it has none.
    """

    hidden: Float[Tensor, "n D"]
    queries: Sequence[Tensor] | Tensor
    features: Float[Tensor, "k n D"] | None = None


#: is told of a pass over a prompt: the position of its first row, and its hidden states (n, D)
OnRead: TypeAlias = Callable[[int, Tensor], None]


@dataclass(slots=True)
class Segment:
    """Rows of one text in a pass.

    Attributes:
        tokens: (m,) token ids, on the host, or where the model is if they arose there.
        positions: (m,) their positions, on the host.
        cache: the text's own; the rows' entries go to its scratch.
        parents: the row that each row follows (-1 for the root): it sees the whole cache, its ancestors and
            itself. None is a chain, each row after the last.
    """

    tokens: Int[Tensor, " m"]
    positions: Int[Tensor, " m"]
    cache: KVCache
    parents: Sequence[int] | None = None


class KVCache(Protocol):
    """Keys and values of the tokens committed so far, plus room for the pass under way.

    Attributes:
        data: (2 · layers, K, capacity, d): layer l's keys at index 2l, its values at 2l + 1; of int8
            (layers, K, pages, bytes of a page), see `kernels.cpu.entries`.
        ordered: whether entry i is position i (the full cache), so that sliding windows hold.
        work: scratch memory of the kernels, uint8; they replace it by more when they need it.
    """

    data: Tensor
    ordered: bool
    work: Tensor

    @property
    def length(self) -> int:
        """Entries that a pass attends to besides its own tokens."""
        ...

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values (1, K, n, d) and return all of them (1, K, L, d): what a
        model that runs through transformers' own code calls."""
        ...

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Same as :attr:`length`; transformers asks for it."""
        ...


class CommittingCache(KVCache, Protocol):
    """The full cache: a pass's entries become permanent only by ``commit``."""

    @property
    def capacity(self) -> int:
        """Tokens that fit, scratch room included."""
        ...

    def commit(self, nodes: tuple[int, ...]) -> None:
        """Keep the entries of these nodes of the last pass, in order; drop the others."""
        ...

    def prefault(self, seconds: float) -> bool:
        """Have the system back, for about so long, what a first row is written to; whether all of it is."""
        ...

    def fork(self, capacity: int, length: int | None = None) -> CommittingCache:
        """A copy of the first ``length`` entries (None: all), with room for ``capacity``."""
        ...


class FeatureStore(Protocol):
    """Keeps features of a text's committed tokens for what drafts from them."""

    def take(self, at: int, features: Float[Tensor, "k n D"]) -> None:
        """The tokens at positions ``at`` and on have these; each position once, in order, but some may be
        left out (those whose keys and values were copied from another text)."""
        ...

    def drain(self) -> tuple[int, Float[Tensor, "k n D"]] | None:
        """The features that nobody has drained yet, without a gap, and the position of the first; None where
        there are none."""
        ...

    def copy(self) -> FeatureStore:
        """For a text that begins as this one."""
        ...


class PassModel(Protocol):
    """What runs tokens of a text over its cache."""

    device: torch.device

    def forward(
        self,
        tokens: Int[Tensor, " n"],
        positions: Int[Tensor, " n"],
        cache: KVCache,
        parents: Sequence[int] | None = None,
    ) -> Pass:
        """Run n tokens of one text over its cache; see :class:`Segment`."""
        ...

    def logits(self, hidden: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        """Final norm and LM head; float32."""
        ...


class TargetModel(PassModel, Protocol):
    """The model whose output is to be reproduced.

    Attributes:
        equal_bits: whether a row's bits depend on its own context alone.
        prefill_keeps_bits: whether those of a prompt do, too, in whatever passes it is read.
        prefill_chunk: rows of a pass that reads a prompt.
    """

    vocab_size: int
    prefill_chunk: int

    @property
    def equal_bits(self) -> bool: ...

    @property
    def prefill_keeps_bits(self) -> bool: ...

    def forward_all(self, segments: Sequence[Segment]) -> list[Pass]:
        """Run rows of several texts in one pass. Each text's part is what :meth:`forward` alone gives, bit
        for bit where ``equal_bits`` holds."""
        ...

    def prefill(
        self,
        tokens: list[int],
        cache: CommittingCache,
        on_progress: OnProgress | None = None,
        ends: bool = True,
        on_read: OnRead | None = None,
        features: FeatureStore | None = None,
    ) -> Pass:
        """Run the prompt, or without ``ends`` a part of it that others follow, in chunks and commit it. The
        result of an end holds rows of it, the last token's last. ``on_read`` is told of each chunk, and
        ``features`` are given those of all rows."""
        ...

    def project(self, normed: Float[Tensor, "n D"], rows: Any = None) -> Float[Tensor, "n V"]:
        """The LM head alone, on states that are normalised already; float32. With ``rows`` from
        ``head_rows``, the logits of those tokens alone."""
        ...

    def embed(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n D"]:
        """Input embeddings."""
        ...


class DraftModel(TargetModel, Protocol):
    """What drafting needs of a model beyond verification."""

    dtype: torch.dtype
    backend: Any  # `kernels.base.Backend`
    whole: bool  # products are in int8

    def sampler(self, params: SamplingParams, rules: Any = ...) -> Any:
        """The choice rule for one generation with this model; ``rules``: `sampling.adjust.TextRules`."""
        ...

    @property
    def windows(self) -> list[int | None]:
        """Sliding window of each layer; None where it sees everything."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values per cached token."""
        ...

    @property
    def rotary_frequencies(self) -> Float[Tensor, " half"]:
        """Angle per position of each pair of a head's dimensions, (d / 2,)."""
        ...

    def new_cache(self, capacity: int) -> Any:
        """An empty full cache for ``capacity`` tokens, scratch room included."""
        ...

    def norm(self, hidden: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
        """The final norm."""
        ...

    def head_rows(self, ids: Int[Tensor, " m"]) -> Any:
        """Rows of the LM head, in the form that ``project`` takes."""
        ...


class Chooser(Protocol):
    """The target's choice rule; see `sampling.choice.Sampler`, which ranks drafts by it, too.

    A row's context is ``history + path``: the whole text so far (root included) and the drafted
    tokens on the way to the row's node. The token to choose has position ``len(context)``.
    """

    def choose(self, logits: Float[Tensor, "n V"], history: list[int], paths: list[list[int]]) -> list[int]:
        """The token that follows each row's context: argmax of processed scores plus noise."""
        ...


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """What a step holds besides one text, as far as it is known when that text drafts.

    Attributes:
        rows: of the other texts in the verify pass.
        context: tokens that these have cached, in all.
        tokens: that their steps are expected to yield.
        ms: milliseconds that they take outside of the pass: drafting, choosing, observing.
    """

    rows: int = 0
    context: int = 0
    tokens: float = 0.0
    ms: float = 0.0


ALONE = BatchLoad()


def _always() -> bool:
    return True


def _endless() -> float:
    return inf


@dataclass(slots=True)
class TokenSequence:
    """The state of one generation, shared by the loop and the strategy.

    Attributes:
        tokens: prompt and generated tokens; the last one is the root (known, not in the cache).
        prompt_tokens: length of the prompt.
        cache: the full cache; it holds ``len(tokens) - 1`` entries between steps.
        model, sampler: the target and its choice rule.
        newest: the pass that committed the newest cached token (None before any), and
        newest_row: that token's row in it.
        features: takes those of every committed token; None where nothing drafts from them.
        draft_passes: extra passes that the strategy made (it counts them itself).
        load: what the step under way holds besides.
        left: new tokens that may still come, the step's own included; None: nobody knows.
        owner: whose it is: only texts of one owner have beginnings copied from each other.
        wanted: whether somebody still wants the text; asked between the passes that draft.
        patience: seconds that a step may draft for now; asked there too.
        begun: when the step under way began to draft (`time.perf_counter`).
        on_read: is told of each pass that reads the text before its first step: the position of the pass's
            first row, and its hidden states (n, D), before the final norm.
    """

    tokens: list[int]
    prompt_tokens: int
    cache: CommittingCache
    model: TargetModel
    sampler: Chooser
    newest: Pass | None = None
    newest_row: int = 0
    features: FeatureStore | None = None
    draft_passes: int = 0
    load: BatchLoad = ALONE
    left: int | None = None
    owner: str = ""
    wanted: Callable[[], bool] = _always
    patience: Callable[[], float] = _endless
    begun: float = 0.0
    on_read: OnRead | None = None

    @property
    def has_enough(self) -> bool:
        """Whether the step has drafted for as long as it may: what drafts makes no further pass then. May be
        asked after the first pass only, so that every draft gets on."""
        return perf_counter() - self.begun > self.patience()

    def check(self) -> None:
        """Called between passes that draft.

        Raises:
            Stopped: nobody wants the text any more.
        """
        if not self.wanted():
            raise Stopped


class Strategy(Protocol):
    """Proposes a tree of tokens per step. It can never change the output, only the speed."""

    name: str
    acceptance: str

    @property
    def max_nodes(self) -> int:
        """Upper bound of a tree's nodes: scratch room that the full cache must have."""
        ...

    def begin(self, sequence: TokenSequence) -> None:
        """Called once, after the prompt's prefill."""
        ...

    def draft(self, sequence: TokenSequence) -> DraftTree:
        """The tree to verify in this step; its root is ``sequence.tokens[-1]``."""
        ...

    def observe(self, sequence: TokenSequence, step: Step, nodes: tuple[int, ...]) -> None:
        """Called after a step was committed: ``nodes`` of the step's tree were kept. ``step.times`` holds its
        seconds up to here, and later those of this call too."""
        ...


@runtime_checkable
class Calibrated(Protocol):
    """A strategy that goes by what passes cost."""

    def calibrate(self) -> None:
        """Called once, before `Strategy.begin`: measure what was never measured here."""
        ...

    def settle(self) -> None:
        """Called once, after the last step: keep what the steps have shown of it."""
        ...
