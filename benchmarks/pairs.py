"""What passes cost in this checkout and in another one, in turns.

    python -m benchmarks.pairs MODEL --against CHECKOUT [--contexts 1024 16384] [--rows 1 8]
                               [--rounds 15] [--kv-cache-dtype auto] [--out FILE]

CHECKOUT is another working tree of the project; its code runs with this environment's packages.
Each checkout has a process of its own, which loads the model once. They take turns, so that what
disturbs the machine disturbs both. One line of JSON for each context and number of rows: the
medians of a pass in ms, and the median of the pairs' ratios, this checkout's time over the other's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from benchmarks.fetch import fetched
from benchmarks.needs import FETCHED
from benchmarks.row import commit, machine
from tokenswift.types import RunError

ROOT = Path(__file__).resolve().parents[1]
#: a program that loads a model and times passes of so many rows behind a context
WORKER = """
import json, sys, time
import torch
from tokenswift import LLM
asked = json.loads(sys.argv[1])
llm = LLM(asked["model"], device="cpu", eagle=None, heads=None, **asked["loading"])
target, caches = llm.target, {}
print(json.dumps(target.kv_bytes), flush=True)
for line in sys.stdin:
    context, rows = json.loads(line)
    if context not in caches:
        caches.clear()
        caches[context] = target.new_cache(context + 64)
        ids = [11 + 37 * i % 5000 for i in range(512)]
        cache = caches[context]
        for start in range(0, context, 512):
            count = min(512, context - start)
            tokens, places = torch.tensor(ids[:count]), torch.arange(start, start + count)
            with torch.inference_mode():
                target.forward(tokens, places, cache)
            cache.commit(tuple(range(count)))
    cache = caches[context]
    tokens, places = torch.tensor(list(range(20, 20 + rows))), torch.arange(rows) + context
    with torch.inference_mode():
        begun = time.perf_counter()
        for _ in range(3):
            target.logits(target.forward(tokens, places, cache).hidden)
        taken = (time.perf_counter() - begun) / 3
    print(json.dumps(1e3 * taken), flush=True)
"""


class Side:
    """One checkout's process.

    Args:
        checkout: its working tree.
        asked: the model and how it is loaded.
    """

    def __init__(self, checkout: Path, asked: dict[str, object]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "TOKENSWIFT_SHAPES": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=checkout,
        )
        self.kv_bytes: int = json.loads(self._answer())

    def pass_ms(self, context: int, rows: int) -> float:
        """Milliseconds of a pass of some rows behind a context, with its LM head."""
        pipe = self._process.stdin
        if pipe is None:
            raise RunError("a checkout's process has no input")
        pipe.write(json.dumps([context, rows]) + "\n")
        pipe.flush()
        return float(json.loads(self._answer()))

    def _answer(self) -> str:
        output = self._process.stdout
        line = output.readline() if output is not None else ""
        if not line:
            raise RunError(f"a checkout's process ended with {self._process.wait()}")
        return line

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Print a line for each context and number of rows."""
    parser = argparse.ArgumentParser(description="Passes of two checkouts, in turns.")
    parser.add_argument("model")
    parser.add_argument("--against", type=Path, required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    name = options.model
    file = str(fetched(name)) if name in FETCHED else name
    asked: dict[str, object] = {
        "model": file,
        "loading": {"kv_cache_dtype": options.kv_cache_dtype},
    }
    this = Side(ROOT, asked)
    asked["loading"] = {}
    other = Side(options.against.resolve(), asked)
    for context in options.contexts:
        for rows in options.rows:
            this.pass_ms(context, rows)
            other.pass_ms(context, rows)
            pairs = [
                (this.pass_ms(context, rows), other.pass_ms(context, rows))
                for _ in range(options.rounds)
            ]
            row = {
                "model": name if name in FETCHED else Path(name).stem,
                "context": context,
                "rows": rows,
                "this_ms": round(median(pair[0] for pair in pairs), 3),
                "other_ms": round(median(pair[1] for pair in pairs), 3),
                "ratio": round(median(mine / theirs for mine, theirs in pairs), 4),
                "rounds": options.rounds,
                "kv_cache_dtype": options.kv_cache_dtype,
                "kv_bytes": [this.kv_bytes, other.kv_bytes],
                "kernels": os.environ.get("TOKENSWIFT_KERNELS", "native"),
                "commit": commit(),
                "machine": machine(),
            }
            print(json.dumps(row), flush=True)
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(row) + "\n")
    this.close()
    other.close()


if __name__ == "__main__":
    main()
