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
import sys
from pathlib import Path
from statistics import median

from benchmarks.fetch import model_file, model_name
from benchmarks.json_lines import PEERS, LineProcess, publish
from benchmarks.row import commit, machine
from tokenswift.turns import take_turns

ROOT = Path(__file__).resolve().parents[1]


class Checkout(LineProcess):
    """One checkout's process.

    Args:
        folder: its working tree.
        model: its file, or its name.
        loading: options of `LLM`.

    Attributes:
        kv_bytes: of the KV cache, for each token.
    """

    def __init__(self, folder: Path, model: Path, loading: dict[str, str]) -> None:
        program = str(PEERS / "checkout_passes.py")
        place = model.resolve() if model.exists() else model  # or the name of a model
        super().__init__(
            "a checkout's process",
            [sys.executable, program, str(place), json.dumps(loading)],
            folder=folder,
            environment={"PYTHONPATH": str(folder / "src"), "TOKENSWIFT_SHAPES": "0"},
        )
        self.kv_bytes = self.read(int)

    def pass_ms(self, context: int, rows: int) -> float:
        """Milliseconds of a pass of some rows behind a context, with its LM head."""
        return self.ask([context, rows], float)


def compare(
    this: Checkout, other: Checkout, context: int, rows: int, rounds: int
) -> dict[str, float]:
    """Medians of a pass of either checkout, and of their ratios; a first round is not counted."""
    this_ms: list[float] = []
    other_ms: list[float] = []
    sides = ((this, this_ms), (other, other_ms))
    for _, (checkout, milliseconds) in take_turns(sides, range(rounds + 1)):
        milliseconds.append(checkout.pass_ms(context, rows))
    pairs = zip(this_ms[1:], other_ms[1:], strict=True)
    return {
        "this_ms": round(median(this_ms[1:]), 3),
        "other_ms": round(median(other_ms[1:]), 3),
        "ratio": round(median(mine / theirs for mine, theirs in pairs), 4),
    }


def parse_options() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description="Passes of two checkouts, in turns.")
    parser.add_argument("model")
    parser.add_argument("--against", type=Path, required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    """Print a line for each context and number of rows."""
    options = parse_options()
    file = model_file(options.model)
    this = Checkout(ROOT, file, {"kv_cache_dtype": options.kv_cache_dtype})
    other = Checkout(options.against.resolve(), file, {})
    with this, other:
        for context in options.contexts:
            for rows in options.rows:
                row = {
                    "model": model_name(options.model),
                    "context": context,
                    "rows": rows,
                    **compare(this, other, context, rows, options.rounds),
                    "rounds": options.rounds,
                    "kv_cache_dtype": options.kv_cache_dtype,
                    "kv_bytes": [this.kv_bytes, other.kv_bytes],
                    "kernels": os.environ.get("TOKENSWIFT_KERNELS", "native"),
                    "commit": commit(),
                    "machine": machine(),
                }
                publish(row, options.out)


if __name__ == "__main__":
    main()
