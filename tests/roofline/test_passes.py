"""Bytes, operations and floors of passes against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tokenswift.roofline.cards import CARDS, Card
from tokenswift.roofline.passes import Floor, Sizes, floor, read_seconds, steps, stored_bytes

#: three layers, each head with keys of its own: 1,000 weights, 2 · 2 · 2 · 2 bytes of keys and values a layer
DENSE = Sizes(4, 2, 2, 2, (0, 0, 0), {"bfloat16": 1000}, "bfloat16")
#: two layers, one with a window, four queries to a key head; quantized weights
GROUPED = Sizes(64, 8, 2, 16, (0, 50), {"q4_1": 3200, "q8_0": 640}, "float32")
SLOW = Card("slow", "made up", 100.0, {"bfloat16": 1000.0, "float32": 4000.0})


def test_a_dense_model_by_hand() -> None:
    """One row waits for memory: 2,000 bytes of weights, 10 · 48 of keys and values. Eleven rows
    compute longer: 22,000 operations of products, 4 · 30 · 2 · 2 · 11 of attention."""
    assert (DENSE.weight_bytes, DENSE.token_bytes, DENSE.seen(10)) == (2000, 48, 30)
    assert floor(DENSE, SLOW, 1, 10) == Floor(2480, 2000 + 480, 20.0, 4.8)
    found = floor(DENSE, SLOW, 11, 10)
    assert found == Floor(2480, 22_000 + 5280, 22.0, 5.28)
    assert found.seconds == pytest.approx(27.28)
    assert floor(DENSE, SLOW, 1, 0) == Floor(2000, 2000, 20.0, 0.0)


def test_a_grouped_model_by_hand() -> None:
    """Formats are read one by one: 3,200 weights of 20 bytes a 32, 640 of 34 a 32. Behind 70 tokens one layer
    sees 70 keys and the other 50, of 256 bytes."""
    assert (GROUPED.weight_bytes, GROUPED.token_bytes, GROUPED.seen(70)) == (2000 + 680, 512, 120)
    assert floor(GROUPED, SLOW, 1, 70) == Floor(2680 + 30_720, 7680 + 61_440, 26.8, 307.2)
    found = floor(GROUPED, SLOW, 20, 70)  # q4_1 computes 32 s, q8_0 reads 6.8 s, attention computes 307.2 s
    assert found == Floor(33_400, 153_600 + 1_228_800, 32.0 + 6.8, 307.2)


def test_bytes_of_formats() -> None:
    """Q4_0: 18 bytes for 32; Q8_0: 34 for 32; Q4_K: 144, Q5_K: 176, Q6_K: 210 for 256."""
    kinds = ("float32", "bfloat16", "float16", "q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k")
    assert [stored_bytes(kind, 256) for kind in kinds] == [1024, 512, 512, 144, 160, 272, 144, 176, 210]


def test_table_2_of_the_paper() -> None:
    """LLaMA3.1-8b behind 128K tokens on an A100, from data sheets: 15 GB of weights in 7.4 ms, computed in
    0.3 ms. (The paper's 83.9 billion operations are 83.7 by our count.)"""
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336) + 128_256 * 4096
    sizes = Sizes(4096, 32, 8, 128, (0,) * 32, {"bfloat16": weights}, "bfloat16")
    found = floor(sizes, CARDS["a100"], 1, 131_072)
    assert weights == 7_504_658_432 and sizes.token_bytes == 131_072
    assert round(sizes.weight_bytes / 1e9, 1) == 15.0 and round(1000 * found.products, 1) == 7.4
    assert round(found.operations / 1e9, 1) == 83.7
    assert round(1000 * found.operations / CARDS["a100"].arithmetic["bfloat16"], 1) == 0.3
    assert found.attention == pytest.approx(131_072 * 131_072 / 2039e9)


def test_drafts_in_few_bits() -> None:
    low = DENSE.in_few_bits("q8_0")
    assert low == replace(DENSE, weights={"q8_0": 1000}, whole=True)
    mixed = replace(GROUPED, weights={"q4_1": 32, "float32": 64, "q8_0": 32}).in_few_bits("q8_0")
    assert mixed.weights == {"q4_1": 32, "q8_0": 96} and mixed.whole


@pytest.mark.parametrize("card", CARDS.values())
@pytest.mark.parametrize("sizes", [DENSE, GROUPED])
def test_more_is_never_less(sizes: Sizes, card: Card) -> None:
    """More rows and longer texts take at least as long; a window holds a layer's part; drafts are cheaper."""
    lengths, counts = (0, 1, 49, 50, 51, 1024, 131_072), (1, 2, 5, 64, 4096)
    found = {(rows, n): floor(sizes, card, rows, n) for rows in counts for n in lengths}
    for few, many in zip(counts, counts[1:], strict=False):
        assert all(found[few, n].seconds <= found[many, n].seconds for n in lengths)
        assert all(found[few, n].operations < found[many, n].operations for n in lengths)
        assert all(found[few, n].nbytes == found[many, n].nbytes for n in lengths)
    for short, long in zip(lengths, lengths[1:], strict=False):
        assert all(found[rows, short].seconds < found[rows, long].seconds for rows in counts)
    open_end = replace(sizes, windows=(0,) * len(sizes.windows))
    assert floor(open_end, card, 1, 1024).attention >= found[1, 1024].attention
    low = sizes.in_few_bits("q8_0")
    assert floor(low, card, 1, 1024).nbytes <= found[1, 1024].nbytes


def test_speedups_by_hand() -> None:
    """Plain 20 + 4.8 s, verified by 11 rows in 27.28 s, ten drafts of 10.625 + 2.4 s over 5 of the tokens."""
    found = steps(DENSE, DENSE.in_few_bits("q8_0"), SLOW, 10, 11, 5, [2.0, 4.0])
    assert found.plain.seconds == 24.8 and found.draft == Floor(1062 + 240, 2000 + 240, 10.62, 2.4)
    slow, fast = found.speedups[4.0]
    assert fast == pytest.approx(4 * 24.8 / 27.28)
    assert slow == pytest.approx(4 * 24.8 / (27.28 + 10 * 13.02))
    assert found.speedups[2.0] == pytest.approx((slow / 2, fast / 2))
    assert steps(DENSE, DENSE, SLOW, 3, 1, 5, [1.0]).speedups == {1.0: (1.0, 1.0)}  # a step of plain decoding
    assert steps(DENSE, DENSE, SLOW, 3, 1, 5, [1.0]).draft == floor(
        DENSE, SLOW, 1, 3
    )  # no more than there is


def test_reading_a_prompt() -> None:
    """Passes of 512 rows, behind half of the prompt on average: for 1,000 tokens 1000 / 512 of them."""
    on_cpu = replace(SLOW, device="cpu")
    found = read_seconds(DENSE, on_cpu, 1000)
    assert found == pytest.approx(1000 / 512 * floor(DENSE, SLOW, 512, 500).seconds)
    found = read_seconds(DENSE, SLOW, 3000)
    assert found == pytest.approx(3000 / 2048 * floor(DENSE, SLOW, 2048, 1500).seconds)
    assert read_seconds(DENSE, SLOW, 7) == floor(DENSE, SLOW, 7, 3).seconds
