"""Token equality of a strategy with plain decoding, and the account of a divergence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenswift.audit.logits import NumericError, VerifyPass, watching
from tokenswift.audit.rounding import far, reference_rows
from tokenswift.config import SamplingParams
from tokenswift.engine.llm import LLM
from tokenswift.sampling.choice import Sampler

KEPT = 48  # places of a text at which plain decoding's logits are kept for the numeric error
WITHIN = 2.0  # each of two scores may be off by the numeric error
CONTEXT = 60  # characters of text shown before a divergence


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where a strategy's token differs from plain decoding's.

    Attributes:
        place: index of the new token.
        before: the text before it.
        plain, other: both tokens, as text and as id.
        gap: difference of the two best perturbed scores in plain decoding's one-row pass.
        shift: the change of the two tokens' logits, one up and one down, that flips the choice there;
            unlike ``gap`` it also measures a flip at a filter's edge (min-p, top-k, …).
        difference: greatest difference of the logits of the two passes at this place.
        error: what rounding does to a logit of the model on this device (`logits.NumericError.unit`).
        reproduced: whether both passes, run again, chose the same two tokens.
        off: greatest difference of a logit of either pass here from the reference's (`audit.rounding`).
        allowed: what ``off`` may be at most.
        reference_shift: the change of the two tokens' logits that makes the reference choose the one of
            them that it does not choose (or either, where it chooses a third).
    """

    place: int
    before: str
    plain: tuple[int, str]
    other: tuple[int, str]
    gap: float
    shift: float
    difference: float
    error: float
    reproduced: bool
    off: float
    allowed: float
    reference_shift: float

    @property
    def near_tie(self) -> bool:
        """The difference of rounding explains it: both passes agree within the error, so small a change
        flips the choice, and the reference, which shares no code with either, sees the same tie."""
        bound = WITHIN * self.error
        passes = self.reproduced and self.shift <= bound and self.difference <= 2 * bound
        return passes and self.off <= self.allowed and self.reference_shift <= 2 * bound


@dataclass(frozen=True, slots=True)
class Plain:
    """A text by plain decoding, with the logits of some of its one-row passes."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int]
    kept: dict[int, Tensor]


def plain_text(llm: LLM, prompt: list[int], count: int, params: SamplingParams) -> Plain:
    """Write ``count`` tokens by plain decoding."""
    stride = max(1, -(-count // KEPT))
    kept: dict[int, Tensor] = {}
    passes = 0

    def tell(seen: VerifyPass) -> None:
        nonlocal passes
        if passes % stride == 0:
            kept[passes] = seen.logits[0]
        passes += 1

    with watching(llm, tell):
        result = llm.generate(prompt, count, "autoregressive", sampling=params, ignore_eos=True)
    return Plain(prompt, params, result.token_ids, kept)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first difference; None for equal sequences."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))


def account(
    llm: LLM, plain: Plain, strategy: str, options: dict[str, Any], other: list[int], error: NumericError
) -> Divergence | None:
    """What is behind the first difference of ``other`` from plain decoding; None if there is none.

    Both runs are repeated up to that place, which runs the very passes again: one-row passes for plain
    decoding, the diverging pass in its own shape and over the cache that the strategy had built.
    """
    place = first_difference(plain.tokens, other)
    if place is None:
        return None
    common = [*plain.prompt, *plain.tokens[:place]]
    ours, theirs = plain.tokens[place], other[place]
    row = _row_at(llm, plain, "autoregressive", {}, place, common)
    seen = _row_at(llm, plain, strategy, options, place, common)
    sampler = llm.target.sampler(plain.params)
    reproduced = (
        row is not None
        and seen is not None
        and sampler.choose(row[None], common, [[]]) == [ours]
        and sampler.choose(seen[None], common, [[]]) == [theirs]
    )
    gap = shift = difference = float("inf")
    if row is not None:
        best = sampler.perturbed(row[None], common, [[]])[0].topk(2).values.tolist()
        gap = best[0] - best[1]
        shift = flipping_shift(sampler, row, common, ours, theirs)
    off = reference_shift = float("inf")
    if row is not None and seen is not None:
        difference = far(row, seen)
        own = reference_rows(llm, common, [len(common) - 1])[1][0]
        off = max(far(row, own), far(seen, own))
    if off < float("inf"):
        reference_shift = max(
            flipping_shift(sampler, own.float(), common, *pair) for pair in ((ours, theirs), (theirs, ours))
        )
    return Divergence(
        place=place,
        before=_decode(llm, common)[-CONTEXT:],
        plain=(ours, _decode(llm, [ours])),
        other=(theirs, _decode(llm, [theirs])),
        gap=gap,
        shift=shift,
        difference=difference,
        error=error.unit,
        reproduced=reproduced,
        off=off,
        allowed=error.rounding.allowed.worst,
        reference_shift=reference_shift,
    )


def flipping_shift(sampler: Sampler, row: Tensor, text: list[int], ours: int, theirs: int) -> float:
    """The least change e of logits, ``theirs`` + e and ``ours`` - e, after which ``theirs`` is chosen."""

    def flips(e: float) -> bool:
        moved = row.clone()
        moved[theirs] += e
        moved[ours] -= e
        return sampler.choose(moved[None], text, [[]])[0] == theirs

    high = 1e-7
    while not flips(high):
        high *= 2
        if high > 1e4:
            return float("inf")
    low = high / 2
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if flips(middle) else (middle, high)
    return high


def _row_at(
    llm: LLM, plain: Plain, strategy: str, options: dict[str, Any], place: int, common: list[int]
) -> Tensor | None:
    """Logits after the common prefix, in the pass from which the strategy chose the token at ``place``."""
    last: list[VerifyPass] = []

    def tell(seen: VerifyPass) -> None:
        last[:] = [seen]

    written = 0
    with watching(llm, tell), torch.inference_mode():
        steps = llm.stream(
            plain.prompt,
            max(len(plain.tokens), place + 1),
            strategy,
            options,
            plain.params,
            ignore_eos=True,
        )
        for step in steps:
            written += len(step.token_ids)
            if written > place:
                break
    return last[0].row_after(common) if last else None


def _decode(llm: LLM, tokens: list[int]) -> str:
    if llm.tokenizer is None:
        return " ".join(map(str, tokens))
    return llm.tokenizer.decode(tokens)
