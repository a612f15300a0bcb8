"""Mixtures of experts: the compiled kernels against torch, and rows by themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tokenswift.kernels.base import Backend
from tokenswift.kernels.check import BEFORE, HIDDEN, MIXTURE, TAIL, Case, keeps_bits
from tokenswift.kernels.cpu import library
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.cpu.layer_structs import check_sizes, layers_of
from tokenswift.kernels.formats import FORMATS
from tokenswift.kernels.mixture import routes_of
from tokenswift.kernels.packed import Packed
from tokenswift.kernels.weights import Mixture
from tokenswift.loader.default_model import cache_dir

ALONE = replace(MIXTURE, shared=0, shared_gate=False)
MIXTURES = {
    "shared expert with a gate": MIXTURE,
    "shared expert without a gate": replace(MIXTURE, shared_gate=False),
    "no shared expert": ALONE,
    "renormalised": replace(ALONE, renormalised=True),
    "sigmoid": replace(ALONE, sigmoid=True),
    "sigmoid, renormalised": replace(ALONE, sigmoid=True, renormalised=True),
    "one expert a row": replace(ALONE, used=1),
    "all experts": replace(ALONE, used=ALONE.experts),
    "biases, limits of gates, and sinks": replace(MIXTURE, biased=True),
    "the same without a shared expert": replace(ALONE, biased=True, renormalised=True),
    "narrow experts, no whole panel": replace(ALONE, inner=34),
}
BITS = [
    (torch.float32, None, None),
    (torch.bfloat16, None, None),
    (torch.float16, None, None),
    (torch.float32, "q4_1", None),
    (torch.bfloat16, "q8_0", None),
    (torch.float32, "q8_0", torch.int8),
]
#: rows of a pass that takes its experts in several batches
MANY = 900


def case_of(
    backend: Backend,
    mixture: Mixture = MIXTURE,
    dtype: torch.dtype = torch.float32,
    form: str | None = None,
    active: torch.dtype | None = None,
) -> Case:
    """A model whose second layer has experts."""
    case = Case(backend, dtype, FORMATS[form] if form else None, active, mixture=mixture)
    if not mixture.shared:
        case.weights[1].gate_up = case.weights[1].down = None
    return case


@pytest.mark.parametrize("name", MIXTURES)
def test_the_kernels_compute_what_torch_does(kernels: CpuBackend, name: str) -> None:
    reference = Backend()
    states = case_of(kernels, MIXTURES[name]).run(kernels, (0, TAIL))
    expected = case_of(reference, MIXTURES[name]).run(reference, (0, TAIL))
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


def test_a_bias_chooses_and_does_not_weigh(kernels: CpuBackend) -> None:
    mixture = replace(ALONE, sigmoid=True)
    states: list[torch.Tensor] = []
    for backend in (kernels, Backend()):
        case = case_of(backend, mixture)
        experts = case.weights[1].experts
        assert experts is not None
        experts.bias = torch.tensor([0.0, 0, 0, 9, 0, 9, 0])
        states.append(case.run(backend, (0, TAIL)))
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-5)
    routes = routes_of(torch.zeros(1, 7), mixture, torch.tensor([0.0, 0, 0, 9, 0, 9, 0]))
    assert routes.experts.tolist() == [[3, 5]]
    assert routes.weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(("dtype", "form", "active"), BITS)
def test_rows_have_the_bits_that_they_have_alone(
    kernels: CpuBackend, dtype: torch.dtype, form: str | None, active: torch.dtype | None
) -> None:
    """In chunks, in trees, beside other sequences, on one, two and three threads."""
    backends = [CpuBackend(kernels._lib, threads) for threads in (1, 2, 3)]
    assert keeps_bits(backends, case_of(kernels, MIXTURE, dtype, form, active))


def long_case(backend: CpuBackend, active: torch.dtype | None) -> Case:
    """Many random rows behind the case's keys."""
    case = case_of(backend, MIXTURE, torch.float32, None if active is None else "q8_0", active)
    generator = torch.Generator().manual_seed(2)
    case.states = torch.randn(MANY, HIDDEN, generator=generator)
    angles = torch.rand(MANY, case.cos.shape[1], generator=generator)
    case.cos = angles.cos()
    case.sin = angles.sin()
    case.keys = case.keys.fork(BEFORE + MANY)
    return case


