"""From rows to the lines of a table.

Tables of the paper have a line for each configuration and length: means and standard deviations over prompts
and seeds, the paper's figures beside. In tables of our own the spec names each column: a line for each set
of conditions, of its newest measurement. A cell is a template over what a row says: settings, figures of its
last point (``{speedup:.2f}``) or of any point (``{pass_ms@4:.1f}``), ``{prompt[name]}``, ``{heads[kind]}``.
Over rows of several prompts and seeds figures are medians, with ``{least}`` and ``{most}`` of the figure that
``of`` names: of the line's rows, or with ``range = "all"`` of all rows under its conditions, older ones
included.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from benchmarks.needs import METHODS, MODELS
from benchmarks.settings import value_of
from benchmarks.specs import Spec
from benchmarks.words import NAMES, Row, about, drafter_words, head_of, model_words, number, shown

MISSING, UNMEASURED = "–", "not measured"
APART = "Its lines are of several commits, measured at different times."


@dataclass(frozen=True, slots=True)
class Table:
    """What is written as Markdown or HTML: heads, lines of cells, and a sentence below ("" for none)."""

    head: list[str]
    body: list[list[str]]
    below: str = ""

    def markdown(self) -> str:
        """As Markdown."""
        rows = [self.head, ["---"] * len(self.head), *self.body] if self.head else []
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows]
        return "".join(lines) + "\n" * bool(rows and self.below) + (f"{self.below}\n" if self.below else "")


@dataclass(slots=True)
class Line:
    """A line of a table: one configuration at one length.

    Attributes:
        labels: what tells it from other lines, by setting ("point" too).
        runs: its rows (a line each): figures, ``text``, ``seed``, ``identical`` and ``lossless``.
    """

    labels: dict[str, Any]
    runs: Any  # a DataFrame

    def mean(self, figure: str) -> float | None:
        """The mean; None where there is no value."""
        return self.runs[figure].mean() if figure in self.runs else None

    def spread(self, figure: str) -> float | None:
        """Standard deviation (of a sample); None with fewer than two values."""
        return self.runs[figure].std() if figure in self.runs and self.runs[figure].count() > 1 else None

    def reach(self, figure: str) -> tuple[float, float]:
        """How far below and above the mean a plot's bar reaches: to the least and most of all runs where rows
        say them of a speed-up, else a standard deviation."""
        if figure == "speedup" and "least" in self.runs:
            mean = self.runs[figure].mean()
            return mean - self.runs["least"].min(), self.runs["most"].max() - mean
        spread = self.spread(figure) or 0.0
        return spread, spread


@dataclass(slots=True)
class Group:
    """The rows of a spec that are shown in one table.

    Attributes:
        about: the conditions that they were measured under, in words; "" in tables of our own.
        rows: in the order in which they were measured.
        lines: of its table, and of its plot.
    """

    about: str
    rows: list[Row]
    lines: list[Line]


def value(row: Row, key: str) -> Any:
    """What a row says under a name: of itself, else of its configuration."""
    return row[key] if key in row else value_of(row["config"], key)


def mine(spec: Spec, rows: Iterable[Row]) -> list[Row]:
    """The rows that a spec shows."""
    where = spec.data.get("where", {})
    found = [row for row in rows if row["spec"] in spec.sources]
    return [row for row in found if all(_fits(value_of(row["config"], k), v) for k, v in where.items())]


def _fits(found: Any, wanted: Any) -> bool:
    return found in wanted if isinstance(wanted, list) else found == wanted


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
    """A spec's rows as a report shows them: of the paper's tables by their conditions, of ours all together,
    with the lines of its plot."""
    if not spec.of_paper:
        shown_rows = [row for part in newest(spec, rows) for row in part]
        return [Group("", shown_rows, _plotted(spec, shown_rows))] if shown_rows else []

    def conditions(row: Row) -> list[str]:
        model = "" if "model" in spec.by else row["config"]["model"]
        return [row["preset"], model, row["dtype"], row["machine"], row.get("reached", "")]

    made = []
    for part in alike(mine(spec, rows), conditions):
        models, found = {row["config"]["model"] for row in part}, lines(spec, part)
        model = models.pop() if len(models) == 1 else "several models"
        made.append(Group(about(part, model, [line.labels["point"] for line in found]), part, found))
    return made


def _lines(entries: Iterable[tuple[Any, dict[str, Any], dict[str, Any]]]) -> list[Line]:
    """Lines of (what tells a line from others, its labels, a run of it)."""
    runs = pd.DataFrame(
        [{"line": json.dumps(key, sort_keys=True), "labels": labels} | run for key, labels, run in entries]
    )
    parts = runs.groupby("line", sort=False) if len(runs) else ()
    return [Line(part["labels"].iloc[0], part.dropna(axis=1, how="all")) for _, part in parts]


def lines(spec: Spec, rows: Sequence[Row]) -> list[Line]:
    """The lines of a table of the paper."""
    entries = []
    for row in rows:
        config = row["config"]
        run = {"text": config["text"], "seed": config["seed"]}
        run |= {name: row.get(name, True) for name in ("identical", "lossless")}
        for point, figures in row.get("figures", {}).items():
            labels = {key: value_of(config, key) for key in spec.by} | {"point": int(point)}
            labels["drafter"] = drafter_words(row)
            if config["model"] in MODELS:
                labels["called"] = MODELS[config["model"]]["called"]
            entries.append(([*_options(row), point], labels, run | figures))
    return _lines(entries)


def _plotted(spec: Spec, rows: Sequence[Row]) -> list[Line]:
    """The lines of a plot of our own: each row's last point, by the plot's axis and series."""
    plot, entries = spec.data.get("plot", {"x": "variant", "series": []}), []
    for row in rows:
        if all(value(row, key) in wanted for key, wanted in plot.get("where", {}).items()):
            labels = {key: value(row, key) for key in (plot["x"], *plot["series"])}
            entries.append((list(labels.values()), {**labels, "point": 0}, [*row["figures"].values()][-1]))
    return _lines(entries)


# ---- tables of the paper ----------------------------------------------------------------------------


def head(spec: Spec) -> list[str]:
    """The heads of a spec's table, with its published figures where there are any."""
    theirs = spec.data.get("published") if spec.kind != "machine" else None
    names = [NAMES[key][0] for key in theirs["columns"] if key in NAMES] if theirs else []
    more = [f"published: {' / '.join(names)}"] if theirs else []
    if spec.kind != "machine":
        more += ["prompts × seeds", "same text as plain", "heads or draft model"]
    return [*map(head_of, _labels(spec)), *(NAMES[figure][0] for figure in spec.figures), *more]


