"""Do the kernels work on the card at hand? Asked once a process, before the first model is loaded.

A small random model's last positions run alone, all at once, in trees with wrong branches and beside another
text's: they have to be near what torch makes of them, and equal to each other byte by byte.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from tokenswift.interfaces import KVCache, Segment
from tokenswift.json_files import line_of
from tokenswift.kernels.case import BEFORE, LOOKED_AT, TAIL, WIDTH, Case, Keys
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.int_reference import entries_of
from tokenswift.kernels.cuda.plan import ALONE, CHUNK, SPAN, plan_of
from tokenswift.kernels.cuda.reference import summed
from tokenswift.kernels.formats.format import Format
from tokenswift.kernels.formats.q4_1 import Q4_1
from tokenswift.kernels.formats.q8_0 import Q8_0

logger = logging.getLogger("tokenswift")
Kind = tuple[torch.dtype, Format | None, torch.dtype | None]  # of weights, their format, of activations
KINDS: tuple[Kind, ...] = (
    (torch.bfloat16, None, None),
    (torch.float16, None, None),
    (torch.float32, None, None),
    (torch.bfloat16, Q4_1, None),
    (torch.float32, Q8_0, torch.int8),
)
OLDEST, CAPABLE = (3, 6), (8, 0)  # Triton, and a card's compute capability
USUAL = 128  # width of most models' heads, for which kernels have forms of their own
NEVER = 1 << 30  # programs of which there are never as many
LONG, DEEP = 200, 2112  # rows and inner size of products that are compared: several blocks, several parts
WHOLE: Kind = (torch.float32, Q8_0, torch.int8)  # that keys and values in int8 are looked at with
#: greatest relative distance of states from the reference's, by type of keys
NEAR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def started(device: torch.device, graphs: bool = True) -> CudaBackend | str:
    """The backend of a device; or in one line why it does not work there. ``graphs``: see `Backend`."""
    try:
        if (found := unfit(device)) is not None:
            return found
        from tokenswift.kernels.cuda.launch import Kernels
        from tokenswift.kernels.cuda.products import settle

        settle()
        backend = CudaBackend(device, Kernels(device))
        backend.graphs = graphs
        compile_all(backend)
        backend.ops.wide = same_blocks(backend)
        if not same_rows(backend):
            backend.ops.enough = NEVER
        backend.ops.fused = same_layers(backend)
        found = fault(backend) or fault(backend, [(torch.bfloat16, None, None)], (TAIL,), width=USUAL)
    except Exception as error:  # Triton, its compiler, the driver and torch each raise their own here
        return line_of(error)
    if found is not None:
        return found
    if graphs and (found := unrecorded(backend)) is not None:
        logger.warning("CUDA graphs do not work here (%s); kernels are started one by one", found)
        backend.graphs = False
    if (found := int8_fault(backend)) is not None:
        logger.warning("keys and values in int8 do not work here (%s); other types do", found)
        backend.int8_keys = False
    backend.prepares = True
    backend.equal_bits, backend.build = True, f"triton {version('triton')}"
    backend.key = f"{backend.build}, {backend.processor()}"
    return backend


def unfit(device: torch.device) -> str | None:
    """Why kernels cannot even be tried on a device, in one line: a compiler that does not know a card, or its
    types, may end the process; None where they can. Newer Tritons are tried, and the check decides."""
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported: {line_of(error)}"
    numbers = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
    if numbers < OLDEST:
        return f"Triton is {triton.__version__}; valid: 3.6 and newer"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABLE:
        name, has = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        return f"{name} has compute capability {has}; valid: 8.0 and newer"
    return None


@torch.inference_mode()
def same_rows(backend: CudaBackend) -> bool:
    """Whether attention of a long chain, whose blocks go over all keys by themselves, has the bits that its
    rows have alone."""
    found, expected = (attended(backend, alone) for alone in (False, True))
    if torch.equal(found, expected):
        return True
    logger.warning("attention of many rows has other bits over all keys at once here; it is cut into spans")
    return False


def attended(backend: CudaBackend, alone: bool, first: int = SPAN * CHUNK - 40) -> Tensor:
    """Attention of a long chain's last rows, (3, H, d), over the end of a span: with all others, or alone."""
    made, dtype = torch.Generator().manual_seed(2), torch.bfloat16
    heads, kv_heads, rows = 8, 2, ALONE + 16
    query, data = (
        torch.randn(shape, generator=made, dtype=torch.float32).to(backend.device, dtype)
        for shape in ((rows, heads, USUAL), (2, kv_heads, first + rows, USUAL))
    )
    enough, backend.ops.enough = backend.ops.enough, 1
    try:
        found: list[Tensor] = []
        for start in range(rows - 3, rows) if alone else (0,):
            numbers, keys = torch.arange(1 if alone else rows), cast(KVCache, Keys(data, first + start))
            plan = plan_of([Segment(numbers, numbers, keys)], heads, backend.device)
            found.append(backend.ops.attend(plan, query[start : start + len(numbers)], 0, USUAL**-0.5))
        return torch.cat(found)[-3:]
    finally:
        backend.ops.enough = enough


