"""The picture of speed over plain decoding, from the rows in bench/results: docs/speed.svg.

    python bench/plot.py

Left: prose, by context; a line is the mean over texts of medians, its bar from the least to the most of all
turns. Right: every strategy at its best options. Readable without colour.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rows import rows_of

PICTURE = Path(__file__).parents[1] / "docs" / "speed.svg"
NAMES = {"auto": "automatic", "paper": "the paper's tree"}
LOOKS = (("#0072B2", "o", "-"), ("#D55E00", "s", "--"), ("#009E73", "^", "-."), ("#CC79A7", "D", ":"))


def draw(file: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"svg.hashsalt": "tokenswift", "svg.fonttype": "none", "font.size": 9}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
    with pyplot.rc_context(style):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
        _by_context(left)
        _rivals(right)
        for place in (left, right):
            place.grid(color="#d5d9de", linewidth=0.6)
            place.set_ylabel("times plain decoding")
        figure.savefig(file, metadata={"Date": None})
        pyplot.close(figure)


def _by_context(place: Any) -> None:
    found: dict[tuple[str, str], dict[int, list[dict[str, Any]]]] = {}
    for row in rows_of("speed", ("way", "kind", "context", "dtype", "text", "machine")):
        if row["kind"] == "novel" and row["way"] in NAMES:
            found.setdefault((row["way"], row["dtype"]), {}).setdefault(row["context"], []).append(row)
    for (key, rows), (colour, marker, dash) in zip(sorted(found.items()), LOOKS, strict=False):
        contexts = sorted(rows)
        means = [statistics.mean(row["speedup"] for row in rows[at]) for at in contexts]
        low = [mean - min(row["least"] for row in rows[at]) for at, mean in zip(contexts, means, strict=True)]
        high = [max(row["most"] for row in rows[at]) - mean for at, mean in zip(contexts, means, strict=True)]
        look: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dash, "capsize": 2}
        label = f"{NAMES[key[0]]}, {key[1]}"
        place.errorbar(contexts, means, [low, high], label=label, elinewidth=0.8, markersize=5, **look)
    place.axhline(1, color="black", linewidth=0.8)
    place.set_xscale("log", base=2)
    contexts = sorted({at for rows in found.values() for at in rows})
    place.set_xticks(contexts, [f"{round(at / 1024)}K" for at in contexts])
    place.minorticks_off()
    place.set_xlabel("context, tokens")
    place.legend(frameon=False, fontsize=8)


def _rivals(place: Any) -> None:
    rows = [
        row
        for row in rows_of("speed", ("way", "kind", "context", "dtype", "machine"))
        if row["kind"] == "rivals"
    ]
    types = sorted({row["dtype"] for row in rows})
    names = list(dict.fromkeys(row["way"] for row in rows))
    for number, dtype in enumerate(types):
        mine = [row for row in rows if row["dtype"] == dtype]
        at = [names.index(row["way"]) + (number - (len(types) - 1) / 2) * 0.36 for row in mine]
        heights = [row["speedup"] for row in mine]
        look: dict[str, Any] = {"color": LOOKS[number][0], "hatch": ("", "////")[number % 2]}
        place.bar(at, heights, 0.34, label=dtype, edgecolor="white", **look)
    place.axhline(1, color="black", linewidth=0.8)
    place.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=8)
    if types:
        place.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    draw(PICTURE)