def _labels(spec: Spec) -> list[str]:
    return [*spec.by, "context" if spec.kind == "machine" else "point"]


def cells(spec: Spec, line: Line) -> list[str]:
    """A line's cells under :func:`head`."""
    made = [shown(line.labels.get(key if key != "context" else "point")) for key in _labels(spec)]
    for figure in spec.figures:
        mean, spread = line.mean(figure), line.spread(figure)
        made.append(MISSING if mean is None else number(figure, mean))
        if spread is not None:
            made[-1] += f"\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{number(figure, spread)}"
    if spec.kind != "machine":
        made += [_theirs(spec, line)] if spec.data.get("published") else []
        same = "yes" if line.runs["identical"].all() else "no"
        same = same if line.runs["lossless"].all() else "not lossless"
        counts = f"{line.runs['text'].nunique()} × {line.runs['seed'].nunique()}"
        made += [counts, same, line.labels.get("drafter") or "none"]
    return made


def published(spec: Spec, labels: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]] | None:
    """The paper's figures nearest to a line: the figures, and labels that differ; None if there are none.

    Names must be equal (a variant's may go on behind a comma); of numbers the nearest counts, by their ratio.
    """
    best: tuple[float, dict[str, float], dict[str, Any]] | None = None
    for entry in spec.published:
        far, differs, fits = 0.0, {}, True
        for key, theirs in entry.items():
            if key in NAMES:
                continue
            name = "called" if key == "model" else key
            ours: Any = labels.get(name)
            own = "TokenSwift" if key == "variant" and ours in METHODS else ours
            if isinstance(theirs, int | float) and isinstance(ours, int | float):
                far += abs(math.log((theirs + 1) / (ours + 1)))
            elif name in labels and own != theirs and not str(ours).startswith(f"{theirs},"):
                fits = False
            if ours != theirs and not str(ours).startswith("paper,"):
                differs[key] = theirs
        if fits and (best is None or far < best[0]):
            best = (far, {key: one for key, one in entry.items() if key in NAMES}, differs)
    return None if best is None else best[1:]


def _theirs(spec: Spec, line: Line) -> str:
    found = published(spec, line.labels)
    if found is None:
        return MISSING
    figures, differs = found
    names = {"point": "at ", "model": ""}
    apart = ", ".join(names.get(key, f"{head_of(key)} ") + shown(one) for key, one in differs.items())
    text = " / ".join(number(key, one) for key, one in figures.items())
    return text + (f" ({apart})" if apart else "")


def of_group(spec: Spec, group: Group) -> Table:
    """A group's table."""
    if not spec.of_paper:
        return table(spec, group.rows)
    if spec.kind == "draft":  # Table 11: what, ours, theirs
        ours, theirs = group.rows[-1]["draft"], dict(spec.data.get("published", {}).get("rows", ()))
        body = [
            [what, shown(one), shown(theirs[what]) if what in theirs else MISSING]
            for what, one in ours.items()
        ]
        return Table(["", "ours", "published"], body)
    body = [cells(spec, line) for line in group.lines]
    for entry in spec.published if spec.kind == "machine" else ():  # below ours instead of beside
        figures = (number(key, entry[key]) if key in entry else MISSING for key in spec.figures)
        body.append(["published", shown(entry["point"]), *figures])
    heads = head(spec)
    return Table(heads, [*body, *_unmeasured(spec, group.rows, len(heads))])


