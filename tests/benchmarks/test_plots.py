"""Pictures: every series looks different, and a real model's tasks are all in theirs."""

from __future__ import annotations

import pytest

from benchmarks import plots, specs
from tools.summaries import tasks

STYLES = {
    "colours": plots.COLOURS,
    "markers": plots.MARKERS,
    "dashes": plots.DASHES,
    "hatches": plots.HATCHES,
}


@pytest.mark.parametrize("kind", STYLES)
def test_no_two_series_share_a_style(kind: str) -> None:
    styles = STYLES[kind]
    assert len(set(styles)) == len(styles) == len(plots.COLOURS)


@pytest.mark.parametrize("spec", specs.chosen(()), ids=lambda spec: str(spec.name))
def test_there_is_a_style_for_every_way_of_drafting(spec: specs.Spec) -> None:
    ways = [*spec.data.get("methods", []), *spec.data.get("variants", [])]
    assert len(ways) <= len(plots.COLOURS)


def test_the_picture_of_a_real_model_has_every_task_of_its_rows() -> None:
    rows = tasks("EPYC")
    picture = plots.plot_tasks(rows).decode()
    assert len(rows) > 3
    for row in rows:
        assert f">{row['task']}<" in picture
        assert f"{row['auto_over_plain']:.2f} × plain" in picture


def test_long_texts_take_minutes_by_the_speeds_of_their_parts() -> None:
    parts = [{"part": 600, "plain": 10.0, "auto": 20.0}, {"part": 900, "plain": 5.0, "auto": 5.0}]
    assert plots.minutes(parts, "plain") == [1.0, 2.0]
    assert plots.minutes(parts, "auto") == [0.5, 1.5]
    picture = plots.plot_long_texts([[*parts, {"model": "a-model"}]]).decode()
    assert "a-model, with drafts" in picture
    assert plots.plot_long_texts([]) == b""


def test_each_program_has_a_line_over_lengths_and_ours_has_two() -> None:
    rows = [
        {"program": "tokenswift", "context": 1024, "writing": 9.0, "drafting": 12.0},
        {"program": "tokenswift", "context": 4096, "writing": 8.0, "drafting": 11.0},
        {"program": "llama.cpp", "context": 1024, "writing": 6.0},
    ]
    assert plots.speed_lines(rows) == {
        "tokenswift, plain": {1024: 9.0, 4096: 8.0},
        "tokenswift, with drafts": {1024: 12.0, 4096: 11.0},
        "llama.cpp": {1024: 6.0},
    }
    picture = plots.plot_lengths(rows).decode()
    for words in ("tokenswift, plain", "tokenswift, with drafts", "llama.cpp", "4,096"):
        assert words in picture


def test_without_rows_there_is_no_picture() -> None:
    assert plots.plot_tasks([]) == b""
    assert plots.plot_lengths([]) == b""
