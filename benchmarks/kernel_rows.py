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
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from tokenswift import LLM
from tokenswift.kernels.cpu import library
from tokenswift.kernels.cpu.backend import CpuBackend

BEFORE = 256


class Older(ctypes.CDLL):
    """A library that may lack entries; what it lacks is the newer one's."""

    newer: ctypes.CDLL

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.newer, name)


def compiled(sources: Path, name: str, folder: Path) -> str:
    """The library of some sources for an instruction set."""
    out = folder / f"{name}-{len(list(folder.iterdir()))}.so"
    flags = [*library.FLAGS, *library.instruction_sets()[name].flags]
    subprocess.run(
        ["gcc", *flags, "-shared", "cpu.c", "-o", str(out), "-lm"], cwd=sources, check=True
    )
    return str(out)


def memory_speed(folder: Path) -> float:
    """GB/s that two threads read."""
    made = folder / "memory"
    source = Path(__file__).with_name("memory.c")
    subprocess.run(
        ["gcc", "-O3", "-march=native", "-pthread", str(source), "-o", str(made)], check=True
    )
    return float(subprocess.run([str(made)], capture_output=True, text=True, check=True).stdout)


def timed(target: Any, cache: Any, count: int) -> tuple[float, torch.Tensor]:
    """Milliseconds of one pass of a chain, and its logits."""
    tokens = torch.arange(100, 100 + count)
    places = cache.length + torch.arange(count)
    begun = perf_counter()
    logits = target.logits(target.forward(tokens, places, cache, list(range(-1, count - 1))).hidden)
    return (perf_counter() - begun) * 1e3, logits


def main() -> None:
    """Measures, and prints a table and JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--against", type=Path, help="the C sources of another commit")
    parser.add_argument("--sets", nargs="+", default=library.fitting(library.processor())[-1:])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 3, 4, 8])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=library.usable_processors())
    given = parser.parse_args()
    target: Any = LLM(given.model, dtype="int8", device="cpu").target
    cache = target.new_cache(BEFORE + 64)
    target.prefill(list(range(1000, 1000 + BEFORE)), cache)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        speeds = [memory_speed(Path(folder))]
        for name in given.sets:
            newer = ctypes.CDLL(compiled(library.HERE, name, Path(folder)))
            backends = {"new": CpuBackend(newer, given.threads)}
            if given.against is not None:
                older = Older(compiled(given.against, name, Path(folder)))
                older.newer = newer
                backends["old"] = CpuBackend(older, given.threads)
            for count in given.rows:
                times: dict[str, list[float]] = {kind: [] for kind in backends}
                bits = {}
                for turn in range(given.rounds + 1):
                    for kind, target.backend in backends.items():
                        spent, bits[kind] = timed(target, cache, count)
                        times[kind] += [spent] if turn else []
                if not all(torch.equal(each, bits["new"]) for each in bits.values()):
                    parser.error(
                        f"{name}: the bits differ; valid: kernels that know all formats of the file"
                    )
                for kind, each in times.items():
                    line = {"set": name, "kernels": kind, "rows": count}
                    found.append(
                        line
                        | {"median_ms": round(median(each), 1), "least_ms": round(min(each), 1)}
                    )
                    print(*found[-1].values(), flush=True)
        speeds.append(memory_speed(Path(folder)))
    about = {"processor": library.processor().splitlines()[:2], "threads": given.threads}
    about |= {"memory_gb_s": speeds, "weight_bytes": target.weight_bytes}
    print(json.dumps(about | {"passes": found}))


if __name__ == "__main__":
    main()
