"""Line plots as inline SVG. Lines differ by dashes and marks as well as colour; numbers are in a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 14, 38
DASHES = ("", "7 4", "2 3")


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
) -> str:
    """A figure: the plot, and its numbers as a table that opens on demand.

    Args:
        title: of the figure.
        places: new tokens at each point, ascending.
        lines: up to three.
        unit: of the values.
        marks: places of vertical lines (where the run was resumed).
    """
    right = ticks(places[-1] if places else 1)
    known = [value for line in lines for value in line.values if value is not None]
    up = ticks(max(known, default=1.0))

    def x(place: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * place / right[-1]

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / up[-1]

    parts = [f'<path class="grid" d="M{LEFT} {y(v):.1f}H{WIDTH - RIGHT}"/>' for v in up]
    parts += [f'<text x="{LEFT - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{number(v)}</text>' for v in up]
    parts += [
        f'<text x="{min(x(v), WIDTH - 30):.1f}" y="{HEIGHT - 20}" text-anchor="middle">{number(v)}</text>'
        for v in right
    ]
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 4}" text-anchor="middle">new tokens</text>')
    parts += [f'<path class="mark" d="M{x(place):.1f} {TOP}V{HEIGHT - BOTTOM}"/>' for place in marks]
    for i, line in enumerate(lines):
        parts += [_curve(places, line.values, i, x, y)]
    alt = f"{title}: " + "; ".join(_words(line, unit) for line in lines)
    keys = "".join(
        f'<span class="key"><svg width="34" height="10" aria-hidden="true"><path class="line l{i}" '
        f'stroke-dasharray="{DASHES[i]}" d="M1 5H33"/></svg> {escape(line.name)}</span>'
        for i, line in enumerate(lines)
    )
    if marks:
        keys += '<span class="key"><svg width="10" height="12" aria-hidden="true"><path class="mark" '
        keys += 'd="M5 0V12"/></svg> resumed</span>'
    head = "".join(f"<th scope=col>{escape(line.name)}</th>" for line in lines)
    rows = "".join(
        f"<tr><th scope=row>{place:,}</th>" + "".join(f"<td>{number(v)}</td>" for v in values) + "</tr>"
        for place, *values in zip(places, *(line.values for line in lines), strict=True)
    )
    return (
        f"<figure><figcaption>{escape(title)} <small>({escape(unit)})</small></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(alt)}">{"".join(parts)}</svg>'
        f'<p class="keys">{keys}</p><details><summary>Numbers: {escape(title.lower())}</summary>'
        f'<div class="wide" tabindex="0" role="region" aria-label="Numbers: {escape(title)}"><table>'
        f"<thead><tr><th scope=col>up to token</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"</details></figure>"
    )


def _curve(
    places: Sequence[int],
    values: Sequence[float | None],
    i: int,
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> str:
    """A line with marks; broken where a value is unknown."""
    path, pen, points = "", "M", []
    for place, value in zip(places, values, strict=True):
        if value is None:
            pen = "M"
            continue
        path += f"{pen}{x(place):.1f} {y(value):.1f}"
        pen = "L"
        points.append((x(place), y(value)))
    dots = ""
    for a, b in points:
        if i == 0:
            dots += f"M{a - 2:.1f} {b:.1f}a2 2 0 1 0 4 0a2 2 0 1 0 -4 0"
        elif i == 1:
            dots += f"M{a - 2:.1f} {b - 2:.1f}h4v4h-4z"
        else:
            dots += f"M{a:.1f} {b - 3:.1f}l3 5h-6z"
    dash = f'stroke-dasharray="{DASHES[i]}"'
    return f'<path class="line l{i}" {dash} d="{path}"/><path class="dot l{i}" d="{dots}"/>'


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
