"""Eight texts at once over one text, by this checkout and by another one, in turns.

    python -m benchmarks.several_texts MODEL.gguf --against OTHER/src

Each turn is a process of its own with that source folder; tokens a second are those between the
10th and the 110th token of plain decoding, so reading the prompts is not in them. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

SIDE = """
import sys, time
from tokenswift import LLM
n = int(sys.argv[2])
llm = LLM(sys.argv[1])
ids = [llm.encode([{"role": "user", "content": f"Write a story about a {word}"}])
       for word in ("ship", "dog", "king", "tree", "door", "clock", "river", "stone")[:n]]
def spent(new):
    begun = time.perf_counter()
    if n == 1:
        llm.generate(ids[0], new, "autoregressive", temperature=0.7, seed=1, ignore_eos=True)
    else:
        llm.generate_many(ids, new, "autoregressive", temperature=0.7, seed=1, ignore_eos=True)
    return time.perf_counter() - begun
spent(8)
few, many = spent(10), spent(110)
print(100 * n / (many - few))
"""


def main() -> None:
    """Measures, and prints JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--against", type=Path, required=True, help="src of another commit")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    own = Path(__file__).resolve().parents[1] / "src"
    sides = {"old one": (given.against, 1), "one": (own, 1), "eight": (own, 8)}
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(given.rounds):
        for side, (source, texts) in sides.items():
            command = [sys.executable, "-c", SIDE, given.model, str(texts)]
            env = os.environ | {"PYTHONPATH": str(source)}
            said = subprocess.run(
                command, env=env, capture_output=True, text=True, check=True
            ).stdout
            rates[side].append(float(said))
            print(side, round(rates[side][-1], 1), flush=True)
    found = {side: round(median(each), 1) for side, each in rates.items()}
    print(
        json.dumps(
            {
                "tokens_a_second": found,
                "eight_over_old_one": round(found["eight"] / found["old one"], 2),
            }
        )
    )


if __name__ == "__main__":
    main()
