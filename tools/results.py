"""Make what the docs show of the rows in benchmarks/results.

python -m tools.results           rewrite docs/results.md, and tables and pictures elsewhere
python -m tools.results --check   exit 1 if a page is not what the rows say

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``: that of the benchmark NAME, or
one of `summaries`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import plots, report, specs, tables
from benchmarks.runner import read_rows
from benchmarks.words import Row, model_words
from tokenswift.cli.results import enumeration
from tools.summaries import (
    NEWER_MACHINE,
    NO_CLAIM,
    REAL_MACHINE,
    SUMMARIES,
    lengths_rows,
    long_text,
    long_text_rows,
    paper,
    processor,
    tasks,
)

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", DOCS / "benchmarks.md")
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DRAWN = ("speed", "rivals")
#: what stands around the tables of docs/results.md
RESULTS_PAGE = Path(__file__).with_name("results_page.md")
#: models whose long texts are shown
LONG_TEXTS = ("qwen2.5-coder-1.5b-q4_k_m", "qwen2.5-coder-0.5b-q4_k_m")
FIGURE_1 = "figure1-real.svg"


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
    parts = parts_of("paper", plot)
    real_parts = parts_of("paper-real", plot)
    files = {DOCS / "results.md": results_page(parts, real_parts).encode()}
    for part in (*parts, *real_parts):
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
    of_lengths = [row for row in lengths_rows() if processor(row) == NEWER_MACHINE]
    files[DOCS / "lengths.svg"] = plots.plot_lengths(of_lengths) if draws else b"svg"
    long_texts = [rows for rows in map(long_text_rows, LONG_TEXTS) if rows]
    picture = plots.plot_long_texts(long_texts) if draws else b"svg"
    files[DOCS / "results" / FIGURE_1] = picture
    return files


def parts_of(folder: str, plot: report.Plot) -> list[report.Part]:
    """The paper's tables and figures that have rows in a folder of results."""
    return report.parts(
        specs=specs.chosen(()),
        rows=read_rows(RESULTS / folder),
        notes=report.notes(RESULTS / folder),
        plot=plot,
    )


def results_page(parts: Sequence[report.Part], real_parts: Sequence[report.Part]) -> str:
    """docs/results.md.

    Args:
        parts: of the toy.
        real_parts: of real models.
    """
    real_notes = report.notes(RESULTS / "paper-real")
    long_texts = long_texts_block(real_notes.get("figure1", ""))
    page = RESULTS_PAGE.read_text(encoding="utf-8")
    return page.format(
        real_summary=real_notes.get("summary", ""),
        real="\n".join([long_texts, *map(block_of, real_parts)]),
        summary=report.notes(RESULTS / "paper").get("summary", ""),
        table=paper(parts).markdown(),
        remarks="".join(map(remark_of, parts)).rstrip(),
    )


def long_texts_block(note: str) -> str:
    """Table 1 and Figure 1 of real models: texts of 20,000 new tokens."""
    models = [model for model in LONG_TEXTS if long_text_rows(model)]
    blocks = [
        "### Table 1 and Figure 1. Time of a long text, plainly and with drafts",
        note,
        *(long_text(model).markdown().rstrip() for model in models),
        f"![Figure 1](results/{FIGURE_1})",
    ]
    return paragraphs(blocks)


def block_of(part: report.Part) -> str:
    """A table of real models: the paper's claim, what the rows say of it, and the rows."""
    spec = part.spec
    claim = spec.data["claim"]
    blocks = [
        f"### {spec.label}. {spec.title}",
        f"*The paper: {claim}.*" if claim != NO_CLAIM else "",
        part.note,
    ]
    for group, (name, picture) in zip(part.groups, part.pictures, strict=True):
        blocks.append(tables.of_group(spec, group).markdown().rstrip())
        blocks.append(conditions(group))
        blocks.append(f"![{spec.label}](results/{name})" if picture else "")
    return paragraphs(blocks)


def paragraphs(blocks: Iterable[str]) -> str:
    """Paragraphs, those that are empty left out."""
    return "\n\n".join(filter(None, blocks)) + "\n"


def conditions(group: tables.Group) -> str:
    """Model, type, prompts, machine and commits of a group's rows."""

    def several(key: str) -> str:
        return joined_words(tables.value(row, key) for row in group.rows)

    books = joined_words(row["prompt"]["name"] for row in group.rows)
    return (
        f"{model_words(group.rows)} ({several('dtype')}) after {several('prefill')} tokens of "
        f"{books}, on {several('machine')}; commit {several('commit')}."
    )


def joined_words(values: Iterable[object]) -> str:
    """Different values, in words."""
    return enumeration(list(dict.fromkeys(map(str, values))))


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
