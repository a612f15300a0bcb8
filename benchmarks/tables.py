"""From rows to the lines of a table.

A line is what rows of one configuration say that differ by prompt and seed alone. Tables of the
paper have a line for each configuration and length, with the median, least and most of each figure.
In tables of our own the spec names each column: a line for each set of conditions, of its newest
measurement. A cell is a template over what a row says: settings, figures of its last point
(``{speedup:.2f}``) or of any point (``{pass_ms@4:.1f}``), ``{prompt[name]}``, ``{heads[kind]}``;
figures are medians, with ``{least}`` and ``{most}`` of the speed-up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from benchmarks.settings import value_of
from benchmarks.specs import Spec
from benchmarks.words import NAMES, Row, about, drafter_words, head_of, model_words, number, shown

MISSING = "–"
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """What is written as Markdown: heads, lines of cells, and a sentence below ("" for none)."""

    head: list[str]
    body: list[list[str]]
    below: str = ""

    def markdown(self) -> str:
        """As Markdown."""
        rows = [self.head, ["---"] * len(self.head), *self.body] if self.head else []
        parts = ["".join(_markdown_line(row) for row in rows)]
        if self.below:
            parts.append(f"{self.below}\n")
        return "\n".join(filter(None, parts))


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


@dataclass(slots=True)
class Group:
    """The rows of a spec that are shown in one table.

    Attributes:
        about: the conditions that they were measured under, in words; "" in tables of our own.
        rows: in the order in which they were measured.
        lines: of its table (see :func:`view`).
    """

    about: str
    rows: list[Row]
    lines: list[Line]


def value(row: Row, key: str) -> Any:
    """What a row says under a name: of itself, else of its configuration."""
    return row[key] if key in row else value_of(row["config"], key)


def alike(rows: Iterable[Row], key: Callable[[Row], object]) -> list[list[Row]]:
    """Rows by a key, in the order of the first of each."""
    by_key: dict[str, list[Row]] = {}
    for row in rows:
        by_key.setdefault(json.dumps(key(row), sort_keys=True), []).append(row)
    return list(by_key.values())


def _options(row: Row) -> list[object]:
    """A row's configuration, but for its prompt and seed."""
    config = row["config"]
    settings = {k: v for k, v in config.items() if k not in ("text", "seed", "sampling")}
    return [settings, {k: v for k, v in config["sampling"].items() if k != "seed"}]


def groups(spec: Spec, rows: Iterable[Row]) -> list[Group]:
    """A spec's rows as a report shows them: the paper's by their conditions, ours all together."""
    where = spec.data.get("where", {})
    shown_rows = [
        row
        for row in rows
        if row["spec"] in spec.sources
        and all(value_of(row["config"], key) in values for key, values in where.items())
    ]
    return _groups_of_paper(spec, shown_rows) if spec.of_paper else _our_group(spec, shown_rows)


def _our_group(spec: Spec, rows: list[Row]) -> list[Group]:
    """All rows in one group, a line for the newest measurement of each kind; none without rows."""
    newest = [
        _newest(spec, part)
        for part in alike(rows, lambda row: [value(row, key) for key in spec.by])
    ]
    lines = [view(part) for part in newest]
    lines.sort(key=lambda line: [line[key] for key in spec.data["table"].get("sort", ())])
    return [Group("", [row for part in newest for row in part], lines)] if lines else []


def _groups_of_paper(spec: Spec, rows: list[Row]) -> list[Group]:
    """A group for each set of conditions, with a line for each configuration and length."""

    def conditions(row: Row) -> list[str]:
        model = "" if "model" in spec.by else row["config"]["model"]
        processor = str(row["machine"]).rpartition(", ")[0] or row["machine"]  # without threads
        return [row["preset"], model, row["dtype"], processor, row.get("reached", "")]

    result = []
    for part in alike(rows, conditions):
        lines = [
            view(same, point)
            for same in alike(part, _options)
            for point in same[0].get("figures", {})
        ]
        result.append(Group(about(part), part, lines))
    return result


