"""Make what the docs show of the rows in bench/results.

python -m scripts.results           rewrite docs/results.md, and tables and pictures elsewhere
python -m scripts.results --check   exit 1 if a page, or a sentence with a number, is not what the rows say

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``: that of the benchmark NAME, or
one of `summaries`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks import plots, report, specs, tables
from benchmarks.runner import read_rows
from benchmarks.words import Row
from scripts import claims
from scripts.summaries import SUMMARIES, missing

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", DOCS / "index.md", DOCS / "benchmarks.md")
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DRAWN = ("speed", "rivals")
TITLE = "The paper's tables and figures, measured here"


def table(name: str, rows: list[Row]) -> str:
    """A table of the docs."""
    made = SUMMARIES[name](rows) if name in SUMMARIES else tables.table(specs.load(name), rows)
    return (
        made.markdown() if made.body or made.below else missing(f"python -m benchmarks run {name}").markdown()
    )


def made() -> dict[Path, bytes]:
    """Every page and picture."""
    paper = RESULTS / "paper"
    found = report.make(specs.chosen(()), read_rows(paper), report.notes(paper), plots.plot)
    results = report.markdown(found, TITLE, "results", "make results")
    files = {DOCS / "results.md": results.encode()}
    files |= {DOCS / "results" / name: data for name, data in found.pictures.items() if name[-3:] == "svg"}
    rows = read_rows(RESULTS)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        files[page] = BLOCK.sub(lambda m: m[1] + table(m[2], rows) + m[3], text).encode()
    for name in DRAWN:
        (group,) = tables.groups(specs.load(name), rows)
        files[DOCS / f"{name}.svg"] = plots.plot(specs.load(name), group)["svg"]
    return files


def main() -> int:
    """Rewrite or check; of pictures it is checked that they are there (their bytes depend on matplotlib)."""
    files = made()
    if "--check" in sys.argv:
        stale = [
            file.name
            for file, data in files.items()
            if not file.is_file() or (file.suffix == ".md" and file.read_bytes() != data)
        ]
        for name in stale:
            print(f"error: {name} is not what bench/results says; run make results")
        wrong = claims.check(read_rows(RESULTS))
        for fault in wrong:
            print(f"error: {fault}")
        return 1 if stale or wrong else 0
    (DOCS / "results").mkdir(exist_ok=True)
    for file in (DOCS / "results").glob("*.svg"):
        if file not in files:
            file.unlink()
    for file, data in files.items():
        file.write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
