"""Line plots as inline SVG, which ``templates/parts.html`` draws.

Lines differ by dashes and marks as well as colour; numbers are in a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: where the drawing and its axes end, for the template too
EDGES = {"width": 720, "height": 250, "left": 56, "right": 708, "top": 14, "bottom": 212}
#: a dot of each line, around its middle
DOTS = ("m-2 0a2 2 0 1 0 4 0a2 2 0 1 0 -4 0", "m-2 -2h4v4h-4z", "m0 -3l3 5h-6z")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a plot: its name, and a value for each place (None: unknown)."""

    name: str
    values: Sequence[float | None]


def ticks(top: float, most: int = 5) -> list[float]:
    """Round numbers from 0 up to at least ``top``."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / most
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * f for f in (1, 2, 5, 10) if unit * f >= raw)
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def plot(
    title: str, places: Sequence[int], lines: Sequence[Line], unit: str, marks: Sequence[int] = ()
) -> dict[str, Any]:
    """A figure: where everything of the plot stands, and its numbers.

    Args:
        title: of the figure.
        places: new tokens at each point, ascending.
        lines: up to three.
        unit: of the values.
        marks: places of vertical lines (where the run was resumed).
    """
    across = ticks(places[-1] if places else 1)
    known = [value for line in lines for value in line.values if value is not None]
    up = ticks(max(known, default=1.0))

    def x(place: float) -> float:
        return round(EDGES["left"] + (EDGES["right"] - EDGES["left"]) * place / across[-1], 1)

    def y(value: float) -> float:
        return round(EDGES["bottom"] - (EDGES["bottom"] - EDGES["top"]) * value / up[-1], 1)

    return {
        **EDGES,
        "title": title,
        "unit": unit,
        "words": f"{title}: " + "; ".join(_words(line, unit) for line in lines),
        "up": [(y(value), number(value)) for value in up],
        "across": [(min(x(value), EDGES["width"] - 30), number(value)) for value in across],
        "marks": [x(place) for place in marks],
        "curves": [
            _curve(
                DOTS[i],
                line.name,
                [(x(a), b if b is None else y(b)) for a, b in zip(places, line.values, strict=True)],
            )
            for i, line in enumerate(lines)
        ],
        "head": ["up to token", *(line.name for line in lines)],
        "rows": [
            (f"{place:,}", *map(number, values))
            for place, *values in zip(places, *(line.values for line in lines), strict=True)
        ],
    }


def _curve(dot: str, name: str, points: Sequence[tuple[float, float | None]]) -> dict[str, str]:
    """Paths of a line, broken where a value is unknown, and of its dots."""
    path, dots, pen = "", "", "M"
    for x, y in points:
        if y is not None:
            path += f"{pen}{x} {y}"
            dots += f"M{x} {y}{dot}"
        pen = "M" if y is None else "L"
    return {"name": name, "path": path, "dots": dots}


def _words(line: Line, unit: str) -> str:
    known = [value for value in line.values if value is not None]
    if not known:
        return f"{line.name} unknown"
    return (
        f"{line.name} from {number(known[0])} to {number(known[-1])} {unit}, least {number(min(known))}, "
        f"most {number(max(known))}"
    )


def number(value: float | None) -> str:
    """A number as tables show it."""
    if value is None:
        return "–"
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
