"""Defects of products, keys and values in int8."""

from __future__ import annotations

from defects.defect import Defect

PRODUCTS, ATTENTION = "backends/cpu/cpu_int.h", "backends/cpu/cpu_int_attention.h"
PANELS, SPECIFIED, ROWS = (
    "tests/weights/test_panels.py",
    "tests/backends/test_int8.py",
    "tests/backends/test_tunings.py",
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
        "const V scales = *(const Vm *)(pages + p * page + h * 4 * W);",
        "const V scales = *(const Vm *)(pages + p * page + 64 + h * 4 * W);",
        (SPECIFIED,),
    ),
    Defect(
        "int8: a row's probabilities are worth what the first row's are",
        ATTENTION,
        "const V y = __builtin_convertvector(sum[r][c], V) * worth[r];",
        "const V y = __builtin_convertvector(sum[r][c], V) * worth[0];",
        (ROWS,),
    ),
    Defect(
        "int8: a row sees the greatest score of the row before",
        ATTENTION,
        "    *max = best, *sum = *worth = 0;\n",
        "    static _Thread_local float before;\n    const float other = before;\n    before = best;\n"
        "    if (other > best) best = other;\n    *max = best, *sum = *worth = 0;\n",
        (ROWS,),
    ),
    Defect(
        "int8: a tree's values have the scales of what stands in their places",
        ATTENTION,
        "                memcpy(own + j, pages + slot / PAGE * page + (PAGE + slot % PAGE) * 4, 4);\n",
        "",
        (ROWS,),
    ),
    Defect(
        "int8: a copied key keeps the scale of what stood there",
        ATTENTION,
        "            memcpy(x + t * 4, y + f * 4, 4);\n",
        "",
        (ROWS,),
    ),
    Defect(
        "int8: turned keys lose the offset of their numbers",
        "backends/cpu/entries.py",
        "round().clamp(-127, 127) + 128",
        "round().clamp(-127, 127) % 256",
        (SPECIFIED,),
    ),
    Defect(
        "int8: scores are rounded to 6 bits",
        ATTENTION,
        "const float factor = scale_of(greatest & 0x7fffffff, worth);",
        "const float factor = scale_of(greatest & 0x7fffffff, worth) / 2;\n    *worth *= 2;",
        (SPECIFIED,),
    ),
)
