"""What a pass of a few rows costs, by the kernels of this checkout and of another one, in one
process.

    python -m benchmarks.kernel_rows MODEL.gguf --against OTHER/src/tokenswift/kernels/cpu
        --sets avx2 avx512-vnni

The libraries read the same panels and take turns; other bits end it. The last line is JSON: for
each set of instructions, library and number of rows the median and the least time of a pass in ms,
layers and LM head behind 256 tokens; and what a C loop (memory.c) reads in GB/s, before and after,
beside the bytes of the weights.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from tokenswift import LLM
from tokenswift.kernels.cpu import library
from tokenswift.kernels.cpu.backend import CpuBackend
from tokenswift.kv.cache import FullCache
from tokenswift.models.decoder import NativeTarget
from tokenswift.turns import take_turns

BEFORE = 256  # tokens of the context


class OlderLibrary(ctypes.CDLL):
    """A library that may lack entries; what it lacks is the newer one's."""

    newer: ctypes.CDLL

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.newer, name)


def compile_kernels(sources: Path, instruction_set: str, folder: Path) -> str:
    """Compile some sources for an instruction set; the library's file."""
    out = folder / f"{instruction_set}-{len(list(folder.iterdir()))}.so"
    flags = [*library.FLAGS, *library.instruction_sets()[instruction_set].flags]
    subprocess.run(
        ["gcc", *flags, "-shared", "cpu.c", "-o", str(out), "-lm"], cwd=sources, check=True
    )
    return str(out)


def memory_speed(folder: Path) -> float:
    """GB/s that two threads read."""
    program = folder / "memory"
    source = Path(__file__).with_name("memory.c")
    subprocess.run(
        ["gcc", "-O3", "-march=native", "-pthread", str(source), "-o", str(program)], check=True
    )
    return float(subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout)


def timed(target: NativeTarget, cache: FullCache, count: int) -> tuple[float, torch.Tensor]:
    """Milliseconds of one pass of a chain, and its logits."""
    tokens = torch.arange(100, 100 + count)
    positions = cache.length + torch.arange(count)
    parents = list(range(-1, count - 1))
    start = perf_counter()
    logits = target.logits(target.forward(tokens, positions, cache, parents).hidden)
    return (perf_counter() - start) * 1e3, logits


def backends_of(
    instruction_set: str, options: argparse.Namespace, folder: Path
) -> dict[str, CpuBackend]:
    """The kernels of this checkout ("new"), and of the other one ("old")."""
    newer = ctypes.CDLL(compile_kernels(library.HERE, instruction_set, folder))
    backends = {"new": CpuBackend(newer, options.threads)}
    if options.against is not None:
        older = OlderLibrary(compile_kernels(options.against, instruction_set, folder))
        older.newer = newer
        backends["old"] = CpuBackend(older, options.threads)
    return backends


def measure(
    target: NativeTarget,
    cache: FullCache,
    backends: dict[str, CpuBackend],
    count: int,
    rounds: int,
) -> dict[str, list[float]]:
    """Milliseconds of passes of so many rows by each backend, in turns; a first round is not
    counted.

    Raises:
        ValueError: the bits of their logits differ.
    """
    times: dict[str, list[float]] = {name: [] for name in backends}
    logits: dict[str, torch.Tensor] = {}
    for _, name in take_turns(list(backends), range(rounds + 1)):
        target.backend = backends[name]
        milliseconds, logits[name] = timed(target, cache, count)
        times[name].append(milliseconds)
    if not all(torch.equal(bits, logits["new"]) for bits in logits.values()):
        raise ValueError("the bits differ; valid: kernels that know all formats of the file")
    return {name: milliseconds[1:] for name, milliseconds in times.items()}


def parse_options() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--against", type=Path, help="the C sources of another commit")
    parser.add_argument("--sets", nargs="+", default=library.fitting(library.processor())[-1:])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 3, 4, 8])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=library.usable_processors())
    return parser.parse_args()


def main() -> None:
    """Measures, and prints a table and JSON."""
    options = parse_options()
    target = LLM(options.model, dtype="int8", device="cpu").target
    if not isinstance(target, NativeTarget):
        sys.exit(f"error: model is {options.model}; valid: one of the native families")
    cache = target.new_cache(BEFORE + 64)
    target.prefill(list(range(1000, 1000 + BEFORE)), cache)
    passes: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        speeds = [memory_speed(folder)]
        for instruction_set in options.sets:
            backends = backends_of(instruction_set, options, folder)
            for count in options.rows:
                try:
                    times = measure(target, cache, backends, count, options.rounds)
                except ValueError as error:
                    sys.exit(f"error: {instruction_set}: {error}")
                for kernels, milliseconds in times.items():
                    line = {
                        "set": instruction_set,
                        "kernels": kernels,
                        "rows": count,
                        "median_ms": round(median(milliseconds), 1),
                        "least_ms": round(min(milliseconds), 1),
                    }
                    passes.append(line)
                    print(*line.values(), flush=True)
        speeds.append(memory_speed(folder))
    summary = {
        "processor": library.processor().splitlines()[:2],
        "threads": options.threads,
        "memory_gb_s": speeds,
        "weight_bytes": target.weight_bytes,
        "passes": passes,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
