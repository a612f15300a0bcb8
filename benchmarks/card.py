"""The first half hour on a card begins here: ten minutes of facts, by passes of an 8B model of
drawn weights.

    python -m benchmarks.card --results FOLDER [--seconds 600] [--device cuda] [--layers 32]
        [--width 4096]

Do rows keep their bits under padding, and at which row counts? Is a recorded pass an eager one,
byte by byte, and a row in a tree the row alone? How many bytes a second do products and attention
read? What does a pass of 16 rows cost over one of 1 row? A line is written to FOLDER/card.jsonl as
soon as it is there; what fails has a line that says why, and the next measurement goes on. Without
a card it ends with exit code 3; ``--device cpu`` tries the code itself in Triton's interpreter
(TRITON_INTERPRET=1), with few layers.
"""

# ruff: noqa: B023  each measurement is over before the next begins
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.common import fill, median, pass_times
from benchmarks.words import Measured
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.plan import ROW_COUNTS
from tokenswift.kernels.cuda.products import counts_that_keep_bits, cublas, padded, set_blas_flags
from tokenswift.kv.passes import Segment
from tokenswift.loader.layout import HEAD, Layout
from tokenswift.loader.rotary import Rotary
from tokenswift.models.decoder import NativeTarget

NO_CARD = 3  # exit code
HEAD_WIDTH = 128  # dimensions of a head
HEADS_PER_KV_HEAD = 4
CONTEXTS = (8_192, 32_768, 100_000)
ROWS = (1, 16, 64)
RUNS = 20


class Rows:
    """The file of rows.

    Args:
        folder: where it is.
        seconds: how long measuring may take.

    Attributes:
        failed: measurements that ended with an error.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "card.jsonl"
        self._end = time.monotonic() + seconds
        self.failed = 0

    @contextmanager
    def measurement(self, **fields: object) -> Iterator[Measured]:
        """A measurement: its row has what is put into the dictionary, or why there is nothing."""
        if time.monotonic() > self._end:
            print("no time left", flush=True)
            raise SystemExit(1)
        row: Measured = {}
        try:
            yield row
        except Exception as error:  # whatever a card, its driver or a compiler says
            row = {"error": " ".join(str(error).split())[:300] or type(error).__name__}
            self.failed += 1
        line = json.dumps(fields | row, default=str)
        with self._file.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class DrawnWeights:
    """Weights drawn on a device in the shape of an 8B Llama (as `loader.weights.Weights`)."""

    copies = False

    def __init__(self, device: torch.device, options: argparse.Namespace) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        heads = options.width // HEAD_WIDTH
        self.layout = Layout(
            model_type="llama",
            vocab_size=options.vocabulary,
            hidden_size=options.width,
            intermediate_size=options.width * 7 // 2,
            num_hidden_layers=options.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // HEADS_PER_KV_HEAD,
            head_dim=HEAD_WIDTH,
            eps=1e-5,
            scale=HEAD_WIDTH**-0.5,
            windows=(0,) * options.layers,
            tied=False,
        )
        self._shapes = self.layout.shapes()

    def get(self, name: str) -> Tensor | None:
        """See `Weights`."""
        shape = self._shapes.get(name)
        if shape is None or len(shape) == 1:
            return None if shape is None else torch.ones(shape, device=self.device)
        size = shape[1] ** -0.5 * (4.0 if name == HEAD else 1.0)
        return torch.empty(shape, device=self.device, dtype=self.dtype).normal_(0.0, size)

    raw = get


def library(states: Tensor, weight: Tensor) -> Tensor:
    """The vendor's product; on a CPU torch's."""
    return cublas(states, weight) if states.is_cuda else states.float() @ weight.float().T


def microseconds(works: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Time of one of several pieces of work of a kind, in one graph: as many as outgrow what a card
    caches; 0 on a CPU."""
    for work in works:
        work()
    if device.type == "cpu":
        return 0.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            for work in works:
                work()
    times: list[float] = []
    for _ in range(7):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / (4 * len(works)))
    return round(min(times[1:]), 2)


