"""A row's bits are its own whatever compiler made the kernels, whatever processor they are scheduled for.

Some tunings make a compiler split a fused multiply-add into two roundings in one place and not in another.
The kernels may not leave that to a compiler: here they are compiled for many tunings, and rows of random
shapes run through each. Libraries for one instruction set must agree in every bit, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.rows import Tally, fuzz
from tests.kernels.tunings import RARE, Compiler, Tuning, compile_all, compilers, sets_here
from tokenswift.kernels.cpu.backend import CpuBackend

KINDS = ("gcc", "clang")
QUICK = (
    Tuning("x86-64"),
    Tuning("x86-64-v3"),
    Tuning("x86-64-v3", "haswell"),
    Tuning("x86-64-v3", "znver2"),
    Tuning("x86-64-v3", "znver3"),
    Tuning("x86-64-v4", "skylake-avx512"),
    Tuning("x86-64-v4", more="--param=avoid-fma-max-bits=512"),
    Tuning("x86-64-v4+bf16", "sapphirerapids"),
    Tuning("x86-64-v4+bf16", "znver2"),
)
SEEDS, MORE_SEEDS = range(12), range(12, 160)

pytestmark = pytest.mark.skipif(not sets_here(), reason="instruction sets are listed for x86-64 alone")


def compiler_of(kind: str) -> Compiler:
    """gcc or clang, or the test is skipped."""
    if kind not in compilers():
        pytest.skip(f"no {kind} here")
    return compilers()[kind]


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[Tuning, ctypes.CDLL]]:
    """``libraries(kind)`` → the quick tunings that this compiler and this processor know, compiled once."""
    made: dict[str, dict[Tuning, ctypes.CDLL]] = {}

    def compiled(kind: str) -> dict[Tuning, ctypes.CDLL]:
        if kind not in made:
            compiler = compiler_of(kind)
            known = [t for t in QUICK if t.instructions in sets_here() and compiler.takes(*t.flags)]
            made[kind], missing = compile_all(compiler, known, tmp_path_factory.mktemp("kernels"))
            assert not missing
        return made[kind]

    return compiled


@pytest.fixture(scope="session")
def quick(libraries: Callable[[str], Any]) -> Callable[[str], dict[Tuning, Tally]]:
    """``quick(kind)`` → the tallies of these libraries."""
    made: dict[str, dict[Tuning, Tally]] = {}

    def tallies(kind: str) -> dict[Tuning, Tally]:
        if kind not in made:
            made[kind] = run(libraries(kind), SEEDS)
        return made[kind]

    return tallies


def run(libraries: dict[Tuning, ctypes.CDLL], seeds: range) -> dict[Tuning, Tally]:
    """The tally of each library."""
    return {tuning: fuzz(library, seeds) for tuning, library in libraries.items()}


def faults_of(name: str, tallies: dict[Tuning, Tally]) -> list[str]:
    """A line for each of a compiler's tunings that made rows differ."""
    return [
        f"{name} {tuning.name}: {sum(tally.wrong.values())} of {tally.rows} rows differ, "
        f"first of {next(iter(tally.wrong))}"
        for tuning, tally in tallies.items()
        if tally.wrong
    ]


def unlike(tallies: dict[str, Tally]) -> list[str]:
    """The libraries whose rows alone differ from most libraries' rows, each with the first case that does."""
    found: list[str] = []
    for case in next(iter(tallies.values())).digests if tallies else ():
        digests = [tally.digests[case] for tally in tallies.values()]
        usual = max(digests, key=digests.count)
        known = {line.split(": ")[0] for line in found}
        others = [name for name, tally in tallies.items() if tally.digests[case] != usual]
        found += [f"{name}: {case}" for name in others if name not in known]
    return found


# ---- quick ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tuning", QUICK, ids=lambda tuning: tuning.name)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_their_own_bits(quick: Callable[[str], Any], kind: str, tuning: Tuning) -> None:
    tallies = quick(kind)
    if tuning not in tallies:
        pytest.skip(f"this processor or this {kind} does not know {tuning.name}")
    assert not faults_of(kind, {tuning: tallies[tuning]})
    assert tallies[tuning].rows >= 1000


@pytest.mark.slow
@pytest.mark.parametrize("instructions", sorted({tuning.instructions for tuning in QUICK}))
def test_tunings_of_an_instruction_set_agree(quick: Callable[[str], Any], instructions: str) -> None:
    tallies = {
        f"{kind} {tuning.name}": tally
        for kind in KINDS
        if kind in compilers()
        for tuning, tally in quick(kind).items()
        if tuning.instructions == instructions
    }
    if not tallies:
        pytest.skip(f"this processor or these compilers do not know {instructions}")
    assert not unlike(tallies)


def test_the_fuzz_finds_rows_that_know_of_their_pass(kernels: CpuBackend) -> None:
    class Bent(CpuBackend):
        def attend(self, *args: Any, **named: Any) -> torch.Tensor:
            out, parents = super().attend(*args, **named), args[3]
            return out if parents is None else torch.nextafter(out, torch.zeros_like(out))

        def linear(self, *args: Any, **named: Any) -> torch.Tensor:
            out = super().linear(*args, **named)
            return out if len(out) < 20 else torch.nextafter(out, torch.zeros_like(out))

    tally = fuzz(kernels._lib, SEEDS, Bent)
    assert {case.split()[0] for case in tally.wrong} == {"attention", "product", "passes"}


# ---- slow: more shapes, and everything that the compilers know -----------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_shapes(libraries: Callable[[str], Any], capsys: pytest.CaptureFixture[str], kind: str) -> None:
    tallies = run(libraries(kind), MORE_SEEDS)
    rows, faults = sum(tally.rows for tally in tallies.values()), faults_of(kind, tallies)
    with capsys.disabled():
        print(f"\n  {kind}: {rows} rows compared, {len(tallies)} tunings")
    assert not faults
    assert rows >= 10_000


@pytest.mark.slow
def test_every_tuning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """gcc and clang with the tuning of every processor for its own instructions, and every further flag;
    other versions with the quick ones, where they compile at all (clang 16 crashes over the bfloat16 dot
    product)."""
    alike: dict[str, dict[str, Tally]] = {name: {} for name in sets_here()}
    few = {tuning.tune for tuning in QUICK}
    faults, rows = [], 0
    for name, compiler in compilers().items():
        known = compiler.tunings()
        assert {Tuning("x86-64"), Tuning("x86-64", "haswell"), Tuning("x86-64", "znver2")} <= {*known}
        if name in KINDS:
            own = {tune: compiler.best_set(tune) for tune in compiler.processors()}
            known = [
                t
                for t in known
                if t.instructions not in RARE and (t.tune == "generic" or own[t.tune] == t.instructions)
            ]
        else:
            known = [t for t in known if t.tune in few]
        libraries, missing = compile_all(compiler, known, tmp_path)
        failed = [f"{name} {tuning.name}: no kernels" for tuning in missing]
        if name in KINDS:
            faults += failed
        tallies = run(libraries, SEEDS)
        faults += faults_of(name, tallies)
        for tuning, tally in tallies.items():
            alike[tuning.instructions][f"{name} {tuning.name}"] = tally
        compared = sum(tally.rows for tally in tallies.values())
        rows += compared
        with capsys.disabled():
            print(
                "", f"{name}: {compared} rows compared, {len(tallies)} tunings", *failed, sep="\n  ", end=""
            )
    if not compilers():
        pytest.skip("no gcc and no clang here")
    for tallies in alike.values():
        faults += [f"unlike other libraries: {line}" for line in unlike(tallies)]
    assert not faults
    assert rows >= 10_000
