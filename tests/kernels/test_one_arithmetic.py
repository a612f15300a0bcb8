"""Kernels for every instruction set give the same bits, but for the bfloat16 dot products of some."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.kernels.rows import Tally, fuzz
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.cpu.library import compiled, fitting, own_sets, processor
from tokenswift.loader.find import cache_dir
from tokenswift.loader.rope import cos_sin

RUN = fitting(processor())


def library(name: str) -> ctypes.CDLL:
    made = compiled(cache_dir() / "kernels", (own_sets()[name].flags,))
    if isinstance(made, str):
        pytest.skip("no C compiler here")
    return made


def differing(a: Tally, b: Tally) -> list[str]:
    assert a.digests.keys() == b.digests.keys() and len(a.digests) > 10
    return [case for case, digest in a.digests.items() if b.digests[case] != digest]


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in RUN, reason="the processor has no AVX2")
def test_this_processors_own_kernels_give_the_bits_of_avx2() -> None:
    own = compiled(cache_dir() / "kernels")
    if isinstance(own, str):
        pytest.skip("no C compiler here")
    found = differing(fuzz(own, range(8)), fuzz(library("avx2"), range(8)))
    assert all("bfloat16" in case for case in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_an_instruction_set_gives_the_bits_of_plain_x86_64(name: str) -> None:
    found = differing(fuzz(library(name), range(40)), fuzz(library("x86-64"), range(40)))
    assert all("bfloat16" in case for case in found) if name == "avx512-bf16" else not found


def test_angles_are_rounded_from_the_true_ones() -> None:
    angles = torch.rand(100_000, generator=torch.Generator().manual_seed(1)) * 200_000
    cos, sin = cos_sin(angles)
    assert torch.equal(cos, angles.double().cos().float()) and torch.equal(sin, angles.double().sin().float())


def test_the_fuzz_finds_rows_that_know_of_their_pass(kernels: CpuBackend) -> None:
    class Bent(CpuBackend):
        def attend(self, *args: Any, **named: Any) -> torch.Tensor:
            out, parents = super().attend(*args, **named), args[3]
            return out if parents is None else torch.nextafter(out, torch.zeros_like(out))

        def linear(self, *args: Any, **named: Any) -> torch.Tensor:
            out = super().linear(*args, **named)
            return out if len(out) < 20 else torch.nextafter(out, torch.zeros_like(out))

    tally = fuzz(kernels._lib, range(12), Bent)
    assert {case.split()[0] for case in tally.wrong} == {"attention", "product", "passes"}