def versions(rows: Rows, device: torch.device) -> None:
    """What is here, and what the check at loading says."""
    import transformers
    import triton

    with rows.measurement(what="versions") as row:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
        row |= {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": sys.version.split()[0],
            "transformers": transformers.__version__,
            "commit": commit.stdout.strip() or None,
        }
        if device.type == "cuda":
            row["properties"] = str(torch.cuda.get_device_properties(device))
    if device.type == "cpu":
        return
    from tokenswift.kernels.cuda.check import open_backend

    with rows.measurement(what="check at loading") as row:
        start = time.monotonic()
        backend = open_backend(device)
        row["seconds"] = round(time.monotonic() - start, 1)
        row["found"] = backend if isinstance(backend, str) else "works"
        if isinstance(backend, CudaBackend):
            row["equal_bits"] = backend.equal_bits
            row["records"] = backend.records
            row["build"] = backend.build


def copying(rows: Rows, device: torch.device) -> float:
    """Bytes a second that a copy reads and writes: what the rest is compared with."""
    speed = 1.0
    with rows.measurement(what="copy") as row:
        size = 1 << (30 if device.type == "cuda" else 20)
        source = torch.empty(size, dtype=torch.uint8, device=device)
        into = torch.empty_like(source)
        taken = microseconds([partial(into.copy_, source)], device)
        speed = 2e6 * size / taken if taken else 1.0
        row |= {"us": taken, "gb_s": round(speed / 1e9)}
    return speed


