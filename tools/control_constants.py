"""What the constants of adaptive drafting are worth, on made-up steps.

    python tools/control_constants.py [SEEDS]

Prints, for half and twice each constant of control, modes and costs in `speculation`, how the
tokens a unit of time change: the mean over ten texts, and the worst and the best of them. The steps
are those of tests/speculation/test_control.py. They show what a constant does to decisions, not how
fast a machine is.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.speculation.test_control import HEADS, Decoder, flat
from tokenswift.speculation import control, costs, modes
from tokenswift.speculation.control import Control
from tokenswift.speculation.costs import CostEstimate, Costs
from tokenswift.speculation.sequence_state import ALONE, BatchLoad


@dataclass(frozen=True)
class Text:
    """A made-up text.

    Attributes:
        parts: of each part, its tokens and the chance that a repeat is right.
        heads: chance that the heads are right; None: there are none.
        rows: what a pass takes, by its rows.
        estimate: what the heads expect.
        load: the other sequences in each step.
    """

    parts: tuple[tuple[int, float], ...]
    heads: float | None = None
    rows: Callable[[int], float] = flat
    estimate: CostEstimate = HEADS
    load: BatchLoad = ALONE

    def rate(self, seed: int) -> float:
        """Tokens a unit of time."""
        decoder = Decoder(self.rows, self.heads)
        decoder.rnd = random.Random(seed)
        if self.heads is not None:
            decoder.control = Control(Costs(), {"heads": self.estimate})
        tokens = 0
        time = 0.0
        for count, chance in self.parts:
            tokens += count
            time += count / decoder.write(count, chance, self.load)
        return tokens / time


PASSES = replace(HEADS, pass_cost=0.2, best_chance=0.5, draft_cost=0.3)
TEXTS = (
    Text(((300, 0.02),)),
    Text(((300, 0.1),), rows=lambda rows: 0.5 + 0.5 * rows),
    Text(((150, 0.05), (150, 0.97), (150, 0.05), (150, 0.9), (150, 0.05))),
    Text(((600, 0.1),), heads=0.1),
    Text(((600, 0.1),), heads=0.5),
    Text(((600, 0.1),), heads=0.8),
    Text(((200, 0.1), (200, 0.95), (200, 0.1), (200, 0.6)), heads=0.6),
    Text(((600, 0.3),), heads=0.4, estimate=PASSES),
    Text(((400, 0.5),), rows=lambda rows: 0.2 + 0.8 * rows, load=BatchLoad(7, 7.0, 0.0)),
    Text(((600, 0.6),), heads=0.5, rows=lambda rows: 1 + 0.15 * (rows - 1)),
)
#: constants that are no defaults of classes, with other values than half and twice where a
#: constant has bounds
CHANGES: dict[str, tuple[float, float]] = {
    "_PLAIN_EVERY": (128, 512),
    "_FAST": (1 / 32, 1 / 8),
    "_BIAS_MEMORY": (32.0, 128.0),
    "_LEAST_BIAS": (0.1, 0.6),
    "_MOST_BIAS": (1.0, 2.0),
    "MOST_ERROR": (1.5, 6.0),
    "_MARGIN": (1.0, 1.05),
    "_TRIAL": (2, 8),
    "_TRIAL_RATE": (0.6, 1.0),
    "_LAST_WAIT": (512, 2048),
    "_ALWAYS": (0.3, 1.1),
    "_FIRST_ASKING": (0.015, 0.06),
    "_FIRST_BIAS": (0.6, 1.0),
    "FIRST": (1, 6),
    "FIRST_COST": (0.05, 0.2),
    "_OUTLIER": (math.log(1.5) / 2, math.log(1.5) * 2),
    "_UNIT": (1 / 16, 1 / 4),
    "SMALLEST_WEIGHT": (1 / 64, 1 / 16),
    "_ANCHOR": (1 / 6, 2 / 3),
}


def mean_rates(seeds: int) -> list[float]:
    """The logarithm of each text's rate, in the mean of the seeds."""
    return [statistics.mean(math.log(text.rate(seed)) for seed in range(seeds)) for text in TEXTS]


def main() -> None:
    """Print a line for each change."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    before = mean_rates(seeds)
    for name, values in CHANGES.items():
        modules = [module for module in (control, modes, costs) if hasattr(module, name)]
        value = getattr(modules[0], name)
        for changed in values:
            for module in modules:
                setattr(module, name, changed)
            pairs = zip(mean_rates(seeds), before, strict=True)
            gains = [100 * (rate - old) for rate, old in pairs]
            spread = f"{min(gains):+.1f} to {max(gains):+.1f}"
            print(f"{name} {value:.4g} → {changed:.4g}: {statistics.mean(gains):+.1f}% ({spread})")
        for module in modules:
            setattr(module, name, value)


if __name__ == "__main__":
    main()
