"""Eight texts at once over one text, by this checkout and by another one, in turns.

    python -m benchmarks.several_texts MODEL.gguf --against OTHER/src [--rounds 3]

Each turn is a process of its own with that source folder; tokens a second are those between the
10th and the 110th token of plain decoding, so reading the prompts is not in them. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from benchmarks.json_lines import last_line_of
from tokenswift.turns import take_turns

SOURCES = Path(__file__).resolve().parents[1] / "src"


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--against", type=Path, required=True, help="src of another commit")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    #: side → (source folder, texts at once)
    sides = {"old one": (options.against, 1), "one": (SOURCES, 1), "eight": (SOURCES, 8)}
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for _, side in take_turns(list(sides), range(options.rounds)):
        sources, count = sides[side]
        rate = last_line_of("checkout_texts.py", [options.model, count], float, sources)
        rates[side].append(rate)
        print(side, round(rate, 1), flush=True)
    medians = {side: round(median(of_side), 1) for side, of_side in rates.items()}
    over_old = round(medians["eight"] / medians["old one"], 2)
    print(json.dumps({"tokens_a_second": medians, "eight_over_old_one": over_old}))


if __name__ == "__main__":
    main()