def _newest(spec: Spec, rows: list[Row]) -> list[Row]:
    """The newest measurement's rows; where the table names a figure as ``best``, of the newest
    commit's the options that did best by it."""
    last = max(rows, key=lambda row: row["date"])
    tries = alike([row for row in rows if row["commit"] == last["commit"]], _options)
    best = spec.data["table"].get("best")
    if best:
        return max(tries, key=lambda part: view(part)[best])
    return next(part for part in tries if last in part)


def view(rows: list[Row], point: str | None = None) -> Line:
    """What templates may name, of rows that make one line, at a point of theirs or at the last."""
    last = rows[-1]
    frame = pd.DataFrame([_figures(row, point) for row in rows])
    spread = {str(name): (frame[name].min(), frame[name].max()) for name in frame}
    least, most = spread.get("speedup", (0, 0))
    shown_point = point or [*last.get("figures", {0: {}})][-1]
    line: Line = {
        **last["config"]["sampling"],
        **last["config"]["options"],
        **last["config"],
        **last,
        "spread": spread,
        "least": least,
        "most": most,
        **{name: frame[name].median() for name in spread},
        "point": int(shown_point),
        "texts": len({row.get("prompt", {}).get("name") for row in rows}),
        "seeds": len({row["config"].get("seed") for row in rows}),
        "runs": sum(row.get("runs", 1) for row in rows),
        "identical": _identical(rows),
        "drafter": drafter_words(last),
    }
    return line


def _identical(rows: list[Row]) -> str:
    """Whether the texts are those of plain decoding, in a word or two."""
    if not all(row.get("lossless", True) for row in rows):
        return "not lossless"
    return "yes" if all(row.get("identical", True) for row in rows) else "no"


def _figures(row: Row, point: str | None) -> dict[str, float]:
    """A row's figures: those of each point under "name@point", those of one by name."""
    points = row.get("figures", {})
    figures = {
        f"{name}@{at}": number for at, named in points.items() for name, number in named.items()
    }
    return figures | points[point or [*points][-1]] if points else figures


def of_group(spec: Spec, group: Group) -> Table:
    """A group's table."""
    lines = group.lines
    if spec.of_paper:
        settings = [head_of(key) for key in (*spec.by, "point")]
        figures = [NAMES[figure][0] for figure in spec.figures]
        return Table([*settings, *figures, *LAST_COLUMNS], [_cells(spec, line) for line in lines])
    columns = spec.data["table"]["columns"]
    body = [[_cell(template, line) for _, template in columns] for line in lines]

    def several(key: str) -> str:
        return " and ".join(dict.fromkeys(str(line[key]) for line in lines))

    below = f"{model_words(group.rows)} on {several('machine')}; commit {several('commit')}."
    return Table([name for name, _ in columns], body, below)


LAST_COLUMNS = ("prompts × seeds", "same text as plain", "heads or draft model")


def _cells(spec: Spec, line: Line) -> list[str]:
    """A line's cells in a table of the paper."""
    return [
        *(shown(line.get(key)) for key in (*spec.by, "point")),
        *(_figure_cell(figure, line) for figure in spec.figures),
        f"{line['texts']} × {line['seeds']}",
        line["identical"],
        line["drafter"],
    ]


def _figure_cell(figure: str, line: Line) -> str:
    """A figure, with the least and the most in brackets where they differ."""
    if figure not in line:
        return MISSING
    ends = [number(figure, end) for end in line.get("spread", {}).get(figure, ())]
    several = f" ({'–'.join(ends)})" if len(set(ends)) > 1 else ""
    return number(figure, line[figure]) + several


def _cell(template: str, line: Mapping[str, object]) -> str:
    try:
        return template.format_map(line)
    except KeyError:
        return MISSING


def published(spec: Spec) -> Table | None:
    """The paper's own lines."""
    theirs = spec.data.get("published")
    if theirs is None:
        return None
    heads = [NAMES[key][0] if key in NAMES else head_of(key) for key in theirs["columns"]]
    body = [[shown(cell) for cell in row] for row in theirs["rows"]]
    return Table(heads, body, f"Published: {theirs['note']}.")


def table(spec: Spec, rows: Sequence[Row]) -> Table:
    """The table of a spec of our own; empty without rows."""
    shown_groups = groups(spec, rows)
    return of_group(spec, shown_groups[0]) if shown_groups else Table([], [])
