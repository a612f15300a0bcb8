"""The part of a sequence that the decode loop, strategies and drafters share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tokenswift.config.strategies import Acceptance
from tokenswift.kv.cache import FullCache
from tokenswift.kv.passes import Pass
from tokenswift.memory import Need
from tokenswift.metrics import Meter
from tokenswift.models.base import BaseTarget, OnHidden
from tokenswift.sampling.sampler import Sampler
from tokenswift.speculation.accept import EXACT, AcceptanceRule
from tokenswift.speculation.eagle.features import Features
from tokenswift.types import Cancelled, DraftTree, Step


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """The other sequences in a step, as far as known when a sequence drafts.

    Attributes:
        rows: their rows in the verify pass.
        tokens: the tokens that they are expected to gain.
        ms: milliseconds of their work outside the pass: drafting, choosing, observing.
    """

    rows: int = 0
    tokens: float = 0.0
    ms: float = 0.0


ALONE = BatchLoad()


class Strategy:
    """How the steps of one sequence are drafted. This one is for a sequence that is only prefilled
    and takes no step.

    Attributes:
        rule: by which drafted tokens are kept.
        max_nodes: nodes of a tree at most: rows that the cache needs beyond the sequence.
    """

    rule: AcceptanceRule = EXACT
    max_nodes: int = 0

    @property
    def acceptance(self) -> Acceptance:
        """Name of the rule, for journals and reports."""
        return self.rule.name

    def needs(self, text: int, row: int) -> list[Need]:
        """Memory for a sequence of up to ``text`` tokens, the full cache aside, with nodes of
        ``row`` bytes each (see `memory.needs_of`)."""
        return []

    def begin(self, sequence: SequenceState) -> None:
        """Called once after the prefill."""

    def draft(self, sequence: SequenceState) -> DraftTree:
        """The tree to verify in this step, whose root is the sequence's last token."""
        raise NotImplementedError

    def observe(self, sequence: SequenceState, step: Step, nodes: tuple[int, ...]) -> None:
        """Called after every step, with the nodes whose rows were committed to the cache."""

    def report(self) -> dict[str, object] | None:
        """What was decided, for the JSON record; None where there were no decisions."""
        return None


@dataclass(eq=False)
class SequenceState:
    """A sequence as the decode loop and drafters see it; `engine.sequence.Sequence` adds the rest.

    Attributes:
        tokens: ids of prompt and generated tokens; the last one is the root (known, not in the
            cache).
        prompt_tokens: length of the prompt.
        full_cache: the full KV cache, with ``len(tokens) - 1`` entries between steps; None before
            the prefill and after the end.
        model: the target.
        sampler: its choice rule.
        strategy: one of `methods`; without one, the sequence is only prefilled.
        remaining: new tokens still to come at most; None: unlimited.
        eos: token ids that end the text (the token itself is part of the output); may be empty.
        last_pass: the pass that committed the newest cached token; None before the prefill.
        last_row: that token's row in it.
        features: keeps features of committed tokens for an EAGLE drafter; None: no drafter reads
            them.
        draft_passes: model passes made only to draft; strategies count them here.
        load: the other sequences in the current step.
        rows: rows of its last verify pass.
        mean_tokens: running mean of a step's new tokens.
        mean_ms: running mean of a step's milliseconds outside the verify pass.
        owner: its client; KV caches of shared prefixes are copied only between sequences of one
            owner.
        is_wanted: False once it is cancelled; asked between draft passes.
        is_long: whether its keys are rotated by the frequencies of long texts
            (`loader.rotary.Rotary.is_long`).
        top_logprobs: report log-probabilities, with so many of the likeliest tokens; None: report
            none.
        on_hidden: told of the prompt's rows as they are run; None: nobody reads them.
        observe_seconds: what its strategy took to learn from the last step.
        meter: counts, and the seconds of each phase.
    """

    tokens: list[int]
    prompt_tokens: int
    full_cache: FullCache | None
    model: BaseTarget
    sampler: Sampler
    strategy: Strategy = field(default_factory=Strategy)
    remaining: int | None = None
    eos: Collection[int] = ()
    last_pass: Pass | None = None
    last_row: int = 0
    features: Features | None = None
    draft_passes: int = 0
    load: BatchLoad = ALONE
    rows: int = 1
    mean_tokens: float = 1.0
    mean_ms: float = 0.0
    owner: str = ""
    is_wanted: Callable[[], bool] = lambda: True
    is_long: bool = False
    top_logprobs: int | None = None
    on_hidden: OnHidden | None = None
    observe_seconds: float = 0.0
    meter: Meter = field(default_factory=Meter)

    @property
    def cache(self) -> FullCache:
        """The full KV cache of a sequence that is under way."""
        if self.full_cache is None:
            raise RuntimeError("a sequence has a cache from its prefill to its end alone")
        return self.full_cache

    def raise_if_cancelled(self) -> None:
        """Called between draft passes.

        Raises:
            Cancelled: the request was cancelled.
        """
        if not self.is_wanted():
            raise Cancelled
