"""Tables whose spec names each column: a line for each set of conditions, of its newest measurement.

A cell is a template over what a row says: settings, figures of its last point (``{speedup:.2f}``) or of any
point (``{pass_ms@4:.1f}``), ``{prompt[name]}``, ``{heads[kind]}``. Over rows of several prompts and seeds
figures are medians, with ``{least}`` and ``{most}`` of the figure that ``of`` names: of the line's rows, or
with ``range = "all"`` of all rows under its conditions, older ones included.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.settings import value_of
from benchmarks.specs import Spec
from benchmarks.tables import Group, Line, Row, Table, drafter_words, mine, model_words
from benchmarks.tables import groups as by_conditions

MISSING = "–"
APART = "Its lines are of several commits, measured at different times."
WITHOUT_MODEL = ("ngram",)  # kinds that measure no model


def value(row: Row, key: str) -> Any:
    """What a row says under a name: of itself, else of its configuration."""
    return row[key] if key in row else value_of(row["config"], key)


def newest(spec: Spec, rows: Iterable[Row]) -> list[list[Row]]:
    """A spec's rows by its conditions, of each the newest measurement's: its prompts and seeds."""
    return [_newest(spec, part) for part in _every(spec, rows)]


def _every(spec: Spec, rows: Iterable[Row]) -> list[list[Row]]:
    """A spec's rows by its conditions."""
    found: dict[str, list[Row]] = {}
    for row in mine(spec, rows):
        key = [value(row, name) for name in (*spec.by, "dtype")]
        found.setdefault(json.dumps(key, sort_keys=True), []).append(row)
    return list(found.values())


def _newest(spec: Spec, rows: list[Row]) -> list[Row]:
    best = spec.data["table"].get("best")
    return _best(rows, best) if best else _like(rows, _last(rows))


def _like(rows: list[Row], one: Row) -> list[Row]:
    return [row for row in rows if _alike(row) == _alike(one)]


def _best(rows: list[Row], figure: str) -> list[Row]:
    """Of the newest commit's rows those of the options that did best."""
    latest = [row for row in rows if row["commit"] == _last(rows)["commit"]]
    return max((_like(latest, row) for row in latest), key=lambda part: view(part, figure)[figure])


def _last(rows: list[Row]) -> Row:
    return max(enumerate(rows), key=lambda entry: (entry[1]["date"], entry[0]))[1]


def _alike(row: Row) -> str:
    apart = {k: v for k, v in row["config"].items() if k not in ("text", "seed", "sampling")}
    sampling = {k: v for k, v in row["config"]["sampling"].items() if k != "seed"}
    return json.dumps([row["commit"], apart, sampling], sort_keys=True)


def view(rows: list[Row], of: str) -> dict[str, Any]:
    """What templates may name, of rows that make one line."""
    last = rows[-1]
    config, figures = last["config"], {}
    for row in rows:
        for point, found in row.get("figures", {}).items():
            for name, number in found.items():
                figures.setdefault(f"{name}@{point}", []).append(number)
                figures.setdefault(name, [])
                if point == list(row["figures"])[-1]:
                    figures[name].append(number)
    made: dict[str, Any] = {**config["sampling"], **config["options"], **config, **last}
    made |= {name: statistics.median(numbers) for name, numbers in figures.items() if numbers}
    made["least"] = min(figures.get("least") or figures.get(of) or [0])
    made["most"] = max(figures.get("most") or figures.get(of) or [0])
    names = {name for row in rows for name in row.get("prompts", [row.get("prompt", {}).get("name")])}
    made["point"] = list(last.get("figures", {0: {}}))[-1]
    made["texts"] = len(names)
    made["seeds"] = last.get("seeds", len({row["config"].get("seed") for row in rows}))
    made["runs"] = sum(row.get("runs", 1) for row in rows)
    made["identical"] = "yes" if all(row.get("identical", True) for row in rows) else "no"
    if not all(row.get("lossless", True) for row in rows):
        made["identical"] = "not lossless"
    made["drafter"] = drafter_words(last) or "none"
    return made


def views(spec: Spec, rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The lines of a spec's table, in its order."""
    wanted, made = spec.data["table"], list[dict[str, Any]]()
    of = wanted.get("of", "speedup")
    for part in _every(spec, rows):
        whole = view(part, of)
        ends = {name: whole[name] for name in ("least", "most")} if wanted.get("range") == "all" else {}
        made.append(view(_newest(spec, part), of) | ends)
    made = [line for line in made if wanted.get("needs", "variant") in line]
    return sorted(made, key=lambda line: [line[key] for key in wanted.get("sort", ())])


def table(spec: Spec, rows: Iterable[Row]) -> Table:
    """A spec's table; what all its lines share of where they come from stands below, once."""
    wanted = spec.data["table"]
    lines = views(spec, rows)
    head = [name for name, _ in wanted["columns"]]
    body = [[_cell(template, line) for _, template in wanted["columns"]] for line in lines]
    parts = [_source(line, wanted.get("from", ())) for line in lines]
    several = len({line["commit"] for line in lines}) > 1
    models = sorted({line["model"] for line in lines}) if spec.kind not in WITHOUT_MODEL else []
    made = Table(head, body) if not body or not parts[0] else with_sources(head, body, parts)
    if models:
        words = " and ".join(model_words(model, []) for model in models)
        below = f"{words} {made.below[0].lower()}{made.below[1:]}" if made.below else f"{words}."
        made = replace(made, below=below)
    return replace(made, below=f"{made.below} {APART}".lstrip()) if several else made


def with_sources(head: list[str], body: list[list[str]], parts: list[list[str]]) -> Table:
    """A table with a column "from", of the parts of a source that its lines do not share."""
    shared = [same[0] for same in zip(*parts, strict=True) if len(set(same)) == 1]
    if parts[0][0] not in shared:
        shared = []
    below = f"On {', '.join(shared)}." if shared else ""
    left = [[part for part in found if part not in shared] for found in parts]
    alone = bool(below) and len(left[0]) == 1
    cells = [", ".join(part.removeprefix("commit ") if alone else part for part in found) for found in left]
    if not any(cells):
        return Table(head, body, below)
    heads = [*head, "commit" if alone else "from"]
    return Table(heads, [[*line, cell] for line, cell in zip(body, cells, strict=True)], below)


def _cell(template: str, line: Mapping[str, Any]) -> str:
    try:
        return template.format_map(line)
    except KeyError:
        return MISSING


def _source(line: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    return [f"commit {line[name]}" if name == "commit" else str(line[name]) for name in names]


def groups(spec: Spec, rows: Iterable[Row]) -> list[Group]:
    """A spec's rows as a report shows them: of the paper's tables by their conditions, of ours all together,
    with the lines of its plot."""
    if spec.of_paper:
        return by_conditions(spec, rows)
    plot = spec.data.get("plot", {"x": "variant", "series": []})
    lines: dict[str, Line] = {}
    shown = [row for part in newest(spec, rows) for row in part]
    for row in shown:
        if any(value(row, key) not in wanted for key, wanted in plot.get("where", {}).items()):
            continue
        labels = {key: value(row, key) for key in (plot["x"], *plot["series"])}
        line = lines.setdefault(json.dumps(list(labels.values())), Line({**labels, "point": 0}))
        for name, number in list(row["figures"].values())[-1].items():
            line.values.setdefault(name, []).append(number)
    return [Group("", "", "", "", shown, list(lines.values()))] if shown else []
