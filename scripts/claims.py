"""Sentences with numbers in README and in the summary of the results, held against committed rows.

``bench/claims.toml`` has an entry for each such sentence, or part of one::

    [[claim]]
    says = "the words, as they stand there"
    given = [93, 102]                  # numbers that are no measurements of ours: sizes, defaults
    [[claim.rows]]
    spec = "table1"                    # rows of this benchmark
    where = { variant = "auto" }       # with these settings or other entries
    point = 20000                      # at so many new tokens; none: each row's last
    speedup = [0.9, 1.0]               # this figure's median over texts and seeds lies there for every line,
                                       # rounded to as many digits as the bounds have
    each = true                        # not the median: every row of any commit, and every length in it;
                                       # a range of speeds ("1.1 to 1.4 times") must be held so

Ranges of tables are held against every row of their kind as well (`ranges`).

A sentence without an entry, an entry whose words stand nowhere, a number that neither `given` nor the rows
have, rows that do not exist or do not hold: each is a fault.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.specs import Spec
from benchmarks.words import Row
from scripts import ranges

ROOT = Path(__file__).parents[1]
FILE, README = ROOT / "bench" / "claims.toml", ROOT / "README.md"
PAGES = (README, ROOT / "docs" / "benchmarks.md")
NOTES = ROOT / "bench" / "results" / "paper" / "notes.toml"
#: what is no prose: code, generated tables, comments, pictures, where links lead
ASIDE = (r"```.*?```", r"<!-- table: .*?<!-- end -->", r"<!--.*?-->", r"`[^`]*`", r"(?<=\])\([^)]*\)")
#: names with digits in them
NAMES = re.compile(
    r"SmolLM2-135M(-Instruct)?|Q4_1|b?float(16|32)|int8|Qwen[23]|Python 3\.11|ICML 2025|arXiv [\d.]+|"
    r"Apache-2\.0|LLaMA3\.1-8b|A100|(Tables?|Figures?) [\d, and]*\d"
)
#: what tells the lines apart that each must hold
APART = ["variant", "model", "prefill", "prompts", "options", "machine", "temperature", "min_p"]
APART += ["top_p", "eta_cutoff", "repetition_penalty", "penalty_window"]
SPREAD = re.compile(r"\d[\d.]*\W* to \W*\d[\d.]*\W* (?:×|times)")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def numbers(text: str) -> list[float]:
    """The numbers of a sentence that are part of no name."""
    return [float(found.replace(",", "").rstrip(".")) for found in NUMBER.findall(NAMES.sub("", text))]


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page that have numbers."""
    for aside in ASIDE:
        text = re.sub(aside, "", text, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=[-|] |#)|\n?^\d+\. ", text, flags=re.MULTILINE):
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z*`“\[])", " ".join(block.split())):
            if numbers(sentence):
                yield sentence


def pages() -> dict[str, str]:
    """What is held against rows: README, and the summary of docs/results.md."""
    notes = tomllib.loads(NOTES.read_text(encoding="utf-8"))
    return {"README.md": README.read_text(encoding="utf-8"), "the summary of results": notes["summary"]}


def faults(texts: dict[str, str], claims: list[dict[str, Any]], rows: list[Row]) -> list[str]:
    """What does not hold, a line each.

    Args:
        texts: page → its text.
        claims: of the file.
        rows: all that are committed.
    """
    found: list[str] = []
    said = {page: list(sentences(text)) for page, text in texts.items()}
    for claim in claims:
        words = " ".join(claim["says"].split())
        if not any(words in sentence for page in said.values() for sentence in page):
            found.append(f"no page says {words!r}")
        if SPREAD.search(words) and not any(part.get("each") for part in claim.get("rows", ())):
            found.append(f"{words!r} is a range; valid: rows with each = true")
        held = [float(number) for number in claim.get("given", ())]
        for part in claim.get("rows", ()):
            found += [f"{words!r}: {fault}" for fault in _against(part, rows)]
            held += _numbers(part)
        found += [f"{words!r}: no row holds {number:g}" for number in numbers(words) if number not in held]
    for page, whole in said.items():
        for sentence in whole:
            rest = sentence
            for claim in claims:
                rest = rest.replace(" ".join(claim["says"].split()), "")
            found += [f"{page}: nothing in {FILE.name} holds {sentence!r}"] if numbers(rest) else []
    return found


def _numbers(values: Any) -> list[float]:
    """All numbers in an entry."""
    if isinstance(values, dict):
        return [number for value in values.values() for number in _numbers(value)]
    if isinstance(values, list):
        return [number for value in values for number in _numbers(value)]
    return [float(values)] if isinstance(values, int | float) else []


def _against(part: dict[str, Any], rows: Iterable[Row]) -> list[str]:
    """What of an entry's rows does not hold."""
    figures = {
        name: bounds for name, bounds in part.items() if name not in ("spec", "where", "point", "each")
    }
    spec = Spec("claims", {"title": "", "rows_of": [part["spec"]], "table": {"by": APART}})
    point = str(part["point"]) if "point" in part else None
    mine = [row for row in rows if row["spec"] == part["spec"] and point in (None, *row.get("figures", ()))]
    mine = [row for row in mine if all(tables.value(row, k) == v for k, v in part.get("where", {}).items())]
    lines = [tables.view(line, "speedup") for line in tables.newest(spec, mine)]
    if part.get("each"):
        lines = [
            {**entry, **_at(entry, point)}
            for row in mine
            for at, entry in row["figures"].items()
            if point in (None, at)
        ]
    if not lines:
        return [f"there are no rows of {part['spec']} with {part.get('where', {})} and {point} new tokens"]
    wrong = []
    for name, (low, high) in figures.items():
        key = name if point is None else f"{name}@{point}"
        digits = max(len(str(bound).partition(".")[2]) for bound in (low, high))
        for line in lines:
            if key not in line or not low <= round(line[key], digits) <= high:
                wrong.append(f"{name} is {line.get(key)} in a row of {part['spec']}; said: {low} to {high}")
    return wrong


def _at(figures: dict[str, Any], point: str | None) -> dict[str, Any]:
    """Figures by the names that a claim for a length uses."""
    return {} if point is None else {f"{name}@{point}": value for name, value in figures.items()}


def check(rows: list[Row]) -> list[str]:
    """The faults of what is committed."""
    said = faults(pages(), tomllib.loads(FILE.read_text(encoding="utf-8"))["claim"], rows)
    return said + ranges.uncovered({page.name: page.read_text(encoding="utf-8") for page in PAGES}, rows)
