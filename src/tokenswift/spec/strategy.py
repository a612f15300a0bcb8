"""What strategies draft for: the state of one text that the decode loop and drafters share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from tokenswift.kv import FullCache, Pass
from tokenswift.models.decoder import BaseTarget
from tokenswift.sampling.choice import Sampler
from tokenswift.spec.eagle import Features
from tokenswift.types import Meter, Stopped


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """What a step holds besides one text, as far as it is known when that text drafts.

    Attributes:
        rows: of the other texts in the verify pass.
        tokens: that their steps are expected to yield.
        ms: milliseconds that they take outside of the pass: drafting, choosing, observing.
    """

    rows: int = 0
    tokens: float = 0.0
    ms: float = 0.0


ALONE = BatchLoad()


@dataclass(eq=False)
class TokenSequence:
    """The state of one text that the decode loop and drafters share; `engine.sequence.Sequence` is the whole.

    Attributes:
        tokens: prompt and generated tokens; the last one is the root (known, not in the cache).
        prompt_tokens: length of the prompt.
        cache: the full cache; it holds ``len(tokens) - 1`` entries between steps.
        model, sampler: the target and its choice rule.
        strategy: one of `spec.methods`; None: the text is only read.
        left: new tokens that may still come, the step's own included; None: nobody knows.
        eos: token ids that end the text (the token itself is part of the output); may be empty.
        newest: the pass that committed the newest cached token (None before any), and
        newest_row: that token's row in it.
        features: takes those of every committed token; None where nothing drafts from them.
        draft_passes: extra passes that the strategy made (it counts them itself).
        load: what the step under way holds besides.
        rows: of its newest pass.
        mean_tokens, mean_ms: running means of a step: new tokens, and milliseconds outside of the pass.
        owner: whose it is: only texts of one owner have beginnings copied from each other.
        wanted: whether somebody still wants the text; asked between the passes that draft.
        top_logprobs: how many of the likeliest tokens steps tell with each new token's log-probability; None:
            neither is told.
        meter: collects counts and the seconds of each phase.
    """

    tokens: list[int]
    prompt_tokens: int
    cache: FullCache
    model: BaseTarget
    sampler: Sampler
    strategy: Any = None
    left: int | None = None
    eos: Collection[int] = ()
    newest: Pass | None = None
    newest_row: int = 0
    features: Features | None = None
    draft_passes: int = 0
    load: BatchLoad = ALONE
    rows: int = 1
    mean_tokens: float = 1.0
    mean_ms: float = 0.0
    owner: str = ""
    wanted: Callable[[], bool] = lambda: True
    top_logprobs: int | None = None
    meter: Meter = field(default_factory=Meter)

    def check(self) -> None:
        """Called between passes that draft.

        Raises:
            Stopped: nobody wants the text any more.
        """
        if not self.wanted():
            raise Stopped
