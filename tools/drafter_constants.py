"""What the constants of the free drafters are worth, on texts of a model at a fixed price of rows.

    python tools/drafter_constants.py MODEL [TOKENS]

Prints, for half and twice each constant of `drafters.recycle` and `drafters.lookup`, how the tokens
of a unit of time change: the mean over four texts, and the worst and the best of them. Heads,
EAGLE-3 and passes over a partial cache are left out, a row of a pass costs .06 plain passes,
drafting nothing, and no clock is read: the same figures come on any machine.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.real import CHAT, TASKS
from tokenswift import LLM
from tokenswift.speculation.costs import Costs
from tokenswift.speculation.drafters import lookup, occurrences, recycle
from tokenswift.types import Step

ROW = 0.06  # cost of a row in plain passes
TEXTS = ("chat", "essay", "code", "edit")
OPTIONS = {"cache": "full"}  # and no heads: lookups and recycling alone


@dataclass(frozen=True)
class Change:
    """Other values of a constant.

    Attributes:
        module: where the constant is.
        name: its name there.
        values: half of it and twice as much, or what its bounds allow.
    """

    module: ModuleType
    name: str
    values: tuple[object, object]


CHANGES = (
    Change(recycle, "RANKED", (2, 8)),
    Change(recycle, "LONGEST", (1, 2)),
    Change(recycle, "DEPTH", (3, 12)),
    Change(recycle, "EXPANDED", (8, 32)),
    Change(recycle, "SLOTS", (1 << 10, 1 << 16)),
    Change(recycle, "_BOUNDS", ((0.6,), (0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.95))),
    Change(recycle, "_PRIOR", ((0.07, 0.2, 0.35), (0.3, 0.8, 1.0))),
    Change(recycle, "_FIRST", (2.0, 8.0)),
    Change(recycle, "_DECAY", (0.98, 0.995)),
    Change(occurrences, "LEAST", (2, 5)),
    Change(lookup, "MOST", (16, 64)),
    Change(occurrences, "_MAX_PLACES", (2, 8)),
    Change(lookup, "_BEHIND", (0.06, 0.24)),
    Change(lookup, "_NEAR", (2, 8)),
    Change(lookup, "_MEMORY", (0.8, 0.95)),
)


def fix_prices() -> None:
    """A row of a pass costs the same whatever it takes."""

    def verify(self: Costs, rows: float) -> float:
        return 1 + ROW * (rows - 1)

    def observe(self: Costs, rows: int, milliseconds: float) -> None:
        return None

    Costs.verify = verify
    Costs.observe = observe


def rate(llm: LLM, text: str, tokens: int) -> float:
    """Tokens per plain pass of a text, the first of its model."""
    learnt = llm.resources.learnt()
    learnt.outcomes.clear()
    learnt.biases.clear()
    spent: list[float] = []

    def on_step(step: Step) -> None:
        spent.append(1 + ROW * step.drafted)

    question = CHAT if text == "chat" else TASKS[text].question
    result = llm.generate(
        [{"role": "user", "content": str(question)}],
        tokens,
        strategy_options=OPTIONS,
        on_step=on_step,
        ignore_eos=True,
    )
    return len(result.token_ids) / sum(spent)


def rates(measure: Callable[[str], float]) -> list[float]:
    """The logarithm of each text's rate."""
    return [math.log(measure(text)) for text in TEXTS]


def main(arguments: list[str]) -> None:
    """Print a line for each change."""
    llm = LLM(arguments[0], heads=None, eagle="none")
    tokens = int(arguments[1]) if len(arguments) > 1 else 300
    fix_prices()

    def measure(text: str) -> float:
        return rate(llm, text, tokens)

    before = rates(measure)
    print(", ".join(f"{text} {math.exp(log):.2f}" for text, log in zip(TEXTS, before, strict=True)))
    for change in CHANGES:
        value = getattr(change.module, change.name)
        for changed in change.values:
            setattr(change.module, change.name, changed)
            pairs = zip(rates(measure), before, strict=True)
            gains = [100 * (new - old) for new, old in pairs]
            spread = f"{min(gains):+.1f} to {max(gains):+.1f}"
            print(f"{change.name} {value} → {changed}: {statistics.mean(gains):+.1f}% ({spread})")
        setattr(change.module, change.name, value)


if __name__ == "__main__":
    main(sys.argv[1:])