@pytest.mark.parametrize("active", [None, torch.int8], ids=str)
def test_rows_of_a_long_pass_are_those_of_short_ones(
    kernels: CpuBackend, active: torch.dtype | None
) -> None:
    """More rows than an expert's batch has room for."""
    case = long_case(kernels, active)
    cuts = [(0, MANY), (0, 600, MANY), (0, 1, 40, 200, 201, MANY)]
    at_once, *others = [case.run(kernels, each) for each in cuts]
    assert all(torch.equal(states, at_once) for states in others)


def test_equal_scores_go_to_the_first_experts() -> None:
    logits = torch.tensor([[1.0, 3, 3, 2, 3, 2], [0.0, 0, 0, 0, 0, 0]])
    routes = routes_of(logits, Mixture(experts=6, used=4, inner=8))
    assert routes.experts.tolist() == [[1, 2, 3, 4], [0, 1, 2, 3]]


def test_equal_scores_go_to_the_first_experts_in_the_kernels(kernels: CpuBackend) -> None:
    """With a router of zeros the last experts may be anything."""
    case = case_of(kernels, ALONE)
    experts = case.weights[1].experts
    assert experts is not None
    experts.router = kernels.pack(torch.zeros(ALONE.experts, HIDDEN), torch.float32)
    states = case.run(kernels, (0, TAIL))
    for weights in (experts.gate_up, experts.down):
        weights[ALONE.used :] = [
            _filled(weight, torch.nan, kernels) for weight in weights[ALONE.used :]
        ]
    experts.c_experts = None
    case._bodies.clear()
    assert torch.equal(case.run(kernels, (0, TAIL)), states)
    experts.down[0] = _filled(experts.down[0], torch.nan, kernels)
    experts.c_experts = None
    case._bodies.clear()
    assert not case.run(kernels, (0, TAIL)).isfinite().any()


def _filled(weight: Packed, value: float, backend: CpuBackend) -> Packed:
    return backend.pack(torch.full((weight.rows, weight.columns), value))


def test_scores_that_are_no_numbers_choose_experts_that_exist(kernels: CpuBackend) -> None:
    case = case_of(kernels, ALONE)
    case.states = case.states.clone()
    case.states[3] = torch.nan
    states = case.run(kernels, (0, TAIL))
    assert states[3].isnan().all()
    assert states[:3].isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"used": 9}, "a row goes through 9 of 7 experts"),
        ({"experts": 8}, r"experts are \(7, 7\); valid: 8"),
        ({"inner": 32}, r"an expert's gate_up has \(128, 64\) numbers; valid: \(64, 64\)"),
        ({"shared": 64}, r"gate_up has \(192, 64\) numbers; valid: \(128, 64\)"),
        ({"shared_gate": False}, r"router has \(8, 64\) numbers; valid: \(7, 64\)"),
    ],
)
def test_experts_of_other_sizes_are_refused(
    kernels: CpuBackend, changes: dict[str, int], message: str
) -> None:
    case = case_of(kernels)
    shape = replace(case.shape, mixture=replace(MIXTURE, **changes))
    with pytest.raises(ValueError, match=message):
        check_sizes(shape)
        layers_of(shape, case.weights)


BUILDS = [
    (name, library.instruction_sets()[name].flags) for name in library.fitting(library.processor())
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flags"), BUILDS)
@pytest.mark.parametrize("form", [None, "q8_0", "q4_1"])
def test_builds_have_the_same_bits(
    kernels: CpuBackend, name: str, flags: tuple[str, ...], form: str | None
) -> None:
    build = library.compiled(cache_dir() / "kernels", (flags,))
    if isinstance(build, str):
        pytest.skip("no C compiler here, or none that knows these flags")
    other = CpuBackend(build)
    active = None if form is None else torch.int8
    for mixture in MIXTURES.values():
        usual = replace(mixture, inner=64, shared=mixture.shared)
        states = case_of(kernels, usual, form=form, active=active).run(kernels, (0, TAIL))
        assert torch.equal(
            case_of(other, usual, form=form, active=active).run(other, (0, TAIL)), states
        )
