"""Files that no honest program writes end in one line, or load and are generated with.

None may end the command in a signal or a traceback, take more than 10 s of processor time, or more than 1 GB.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.conftest import OTHER
from tests.kernels import sanitized
from tests.malformed import corpus
from tests.malformed.planted import ENDS
from tests.malformed.worker import Worker, fault
from tokenswift.kernels.cpu import build

KINDS = ("gguf", "safetensors", "config", "tokenizer")
#: of the fast suite: cases of each kind
SAMPLE = 4
TARGETS = {"native": ("-march=native",), **OTHER}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(tmp_path_factory.mktemp("cache"))
    yield made
    made.close()


def faults(worker: Worker, cases: Iterator, folder: Path) -> list[str]:
    found = []
    for number, case in enumerate(cases):
        if (wrong := fault(worker.load(case, folder / str(number)))) is not None:
            found.append(f"{case}: {wrong}")
    return found


def test_the_corpus() -> None:
    """Of every kind, each case under a name of its own."""
    names = [str(case) for case in corpus()]
    assert len(names) == len(set(names))
    assert {name.partition(":")[0] for name in names} == set(KINDS)


def test_cases_are_the_same_every_time(tmp_path: Path) -> None:
    """Seeds decide, so that what failed once can be made again."""
    for number, case in enumerate(islice(corpus(), 0, None, 211)):
        written = []
        for name in ("first", "second"):
            (folder := tmp_path / name / str(number)).mkdir(parents=True)
            path = case.write(folder)
            files = [path] if path.is_file() else sorted(path.iterdir())
            written.append([file.read_bytes() for file in files if file.is_file() and not file.is_symlink()])
        assert written[0] == written[1], case


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample(kind: str, worker: Worker, tmp_path: Path) -> None:
    some = random.Random(3).sample(list(corpus(kind)), SAMPLE)
    assert faults(worker, iter(some), tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all(kind: str, worker: Worker, tmp_path: Path) -> None:
    assert faults(worker, corpus(kind), tmp_path) == []


SEEN = {
    "crash": "signal 11",
    "trip": "exit code 1, ['error: the run failed (ZeroDivisionError",
    "swallow": "took 1,",
    "hang": "took 30.0 s",
    "talk": "a traceback: ",
    "refuse": None,
}


@pytest.mark.parametrize(
    "name", [n if n in ("crash", "refuse") else pytest.param(n, marks=pytest.mark.slow) for n in ENDS]
)
def test_what_is_planted_is_seen(name: str, worker: Worker) -> None:
    """Without this, silence would prove nothing."""
    found, expected = fault(worker.run(["planted", name])), SEEN[name]
    assert found is None if expected is None else found is not None and found.startswith(expected), found


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_with_kernels_under_sanitizers(target: str, tmp_path: Path) -> None:
    """All files of weights on this processor, some of the others and elsewhere. Limits of time and memory are
    another test's: the sanitizers take much of both."""
    if sanitized.runtime() is None:
        pytest.skip("no GCC with ASan here")
    if target == "avx2" and "avx2" not in build.processor():
        pytest.skip("this processor has no AVX2")
    library = sanitized.compiled(TARGETS[target], tmp_path / "kernels.so")
    (tmp_path / "cache").mkdir()
    worker = Worker(tmp_path / "cache", sanitized.command(library, "tests.malformed.worker"))
    found = []
    try:
        for kind in KINDS:
            step = {"gguf": 1, "safetensors": 1}.get(kind, 5) * (1 if target == "native" else 10)
            for number, case in enumerate(islice(corpus(kind), 0, None, step)):
                said = worker.load(case, tmp_path / f"{kind} {number}")["stderr"]
                if "AddressSanitizer" in said or "runtime error: " in said:
                    found.append(f"{case}: {said[-2000:]}")
    finally:
        worker.close()
    assert found == []
