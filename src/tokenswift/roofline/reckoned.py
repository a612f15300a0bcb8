"""What a pass of the CUDA backend is reckoned to take on a card, by counts of its kernels (`kernels.cuda`).

Nothing in here was measured. A kernel costs its start, one wait for its first bytes, and its work: programs
run in waves of as many as the card holds at once, and a wave takes its bytes at the rate that its programs
can have on their way together (Little's law: bytes on their way by the time that they take to come), or its
operations and instructions at the arithmetic of the processors that have a program, whichever takes longer.
Kernels run one after the other. A test holds names, order and programs against what the backend starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenswift.kernels.formats.registry import FORMATS
from tokenswift.roofline.cards import Card
from tokenswift.roofline.passes import ITEM, Sizes
from tokenswift.types import InputError

ROWS, CONTEXTS = (1, 8, 16, 64), (4096, 32_768, 100_000)  # of the passes that are shown
LOW = ("q8_0", "q4_0")  # formats that are shown beside weights of more bits

#: of a checkout: folders of rows by cards' names, each with a card.jsonl that bench/gpu.sh wrote
RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"

# what is taken for granted of cards; bench/gpu.sh measures passes, and these are to be set right by its rows
START = 1.5e-6  # seconds between two kernels of a replayed graph
MEMORY, NEAR = (
    0.8e-6,
    0.3e-6,
)  # seconds that bytes take to come: from memory, or just written by another kernel
REACH = 0.92  # of the published bandwidth that the best streams come to
NEARER = 2.5  # times the bandwidth: of what another kernel has just written
USED = 0.5  # of the published arithmetic that a product of small tiles comes to
UNPACKED, SCORED = 8, 16  # instructions that unpack a weight of few bits, and that make a weight of a score
OTHERS = 12  # torch's own kernels of a pass: embedding, angles, the last sums, queries, copies in and out

# of `kernels.cuda`: plan and tuning; a test compares them
CHUNK, TILE, SPAN, EARLY, RECORDED = 256, 64, 4, 16, (16, 64)
COLUMNS, INNER, STAGES, SPLIT, FULL, FEW, STEP = 64, 64, 3, 1024, 256, 16, 2


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of a pass.

    Attributes:
        name: of the function.
        programs: that are started.
        nbytes: that all of them read and write.
        ahead: bytes that a program has on their way.
        operations: of all of them, in products of tiles.
        instructions: of all of them, number by number.
        held: programs that a processor holds, by registers and shared memory.
        wait: seconds that its bytes take to come.
    """

    name: str
    programs: int
    nbytes: int
    ahead: int
    operations: int = 0
    instructions: int = 0
    held: int = 16
    wait: float = NEAR

    def work(self, card: Card, dtype: str) -> float:
        """Seconds beside the start, in waves of programs."""
        at_once = card.processors * self.held
        waves, rest = divmod(self.programs, at_once)
        return waves * self._wave(card, dtype, at_once) + (self._wave(card, dtype, rest) if rest else 0.0)

    def in_flight(self, card: Card) -> int:
        """Bytes that are on their way at once, at the most."""
        return min(self.programs, card.processors * self.held) * self.ahead

    def _wave(self, card: Card, dtype: str, programs: int) -> float:
        share = programs / self.programs
        most = card.bandwidth * (REACH if self.wait == MEMORY else NEARER)
        read = share * self.nbytes / min(most, programs * self.ahead / self.wait)
        work = self.operations / (USED * card.arithmetic[dtype])
        work += self.instructions / (card.arithmetic["float32"] / 2)  # a fused step counts twice there
        return max(read, share * work / min(1.0, programs / card.processors))


@dataclass(frozen=True, slots=True)
class Reckoned:
    """What a pass is reckoned to take.

    Attributes:
        seconds: of all of it; of that
        starts: for starting kernels and for their first bytes,
        products, attention: for either's work; the rest is norms, gates and positions.
        launches: kernels that are started, torch's own included.
        programs: of attention over the keys, in one layer.
        in_flight: bytes that these have on their way at once.
    """

    seconds: float
    starts: float
    products: float
    attention: float
    launches: int
    programs: int
    in_flight: int


