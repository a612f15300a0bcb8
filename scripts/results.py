"""Make what the docs show of the rows in bench/results.

python scripts/results.py           rewrite docs/results.md, and tables and pictures elsewhere
python scripts/results.py --check   exit 1 if a page, or a sentence with a number, is not what the rows say

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``: that of the benchmark NAME, or
one of the summaries here.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import claims

from tokenswift.benchmark import columns, plots, report, specs, tables
from tokenswift.benchmark.runner import read_rows
from tokenswift.benchmark.tables import Row, Table

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", DOCS / "index.md", DOCS / "benchmarks.md")
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DRAWN = ("speed", "rivals")
TITLE = "The paper's tables and figures, measured here"


def headline(rows: list[Row]) -> Table:
    """transformers' generate, plain decoding and TokenSwift: medians over the newest rows."""
    found = columns.newest(specs.load("peers"), rows)
    mine = next(
        part
        for part in found
        if (part[0]["config"]["variant"], part[0]["dtype"], part[0]["config"]["prefill"])
        == ("transformers", "float32", 1024)
    )
    line = columns.view(mine, "")
    plain, auto, speed = (
        line[key] for key in ("plain_over_peer", "auto_over_peer", "peer_tokens_per_second")
    )
    body = [
        [f"transformers' `generate` ({speed:.0f} tokens a second)", "1.0 ×", ""],
        ["plain decoding (this engine, no drafts)", f"{plain:.1f} ×", "1.0 ×"],
        ["**TokenSwift**, the default", f"**{auto:.1f} ×**", f"**{auto / plain:.1f} ×**"],
    ]
    below = (
        f"{tables.DEFAULT_WORDS} writing prose in float32 after 1,024 tokens, one run on {line['machine']}; "
        f"commit {line['commit']}, transformers {line['versions']['transformers']}."
    )
    return Table(["", "over transformers", "over plain decoding"], body, below)


#: texts of the benchmark of speed, in words
TEXTS = {
    "prose": "prose",
    "code": "program code that repeats itself, greedy",
    "list": "a repetitive list, greedy",
    "random": "random tokens",
    "prose, hot": "prose at temperature 1.5",
}


#: the variant that is automatic drafting, as rows name it
AUTOMATIC = ("auto", "TokenSwift, automatic")
LONG = 5000  # new tokens from which on a text is a line of its own


def expect(rows: list[Row]) -> Table:
    """Automatic drafting over plain decoding by kind of text: range of medians over texts and contexts, and
    of long texts each length that the newest rows of Tables 1 and 3 reach."""
    lines = columns.views(specs.load("speed"), rows)
    body = []
    for variant, name in TEXTS.items():
        found = [line for line in lines if line["variant"] == variant]
        least, most = (f"{pick(line['speedup'] for line in found):.2f}" for pick in (min, max))
        contexts, dtypes = (sorted({line[key] for line in found}) for key in ("prefill", "dtype"))
        between = " to ".join(f"{n:,}" for n in dict.fromkeys((contexts[0], contexts[-1])))
        speed = least if least == most else f"{least} to {most}"
        body.append([name, f"**{speed} ×**", between, " and ".join(dtypes)])
    lengths: dict[int, list[Row]] = {}
    for row in rows:
        written = row["spec"] in ("table1", "table3") and row["config"]["reach"] == "generate"
        if written and row["config"]["variant"] in AUTOMATIC:
            lengths.setdefault(max(map(int, row["figures"])), []).append(row)
    for length, found in sorted(lengths.items()):
        latest = max(found, key=lambda row: row["date"])["commit"]
        found = [row for row in found if row["commit"] == latest and length >= LONG]
        if not found:
            continue
        speeds = [row["figures"][str(length)]["speedup"] for row in found]
        speed = " to ".join(dict.fromkeys(f"{pick(speeds):.2f}" for pick in (min, max)))
        prefills = sorted({row["config"]["prefill"] for row in found})
        name = f"prose, a text of {length:,} new tokens"
        between = " to ".join(f"{n:,}" for n in dict.fromkeys((prefills[0], prefills[-1])))
        body.append([name, f"**{speed} ×**", between, " and ".join(sorted({row["dtype"] for row in found}))])
        lines += [{"machine": row["machine"]} for row in found]
    machines = " and ".join(dict.fromkeys(line["machine"] for line in lines))
    return Table(["text", "speed", "context, tokens", "type"], body, f"{tables.DEFAULT_WORDS} on {machines}.")


SUMMARIES = {"headline": headline, "expect": expect}


def table(name: str, rows: list[Row]) -> str:
    """A table of the docs."""
    made = SUMMARIES[name](rows) if name in SUMMARIES else columns.table(specs.load(name), rows)
    return made.markdown()


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
        (group,) = columns.groups(specs.load(name), rows)
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
