"""Defects of low-bit weights and of drafts in few bits."""

from __future__ import annotations

from defects.defect import Defect

PANELS, PASSES = "tests/kernels/formats/test_panels.py", "tests/models/test_low_bit.py"
AUTO, CUDA = "tests/spec/drafters/test_auto.py", "tests/kernels/cuda/test_weights.py"
LOW, INT = "kernels/cpu/cpu_low.h", "kernels/cpu/cpu_int.h"

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
        "kernels/cpu/cpu_linear.h",
        "sums + r * NR, NR, k > 0);",
        "sums + r * NR, NR, 0);",
        ("tests/kernels/test_tunings.py",),
    ),
    Defect(
        "low bits: the offset is taken from half of a group",
        INT,
        "out->all = out->first + whole_bytes(out->q + 16, x[1]);",
        "whole_bytes(out->q + 16, x[1]), out->all = out->first;",
        (PANELS,),
    ),
    Defect(
        "low bits: activations are cut, not rounded",
        INT,
        "x[s][h] = up > 0 ? x[s][h] * up : (V){0};",
        "x[s][h] = up > 0 ? __builtin_convertvector(__builtin_convertvector(x[s][h] * up, I), V) : (V){0};",
        (PANELS,),
    ),
    Defect(
        "low bits: a part that ends inside a panel stays packed",
        "kernels/weights.py",
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
        "spec/drafters/partial.py",
        "cache, sparse = self._cache(sequence, candidates)",
        "cache, sparse = sequence.cache, None",
        (AUTO,),
    ),
    Defect(
        "low bits: the rows of a copy have moved",
        "models/low_bit.py",
        "form.encode(weight.unpack().float())), arena",
        "form.encode(weight.unpack().float().roll(1, 0))), arena",
        (PASSES,),
    ),
    Defect(
        "low bits: on CUDA the halves of a byte belong to the other group",
        "kernels/cuda/weights.py",
        "            u = torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)\n",
        "            u = torch.stack((pairs >> 4, pairs & 15), 2).flatten(1)\n",
        (CUDA,),
    ),
    Defect(
        "low bits: weights that are quantized for a card are not checked there",
        "engine/source.py",
        "            self._far = checked(made, weights, files.name)\n",
        "            self._far = 0.0\n",
        (CUDA,),
    ),
    Defect(
        "heads that were packed for another backend are used",
        "spec/heads/packed.py",
        "if kept is None or kept[:2] != (backend, state):",
        "if kept is None or kept[1] != state:",
        (CUDA,),
    ),
    Defect(
        "graphs stay on for who wants none",
        "models/target.py",
        '*(["without graphs"] if off else [])',
        "*[]",
        ("tests/models/test_target.py",),
    ),
    Defect(
        "what would fit into a card's memory leaves the run's own out",
        "memory.py",
        "room = memory.free + held -",
        "room = memory.free -",
        ("tests/test_memory.py",),
    ),
)
