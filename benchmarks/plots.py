"""Plots of a table's lines, by matplotlib: as SVG and PNG, readable without colour.

Series differ by marker, dash and (for bars) hatching; colours are those of Okabe and Ito. Whiskers are one
standard deviation over prompts and seeds, or reach to the least and most of the runs where rows say those.
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


def plot(spec: Spec, group: Group) -> dict[str, bytes]:
    """A group's lines as pictures, ``{"svg": …, "png": …}``; empty where a spec has no plot."""
    wanted = spec.data.get("plot")
    if not wanted or not group.lines:
        return {}
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [wanted["y"]] if wanted.get("together") else [[figure] for figure in wanted["y"]]
    with pyplot.rc_context(fname=STYLE):
        size = (3.7 * max(len(panels), 1.6), 3.4)
        figure, places = pyplot.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
        for place, figures in zip(places[0], panels, strict=True):
            _panel(place, spec, group.lines, figures)
        handles, labels = places[0][0].get_legend_handles_labels()
        if len(labels) > 1:
            columns = 2 if len(labels) > 3 else len(labels)
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        made = {}
        for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
            out = BytesIO()
            figure.savefig(out, format=kind, dpi=130, metadata=metadata)
            made[kind] = out.getvalue()
        pyplot.close(figure)
    return made


def _panel(place: Any, spec: Spec, lines: Sequence[Line], figures: Sequence[str]) -> None:
    """One pair of axes."""
    x, series = spec.data["plot"]["x"], spec.data["plot"]["series"]
    lines = sorted(lines, key=lambda line: _order(line.labels.get(x)))
    made = [(line, _key(line.labels.get(x)), _name(line, series), line.labels["point"]) for line in lines]
    frame: Any = pd.DataFrame(made, columns=["line", "x", "name", "point"], dtype=object)
    if x != "point" and "point" not in series:  # one value a setting: that of the longest text
        longest = frame.groupby(["name", "x"], dropna=False)["point"].transform("max")
        frame = frame[frame["point"] == longest]
    names, values = ([*dict.fromkeys(frame[column])] for column in ("name", "x"))
    as_lines = len(values) > 1 and all(isinstance(value, int | float) for value in values)
    drawn = [(name, figure) for name in names for figure in figures]
    for i, (name, figure) in enumerate(drawn):
        there = frame["line"].map(lambda line: figure in line.runs)  # noqa: B023
        part = frame[there & (frame["name"] == name)]
        ys = [line.mean(figure) for line in part["line"]]
        reach: Any = [*zip(*(line.reach(figure) for line in part["line"]), strict=True)]
        words = (name if len(names) > 1 else "", NAMES[figure][0] if len(figures) > 1 else "")
        look: dict[str, Any] = {"color": COLOURS[i % 7], "yerr": reach if any(map(any, reach)) else None}
        look |= {"label": ", ".join(filter(None, words)) or NAMES[figure][0], "capsize": 2}
        if as_lines:
            look |= {"marker": MARKERS[i % 7], "linestyle": DASHES[i % 7], "markersize": 5}
            place.errorbar([*part["x"]], ys, **look)
        else:
            width = 0.8 / len(drawn)
            middle = [values.index(value) + (i - (len(drawn) - 1) / 2) * width for value in part["x"]]
            look |= {"hatch": HATCHES[i % 7], "edgecolor": "white", "linewidth": 0.5}
            place.bar(middle, ys, width * 0.92, **look)
    if as_lines:
        if max(values) > 20 * max(1, min(values)) and min(values) > 0:
            place.set_xscale("log", base=2)
            values = _apart(values)
        place.set_xticks(values if len(values) < 8 else values[:: -(-len(values) // 7)])
        place.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        place.minorticks_off()
    else:
        long = any(len(str(value)) > 9 for value in values) or len(values) > 4
        place.set_xticks(range(len(values)), [*map(shown, values)])
        place.tick_params(axis="x", rotation=25 if long else 0)
    if "speedup" in figures:
        place.axhline(1.0, color="#565d66", linewidth=1, linestyle=(0, (1, 1)))
    place.set_ylim(0, 1.05 * place.get_ylim()[1])  # no marker is cut off
    place.set_xlabel("context" if spec.kind == "machine" else head_of(x))
    title = "speed-up over plain decoding" if figures[0] == "speedup" else NAMES[figures[0]][0]
    place.set_title(spec.data["plot"].get("together", title), loc="left", fontsize=9)


def _apart(values: Sequence[float]) -> list[float]:
    """Of rising values those whose labels do not touch on a logarithmic axis, the last one always."""
    kept = [values[-1]]
    for value in reversed(values):
        if value * 1.7 < kept[-1]:
            kept.append(value)
    return kept[::-1]


def _name(line: Line, series: Sequence[str]) -> str:
    """A series in words."""
    return ", ".join(
        ("" if key == "variant" else f"{head_of(key)} ") + shown(line.labels.get(key)) for key in series
    )


def _key(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _order(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, int | float) else (1, 0)
