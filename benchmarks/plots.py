"""Plots of a table's lines, by matplotlib: as SVG, readable without colour.

Series differ by marker, dash and (for bars) hatching; colours are those of Okabe and Ito. Whiskers
reach to the least and the most of the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.specs import Spec
from benchmarks.tables import Group, Line
from benchmarks.words import NAMES, head_of, shown

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 2)))
HATCHES = ("", "////", "....", "xxxx", "----", "\\\\\\\\", "ooo")
STYLE = Path(__file__).with_suffix(".mplstyle")


def plot(spec: Spec, group: Group) -> bytes:
    """A group's lines as an SVG picture; empty where a spec has no plot."""
    wanted = spec.data.get("plot")
    if not wanted or not group.lines:
        return b""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [wanted["y"]] if wanted.get("together") else [[figure] for figure in wanted["y"]]
    with pyplot.rc_context(fname=STYLE):
        size = (3.7 * max(len(panels), 1.6), 3.4)
        figure, places = pyplot.subplots(
            1, len(panels), figsize=size, squeeze=False, layout="constrained"
        )
        for place, figures in zip(places[0], panels, strict=True):
            _panel(place, wanted, points(wanted, group.lines, figures))
            title = (
                "speed-up over plain decoding" if figures[0] == "speedup" else NAMES[figures[0]][0]
            )
            place.set_title(wanted.get("together", title), loc="left", fontsize=9)
            if "speedup" in figures:
                place.axhline(1.0, color="#565d66", linewidth=1, linestyle=(0, (1, 1)))
        handles, labels = places[0][0].get_legend_handles_labels()
        if len(labels) > 1:
            columns = 2 if len(labels) > 3 else len(labels)
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        out = BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return out.getvalue()


def points(wanted: dict[str, Any], lines: Sequence[Line], figures: Sequence[str]) -> pd.DataFrame:
    """What is drawn: series, x, y, least and most. Where neither axis nor series is the length, the
    longest text of each counts; lines that neither tells apart are one, the mean."""
    made = []
    for line in lines:
        if all(line.get(key) in values for key, values in wanted.get("where", {}).items()):
            name = ", ".join(
                ("" if key == "variant" else f"{head_of(key)} ") + shown(line.get(key))
                for key in wanted["series"]
            )
            for figure in (figure for figure in figures if figure in line):
                said = ", ".join(filter(None, (name, NAMES[figure][0] if len(figures) > 1 else "")))
                x = line.get(wanted["x"])
                x = shown(x) if isinstance(x, list) or x is None else x
                made.append((said, x, line["point"], line[figure], *line["spread"][figure]))
    frame: Any = pd.DataFrame(made, columns=["name", "x", "point", "y", "least", "most"])
    if "point" not in (wanted["x"], *wanted["series"]):
        frame = frame[frame["point"] == frame.groupby(["name", "x"])["point"].transform("max")]
    ends = {"y": ("y", "mean"), "least": ("least", "min"), "most": ("most", "max")}
    return frame.groupby(["name", "x"], sort=False, as_index=False).agg(**ends)


def _panel(place: Any, wanted: dict[str, Any], frame: Any) -> None:
    """One pair of axes: lines over numbers, bars over names."""
    values, names = [*dict.fromkeys(frame["x"])], [*dict.fromkeys(frame["name"])]
    as_lines = len(values) > 1 and all(isinstance(value, int | float) for value in values)
    values = sorted(values) if as_lines else values
    for i, name in enumerate(names):
        part = (
            frame[frame["name"] == name].sort_values("x")
            if as_lines
            else frame[frame["name"] == name]
        )
        reach = [part["y"] - part["least"], part["most"] - part["y"]]
        ends = reach if any(map(any, reach)) else None
        look: dict[str, Any] = {"color": COLOURS[i % 7], "yerr": ends, "label": name, "capsize": 2}
        if as_lines:
            look |= {"marker": MARKERS[i % 7], "linestyle": DASHES[i % 7], "markersize": 5}
            place.errorbar(part["x"], part["y"], **look)
        else:
            width = 0.8 / len(names)
            middle = [
                values.index(value) + (i - (len(names) - 1) / 2) * width for value in part["x"]
            ]
            look |= {"hatch": HATCHES[i % 7], "edgecolor": "white", "linewidth": 0.5}
            place.bar(middle, part["y"], width * 0.92, **look)
    if as_lines:
        if values[-1] > 20 * max(1, values[0]) and values[0] > 0:
            place.set_xscale("log", base=2)
        place.set_xticks(values if len(values) < 8 else values[:: -(-len(values) // 7)])
        place.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        place.minorticks_off()
    else:
        long = any(len(str(value)) > 9 for value in values) or len(values) > 4
        place.set_xticks(range(len(values)), [*map(shown, values)])
        place.tick_params(axis="x", rotation=25 if long else 0)
    place.set_ylim(0, 1.05 * place.get_ylim()[1])  # no marker is cut off
    place.set_xlabel(head_of(wanted["x"]))
