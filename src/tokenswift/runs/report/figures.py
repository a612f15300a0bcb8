"""What a report shows of a run, as numbers: from the journal alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenswift.runs.state import RunState

BINS = 24  # stretches, at most
REPEAT = 8  # tokens of an n-gram whose second occurrence counts as a repeat
#: of a step: tokens, accepted, accepted of n-grams, γ, ms since the step before (None: not known)
TimedStep = tuple[int, int, int, int, int | None]


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
    """The run in stretches of about equal length.

    Args:
        marked: of each token, whether it is in a repeat.
    """
    size = max(1, -(-len(state.tokens) // BINS))
    made: list[Bin] = []
    steps: list[TimedStep] = []
    at = start = 0
    for step in _timed(state):
        steps.append(step)
        at += step[0]
        if at - start >= size or at == len(state.tokens):
            made.append(_bin(steps, at, marked[start:at]))
            steps, start = [], at
    return made


def _timed(state: RunState) -> Iterator[TimedStep]:
    for session in state.steps:
        last: int | None = None
        for tokens, _, accepted, ngram, gamma, ms in session:
            yield tokens, accepted, ngram, gamma, None if last is None else ms - last
            last = ms


def _bin(steps: Sequence[TimedStep], end: int, marked: Sequence[bool]) -> Bin:
    timed = [(step[0], step[4]) for step in steps if step[4] is not None]
    seconds = sum(ms for _, ms in timed) / 1000
    gamma = sum(step[3] for step in steps) or 1
    return Bin(
        end,
        sum(tokens for tokens, _ in timed) / seconds if seconds else None,
        len(marked) / len(steps),
        sum(step[1] for step in steps) / gamma,
        sum(step[2] for step in steps) / gamma,
        sum(marked) / max(1, len(marked)),
    )


def resumed_at(state: RunState) -> list[int]:
    """New tokens at which sessions after the first began."""
    ends, at = [], 0
    for session in state.steps[:-1]:
        at += sum(step[0] for step in session)
        ends.append(at)
    return ends
