"""Plots of a table's lines, by matplotlib: as SVG, readable without colour.

Series differ by colour, marker, dash and (for bars) hatching, up to twelve of them; the first seven
colours are those of Okabe and Ito. Whiskers reach to the least and the most of the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from benchmarks.settings import Settings
from benchmarks.specs import Spec
from benchmarks.tables import Group, Line
from benchmarks.words import NAMES, Row, head_of, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: a dash by name, or (offset, lengths of strokes and gaps)
Dash = str | tuple[int, tuple[int, ...]]
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"),
    *("#6A3D9A", "#8C564B", "#7A7F86", "#00474F", "#B5BD00"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*", "p", ">", "h")
DASHES: tuple[Dash, ...] = (
    *("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 2))),
    *((0, (12, 3)), (0, (3, 3)), (0, (6, 2, 2, 2)), (0, (2, 1)), (0, (10, 2, 1, 2))),
)
HATCHES = (
    *("", "////", "....", "xxxx", "----", "\\\\\\\\", "ooo"),
    *("++++", "||||", "//..", "**", "xx.."),
)
STYLE = Path(__file__).with_suffix(".mplstyle")


def plot(spec: Spec, group: Group) -> bytes:
    """A group's lines as an SVG picture; empty where a spec has no plot."""
    settings = spec.data.get("plot")
    if not settings or not group.lines:
        return b""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = settings["y"]
    panels = [figures] if settings.get("together") else [[figure] for figure in figures]
    with pyplot.rc_context(fname=STYLE):
        size = (3.7 * max(len(panels), 1.6), 3.4)
        picture, grid = pyplot.subplots(
            1, len(panels), figsize=size, squeeze=False, layout="constrained"
        )
        for axes, panel in zip(grid[0], panels, strict=True):
            draw_panel(axes, settings, points(settings, group.lines, panel))
            title = settings.get("together") or title_of(panel[0]) + settings.get("model", "")
            axes.set_title(title, loc="left", fontsize=9)
            if "speedup" in panel:
                axes.axhline(1.0, color="#565d66", linewidth=1, linestyle=(0, (1, 1)))
        handles, labels = grid[0][0].get_legend_handles_labels()
        if len(labels) > 1:
            columns = 2 if len(labels) > 3 else len(labels)
            picture.legend(handles, labels, loc="outside lower center", ncols=columns)
        return svg(picture)


def svg(picture: Figure) -> bytes:
    """A picture as SVG, always the same for the same lines; the picture is closed."""
    from matplotlib import pyplot

    out = BytesIO()
    picture.savefig(out, format="svg", metadata={"Date": None})
    pyplot.close(picture)
    return out.getvalue()


def title_of(figure: str) -> str:
    """A panel's title."""
    return "speed-up over plain decoding" if figure == "speedup" else NAMES[figure][0]


def points(settings: Settings, lines: Sequence[Line], figures: Sequence[str]) -> pd.DataFrame:
    """What is drawn: series, x, y, least and most. Where neither axis nor series is the length, the
    longest text of each counts; lines that neither tells apart are one, the mean."""
    where = settings.get("where", {})
    rows = []
    for line in lines:
        if not all(line.get(key) in values for key, values in where.items()):
            continue
        x = line.get(settings["x"])
        for figure in figures:
            if figure not in line:
                continue
            least, most = line["spread"][figure]
            rows.append(
                {
                    "name": series_name(settings, line, figure if len(figures) > 1 else None),
                    "x": shown(x) if isinstance(x, list) or x is None else x,
                    "point": line["point"],
                    "y": line[figure],
                    "least": least,
                    "most": most,
                }
            )
    frame = pd.DataFrame(rows, columns=["name", "x", "point", "y", "least", "most"])
    if "point" not in (settings["x"], *settings["series"]):
        longest = frame.groupby(["name", "x"])["point"].transform("max")
        frame = frame.loc[frame["point"] == longest]
    groups = frame.groupby(["name", "x"], sort=False, as_index=False)
    return groups.agg(y=("y", "mean"), least=("least", "min"), most=("most", "max"))


def series_name(settings: Settings, line: Line, figure: str | None) -> str:
    """What the legend calls a line's series; of one figure among several with the figure's name."""
    parts = []
    for key in settings["series"]:
        value = shown(line.get(key))
        parts.append(value if key == "variant" else f"{head_of(key)} {value}")
    if figure is not None:
        parts.append(NAMES[figure][0])
    return ", ".join(filter(None, parts))


def draw_panel(axes: Axes, settings: Settings, frame: pd.DataFrame) -> None:
    """One pair of axes: lines over numbers, bars over names."""
    values = list(dict.fromkeys(frame["x"]))
    if len(values) > 1 and all(isinstance(value, int | float) for value in values):
        draw_lines(axes, sorted(values), frame)
    else:
        draw_bars(axes, values, frame)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # no marker is cut off
    axes.set_xlabel(head_of(settings["x"]))


def whiskers(part: pd.DataFrame) -> list[list[float]] | None:
    """How far a series reaches below and above its values; None where it does not."""
    below = (part["y"] - part["least"]).tolist()
    above = (part["most"] - part["y"]).tolist()
    return [below, above] if any([*below, *above]) else None


