"""Adaptive drafting over plain decoding by kind of text: every run and every length of committed rows.

A range that a page gives holds all rows of its kind, wherever they stand; `uncovered` says which do not. Rows
of before the weights were read as they are stored say nothing of today's speed and do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from statistics import median

from benchmarks.tables import Table
from benchmarks.words import DEFAULT_WORDS, Row
from tokenswift.config import SamplingParams, settings_of
from tokenswift.loader import embedded
from tokenswift.sampling.presets import sampler

#: sources of texts that are no prose, and what their lines are called
TEXTS = {
    "code": "program code that repeats itself, greedy",
    "list": "a repetitive list, greedy",
    "random": "random tokens",
}
PROSE, OTHER, HOT = "prose, the default sampling", "prose, other sampling", "prose at temperature 1.5"
ORDER = (PROSE, OTHER, *TEXTS.values(), HOT)
LONG = 5000  # new tokens from which on a length is a line of its own
#: kinds of rows with a speed over plain decoding, and what others call it
BOTH = ("decode", "text", "rates")
FIGURES = {"weights": "auto_stored", "texts": "auto_1"}
LINE = re.compile(r"^\| ([^|]+) \| \*\*([\d.]+)(?: to ([\d.]+))? ×\*\* \|", re.MULTILINE)


def kind(row: Row) -> str | None:
    """The kind of text that a row drafts for, by its prompts and sampling; None: it is no such row."""
    config = row["config"]
    if config.get("model") != embedded.NAME or config["strategy"] != "auto" or not row.get("figures"):
        return None
    if row["kind"] not in (*BOTH, *FIGURES) or not (row.get("stored") or row["kind"] in FIGURES):
        return None
    if config.get("prompts") in TEXTS:
        return TEXTS[config["prompts"]]
    given = {key: value for key, value in config["sampling"].items() if key != "seed"}
    usual = settings_of(SamplingParams(**sampler("llama3.1-8b"), seed=0))
    if given.get("temperature", 1.0) >= 1.5:
        return HOT
    return PROSE if all(value == usual[key] for key, value in given.items()) else OTHER


def runs(row: Row) -> Iterator[tuple[int, float]]:
    """New tokens and speed over plain decoding of each of a row's lengths; of several runs the least and the
    most."""
    key = FIGURES.get(row["kind"], "speedup")
    for point, figures in row["figures"].items():
        for name in (key, "least", "most"):
            if name in figures:
                yield int(point), figures[name]


def kinds(rows: Iterable[Row]) -> dict[str, tuple[list[Row], list[float]]]:
    """The rows of each kind and their speeds, in the table's order; a long text's length is one more."""
    found: dict[str, list[Row]] = {}
    long: dict[int, list[Row]] = {}
    for row in rows:
        name = kind(row)
        if name is None:
            continue
        found.setdefault(name, []).append(row)
        most = max(map(int, row["figures"]))
        if most >= LONG and name in (PROSE, OTHER) and row["config"]["reach"] == "generate":
            long.setdefault(most, []).append(row)
    made = {
        name: (found[name], [v for row in found[name] for _, v in runs(row)])
        for name in ORDER
        if name in found
    }
    for most, part in sorted(long.items()):
        values = [value for row in part for at, value in runs(row) if at == most]
        made[f"prose, a text of {most:,} new tokens"] = part, values
    return made


def between(values: Iterable[float], form: str) -> str:
    """From the least to the most, or one of them where they read the same."""
    found = sorted(values)
    return " to ".join(dict.fromkeys(format(value, form) for value in (found[0], found[-1])))


def table(rows: list[Row]) -> Table:
    """Lowest to highest of every run and length by kind, and of how many rows."""
    body, machines = [], dict[str, None]()
    for name, (part, values) in kinds(rows).items():
        most = [max(map(int, row["figures"])) for row in part]
        contexts, types = (row["config"]["prefill"] for row in part), {row["dtype"] for row in part}
        cells = [between(contexts, ","), between(most, ","), " and ".join(sorted(types)), str(len(part))]
        body.append([name, f"**{between(values, '.2f')} ×**", f"{median(values):.2f}", *cells])
        machines |= dict.fromkeys(row["machine"] for row in part)
    below = f"{DEFAULT_WORDS} on {' and '.join(machines)}. Every row of any commit, and every length in it."
    head = ["text", "speed, lowest to highest", "median", "context, tokens", "new tokens", "type", "rows"]
    return Table(head, body, below)


def uncovered(pages: dict[str, str], rows: list[Row]) -> list[str]:
    """A line for each range of a page's table that speeds of its kind lie outside of.

    Args:
        pages: page → its text.
    """
    found, every = list[str](), {name: values for name, (_, values) in kinds(rows).items()}
    every["prose"] = every.get(PROSE, []) + every.get(OTHER, [])
    for page, text in pages.items():
        for block in re.findall(r"<!-- table: expect -->\n(.*?)<!-- end -->", text, re.DOTALL):
            for name, low, high in LINE.findall(block):
                values = every.get(name)
                if not values:
                    found.append(f"{page}: no rows are of the kind {name!r}")
                    continue
                least, most = float(low), float(high or low)
                out = sorted(round(value, 2) for value in values if not least <= round(value, 2) <= most)
                if out:
                    said = f"{page}: {name!r} is said to be {low} to {high or low}"
                    found.append(f"{said}; {len(out)} of {len(values)} are not: {out[0]} to {out[-1]}")
    return found