def products(rows: Rows, device: torch.device, options: argparse.Namespace) -> None:
    """Of each weight of an 8B model: the row counts at which rows keep their bits, and
    microseconds."""
    width = options.width
    inner = width * 7 // 2
    shapes = [
        (width * 3 // 2, width),
        (width, width),
        (2 * inner, width),
        (width, inner),
        (options.vocabulary, width),
    ]
    for outputs, columns in shapes:
        with rows.measurement(what="product", outputs=outputs, inner=columns) as row:
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            size = 2 * outputs * columns
            copies = max(1, min(8, (200 << 20) // size))
            weights = [
                torch.empty(outputs, columns, device=device, dtype=dtype).normal_()
                for _ in range(copies)
            ]
            row["keeps_bits_at"] = counts_that_keep_bits(library, weights[0])
            for count in ROW_COUNTS:
                states = torch.randn(count, columns, device=device).to(dtype)
                taken = microseconds(
                    [partial(library, states, weight) for weight in weights], device
                )
                row |= {
                    f"us_{count}": taken,
                    f"gb_s_{count}": round(size / taken / 1e3) if taken else None,
                }
            alone = padded(library, states[:1], weights[0])
            row["one_row_in_16_and_64"] = torch.equal(
                alone, padded(library, states[:64], weights[0])[:1]
            )


def attention(rows: Rows, backend: CudaBackend, target: NativeTarget, context: int) -> None:
    """Bytes a second of keys and values, of passes of few rows over a context."""
    shape = target.body.shape
    device = target.device
    cache = target.backend.new_cache(4, shape.kv_heads, shape.width, context + 64, shape.keys)
    fill(cache, context)
    size = 2 * context * shape.kv_heads * shape.width * shape.keys.itemsize
    for count in ROWS:
        with rows.measurement(what="attention", context=context, rows=count) as row:
            numbers = torch.arange(count)
            batch = backend.batch(
                [Segment(numbers, numbers, cache, list(range(-1, count - 1)))], shape
            )
            query = torch.randn(len(batch.tokens), shape.heads, shape.width, device=device).to(
                shape.keys
            )
            works = [lambda n=n: backend.ops.attend(batch, query, n, shape, 0) for n in range(4)]
            taken = microseconds(works, device)
            row |= {"us": taken, "gb_s": round(size / taken / 1e3) if taken else None}


def passes(rows: Rows, target: NativeTarget, context: int, speed: float) -> None:
    """Passes over a context, logits included, against one reading of weights and cache."""
    one_row_ms = 0.0
    runs = RUNS if target.device.type == "cuda" else 1
    for count in ROWS:
        with rows.measurement(what="pass", context=context, rows=count) as row:
            times = pass_times(target, context, count, runs)
            ms = median(times)
            one_row_ms = one_row_ms or ms
            least = 1e3 * (target.weight_bytes + context * target.kv_bytes) / speed
            row |= {
                "ms": ms,
                "least_ms": round(min(times), 4),
                "over_one_row": round(ms / one_row_ms, 3),
            }
            row |= {"over_reading_once": round(ms / least, 3), "runs": runs}


def eager_pass(rows: Rows, backend: CudaBackend, target: NativeTarget, context: int) -> None:
    """A pass of one row that is not recorded before."""
    runs = RUNS if target.device.type == "cuda" else 1
    with rows.measurement(what="eager pass", context=context, rows=1) as row:
        backend.records = False
        try:
            row["ms"] = median(pass_times(target, context, 1, runs))
        finally:
            backend.records = True


def bits(rows: Rows, backend: CudaBackend, target: NativeTarget, context: int) -> None:
    """Whether rows have the same bits in a chain, in a tree, alone, and in a recorded pass."""
    with rows.measurement(what="bits", context=context) as row:
        cache = target.new_cache(context + 64)
        fill(cache, context)
        tokens = torch.randint(target.vocab_size, (16,), generator=torch.Generator().manual_seed(1))

        def hidden(parents: list[int], ids: Tensor) -> Tensor:
            depths = [0] * len(parents)
            for node, parent in enumerate(parents):
                depths[node] = depths[parent] + 1 if parent >= 0 else 0
            return target.forward(ids, context + torch.tensor(depths), cache, parents).hidden

        chain = hidden(list(range(-1, 15)), tokens)
        tree = hidden([-1, 0, 0, 2, 2], tokens[[0, 5, 1, 6, 2]])  # with wrong branches
        row["tree_is_chain"] = torch.equal(tree[[0, 2, 4]], chain[:3])
        row["one_row_is_first_of_16"] = torch.equal(hidden([-1], tokens[:1]), chain[:1])
        backend.records = False
        try:
            row["graph_is_eager"] = torch.equal(hidden(list(range(-1, 15)), tokens), chain)
        finally:
            backend.records = True


def open_target(
    rows: Rows, device: torch.device, options: argparse.Namespace
) -> tuple[CudaBackend, NativeTarget] | None:
    """A backend and a model of drawn weights; None where there is no room for it, or another
    error."""
    opened = None
    with rows.measurement(what="model") as row:
        backend = CudaBackend(device, product=library)
        frequencies = 500_000.0 ** -(torch.arange(0, HEAD_WIDTH, 2, device=device) / HEAD_WIDTH)
        rotary = Rotary(
            frequencies=frequencies.float(), scaling=1.0, limit=None, config=SimpleNamespace()
        )
        target = NativeTarget(DrawnWeights(device, options), backend, rotary)
        row["weight_bytes"] = target.weight_bytes
        opened = (backend, target)
    return opened


def prompt(rows: Rows, target: NativeTarget, length: int) -> None:
    """Tokens a second of a prompt, the second time that it is read."""
    with rows.measurement(what="prompt", tokens=length) as row:
        seconds = 0.0
        for _ in range(2):
            start = time.monotonic()
            target.prefill([5] * length, target.new_cache(length))
            torch.cuda.synchronize()
            seconds = time.monotonic() - start
        row["seconds"] = round(seconds, 3)
        row["tokens_a_second"] = round(length / seconds)


def parse_options() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description="ten minutes of facts on a card")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument(
        "--contexts", type=lambda text: [int(n) for n in text.split(",")], default=CONTEXTS
    )
    return parser.parse_args()


def main() -> int:
    """Measure."""
    options = parse_options()
    if options.device != "cpu" and not torch.cuda.is_available():
        print("no card is here", flush=True)
        return NO_CARD
    rows = Rows(options.results, options.seconds)
    device = torch.device(options.device)
    if device.type == "cuda":
        set_blas_flags()
    with torch.inference_mode():
        versions(rows, device)
        speed = copying(rows, device)
        products(rows, device, options)
        opened = open_target(rows, device, options)
        if opened is None:
            return 1
        backend, target = opened
        for context in options.contexts:
            attention(rows, backend, target, context)
            passes(rows, target, context, speed)
            eager_pass(rows, backend, target, context)
            bits(rows, backend, target, context)
        prompt(rows, target, options.contexts[0])
    return 1 if rows.failed else 0


if __name__ == "__main__":
    sys.exit(main())