def draw_lines(axes: Axes, values: list[float], frame: pd.DataFrame) -> None:
    """A line for each series over numbers, which are in order."""
    for i, (name, part) in enumerate(frame.groupby("name", sort=False)):
        part = part.sort_values("x")
        axes.errorbar(
            part["x"],
            part["y"],
            yerr=whiskers(part),
            label=str(name),
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            linestyle=DASHES[i % len(DASHES)],
            markersize=5,
            capsize=2,
        )
    if values[-1] > 20 * max(1, values[0]) and values[0] > 0:
        axes.set_xscale("log", base=2)
    every = 1 if len(values) < 8 else -(-len(values) // 7)
    axes.set_xticks(values[::every])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.minorticks_off()


def draw_bars(axes: Axes, values: list[object], frame: pd.DataFrame) -> None:
    """A bar for each series over each name."""
    count = len(set(frame["name"]))
    width = 0.8 / count
    for i, (name, part) in enumerate(frame.groupby("name", sort=False)):
        offset = (i - (count - 1) / 2) * width
        axes.bar(
            [values.index(value) + offset for value in part["x"]],
            part["y"],
            width * 0.92,
            yerr=whiskers(part),
            label=str(name),
            color=COLOURS[i % len(COLOURS)],
            hatch=HATCHES[i % len(HATCHES)],
            edgecolor="white",
            linewidth=0.5,
            capsize=2,
        )
    long = any(len(str(value)) > 9 for value in values) or len(values) > 4
    axes.set_xticks(range(len(values)), [*map(shown, values)])
    for label in axes.get_xticklabels():
        label.set(rotation=25 if long else 0, horizontalalignment="right" if long else "center")


# ---- a real model --------------------------------------------------------------------------------

#: sides of a real model's rows → what the legend calls them
SIDES = {"llama": "llama.cpp", "plain": "tokenswift, plain", "auto": "tokenswift, with drafts"}
SIDE_COLOURS = ("#A7AEB7", "#56B4E9", "#0072B2")


def plot_tasks(rows: Sequence[Row]) -> bytes:
    """Tokens a second of a real model by task, a bar for each side, as an SVG picture; the ratio
    to plain decoding stands at the bar of the drafts. Empty where there are no rows."""
    if not rows:
        return b""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = 0.8 / len(SIDES)
    with pyplot.rc_context(fname=STYLE):
        picture, axes = pyplot.subplots(figsize=(7.4, 0.62 * len(rows) + 1), layout="constrained")
        for i, (side, name) in enumerate(SIDES.items()):
            places = [place + (i - 1) * height for place in range(len(rows))]
            speeds = [row[side] for row in rows]
            axes.barh(places, speeds, height * 0.92, label=name, color=SIDE_COLOURS[i])
        for place, row in enumerate(rows):
            axes.annotate(
                f"{row['auto']:.0f}, {row['auto_over_plain']:.2f} × plain",
                (row["auto"], place + height),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.set_yticks(range(len(rows)), [row["task"] for row in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.22 * max(row["auto"] for row in rows))
        axes.set_xlabel("tokens a second; more is better")
        axes.grid(visible=False, axis="y")
        handles, labels = axes.get_legend_handles_labels()
        picture.legend(handles, labels, loc="outside upper left", ncols=len(SIDES))
        return svg(picture)


# ---- long texts ----------------------------------------------------------------------------------

WAYS = {"plain": "plain", "auto": "with drafts"}  # of rows → what the legend calls them


def plot_long_texts(texts: Sequence[Sequence[Row]]) -> bytes:
    """Minutes over new tokens, plainly and with drafts, as an SVG picture; empty without texts.

    Args:
        texts: of each text its parts, then the whole.
    """
    if not texts:
        return b""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(fname=STYLE):
        picture, axes = pyplot.subplots(figsize=(5.9, 3.4), layout="constrained")
        for i, (*parts, total) in enumerate(texts):
            for j, (way, words) in enumerate(WAYS.items()):
                axes.plot(
                    [0, *(part["part"] for part in parts)],
                    [0.0, *minutes(parts, way)],
                    label=f"{total['model']}, {words}",
                    color=COLOURS[i],
                    marker=MARKERS[j],
                    linestyle=DASHES[1 - j],
                    markersize=4,
                )
        axes.set_xlabel("new tokens")
        axes.set_ylabel("minutes")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        picture.legend(loc="outside lower center", ncols=2)
        return svg(picture)


def minutes(parts: Sequence[Row], way: str) -> list[float]:
    """Of the whole text at the end of each part."""
    ends = [part["part"] for part in parts]
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    seconds = [length / part[way] for length, part in zip(lengths, parts, strict=True)]
    return [total / 60 for total in accumulate(seconds)]


# ---- lengths of the context ----------------------------------------------------------------------

#: of tokenswift's rows → what the legend calls them
SPEEDS = {"writing": "plain", "drafting": "with drafts"}


def plot_lengths(rows: Sequence[Row]) -> bytes:
    """Tokens a second by length of the context, a line for each program, as an SVG picture; empty
    without rows.

    Args:
        rows: of one kind of processor, one for each program and context.
    """
    if not rows:
        return b""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = speed_lines(rows)
    contexts = sorted({row["context"] for row in rows})
    with pyplot.rc_context(fname=STYLE):
        picture, axes = pyplot.subplots(figsize=(5.9, 3.4), layout="constrained")
        for i, (name, speeds) in enumerate(lines.items()):
            axes.plot(
                sorted(speeds),
                [speeds[context] for context in sorted(speeds)],
                label=name,
                color=COLOURS[i],
                marker=MARKERS[i],
                linestyle=DASHES[i],
                markersize=5,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens of context")
        axes.set_ylabel("tokens a second")
        picture.legend(loc="outside lower center", ncols=3)
        return svg(picture)


def speed_lines(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """What the legend calls a line → its speed at each length of the context."""
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        for speed, words in SPEEDS.items():
            if speed in row:
                name = row["program"]
                if name == "tokenswift":
                    name = f"{name}, {words}"
                lines.setdefault(name, {})[row["context"]] = row[speed]
    return lines
