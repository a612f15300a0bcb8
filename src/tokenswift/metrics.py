"""Figures of one generation: α, β, acceptance length, Distinct-n and where the time went.

Definitions (paper section 4.1): α is accepted draft tokens ÷ the sum of γ over the steps; β the same
for tokens accepted on n-gram branches; the acceptance length is new tokens ÷ steps, the target's own
included. The rate per drafted node, which other engines call acceptance rate, has its own name.
A figure whose denominator is 0 is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

from tokenswift.types import Loop, Metrics, Step

PREFILL = "prefill"


def distinct(tokens: Sequence[int], n: int) -> float:
    """Distinct-n (Li et al. 2016): unique n-grams ÷ all n-grams; 0 when there is none."""
    total = len(tokens) - n + 1
    if total < 1:
        return 0.0
    return len(set(zip(*(tokens[i : i + total] for i in range(n)), strict=True))) / total


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class _Phase:
    """A stopwatch that adds up; also of the time spent so far when the phase raises."""

    __slots__ = ("seconds", "_since")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += perf_counter() - self._since


class Meter:
    """Adds up steps and times of one generation.

    Times are wall-clock seconds of the calling thread. An accelerator that runs behind shows up in
    the phase that waits for it (the choice of tokens), so only the sum is exact there.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
        self.ngram_accepted = 0
        self.gamma = 0
        self._phases: dict[str, _Phase] = {}
        self._lap: dict[str, float] = {}

    def phase(self, name: str) -> _Phase:
        """A context manager that adds its time to the phase; "prefill" is kept apart."""
        phase = self._phases.get(name)
        if phase is None:
            phase = self._phases[name] = _Phase()
        return phase

    def add(self, step: Step) -> None:
        """Count one verify pass."""
        self.steps += 1
        self.drafted += step.drafted
        self.accepted += step.accepted
        self.ngram_accepted += step.ngram_accepted
        self.gamma += step.gamma

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase so far, prefill included."""
        return {name: phase.seconds for name, phase in self._phases.items()}

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last call (or the beginning); phases without time are left out."""
        before, self._lap = self._lap, self.seconds
        spent = {name: now - before.get(name, 0.0) for name, now in self._lap.items()}
        return {name: seconds for name, seconds in spent.items() if seconds}

    def restore(self, steps: Sequence[tuple[int, ...]], seconds: Mapping[str, float]) -> None:
        """Count steps of an earlier part of the run, as journals have them (see `runs.state.Tokens`), and
        the seconds by phase of all."""
        for _, drafted, accepted, ngram_accepted, gamma, _ in steps:
            self.add(Step((), drafted, accepted, ngram_accepted, gamma))
        for name, value in seconds.items():
            self.phase(name).seconds += value

    def finish(self, tokens: Sequence[int], draft_passes: int = 0, loop: Loop | None = None) -> Metrics:
        """The figures of the run.

        Args:
            tokens: the new tokens, as handed to the user.
            draft_passes: model passes made only to draft.
            loop: where the text repeats itself.
        """
        phases = self.seconds
        prefill = phases.pop(PREFILL, 0.0)
        seconds = sum(phases.values())
        return Metrics(
            steps=self.steps,
            draft_passes=draft_passes,
            acceptance_rate=_ratio(self.accepted, self.gamma),
            ngram_acceptance_rate=_ratio(self.ngram_accepted, self.gamma),
            mean_acceptance_length=_ratio(len(tokens), self.steps),
            node_acceptance_rate=_ratio(self.accepted, self.drafted),
            tokens_per_second=_ratio(len(tokens), seconds),
            seconds=seconds,
            prefill_seconds=prefill,
            distinct=(distinct(tokens, 1), distinct(tokens, 2), distinct(tokens, 3), distinct(tokens, 4)),
            phases=phases,
            loop=loop,
        )


def decoding(seconds: Mapping[str, float]) -> float:
    """Of seconds by phase those of the steps."""
    return sum(value for phase, value in seconds.items() if phase != PREFILL)
