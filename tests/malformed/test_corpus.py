"""Files that no honest program writes end in one line, or load and are generated with.

None may end the command in a signal or a traceback, take more than 10 s of processor time, or more than 1 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.malformed.cases import Case, corpus, fuzz
from tests.malformed.worker import Worker, fault


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(tmp_path_factory.mktemp("cache"))
    yield made
    made.close()


def faults(worker: Worker, cases: Iterator[Case], folder: Path) -> list[str]:
    ends = ((case, fault(worker.load(case, folder / str(number)))) for number, case in enumerate(cases))
    return [f"{case}: {wrong}" for case, wrong in ends if wrong is not None]


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_every_case_of_the_corpus(step: int, worker: Worker, tmp_path: Path) -> None:
    assert faults(worker, islice(corpus(), 0, None, step), tmp_path) == []


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 400), marks=pytest.mark.slow)])
def test_gguf_files_with_bytes_changed(seeds: range, worker: Worker, tmp_path: Path) -> None:
    assert faults(worker, fuzz(seeds), tmp_path) == []


@pytest.mark.parametrize(("name", "seen"), [("crash", "signal 11"), ("trip", "exit code 1"), ("refuse", "")])
def test_what_is_planted_is_seen(name: str, seen: str, worker: Worker) -> None:
    """Without this, silence would prove nothing."""
    assert (fault(worker.run(["planted", name])) or "").startswith(seen)