@torch.inference_mode()
def compile_all(backend: CudaBackend) -> None:
    """Compile the check's kernels several at a time, so that it does not wait for one after the other."""
    try:
        with backend.ops.compiling():
            for kind, width in (*((kind, WIDTH) for kind in KINDS), ((torch.bfloat16, None, None), USUAL)):
                case = Case(backend, *kind, width=width)
                case.run(backend, [list(range(TAIL))])
                case.replayed(backend, None)
            for alone in (False, True):
                attended(backend, alone)
            layers(backend)
    except Exception as error:  # of Triton or its compiler; what is really wrong the check finds out
        logger.warning("kernels are compiled one after the other here (%s)", line_of(error))


@torch.inference_mode()
def same_blocks(backend: CudaBackend) -> bool:
    """Whether products of many rows, whose blocks are larger, have the bits that each row has alone."""
    made = torch.Generator().manual_seed(1)
    states, weight = (
        torch.randn(n, DEEP, generator=made, dtype=torch.float32).bfloat16().to(backend.device)
        for n in (LONG, 192)
    )
    many = backend.ops.product(states, weight, None)[0]
    alone = [backend.ops.product(states[row : row + 1], weight, None, False) for row in (0, 70, LONG - 1)]
    if all(torch.equal(summed(one), many[[row]]) for one, row in zip(alone, (0, 70, LONG - 1), strict=True)):
        return True
    logger.warning("products of many rows have other bits in larger blocks here; smaller ones are used")
    return False


@torch.inference_mode()
def same_layers(backend: CudaBackend) -> bool:
    """Whether layers in few launches have the bits of those in many, which passes of many rows go by."""
    try:
        *found, expected = layers(backend)
        said = "" if all(torch.equal(one, expected) for one in found) else "they have other bits"
    except Exception as error:  # as in `started`
        said = line_of(error)
    if said:
        logger.warning("layers in few launches do not work here (%s); they take more", said)
    return not said


def layers(backend: CudaBackend) -> list[Tensor]:
    """States behind layers in few launches, several times, and in many; with sums in many parts."""
    ops, made = backend.ops, list[Tensor]()
    before = ops.fused, ops.split
    ops.split = 64
    try:
        case = Case(backend, torch.bfloat16, width=USUAL)
        for ops.fused in (True, True, True, False):
            made.append(case.run(backend, [list(range(TAIL))]))
    finally:
        ops.fused, ops.split = before
    return made


def int8_fault(backend: CudaBackend, kind: Kind = WHOLE, steps: Sequence[int] = (3, TAIL)) -> str | None:
    """What is wrong with keys and values in int8; None when nothing is."""
    try:
        return fault(backend, [kind], steps, torch.int8)
    except Exception as error:  # as in `started`
        return line_of(error)


@torch.inference_mode()
def unrecorded(backend: CudaBackend) -> str | None:
    """Why a backend's passes cannot be recorded; None when replays give the bits of eager passes."""
    case = Case(backend, torch.bfloat16)
    case.run(backend, [list(range(TAIL))])
    expected = case.replayed(backend, None)
    try:
        found = case.replayed(backend, backend.replays(), (BEFORE, BEFORE + TAIL, BEFORE))
    except RuntimeError as error:  # torch, the driver and Triton's launcher
        return line_of(error)
    return None if torch.equal(found, expected) else "replays have other bits"


@torch.inference_mode()
def fault(
    backend: CudaBackend,
    kinds: Sequence[Kind] = KINDS,
    steps: Sequence[int] = (3, TAIL),
    keys: torch.dtype | None = None,
    width: int = WIDTH,
) -> str | None:
    """What is wrong with a backend's kernels: the first case; None when they are right.

    Args:
        steps: of the trees that are compared, in right nodes.
        keys: type of keys and values, int8; None: as the weights.
        width: of heads.
    """
    reference = CudaBackend(backend.device)
    for kind in kinds:
        case = Case(backend, *kind, width=width)
        if keys is not None:
            case.shape, case.keys.data = replace(case.shape, keys=keys), entries_of(case.keys.data)
            case.name += f", keys {keys}"
        alone = case.run(backend, [[row] for row in range(TAIL)])
        expected = case.run(reference, [list(range(TAIL))])
        far = float((alone - expected).norm() / expected.norm())
        near = max(NEAR[kind[0]], 1e-2 if kind[2] is not None else 0.0)  # a number may round the other way
        if not far <= near:
            return f"{case.name} is {far:.1e} of its size from the reference"
        for cuts in ((0, TAIL), (0, 7, TAIL)):
            passes = [list(range(*ends)) for ends in pairwise(cuts)]
            if not torch.equal(case.run(backend, passes), alone):
                return f"rows in {len(passes)} passes, {case.name}"
        if not torch.equal(case.replayed(backend, None), alone[[*LOOKED_AT]]):
            return f"rows in passes that are filled up, {case.name}"
        for count in steps:
            tree, text = case.tree(backend, count)
            if not torch.equal(tree, alone[:count]):
                return f"a tree of {2 * count - 1} rows, {case.name}"
            if not torch.equal(text, alone[:count]):
                return f"{count} rows beside another text's, {case.name}"
    return None
