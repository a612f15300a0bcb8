"""An older version of this repository beside the checkout: milliseconds a token of the same texts.

    python -m benchmarks.versions COMMIT BOOK [--rounds 3] [--tokens 200] [--context 1024]
        [--out FILE]

Each round runs either version in a process of its own, the one first that came second before: plain
decoding and adaptive drafting of the default model, in float32 and in bfloat16. The older version's
sources are taken from git and run with the packages of this environment; it keeps a copy of the
default model and its kernels in a folder that is removed afterwards. Prints a line of JSON for each
mode; ``--out`` appends them to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.row import commit, machine

ROOT = Path(__file__).resolve().parents[1]

MEASURE = """
import json, sys
from tokenswift import LLM, SamplingParams

book, dtype, context, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
llm = LLM("smollm2-135m", dtype=dtype)
ids = llm.encode(open(book, encoding="utf-8").read()[20_000 : 20_000 + 8 * context])[:context]
found = {}
for mode, strategy in (("plain", "autoregressive"), ("automatic", sys.argv[5])):
    llm.generate(ids, 32, strategy, sampling=SamplingParams(seed=0), ignore_eos=True)
    done = llm.generate(ids, tokens, strategy, sampling=SamplingParams(seed=1), ignore_eos=True)
    found[mode] = 1000 * done.metrics.seconds / len(done.token_ids)
print(json.dumps(found))
"""


def measure(source: Path, cache: Path | None, strategy: str, *how: object) -> dict[str, float]:
    """Milliseconds a token of one version, by mode."""
    environment = {**os.environ, "PYTHONPATH": str(source)}
    if cache is not None:
        environment |= {"TOKENSWIFT_CACHE": str(cache), "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-c", MEASURE, *map(str, how), strategy]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, and print medians and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("older", metavar="COMMIT")
    parser.add_argument("book", type=Path, metavar="BOOK")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--strategy", default="auto", help="what adaptive drafting was called then")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        older = Path(folder) / "older"
        older.mkdir()
        packed = subprocess.run(
            ["git", "archive", args.older, "src"], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", str(older)], input=packed.stdout, check=True)
        sides = {
            "older": (older / "src", Path(folder) / "cache", args.strategy),
            "newer": (ROOT / "src", None, "auto"),
        }
        for dtype in ("float32", "bfloat16"):
            times: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for turn in range(args.rounds):
                for side in sorted(sides, reverse=bool(turn % 2)):
                    how = (args.book, dtype, args.context, args.tokens)
                    times[side].append(measure(*sides[side], *how))
            for mode in ("plain", "automatic"):
                ms = {side: [round(one[mode], 2) for one in times[side]] for side in sides}
                ratio = median(ms["newer"]) / median(ms["older"])
                row = {
                    "older": args.older,
                    "commit": commit(),
                    "machine": machine("cpu"),
                    "mode": mode,
                    "dtype": dtype,
                    "context": args.context,
                    "tokens": args.tokens,
                    "ms_a_token": ms,
                    "newer_over_older": round(ratio, 3),
                }
                print(json.dumps(row), flush=True)
                if args.out is not None:
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
