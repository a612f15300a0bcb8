"""Do the compiled kernels keep the rule that a row's bits are its own affair? Asked at first use.

The tests ask it of many shapes and compilers; this asks it, in milliseconds, of the library at hand on the
machine at hand: a small random model of two layers, whose last positions run alone, all at once, in trees
with wrong branches and beside another text's, on one thread and on two, in every type and with weights of few
bits, compared byte by byte.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise

import torch

from tokenswift.kernels.case import TAIL, Case
from tokenswift.kernels.cpu.arguments import TYPES
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kernels.formats.registry import Q4_1, Q8_0

#: quantized weights: the type of their values, their format, what is multiplied with them
LOW = ((torch.float32, Q4_1, None), (torch.bfloat16, Q8_0, None), (torch.float32, Q8_0, torch.int8))


@torch.inference_mode()
def fault(library: ctypes.CDLL) -> str | None:
    """What is wrong with a compiled library: the first case in which rows differ; None when all are equal."""
    kernels = [CpuBackend(library, threads) for threads in (1, 2)]
    for case in (*(Case(kernels[0], dtype) for dtype in TYPES), *(Case(kernels[0], *low) for low in LOW)):
        alone = case.run(kernels[0], [[row] for row in range(TAIL)])
        for threads, each in enumerate(kernels, 1):
            for cuts in (range(TAIL + 1), (0, TAIL), (0, 7, TAIL)):
                passes = [list(range(*ends)) for ends in pairwise(cuts)]
                if not torch.equal(case.run(each, passes), alone):
                    return f"rows in {len(passes)} passes, {case.name}, {threads} threads"
            for steps in (3, TAIL):
                tree, text = case.tree(each, steps)
                if not torch.equal(tree, alone[:steps]):
                    return f"a tree of {2 * steps - 1} rows, {case.name}, {threads} threads"
                if not torch.equal(text, alone[:steps]):
                    return f"{steps} rows beside another text's, {case.name}, {threads} threads"
            rows = torch.cat([each.linear(row[None], case.head, active=case.active) for row in alone])
            if not torch.equal(each.linear(alone, case.head, active=case.active), rows):
                return f"a product, {case.name}, {threads} threads"
    return None
