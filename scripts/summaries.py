"""Tables of the docs that rows of several benchmarks make: this engine beside llama.cpp."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks import specs, tables
from benchmarks.tables import Table
from benchmarks.words import DEFAULT_WORDS, Row
from scripts import ranges
from tokenswift.loader import embedded

Line = dict[str, Any]
NO_CLAIM = "none at hand as numbers"  # of specs
#: ways of drafting that most of the paper's tables have a line of
WAYS = ("paper, published rule", "paper, exact rule", "ours, fixed tree", "auto")
HEADLINE = "python -m benchmarks run headline --preset cpu --llama-bench PATH"
SHAPE = "python -m benchmarks run llama shape --preset cpu --model FILE.gguf --llama-bench PATH"


def headline(rows: list[Row]) -> Table:
    """llama.cpp and this engine on the default model's file: tokens a second by context."""
    theirs, ours = (_of(name, rows, True) for name in ("llama", "rates"))
    if not theirs or not ours:
        return missing(HEADLINE)
    named: list[tuple[str, Line, str]] = []
    for line in theirs:
        named.append((f"llama.cpp, without sampling, KV cache {line['kv_type']}", line, "plain"))
    for line in ours:
        if line["variant"] == "prose":
            named.append((f"tokenswift, plain, {line['dtype']}", line, "plain"))
    for line in ours:
        named.append((f"tokenswift, adaptive, {line['variant']}, {line['dtype']}", line, "auto"))
    return _table(named, "tokens a second", _bests(theirs), [*theirs, *ours], DEFAULT_WORDS)


def shape(rows: list[Row]) -> Table:
    """llama.cpp and plain decoding on files of random weights in the shape of larger models."""
    theirs, ours = _of("llama", rows, False), _of("shape", rows, False)
    files = {line["stored"]["file"] for line in ours}
    theirs = [line for line in theirs if line["stored"]["file"] in files]
    if not theirs or not ours:
        return missing(SHAPE)
    named = []
    for file in sorted(files):
        for line in (line for line in theirs if line["stored"]["file"] == file):
            named.append((f"{file}: llama.cpp, KV cache {line['kv_type']}", line, "plain"))
        for line in (line for line in ours if line["stored"]["file"] == file):
            named.append((f"{file}: tokenswift, plain, {line['dtype']}", line, "plain"))
    return _table(named, "tokens a second", _bests(theirs), [*theirs, *ours], "Random weights")


def _of(name: str, rows: list[Row], default: bool) -> list[Line]:
    """The lines of a benchmark, of the default model or of others."""
    mine = [row for row in rows if (row["config"].get("model") == embedded.NAME) is default]
    return tables.views(specs.load(name), mine)


def paper(parts: list[dict[str, Any]]) -> Table:
    """The paper's tables and figures, a line each: its claim, tokens a step by way of drafting, and the speed
    of adaptive drafting over plain decoding."""
    lines = []
    for part in parts:
        rows = [row for group in part["groups"] for row in group["rows"]]
        cells = [_spread(rows, way, "length") for way in WAYS]
        same = {bool(row["identical"]) for row in rows if row.get("lossless")}
        claim = part["claim"] if part["claim"] != NO_CLAIM else tables.MISSING
        told = {True: "yes", False: "no"}[same == {True}] if same else tables.MISSING
        lines.append(
            [
                f"{part['label']}. {part['title']}",
                claim,
                *cells,
                _spread(rows, "auto", "speedup"),
                told,
                str(len(rows)),
            ]
        )
    ways = [f"tokens a step: {way}" for way in WAYS]
    return Table(["", "the paper's claim", *ways, "auto, ×", "same text as plain", "rows"], lines)


def _spread(rows: list[Row], way: str, figure: str) -> str:
    """Mean, least and most of a figure at the last point of a way's rows."""
    mine = [row["figures"] for row in rows if row["config"]["variant"] == way]
    found = [points[max(points, key=int)].get(figure) for points in mine]
    values = [value for value in found if value is not None]
    if not values:
        return tables.MISSING
    spread = f" ({min(values):.2f}–{max(values):.2f})" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.2f}{spread}"


def missing(command: str) -> Table:
    """What stands where a table will be."""
    return Table([], [], f"Not measured yet: `{command}`.")


def _bests(lines: list[Line]) -> dict[tuple[str, int], Line]:
    """The fastest of llama.cpp's lines by file and context: what others are compared with."""
    found: dict[tuple[str, int], Line] = {}
    for line in lines:
        key = line["stored"]["file"], line["prefill"]
        if key not in found or line["plain"] > found[key]["plain"]:
            found[key] = line
    return found


def _table(
    named: list[tuple[str, Line, str]],
    what: str,
    best: dict[tuple[str, int], Line],
    lines: list[Line],
    model: str,
) -> Table:
    """Lines by name with a cell for each context: median, least to most, and times the best of llama.cpp."""
    contexts = sorted({line["prefill"] for _, line, _ in named})
    body: dict[str, list[str]] = {}
    for name, line, key in named:
        cells = body.setdefault(name, [name, *["–"] * (1 + len(contexts)), f"{line['weights_mb']:.0f}"])
        value = line[key]
        other = best.get((line["stored"]["file"], line["prefill"]))
        cell = f"**{value:.0f}** ({line[f'{key}_least']:.0f}–{line[f'{key}_most']:.0f})"
        if other is not None:
            cell += f", {value / other['plain']:.2f} ×"
        cells[1 + contexts.index(line["prefill"])] = cell
        reading = line.get("reading")
        if reading is not None and line["prefill"] == contexts[0]:
            cells[1 + len(contexts)] = f"{reading:.0f}"
    heads = [f"after {context:,}" for context in contexts]
    head = [what, *heads, f"prompt of {contexts[0]:,}", "weights read a pass, MB"]
    return Table(head, list(body.values()), f"{model} on {_sources(lines)}")


def _sources(lines: Iterable[Line]) -> str:
    """Machines, runs, programs and commits."""
    made = list(lines)

    def several(values: Iterable[str]) -> str:
        return " and ".join(dict.fromkeys(values))

    machines = several(line["machine"] for line in made)
    programs = [line for line in made if "program" in line]
    commits = sorted({line["program"]["commit"] for line in programs})
    own = sorted({str(line["commit"]) for line in made})
    runs = several(str(line["runs"]) for line in made)
    apart = f" {tables.APART}" if len(own) > 1 else ""
    return (
        f"{machines}: medians of {runs} runs (least–most), × over the faster of llama.cpp's lines. "
        f"llama.cpp {', '.join(commits)} by its own llama-bench, on the same file, "
        "flash attention on or off, whichever was faster; "
        f"tokenswift with sampling, commit {', '.join(own)}.{apart}"
    )


SUMMARIES = {"headline": headline, "expect": ranges.table, "shape": shape}
