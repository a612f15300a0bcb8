"""Defects of low-bit weights and of drafts in few bits."""

from __future__ import annotations

from defects.defect import Defect

PANELS, PASSES = "tests/weights/test_panels.py", "tests/models/test_low_bit.py"
AUTO = "tests/drafters/test_auto.py"
LOW = "backends/cpu/cpu_low.h"

LOW_BIT = (
    Defect(
        "low bits: the fifth bit is that of the position before",
        LOW,
        "if (m.bits == 5) u |= (x.high >> (8 * byte + quad) & 1) << 4;",
        "if (m.bits == 5) u |= (x.high >> (8 * byte + quad - (quad > 0)) & 1) << 4;",
        (PANELS,),
    ),
    Defect(
        "low bits: a group of 16 takes the scale of 32",
        LOW,
        "if (w * per % m.group == 0) scales(m, b, (g * 32 + w * per) / m.group, scale, least);",
        "if (w == 0) scales(m, b, (g * 32 + w * per) / m.group, scale, least);",
        (PANELS,),
    ),
    Defect(
        "low bits: many rows go on from nothing at every part of a panel",
        "backends/cpu/cpu.c",
        "sums + r * NR, NR, k > 0);",
        "sums + r * NR, NR, 0);",
        ("tests/backends/test_tunings.py",),
    ),
    Defect(
        "low bits: the offset is taken from half of a group",
        LOW,
        "y->sums[0] + y->sums[1];",
        "y->sums[0];",
        (PANELS,),
    ),
    Defect(
        "low bits: activations are cut, not rounded",
        LOW,
        "const float whole = y[i] * up + 12582912.0f;",
        "const float whole = truncf(y[i] * up) + 12582912.0f;",
        (PANELS,),
    ),
    Defect(
        "low bits: a part that ends inside a panel stays packed",
        "backends/weights.py",
        "if any(_rows(run) % PANEL for run in runs[:-1]):",
        "if False:",
        (PANELS,),
    ),
    Defect(
        "low bits: drafts go to the position before",
        "models/low_bit.py",
        "Segment(tokens, positions, cache, parents)",
        "Segment(tokens, positions - 1, cache, parents)",
        (AUTO,),
    ),
    Defect(
        "low bits: drafts are made over the full cache",
        "drafters/partial.py",
        "cache, sparse = self._cache(sequence, candidates)",
        "cache, sparse = sequence.cache, None",
        (AUTO,),
    ),
    Defect(
        "low bits: the rows of a copy have moved",
        "models/low_bit.py",
        "made = backend.pack(Stored(form, form.encode(weight.unpack().float())))",
        "made = backend.pack(Stored(form, form.encode(weight.unpack().float().roll(1, 0))))",
        (PASSES,),
    ),
)
