"""What a run measures: a meter, from whose times and counts the figures of a text are made."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from time import perf_counter

from tokenswift.types import Litany, Loop, Metrics, Step, distinct

PREFILL = "prefill"


def _ratio(part: float, total: float) -> float:
    return part / total if total else 0.0


class _Phase:
    """A stopwatch that adds up, also when the block raises."""

    __slots__ = ("seconds", "_since")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += perf_counter() - self._since


class Meter:
    """Counts steps and adds up times of one generation.

    Definitions (paper, section 4.1): α is accepted draft tokens ÷ the sum of γ over the steps; β is
    the same for tokens accepted on n-gram branches; the acceptance length is new tokens ÷ steps,
    the target's own included. A figure whose denominator is 0 is 0.

    Times are wall-clock seconds. On an accelerator, a phase that waits for the device (the choice
    of tokens) includes the work queued before it, so only the sum is exact.
    """

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._phases = defaultdict[str, _Phase](_Phase)
        self._lap: dict[str, float] = {}

    def phase(self, name: str) -> _Phase:
        """A context manager that adds the time of its block to a phase."""
        return self._phases[name]

    def add(self, step: Step) -> None:
        """Count one verify pass."""
        names = ("drafted", "accepted", "ngram_accepted", "gamma")
        self._counts.update({name: getattr(step, name) for name in names}, steps=1)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase so far, prefill included."""
        return {name: phase.seconds for name, phase in self._phases.items()}

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last call; phases without time are left out."""
        earlier = self._lap
        self._lap = self.seconds
        spent = {name: now - earlier.get(name, 0.0) for name, now in self._lap.items()}
        return {name: seconds for name, seconds in spent.items() if seconds}

    def restore(self, steps: Sequence[tuple[int, ...]], seconds: Mapping[str, float]) -> None:
        """Add the steps of an earlier part of the run, in the journal's form
        (`runs.records.Tokens`), and its seconds by phase."""
        for _, drafted, accepted, ngram_accepted, gamma, _ in steps:
            self.add(Step((), drafted, accepted, ngram_accepted, gamma))
        for name, value in seconds.items():
            self.phase(name).seconds += value

    def finish(
        self,
        tokens: Sequence[int],
        draft_passes: int = 0,
        loop: Loop | None = None,
        litany: Litany | None = None,
    ) -> Metrics:
        """The figures of the run.

        Args:
            tokens: the new tokens, as handed to the user.
            draft_passes: model passes made only to draft.
            loop: where the text repeats itself.
            litany: where it goes on in one form.
        """
        counts = self._counts
        phases = self.seconds
        prefill_seconds = phases.pop(PREFILL, 0.0)
        seconds = sum(phases.values())
        return Metrics(
            steps=counts["steps"],
            draft_passes=draft_passes,
            acceptance_rate=_ratio(counts["accepted"], counts["gamma"]),
            ngram_acceptance_rate=_ratio(counts["ngram_accepted"], counts["gamma"]),
            mean_acceptance_length=_ratio(len(tokens), counts["steps"]),
            node_acceptance_rate=_ratio(counts["accepted"], counts["drafted"]),
            tokens_per_second=_ratio(len(tokens), seconds),
            seconds=seconds,
            prefill_seconds=prefill_seconds,
            distinct=(
                distinct(tokens, 1),
                distinct(tokens, 2),
                distinct(tokens, 3),
                distinct(tokens, 4),
            ),
            phases=phases,
            loop=loop,
            litany=litany,
        )