def _unmeasured(spec: Spec, rows: Iterable[Row], cells: int) -> list[list[str]]:
    """A line of so many cells for each EAGLE-3 variant of a spec that has no rows among these."""
    there = {row["config"]["variant"] for row in rows}
    return [
        [shown(name), UNMEASURED, *[MISSING] * (cells - 2)] for name in spec.with_eagle if name not in there
    ]


# ---- tables of our own ------------------------------------------------------------------------------


def newest(spec: Spec, rows: Iterable[Row]) -> list[list[Row]]:
    """A spec's rows by its conditions, of each the newest measurement's: its prompts and seeds; where the
    table names a figure as ``best``, of the newest commit's the options that did best by it."""
    return [_newest(spec, part) for part in _conditions(spec, rows)]


def _conditions(spec: Spec, rows: Iterable[Row]) -> list[list[Row]]:
    return alike(mine(spec, rows), lambda row: [value(row, name) for name in (*spec.by, "dtype")])


def _newest(spec: Spec, rows: list[Row]) -> list[Row]:
    last = max(enumerate(rows), key=lambda entry: (entry[1]["date"], entry[0]))[1]
    latest = [row for row in rows if row["commit"] == last["commit"]]
    tries, best = alike(latest, _options), spec.data["table"].get("best")
    if best:
        return max(tries, key=lambda part: view(part, best)[best])
    return next(part for part in tries if last in part)


def view(rows: list[Row], of: str) -> dict[str, Any]:
    """What templates may name, of rows that make one line."""
    last, flat = rows[-1], list[dict[str, float]]()
    for row in rows:
        points = row.get("figures", {})
        flat.append({f"{name}@{point}": n for point, found in points.items() for name, n in found.items()})
        flat[-1] |= [*points.values()][-1] if points else {}
    found: Any = pd.DataFrame(flat)
    config = last["config"]
    made: dict[str, Any] = {**config["sampling"], **config["options"], **config, **last}
    made |= found.median().to_dict()
    for name, end in (("least", pd.Series.min), ("most", pd.Series.max)):
        column = name if name in found else of
        made[name] = end(found[column]) if column in found else 0
    names = {name for row in rows for name in row.get("prompts", [row.get("prompt", {}).get("name")])}
    made["point"], made["texts"] = [*last.get("figures", {0: {}})][-1], len(names)
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
    for part in _conditions(spec, rows):
        line = view(_newest(spec, part), of)
        if wanted.get("range") == "all":
            whole = view(part, of)
            line |= {"least": whole["least"], "most": whole["most"]}
        if wanted.get("needs", "variant") in line:
            made.append(line)
    return sorted(made, key=lambda line: [line[key] for key in wanted.get("sort", ())])


def table(spec: Spec, rows: Iterable[Row]) -> Table:
    """A spec's table; what all its lines share of where they come from stands below, once."""
    wanted, rows = spec.data["table"], list(rows)
    lines = views(spec, rows)
    heads = [name for name, _ in wanted["columns"]]
    body = [[_cell(template, line) for _, template in wanted["columns"]] for line in lines]
    names = wanted.get("from", ())
    sources = [[f"commit {line[n]}" if n == "commit" else str(line[n]) for n in names] for line in lines]
    made = _with_sources(heads, body, sources) if body and names else Table(heads, body)
    if body:
        made = replace(made, body=[*made.body, *_unmeasured(spec, mine(spec, rows), len(made.head))])
    models = sorted({line["model"] for line in lines})
    if models:
        words = " and ".join(model_words(model, []) for model in models)
        below = f"{words} {made.below[0].lower()}{made.below[1:]}" if made.below else f"{words}."
        made = replace(made, below=below)
    several = len({line["commit"] for line in lines}) > 1
    return replace(made, below=f"{made.below} {APART}".lstrip()) if several else made


def _cell(template: str, line: Mapping[str, Any]) -> str:
    try:
        return template.format_map(line)
    except KeyError:
        return MISSING


def _with_sources(heads: list[str], body: list[list[str]], sources: list[list[str]]) -> Table:
    """A table with a column "from", of the parts of a source that its lines do not share."""
    shared = [same[0] for same in zip(*sources, strict=True) if len(set(same)) == 1]
    if sources[0][0] not in shared:
        shared = []
    below = f"On {', '.join(shared)}." if shared else ""
    left = [[part for part in found if part not in shared] for found in sources]
    alone = bool(below) and len(left[0]) == 1
    column = [", ".join(part.removeprefix("commit ") if alone else part for part in found) for found in left]
    if not any(column):
        return Table(heads, body, below)
    heads = [*heads, "commit" if alone else "from"]
    return Table(heads, [[*line, cell] for line, cell in zip(body, column, strict=True)], below)
