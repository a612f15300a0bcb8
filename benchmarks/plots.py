"""Plots of a table's lines, by matplotlib: as SVG and PNG, readable without colour.

Series differ by marker, dash and (for bars) hatching; colours are those of Okabe and Ito. Whiskers are one
standard deviation over prompts and seeds, or reach to the least and most of the runs where rows say those.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from benchmarks.specs import Spec
from benchmarks.tables import HEADS, NAMES, Group, Line, shown
from tokenswift.types import InputError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 2)))
HATCHES = ("", "////", "....", "xxxx", "----", "\\\\\\\\", "ooo")
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tokenswift",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d5d9de",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.facecolor": "white",
}


def check() -> None:
    """Raise :class:`InputError` where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError(
            "plots need matplotlib; pip install 'tokenswift-exact[bench]', or --no-plots"
        ) from error


def plot(spec: Spec, group: Group) -> dict[str, bytes]:
    """A group's lines as pictures, ``{"svg": …, "png": …}``; empty where a spec has no plot."""
    wanted = spec.data.get("plot")
    lines = [line for line in group.lines if line.values]
    if not wanted or not lines:
        return {}
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [[figure for figure in wanted["y"]]] if wanted.get("together") else [[f] for f in wanted["y"]]
    with pyplot.rc_context(STYLE):
        figure, places = pyplot.subplots(
            1, len(panels), figsize=(3.7 * max(len(panels), 1.6), 3.4), squeeze=False, layout="constrained"
        )
        for place, figures in zip(places[0], panels, strict=True):
            _panel(place, spec, lines, figures)
        handles, labels = places[0][0].get_legend_handles_labels()
        if len(labels) > 1:
            figure.legend(
                handles, labels, loc="outside lower center", ncols=2 if len(labels) > 3 else len(labels)
            )
        made = {}
        for kind in ("svg", "png"):
            out = BytesIO()
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(out, format=kind, dpi=130, metadata=metadata)
            made[kind] = out.getvalue()
        pyplot.close(figure)
    return made


def _panel(place: Any, spec: Spec, lines: Sequence[Line], figures: Sequence[str]) -> None:
    """One pair of axes."""
    x, series = spec.data["plot"]["x"], spec.data["plot"]["series"]
    lines = sorted(lines, key=lambda line: _order(line.labels.get(x)))
    if x != "point" and "point" not in series:  # one value a setting: that of the longest text
        lines = [line for line in lines if line.labels["point"] == _longest(lines, line, series, x)]
    names = list(dict.fromkeys(_name(line, series) for line in lines))
    values = list(dict.fromkeys(_key(line.labels.get(x)) for line in lines))
    numbers = all(isinstance(value, int | float) for value in values)
    drawn = [(name, figure) for name in names for figure in figures]
    as_lines = numbers and len(values) > 1
    for i, (name, figure) in enumerate(drawn):
        mine = [line for line in lines if _name(line, series) == name and line.mean(figure) is not None]
        ys = [line.mean(figure) for line in mine]
        reach = list(zip(*(line.reach(figure) for line in mine), strict=True))
        label = ", ".join(
            filter(None, (name if len(names) > 1 else "", NAMES[figure][0] if len(figures) > 1 else ""))
        )
        look: dict[str, Any] = {"color": COLOURS[i % 7], "label": label or NAMES[figure][0], "yerr": reach}
        if not any(map(any, reach)):
            look["yerr"] = None
        at = [_key(line.labels.get(x)) for line in mine]
        if as_lines:
            place.errorbar(
                at, ys, **look, marker=MARKERS[i % 7], linestyle=DASHES[i % 7], markersize=5, capsize=2
            )
        else:
            width = 0.8 / len(drawn)
            middle = [values.index(value) + (i - (len(drawn) - 1) / 2) * width for value in at]
            place.bar(
                middle,
                ys,
                width * 0.92,
                **look,
                hatch=HATCHES[i % 7],
                edgecolor="white",
                capsize=2,
                linewidth=0.5,
            )
    if as_lines:
        if max(values) > 20 * max(1, min(v for v in values)) and min(values) > 0:
            place.set_xscale("log", base=2)
            values = _apart(values)
        place.set_xticks(values if len(values) < 8 else values[:: -(-len(values) // 7)])
        place.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        place.minorticks_off()
    else:
        long = any(len(shown(value)) > 9 for value in values) or len(values) > 4
        place.set_xticks(range(len(values)), [shown(_list(v)) for v in values])
        place.tick_params(axis="x", rotation=25 if long else 0)
    if "speedup" in figures:
        place.axhline(1.0, color="#565d66", linewidth=1, linestyle=(0, (1, 1)))
    place.set_ylim(0, 1.05 * place.get_ylim()[1])  # no marker is cut off
    place.set_xlabel("context" if spec.kind == "machine" else HEADS.get(x, x.replace("_", " ")))
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
    parts = [
        shown(line.labels.get(key))
        if key == "variant"
        else f"{HEADS.get(key, key)} {shown(line.labels.get(key))}"
        for key in series
    ]
    return ", ".join(parts)


def _longest(lines: Sequence[Line], like: Line, series: Sequence[str], x: str) -> int:
    same = [
        line
        for line in lines
        if _name(line, series) == _name(like, series) and line.labels.get(x) == like.labels.get(x)
    ]
    return max(line.labels["point"] for line in same)


def _key(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _order(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, int | float) else (1, 0)