def reckoned(sizes: Sizes, card: Card, rows: int, context: int) -> Reckoned | None:
    """A recorded pass of up to 64 rows of one text, with the logits of all; None where the backend has no
    kernels of its own for the model, or nobody knows the card's processors."""
    if not sizes.inner or not card.processors or rows > RECORDED[-1]:
        return None
    starts = OTHERS * START
    products = attention = rest = 0.0
    launches, programs, in_flight = OTHERS, 0, 0
    for kernel in kernels(sizes, card, rows, context):
        launches += 1
        starts += START + kernel.wait
        work = kernel.work(card, sizes.dtype)
        if kernel.name.endswith("product"):
            products += work
        elif kernel.name.startswith(("attend", "merge")):
            attention += work
        else:
            rest += work
        if kernel.name in ("attend_chunks", "attend_whole_chunks"):
            programs, in_flight = max(programs, kernel.programs), max(in_flight, kernel.in_flight(card))
    seconds = starts + products + attention + rest
    return Reckoned(seconds, starts, products, attention, launches, programs, in_flight)


def kernels(sizes: Sizes, card: Card, rows: int, context: int) -> Iterator[Kernel]:
    """The kernels of a recorded pass in their order, as `CudaBackend.layers` and the LM head start them."""
    size = next(size for size in RECORDED if size >= rows)
    hidden, inner, heads, kv, width = sizes.hidden, sizes.inner, sizes.heads, sizes.kv_heads, sizes.width
    mixed = (heads + 2 * kv) * width
    layer = mixed * hidden + hidden * heads * width + 3 * hidden * inner
    total = sum(sizes.weights.values())
    item, parts = ITEM[sizes.dtype], 0
    whole = "_whole" if sizes.keys == "int8" else ""
    fused = _fuses(sizes)
    if fused:
        yield _rows("row_squares", size, hidden * 4)
    for window in sizes.windows:
        if fused:
            yield _product(sizes, size, mixed, hidden, name="turn_product", pairs=2)[0]
            yield from _attention(sizes, card, rows, size, context, window)
            yield _product(sizes, size, hidden, heads * width, name="add_product")[0]
            yield _product(sizes, size, 2 * inner, hidden, name="gate_product", pairs=2)[0]
            yield _product(sizes, size, hidden, inner, name="add_product")[0]
            continue
        yield _rows("add_norm", size, hidden * 4 * (2 + parts))
        qkv, parts = _product(sizes, size, mixed, hidden)
        yield qkv
        turned = size * mixed // width
        yield Kernel(f"turn_append{whole}", turned, 4 * size * mixed * (parts + 1), 4 * width * parts)
        yield from _attention(sizes, card, rows, size, context, window)
        out, parts = _product(sizes, size, hidden, heads * width)
        yield out
        yield _rows("add_norm", size, hidden * 4 * (2 + parts))
        both, parts = _product(sizes, size, 2 * inner, hidden)
        yield both
        gates = size * -(-inner // 1024)
        yield Kernel("gated", gates, size * inner * (8 * parts + item), 8192 * parts)
        down, parts = _product(sizes, size, hidden, inner)
        yield down
    yield _rows("add_norm", size, hidden * 8)
    yield _product(sizes, size, (total - len(sizes.windows) * layer) // hidden, hidden, fold=True)[0]


def _rows(name: str, rows: int, nbytes: int) -> Kernel:
    """A kernel with a program for each row, which has all of it on its way."""
    return Kernel(name, rows, rows * nbytes, nbytes)


def _low(sizes: Sizes) -> bool:
    """Whether most weights are of few bits."""
    return sum(count for kind, count in sizes.weights.items() if kind in FORMATS) * 2 > sum(
        sizes.weights.values()
    )


def _fuses(sizes: Sizes) -> bool:
    """Whether layers of few rows go by `FusedKernels`."""
    half = sizes.width // 2
    return not (_low(sizes) or sizes.keys == "int8" or COLUMNS % half or half & (half - 1))


def _product(
    sizes: Sizes,
    rows: int,
    columns: int,
    inner: int,
    fold: bool = False,
    name: str = "product",
    pairs: int = 1,
) -> tuple[Kernel, int]:
    """A product of rows with a weight, and its parts: `ProductKernels.product` and `low_product`, and those
    of `FusedKernels`, of which some take columns in ``pairs`` by twice the warps."""
    low = _low(sizes)
    stored = sizes.weight_bytes / sum(sizes.weights.values())  # bytes of a number
    at_once = FEW if low else 64
    blocks = -(-columns // (COLUMNS * pairs)) * -(-rows // at_once)
    parts = 1 if fold or blocks >= FULL else -(-inner // SPLIT)
    taken = INNER if not low else 64 * STEP
    nbytes = int(columns * inner * stored) * (1 if not low else -(-rows // FEW)) + parts * rows * columns * 4
    return Kernel(
        "low_product" if low else name,
        blocks * parts,
        nbytes,
        int((STAGES - 1) * COLUMNS * pairs * taken * stored),
        2 * blocks * COLUMNS * pairs * at_once * inner,
        UNPACKED * blocks * COLUMNS * inner if low else 0,
        5 if low else 4 // pairs,
        MEMORY,
    ), parts


def _attention(sizes: Sizes, card: Card, rows: int, size: int, context: int, window: int) -> Iterator[Kernel]:
    """Attention of a layer behind a text: programs of shared spans and of rows' own chunks, and merges."""
    heads, kv, width, whole = sizes.heads, sizes.kv_heads, sizes.width, sizes.keys == "int8"
    padded = 1 << (width - 1).bit_length()
    item = 1 if whole else ITEM[sizes.keys or sizes.dtype]
    queries = min(64, (1 << 14) // (padded * item))
    step = max(1, queries * kv // heads)
    spans = max(1, -(-(context // CHUNK) // SPAN))
    room = _power(-(-(context + rows) // (SPAN * CHUNK)))
    cells, own = min(room, max(EARLY, _power(spans))) * (SPAN if whole else 1), 2
    blocks = _power(-(-rows // step))
    more = -(-heads // kv // queries)
    programs = (blocks * cells + size * own) * kv * more
    seen = min(context, window or context)
    keys = seen + rows
    worked = 4 * queries * width * more * kv * (blocks * seen + size * own * CHUNK)
    if whole:
        yield Kernel("whole_queries", size * heads, size * heads * width * 5, 4 * width)
    tile = TILE * sizes.layer_bytes // kv
    yield Kernel(
        "attend_whole_chunks" if whole else "attend_chunks",
        programs,
        keys * sizes.layer_bytes,
        tile if whole else (STAGES - 1) * tile,
        worked,
        SCORED * worked // (4 * width),
        2 if not whole and card.generation == 9 and item == 2 else 1,
        MEMORY,
    )
    merged = 4 * (width + 2) * (-(-seen // CHUNK) if whole else -(-seen // (CHUNK * SPAN)) + own)
    ahead = 4 * (width + 2) * (1 if whole else 8)
    yield Kernel(
        "merge_whole_chunks" if whole else "attend_merge", size * heads, rows * heads * merged, ahead
    )


def low_bits(sizes: Sizes) -> Mapping[str, Sizes]:
    """The sizes as they are, and with all weights in each format of :data:`LOW` where they have more bits."""
    name = ", ".join(sizes.weights)
    if any(kind in FORMATS for kind in sizes.weights):
        return {name: sizes}
    total = sum(sizes.weights.values())
    return {name: sizes} | {form: replace(sizes, weights={form: total}) for form in LOW}


def measured(folder: Path) -> dict[tuple[int, int, int, int], float]:
    """Seconds of recorded passes that were measured on a card, by bytes of weights, bytes of keys and values
    of a token, tokens before the pass, and its rows.

    Args:
        folder: with a card.jsonl; where there is none, nothing was measured.
    Raises:
        InputError: a line is no row.
    """
    file, found = folder / "card.jsonl", {}
    if not file.is_file():
        return {}
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        try:
            row: Any = json.loads(line)
            if row.get("what") != "pass" or "ms" not in row or not row.get("graphs"):
                continue
            if row.get("product", "ours") == "ours" and "dtype" not in row:
                at = (int(row[name]) for name in ("weight_bytes", "token_bytes", "context", "rows"))
                found[tuple(at)] = float(row["ms"]) / 1e3
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise InputError(f"{file}, line {number} is no row; valid: what bench/gpu.sh writes") from None
    return found


def _power(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
