"""What a card is measured by: passes of an 8B model of weights drawn on the card, their kernels, and tunings.

python bench/card.py PART --results FOLDER [--seconds N] [--device cuda] [--layers 32] [--width 4096]

Parts: start, passes, eager, sweep. A row is written to FOLDER/card.jsonl as soon as it is there; what fails
has a row that says why, and the next measurement goes on. Without a card it stops at its first call of one,
with exit code 3. ``--device cpu`` with few layers tries the code itself, on the kernels' references.
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
from dataclasses import replace
from functools import partial
from itertools import product as pairs
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tokenswift.cli.timer import median, pass_times
from tokenswift.interfaces import Segment
from tokenswift.kernels.cuda.backend import CudaBackend
from tokenswift.kernels.cuda.plan import plan_of
from tokenswift.kernels.cuda.products import Products, cublas, keeps_bits, settle
from tokenswift.kernels.cuda.weights import CudaPacked
from tokenswift.kernels.formats.format import Stored
from tokenswift.kernels.formats.registry import FORMATS
from tokenswift.loader.checkpoint import EMBEDDING, HEAD, Layout
from tokenswift.loader.rope import Rotary
from tokenswift.models.decoder import NativeTarget

NO_CARD = 3  # exit code
WIDTH = 128  # dimensions of a head
CONTEXTS, ROWS = (32_768, 4_096, 100_000), (1, 16, 8, 64)  # in order of value
RUNS = 20
GROUPED = 4  # query heads to a KV head


class Rows:
    """The file of rows.

    Args:
        folder: that it is in.
        part: whose rows they are.
        seconds: that measuring may take.
    """

    def __init__(self, folder: Path, part: str, seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._part, self._end = folder / "card.jsonl", part, time.monotonic() + seconds
        self.failed = 0

    def write(self, **fields: Any) -> None:
        """Add a row, at once."""
        line = json.dumps({"part": self._part, **fields}, default=str)
        with self._file.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    @contextmanager
    def one(self, **fields: Any) -> Iterator[dict[str, Any]]:
        """A measurement: its row has what is put into the dictionary, or why there is nothing."""
        found: dict[str, Any] = {}
        if time.monotonic() > self._end:
            found["error"] = "no time left"
            self.write(**fields, **found)
            raise SystemExit(1)
        try:
            yield found
        except Exception as error:  # whatever a card, its driver or a compiler says
            found = {"error": " ".join(str(error).split())[:300] or type(error).__name__}
            self.failed += 1
        self.write(**fields, **found)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Drawn:
    """Weights drawn on a device in the shape of an 8B Llama (implements `checkpoint.StoredWeights`)."""

    copies = False

    def __init__(self, device: torch.device, args: argparse.Namespace, form: str | None) -> None:
        layers, width = args.layers, args.width
        heads, self.device, self.dtype = width // WIDTH, device, torch.bfloat16
        sizes = (args.vocabulary, width, width * 7 // 2, layers, heads, heads // GROUPED, WIDTH)
        self.layout = Layout("llama", *sizes, 1e-5, WIDTH**-0.5, (0,) * layers, False)
        self._shapes, self._form = self.layout.shapes(), FORMATS[form] if form else None

    def get(self, name: str) -> Tensor | Stored | None:
        """See `checkpoint.Weights`."""
        shape = self._shapes.get(name)
        if shape is None:
            return None
        if len(shape) == 1:
            return torch.ones(shape, device=self.device)
        if self._form is None or name == EMBEDDING:
            size = shape[1] ** -0.5 * (4.0 if name == HEAD else 1.0)
            return torch.empty(shape, device=self.device, dtype=self.dtype).normal_(0.0, size)
        blocks = torch.randint(
            256, (shape[0], self._form.row_bytes(shape[1])), dtype=torch.uint8, device=self.device
        )
        scale = torch.tensor([shape[1] ** -0.5 / (73.0 if self._form.bits == 8 else 4.6)]).half()
        each = blocks.view(shape[0], -1, self._form.nbytes)
        each[..., :2] = scale.view(torch.uint8).to(self.device)
        return Stored(self._form, blocks)

    def packed(self, name: str, restore: Callable[[], Tensor]) -> None:
        """See `checkpoint.Weights`."""

    def rest(self) -> None:
        """See `checkpoint.Weights`."""

    def done(self) -> list[Any]:
        """See `checkpoint.Weights`."""
        return []

    def names(self) -> list[str]:
        """See `checkpoint.StoredWeights`."""
        return sorted(self._shapes)


def backend_of(device: torch.device, graphs: bool = True, library: Any = None, tuning: Any = None) -> Any:
    """The backend as it stands, without the check at loading; on a CPU the references."""
    if device.type == "cpu":
        return CudaBackend(device)
    from tokenswift.kernels.cuda.launch import Kernels

    settle()
    made = CudaBackend(device, Kernels(device) if tuning is None else Kernels(device, tuning), library)
    made.graphs, made.prepares = graphs, True
    return made


def model_on(backend: Any, args: argparse.Namespace, form: str | None = None) -> NativeTarget:
    """The model of drawn weights."""
    frequencies = 500_000.0 ** -(torch.arange(0, WIDTH, 2, device=backend.device) / WIDTH)
    rotary = Rotary(frequencies.float(), 1.0, None, SimpleNamespace())
    return NativeTarget(Drawn(backend.device, args, form), backend, rotary)


def timed(rows: Rows, target: NativeTarget, cases: Any, **said: Any) -> None:
    """Rows of passes: milliseconds of each, logits included."""
    for context, count in cases:
        with rows.one(what="pass", context=context, rows=count, **said) as found:
            taken = pass_times(target, context, count, RUNS)
            found |= {"ms": median(taken), "least_ms": round(min(taken), 4), "runs": RUNS}
            found["weight_bytes"], found["token_bytes"] = target.weight_bytes, target.kv_bytes


# ---- parts ------------------------------------------------------------------------------------------


def start(rows: Rows, device: torch.device, args: argparse.Namespace) -> None:
    """Versions, the check at loading, and for every shape of an 8B model whether the vendor's product keeps
    rows' bits, and how long it and ours take."""
    import transformers
    import triton

    with rows.one(what="versions") as found:
        found |= {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
        found["transformers"] = transformers.__version__
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
        found["commit"] = commit.stdout.strip() or None
        if device.type == "cuda":
            found["properties"] = str(torch.cuda.get_device_properties(device))
    from tokenswift.kernels.cuda.check import started

    for graphs in (True,) if device.type == "cuda" else ():
        with rows.one(what="check at loading") as found:
            begun = time.monotonic()
            made = started(device, graphs)
            found["seconds"] = round(time.monotonic() - begun, 1)
            found["found"] = made if isinstance(made, str) else "works"
            if not isinstance(made, str):
                found |= {"graphs": made.graphs, "int8_keys": made.int8_keys, "key": made.key}
    backend = backend_of(device)
    for outputs, inner in shapes(args):
        weight = torch.empty(outputs, inner, device=device, dtype=torch.bfloat16).normal_(0.0, inner**-0.5)
        ours = Products(backend.ops, None)
        packed = CudaPacked(weight, None, device)
        with rows.one(what="product", outputs=outputs, inner=inner) as found:
            found["library_keeps_bits"] = keeps_bits(cublas, weight) if device.type == "cuda" else None
            states = torch.randn(64, inner, device=device).to(torch.bfloat16)
            alone = torch.cat([ours.linear(states[at : at + 1], packed) for at in range(4)])
            found["ours_keeps_bits"] = torch.equal(ours.linear(states, packed)[:4], alone)
            for count in (1, 16, 64):
                some, padded = states[:count], states[: max(16, count)]
                found[f"ours_{count}_us"] = microseconds([partial(ours.linear, some, packed)], device)
                if device.type == "cuda":
                    works = [partial(cublas, padded, weight)]
                    found[f"library_{count}_us"] = microseconds(works, device)


def shapes(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Outputs and inner sizes of the products of an 8B model: QKV, out, gate and up, down, the LM head."""
    width = args.width
    inner = width * 7 // 2
    return [
        (width * 3 // 2, width),
        (width, width),
        (2 * inner, width),
        (width, inner),
        (args.vocabulary, width),
    ]


def passes(rows: Rows, device: torch.device, args: argparse.Namespace) -> None:
    """Passes of the model in bfloat16, recorded, with our product and the vendor's; and their kernels."""
    for name, library in (("ours", None), ("library", cublas)):
        target = None
        with rows.one(what="model", product=name) as found:
            target = model_on(backend_of(device, library=library), args)
            found |= {"weight_bytes": target.weight_bytes}
        if target is None:
            continue
        cases = list(pairs(args.contexts, ROWS if name == "ours" else (1, 16)))
        timed(rows, target, cases, graphs=True, weights="bfloat16", product=name)
        for count in (1, 16):
            profiled(rows, target, args.contexts[0], count, name)


def profiled(rows: Rows, target: NativeTarget, context: int, count: int, name: str) -> None:
    """Rows of the kernels of a pass, by the time that they take together."""
    from torch.profiler import ProfilerActivity, profile

    cuda = target.device.type == "cuda"
    with rows.one(what="profile", context=context, rows=count, product=name) as found:
        pass_times(target, context, count, 1)  # recorded before it is looked at
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
            pass_times(target, context, count, 4)
        table = [
            (one.self_device_time_total if cuda else one.self_cpu_time_total, one.count, one.key)
            for one in seen.key_averages()
        ]
        found["passes"] = 5
        found["kernels"] = [
            {"us": round(taken, 1), "calls": calls, "name": key[:80]}
            for taken, calls, key in sorted(table, reverse=True)[:20]
        ]


def eager(rows: Rows, device: torch.device, args: argparse.Namespace) -> None:
    """Passes without graphs; then of weights of few bits, and of keys and values in int8."""
    with rows.one(what="model", graphs=False):
        target = model_on(backend_of(device, graphs=False), args)
        timed(rows, target, pairs(args.contexts, (1, 16)), graphs=False, weights="bfloat16")
        del target
    for form in ("q4_0", "q8_0"):
        with rows.one(what="model", weights=form):
            target = model_on(backend_of(device), args, form)
            timed(rows, target, pairs(args.contexts, (1, 16)), graphs=True, weights=form)
            target.take_keys(torch.int8, "kv_cache_dtype")
            timed(rows, target, pairs(args.contexts[:2], (1, 16)), graphs=True, weights=form, keys="int8")
            target.take_int8("activations")
            timed(rows, target, pairs(args.contexts[:1], (1, 16)), graphs=True, weights=form, dtype="int8")
            del target


def microseconds(works: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Of one of several pieces of work of a kind, in one graph: as many as outgrow what a card caches."""
    if device.type == "cpu":
        begun = time.perf_counter()
        for work in works:
            work()
        return round(1e6 * (time.perf_counter() - begun) / len(works), 1)
    for work in works:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            for work in works:
                work()
    taken: list[float] = []
    for _ in range(7):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        taken.append(1e3 * begun.elapsed_time(ended) / (4 * len(works)))
    return round(min(taken[1:]), 2)


def sweep(rows: Rows, device: torch.device, args: argparse.Namespace) -> None:
    """Attention and products by how kernels are started."""
    from tokenswift.kernels.cuda.launch_products import Tuning

    heads, dtype = args.width // WIDTH, torch.bfloat16
    backend = backend_of(device)
    context, layers = args.contexts[0], 4
    cache = backend.new_cache(layers, heads // GROUPED, WIDTH, context + 64, dtype)
    cache.fill_random()
    cache.commit(tuple(range(context)))
    usual = Tuning()
    attends = [replace(usual, attend_warps=w, attend_stages=s) for w, s in pairs((4, 8), (2, 3, 4, 1))]
    for tuning, count in pairs([usual, *attends], (1, 16)):
        said = {"warps": tuning.attend_warps or "usual", "stages": tuning.attend_stages}
        with rows.one(what="attention", context=context, rows=count, **said) as found:
            ops, numbers = backend_of(device, tuning=tuning).ops, torch.arange(count)
            parents = list(range(-1, count - 1))
            plan = plan_of([Segment(numbers, numbers, cache, parents)], heads, device)
            query = torch.randn(count, heads, WIDTH, device=device).to(dtype)
            works = [lambda n=n: ops.attend(plan, query, n, WIDTH**-0.5) for n in range(layers)]
            found["us"] = microseconds(works, device)
    del cache
    for form, (outputs, inner) in pairs((None, "q4_0", "q8_0"), shapes(args)[:4]):
        source = Drawn(device, args, form)
        source._shapes = {"weight": (outputs, inner)}
        copies = max(1, min(4, (200 << 20) // (2 * outputs * inner)))
        given = [source.get("weight") for _ in range(copies)]
        weights = [CudaPacked(one, dtype, device) for one in given if one is not None]
        low = form is not None
        kinds = [(*how, stages, 1024) for how in ((64, 4), (32, 4), (128, 8), (64, 8)) for stages in (3, 4)]
        for columns, warps, stages, split in (*kinds, (64, 4, 3, 2048), (64, 4, 3, 512)):
            names = ("low_columns", "low_warps", "low_stages") if low else ("columns", "warps", "stages")
            tuning = replace(usual, **dict(zip(names, (columns, warps, stages), strict=True)), split=split)
            said = {"outputs": outputs, "inner": inner, "weights": form or "bfloat16"}
            said |= {"columns": columns, "warps": warps, "stages": stages, "split": split}
            with rows.one(what="product", **said) as found:
                products = Products(backend_of(device, tuning=tuning).ops, None)
                for count in (1, 16):
                    states = torch.randn(count, inner, device=device).to(dtype)
                    works = [partial(products.linear, states, weight) for weight in weights]
                    found[f"us_{count}"] = microseconds(works, device)


PARTS = {"start": start, "passes": passes, "eager": eager, "sweep": sweep}


def main() -> int:
    """Measure a part."""
    parser = argparse.ArgumentParser(description="measure a part on a card")
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--contexts", type=lambda text: [int(n) for n in text.split(",")], default=CONTEXTS)
    args = parser.parse_args()
    if args.device != "cpu":
        import tokenswift.kernels.cuda.launch  # noqa: F401  what needs no card is asked for before one is

        if not torch.cuda.is_available():
            print(f"no card: part {args.part} is ready up to its first call on one", flush=True)
            return NO_CARD
    rows = Rows(args.results, args.part, args.seconds)
    with torch.inference_mode():
        PARTS[args.part](rows, torch.device(args.device), args)
    return 1 if rows.failed else 0


if __name__ == "__main__":
    sys.exit(main())
