"""What a report shows of a run, as numbers: from the journal alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenswift.metrics import distinct
from tokenswift.runs.state import RunState

BINS = 48  # points of a plot, at most
REPEAT = 8  # tokens of an n-gram whose second occurrence counts as a repeat


@dataclass(frozen=True, slots=True)
class Bin:
    """A stretch of the text.

    Attributes:
        end: new tokens at its end.
        speed: tokens a second; None where no time is known.
        length: tokens a pass.
        alpha, beta: acceptance rates of drafted depth, all and by n-grams.
        repeated: share of tokens in repeats.
    """

    end: int
    speed: float | None
    length: float
    alpha: float
    beta: float
    repeated: float


def repeats(tokens: Sequence[int], n: int = REPEAT) -> list[bool]:
    """For each token whether it lies in an n-gram that the text has had before (overlaps count)."""
    seen: set[tuple[int, ...]] = set()
    marked = [False] * len(tokens)
    for at in range(len(tokens) - n + 1):
        gram = tuple(tokens[at : at + n])
        if gram in seen:
            marked[at : at + n] = [True] * n
        else:
            seen.add(gram)
    return marked


def bins(state: RunState, marked: Sequence[bool]) -> list[Bin]:
    """The run in stretches of about equal length."""
    size = max(1, -(-len(state.tokens) // BINS))
    made: list[Bin] = []
    at = start = 0
    steps: list[tuple[int, int, int, int, int | None]] = []  # tokens, accepted, by n-grams, γ, ms

    def close() -> None:
        nonlocal start, steps
        timed = [(tokens, ms) for tokens, _, _, _, ms in steps if ms is not None]
        seconds = sum(ms for _, ms in timed) / 1000
        gamma = sum(step[3] for step in steps) or 1
        made.append(
            Bin(
                at,
                sum(tokens for tokens, _ in timed) / seconds if seconds else None,
                (at - start) / len(steps),
                sum(step[1] for step in steps) / gamma,
                sum(step[2] for step in steps) / gamma,
                sum(marked[start:at]) / max(1, at - start),
            )
        )
        start, steps = at, []

    for session in state.steps:
        last: int | None = None
        for tokens, _, accepted, ngram, gamma, ms in session:
            steps.append((tokens, accepted, ngram, gamma, None if last is None else ms - last))
            last, at = ms, at + tokens
            if at - start >= size:
                close()
    if steps:
        close()
    return made


def resumed_at(state: RunState) -> list[int]:
    """New tokens at which sessions after the first began."""
    ends, at = [], 0
    for session in state.steps[:-1]:
        at += sum(step[0] for step in session)
        ends.append(at)
    return ends


def distincts(tokens: Sequence[int]) -> list[float]:
    """Distinct-1 to Distinct-4."""
    return [distinct(tokens, n) for n in range(1, 5)]
