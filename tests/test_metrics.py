"""The figures of a run, from hand-counted steps."""

from __future__ import annotations

import pytest

from tokenswift.metrics import Meter
from tokenswift.types import Step


def test_figures_from_steps() -> None:
    meter = Meter()
    meter.add(Step((1, 2, 3), drafted=40, accepted=2, ngram_accepted=1, gamma=4))
    meter.add(Step((4,), drafted=40, accepted=0, ngram_accepted=0, gamma=4))
    meter.add(Step((5, 6), drafted=3, accepted=1, ngram_accepted=0, gamma=2))
    meter.phase("prefill").seconds = 0.5
    meter.phase("verify").seconds = 3.0
    figures = meter.finish([1, 2, 3, 4, 5, 6], draft_passes=2)
    assert figures.steps == 3
    assert figures.draft_passes == 2
    assert figures.acceptance_rate == pytest.approx(3 / 10)
    assert figures.ngram_acceptance_rate == pytest.approx(1 / 10)
    assert figures.mean_acceptance_length == pytest.approx(2.0)
    assert figures.node_acceptance_rate == pytest.approx(3 / 83)
    assert figures.tokens_per_second == pytest.approx(2.0)
    assert figures.seconds == 3.0
    assert figures.prefill_seconds == 0.5
    assert figures.distinct == (1.0, 1.0, 1.0, 1.0)


def test_phases_add_up_and_keep_the_prefill_apart(monkeypatch) -> None:
    clock = iter([0.0, 5.0, 10.0, 11.0, 20.0, 20.5, 30.0, 32.0])
    monkeypatch.setattr("tokenswift.metrics.perf_counter", lambda: next(clock))
    meter = Meter()
    for name in ("prefill", "draft", "verify", "draft"):
        with meter.phase(name):
            pass
    figures = meter.finish([1, 2, 3, 4, 5, 6, 7])
    assert figures.phases == {"draft": 3.0, "verify": 0.5}
    assert figures.prefill_seconds == 5.0
    assert figures.seconds == 3.5
    assert figures.tokens_per_second == 2.0


def test_figures_of_nothing_are_zero() -> None:
    figures = Meter().finish([])
    assert figures.steps == 0
    assert figures.distinct == (0.0, 0.0, 0.0, 0.0)
    for name in ("acceptance_rate", "ngram_acceptance_rate", "node_acceptance_rate"):
        assert getattr(figures, name) == 0.0
    assert figures.mean_acceptance_length == 0.0
    assert figures.tokens_per_second == 0.0


@pytest.mark.parametrize(
    ("tokens", "shares"),
    [
        ([1, 1, 1, 1], (1 / 4, 1 / 3, 1 / 2, 1.0)),
        ([1, 2, 1, 2, 1], (2 / 5, 2 / 4, 2 / 3, 1.0)),
        ([7], (1.0, 0.0, 0.0, 0.0)),
    ],
)
def test_distinct_is_unique_ngrams_of_all(
    tokens: list[int], shares: tuple[float, float, float, float]
) -> None:
    assert Meter().finish(tokens).distinct == pytest.approx(shares)


def test_a_phase_that_raises_is_timed() -> None:
    meter = Meter()
    with pytest.raises(KeyError), meter.phase("verify"):
        raise KeyError
    assert meter.seconds["verify"] > 0
