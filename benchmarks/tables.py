"""From rows to the lines of a table.

A line is what rows of one configuration say that differ by prompt and seed alone. Tables of the
paper have a line for each configuration and length, with the median, least and most of each figure.
In tables of our own the spec names each column: a line for each set of conditions, of its newest
measurement. A cell is a template over what a row says: settings, figures of its last point
    (``{speedup:.2f}``) or of any point
(``{pass_ms@4:.1f}``), ``{prompt[name]}``, ``{heads[kind]}``; figures are medians, with ``{least}``
and ``{most}`` of the speed-up.
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
        lines = [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows
        ]
        return (
            "".join(lines)
            + "\n" * bool(rows and self.below)
            + (f"{self.below}\n" if self.below else "")
        )


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


def alike(rows: Iterable[Row], key: Callable[[Row], Any]) -> list[list[Row]]:
    """Rows by a key, in the order of the first of each."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(json.dumps(key(row), sort_keys=True), []).append(row)
    return list(found.values())


def _options(row: Row) -> list[Any]:
    """A row's configuration, but for its prompt and seed."""
    apart = {k: v for k, v in row["config"].items() if k not in ("text", "seed", "sampling")}
    return [apart, {k: v for k, v in row["config"]["sampling"].items() if k != "seed"}]


def groups(spec: Spec, rows: Iterable[Row]) -> list[Group]:
    """A spec's rows as a report shows them: the paper's by their conditions, ours all together."""
    where = spec.data.get("where", {})
    mine = [row for row in rows if row["spec"] in spec.sources]
    mine = [row for row in mine if all(value_of(row["config"], k) in v for k, v in where.items())]
    if not spec.of_paper:
        found = [
            _newest(spec, part)
            for part in alike(mine, lambda row: [value(row, key) for key in spec.by])
        ]
        lines = [view(part) for part in found]
        lines.sort(key=lambda line: [line[key] for key in spec.data["table"].get("sort", ())])
        return [Group("", [row for part in found for row in part], lines)] if lines else []

    def conditions(row: Row) -> list[str]:
        model = "" if "model" in spec.by else row["config"]["model"]
        return [row["preset"], model, row["dtype"], row["machine"], row.get("reached", "")]

    made = []
    for part in alike(mine, conditions):
        same = [found for found in alike(part, _options) if found[0].get("figures")]
        made.append(
            Group(
                about(part), part, [view(one, point) for one in same for point in one[0]["figures"]]
            )
        )
    return made


def _newest(spec: Spec, rows: list[Row]) -> list[Row]:
    """The newest measurement's rows; where the table names a figure as ``best``, of the newest
    commit's the options that did best by it."""
    last = max(rows, key=lambda row: row["date"])
    tries = alike([row for row in rows if row["commit"] == last["commit"]], _options)
    best = spec.data["table"].get("best")
    return (
        max(tries, key=lambda part: view(part)[best])
        if best
        else next(p for p in tries if last in p)
    )


def view(rows: list[Row], point: str | None = None) -> Line:
    """What templates may name, of rows that make one line, at a point of theirs or at the last."""
    last, flat = rows[-1], list[dict[str, float]]()
    for row in rows:
        points = row.get("figures", {})
        flat.append(
            {f"{name}@{at}": n for at, found in points.items() for name, n in found.items()}
        )
        flat[-1] |= points[point or [*points][-1]] if points else {}
    found: Any = pd.DataFrame(flat)
    made: Line = {
        **last["config"]["sampling"],
        **last["config"]["options"],
        **last["config"],
        **last,
    }
    made |= {"spread": {name: (found[name].min(), found[name].max()) for name in found}}
    made["least"], made["most"] = made["spread"].get("speedup", (0, 0))
    made |= found.median().to_dict()
    made["point"] = int(point or [*last.get("figures", {0: {}})][-1])
    made["texts"] = len({row.get("prompt", {}).get("name") for row in rows})
    made["seeds"] = len({row["config"].get("seed") for row in rows})
    made["runs"] = sum(row.get("runs", 1) for row in rows)
    made["identical"] = "yes" if all(row.get("identical", True) for row in rows) else "no"
    if not all(row.get("lossless", True) for row in rows):
        made["identical"] = "not lossless"
    return made | {"drafter": drafter_words(last)}


def of_group(spec: Spec, group: Group) -> Table:
    """A group's table."""
    lines = group.lines
    if spec.of_paper:
        heads = [*map(head_of, [*spec.by, "point"]), *(NAMES[figure][0] for figure in spec.figures)]
        return Table([*heads, *ENDS], [_cells(spec, line) for line in lines])
    columns = spec.data["table"]["columns"]
    body = [[_cell(template, line) for _, template in columns] for line in lines]
    machines, commits = (
        [*dict.fromkeys(str(line[key]) for line in lines)] for key in ("machine", "commit")
    )
    below = (
        f"{model_words(group.rows)} on {' and '.join(machines)}; commit {' and '.join(commits)}."
    )
    return Table([name for name, _ in columns], body, below)


ENDS = ("prompts × seeds", "same text as plain", "heads or draft model")


def _cells(spec: Spec, line: Line) -> list[str]:
    """A line's cells in a table of the paper."""
    made = [shown(line.get(key)) for key in (*spec.by, "point")]
    for figure in spec.figures:
        ends = [number(figure, end) for end in line.get("spread", {}).get(figure, ())]
        several = f" ({'–'.join(ends)})" if len(set(ends)) > 1 else ""
        made.append(number(figure, line[figure]) + several if figure in line else MISSING)
    return [*made, f"{line['texts']} × {line['seeds']}", line["identical"], line["drafter"]]


def _cell(template: str, line: Mapping[str, Any]) -> str:
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
    return Table(
        heads, [[*map(shown, row)] for row in theirs["rows"]], f"Published: {theirs['note']}."
    )


def table(spec: Spec, rows: Sequence[Row]) -> Table:
    """The table of a spec of our own; empty without rows."""
    found = groups(spec, rows)
    return of_group(spec, found[0]) if found else Table([], [])
