"""Make docs/results.md and its pictures from the rows in bench/results/paper.

python scripts/results.py           rewrite them
python scripts/results.py --check   exit 1 if the page is not what the rows say
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenswift.benchmark import plots, report, specs
from tokenswift.benchmark.runner import read_rows

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "bench" / "results" / "paper"
PAGE, PICTURES = ROOT / "docs" / "results.md", ROOT / "docs" / "results"
TITLE = "The paper's tables and figures, measured here"


def made() -> tuple[str, dict[str, bytes]]:
    """The page, and its pictures by name."""
    found = report.make(specs.chosen(()), read_rows(ROWS), report.notes(ROWS), plots.plot)
    pictures = {name: content for name, content in found.pictures.items() if name.endswith(".svg")}
    return report.markdown(found, TITLE, PICTURES.name, "make results"), pictures


def main() -> int:
    """Rewrite or check."""
    text, pictures = made()
    if "--check" in sys.argv:
        there = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
        missing = [name for name in pictures if not (PICTURES / name).is_file()]
        if text == there and not missing:
            return 0
        print("error: docs/results.md is not what bench/results/paper says; run make results")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    PICTURES.mkdir(exist_ok=True)
    for file in PICTURES.glob("*.svg"):
        if file.name not in pictures:
            file.unlink()
    for name, content in pictures.items():
        (PICTURES / name).write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
