"""Files that no honest program writes end in one line, or load and are generated with.

None may end the command in a signal or a traceback, take more than 10 s of processor time, or more
than 1 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.malformed.cases import Case, corpus, fuzz
from tests.malformed.worker import fault, generate, planted


def faults(cases: Iterator[Case], folder: Path) -> list[str]:
    faults_of_cases: list[str] = []
    for number, case in enumerate(cases):
        (place := folder / str(number)).mkdir()
        if (wrong := fault(generate, case.write(place), folder)) is not None:
            faults_of_cases.append(f"{case}: {wrong}")
        (folder / "stderr").unlink()
    return faults_of_cases


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_every_case_of_the_corpus(step: int, tmp_path: Path) -> None:
    assert faults(islice(corpus(), 0, None, step), tmp_path) == []


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 400), marks=pytest.mark.slow)])
def test_gguf_files_with_bytes_changed(seeds: range, tmp_path: Path) -> None:
    assert faults(fuzz(seeds), tmp_path) == []


@pytest.mark.parametrize(
    ("name", "seen"), [("crash", "code -11"), ("trip", "code 1"), ("refuse", "")]
)
def test_what_is_planted_is_seen(name: str, seen: str, tmp_path: Path) -> None:
    """Without this, silence would prove nothing."""
    assert seen in (fault(planted, name, tmp_path) or "")
