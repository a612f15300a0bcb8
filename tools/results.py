"""Make what the docs show of the rows in benchmarks/results.

python -m tools.results           rewrite docs/results.md, and tables and pictures elsewhere
python -m tools.results --check   exit 1 if a page is not what the rows say

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``: that of the benchmark NAME, or
one of `summaries`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import plots, report, specs, tables
from benchmarks.runner import read_rows
from benchmarks.words import Row
from tools.summaries import SUMMARIES, paper, tasks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", DOCS / "benchmarks.md")
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DRAWN = ("speed", "rivals")
REAL_MACHINE = "EPYC"  # whose rows README shows
#: what stands around the table of docs/results.md
RESULTS_PAGE = """<!-- made by `make results`; do not edit -->

# The paper's tables and figures, measured here

{summary}

The rows are in `benchmarks/results/paper`: each holds its whole configuration, versions, machine,
commit, seeds and raw times. `python -m benchmarks report --results benchmarks/results/paper --out
build/paper` makes every table of them, with the paper's figures below. A cell is the mean
(least–most) over all rows of a way of drafting, each at its full length.

{table}
## What each says

{remarks}"""


def table(name: str, rows: list[Row]) -> str:
    """A table of the docs."""
    shown = SUMMARIES[name]() if name in SUMMARIES else tables.table(specs.load(name), rows)
    return shown.markdown() or f"Not measured yet: `python -m benchmarks run {name}`.\n"


def remark_of(part: report.Part) -> str:
    """What a part's rows say, with links to its pictures."""
    names = [name for name, picture in part.pictures if picture]
    links = " ".join(f"[Picture {n}](results/{name})." for n, name in enumerate(names, 1))
    return f"- **{part.spec.label}.** {part.note or 'No remark.'} {links}".rstrip() + "\n"


def pages_and_pictures(plot: report.Plot = plots.plot, draws: bool = True) -> dict[Path, bytes]:
    """The content of every file that is made of rows; ``plot`` draws those of specs.

    Args:
        draws: whether the picture of a real model is drawn, too.
    """
    parts = report.parts(
        specs=specs.chosen(()),
        rows=read_rows(RESULTS / "paper"),
        notes=report.notes(RESULTS / "paper"),
        plot=plot,
    )
    files = {DOCS / "results.md": results_page(parts).encode()}
    for part in parts:
        for name, picture in part.pictures:
            if picture:
                files[DOCS / "results" / name] = picture
    rows = read_rows(RESULTS / "cpu", RESULTS / "paper")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        with_tables = BLOCK.sub(lambda match: match[1] + table(match[2], rows) + match[3], text)
        files[page] = with_tables.encode()
    for name in DRAWN:
        spec = specs.load(name)
        (group,) = tables.groups(spec, rows)
        files[DOCS / f"{name}.svg"] = plot(spec, group)
    files[DOCS / "real.svg"] = plots.plot_tasks(tasks(REAL_MACHINE)) if draws else b"svg"
    return files


def results_page(parts: Sequence[report.Part]) -> str:
    """docs/results.md."""
    return RESULTS_PAGE.format(
        summary=report.notes(RESULTS / "paper").get("summary", ""),
        table=paper(parts).markdown(),
        remarks="".join(map(remark_of, parts)),
    )


def undrawn(spec: specs.Spec, group: tables.Group) -> bytes:
    """In place of a picture."""
    return b"svg" if spec.data.get("plot") and group.lines else b""


def main() -> int:
    """Rewrite or check; of pictures it is checked that they are there (their bytes depend on
    matplotlib)."""
    checks = "--check" in sys.argv
    files = pages_and_pictures(undrawn if checks else plots.plot, draws=not checks)
    if checks:
        stale = [
            file.name
            for file, data in files.items()
            if not file.is_file() or (file.suffix == ".md" and file.read_bytes() != data)
        ]
        for name in stale:
            print(f"error: {name} is not what benchmarks/results says; run make results")
        return 1 if stale else 0
    (DOCS / "results").mkdir(exist_ok=True)
    for file in (DOCS / "results").glob("*.svg"):
        if file not in files:
            file.unlink()
    for file, data in files.items():
        file.write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
