"""Defects of products, keys and values in int8."""

from __future__ import annotations

from defects.defect import Defect

PRODUCTS, ATTENTION = "kernels/cpu/cpu_int.h", "kernels/cpu/cpu_int_attention.h"
PANELS, SPECIFIED, ROWS = (
    "tests/kernels/formats/test_panels.py",
    "tests/kernels/test_int8.py",
    "tests/kernels/test_tunings.py",
)

INT8 = (
    Defect(
        "int8: columns take the scales of the first ones",
        PRODUCTS,
        "fused(scale[c0 + c] * x[r].scale,",
        "fused(scale[c] * x[r].scale,",
        (PANELS,),
    ),
    Defect(
        "int8: the last block of a row is left out",
        PRODUCTS,
        "for (long i = 0; i < k; i += m.block, b += block_bytes(m)) {",
        "for (long i = 0; i + m.block < k; i += m.block, b += block_bytes(m)) {",
        (PANELS,),
    ),
    Defect(
        "int8: the second half of a group of 32 has the sum of the first",
        PRODUCTS,
        "s ? x[r].all - x[r].first : x[r].first;",
        "x[r].first;",
        (PANELS,),
    ),
    Defect(
        "int8: keys take the scales of values",
        ATTENTION,
        "const V scales = *(const Vm *)at, level",
        "const V scales = *(const Vm *)(at + 2 * LEVELS), level",
        (SPECIFIED,),
    ),
    Defect(
        "int8: a row of scores takes the scale of the first row's query",
        ATTENTION,
        "scales * scale[r], level);",
        "scales * scale[0], level);",
        (ROWS,),
    ),
    Defect(
        "int8: a row sees the greatest score of the row before",
        ATTENTION,
        "    const float best = highest_lane(top);\n",
        "    static _Thread_local float before;\n    const float own = highest_lane(top);\n"
        "    const float best = before > own ? before : own;\n    before = own;\n",
        (ROWS,),
    ),
    Defect(
        "int8: a tree's values have the scales of what stands in their places",
        ATTENTION,
        "                memcpy(own + j, pages + slot / PAGE * page + 2 * LEVELS + slot % PAGE * 4, 4);\n",
        "",
        (ROWS,),
    ),
    Defect(
        "int8: a copied key keeps the scale of what stood there",
        ATTENTION,
        "for (long w = 0; w < 3 + width / 4; w++) memcpy",
        "for (long w = 1; w < 3 + width / 4; w++) memcpy",
        (ROWS,),
    ),
    Defect(
        "int8: turned keys lose the offset of their numbers",
        "kernels/cpu/entries.py",
        "round().clamp(-127, 127) + 128",
        "round().clamp(-127, 127) % 256",
        (SPECIFIED,),
    ),
    Defect(
        "int8: weights are cut, not rounded",
        ATTENTION,
        "        whole_bytes(p + j, y);\n",
        "        UNROLL for (int h = 0; h < NL; h++) y[h] = y[h] > 0.5f ? y[h] - 0.5f : y[h];\n"
        "        whole_bytes(p + j, y);\n",
        (SPECIFIED,),
    ),
)
