"""Make the tables of the docs from the rows in bench/results.

    python bench/tables.py           rewrite the tables in README.md and docs/benchmarks.md
    python bench/tables.py --check   exit 1 if a table is not what the rows say

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. For every set of equal conditions
the newest row counts.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flips import TABLES as FLIPS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("benchmarks.md", "strategies.md", "exactness.md")),
)
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
Row = dict[str, Any]


def rows_of(bench: str, keys: tuple[str, ...]) -> list[Row]:
    """The newest row for each set of conditions, in the order in which the sets first appear."""
    newest: dict[str, Row] = {}
    for file in sorted(RESULTS.glob("**/*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            if found.get("bench") == bench:
                newest[json.dumps([found.get(key) for key in keys])] = found
    return list(newest.values())


def tree_name(options: Row | None) -> str:
    """``1,3,3,3 + 20 n-grams, partial``."""
    if not options or "tree" not in options:
        return "default"
    tree = ",".join(map(str, options["tree"]))
    grams = f" + {options['ngrams']} n-grams" if options.get("ngrams") else ""
    return f"[{tree}]{grams}, {options.get('draft', 'auto')}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "".join(f"| {line} |\n" for line in lines)


def source(row: Row) -> str:
    """Where a row comes from."""
    return f"{row['machine']}, {row['dtype']}, commit {row['commit']}"


def acceptance() -> str:
    """Tokens a step by way of drafting."""
    rows = rows_of("acceptance", ("variant", "prompt_tokens", "new_tokens", "dtype", "texts"))
    head = ["candidates, rule", "prompts × seeds", "new tokens", "tokens a step", "least–most", "α", "from"]
    return table(
        head,
        [
            [
                r["variant"],
                f"{len(r['texts'])} × {r['seeds']}",
                str(r["new_tokens"]),
                f"**{r['mean_acceptance_length']:.2f}**",
                f"{r['least']:.2f}–{r['most']:.2f}",
                f"{r['acceptance_rate']:.2f}",
                source(r),
            ]
            for r in rows
        ],
    )


def trees() -> str:
    """Speed-up over plain decoding by tree."""
    rows = rows_of("trees", ("options", "heads", "dtype", "machine", "prompt_tokens"))
    head = [
        "tree, draft",
        "heads",
        "speed-up (median)",
        "least–most",
        "tokens a step",
        "pairs",
        "identical",
        "from",
    ]
    return table(
        head,
        [
            [
                tree_name(r["options"]),
                str(r["heads"]),
                f"**{r['speedup']:.2f}**",
                f"{r['least']:.2f}–{r['most']:.2f}",
                f"{r['mean_acceptance_length']:.2f}",
                str(r["pairs"]),
                "yes" if r["identical"] else "no",
                source(r),
            ]
            for r in rows
        ],
    )


def overhead() -> str:
    """Share of a step outside the model."""
    rows = rows_of("overhead", ("strategy", "options", "context", "dtype", "machine"))
    head = ["strategy", "tree, draft", "context", "outside the model", "ms a step", "from"]
    return table(
        head,
        [
            [
                r["strategy"],
                tree_name(r["options"]) if r["strategy"] != "autoregressive" else "–",
                str(r["context"]),
                f"{100 * r['share_outside_model']:.1f}%",
                f"{r['milliseconds_per_step']:.0f}",
                source(r),
            ]
            for r in rows
        ],
    )


def memory() -> str:
    """Memory beyond weights and caches."""
    rows = rows_of("memory", ("context", "dtype", "machine"))
    head = ["context", "peak during the run, MB", "of it caches", "beyond", "from"]
    return table(
        head,
        [
            [
                str(r["context"]),
                str(r["peak_mb"]),
                str(r["caches_mb"]),
                f"**{r['beyond_mb']}**",
                source(r),
            ]
            for r in rows
        ],
    )


def strategies() -> str:
    """Every strategy at two context lengths, on the same prompts."""
    keys = ("variant", "prompt_tokens", "new_tokens", "dtype", "budget")
    head = ["strategy", "context", "tokens a step", "α", "draft passes a step", "identical", "from"]
    return table(
        head,
        [
            [
                r["variant"],
                str(r["prompt_tokens"]),
                f"**{r['mean_acceptance_length']:.2f}**",
                f"{r['acceptance_rate']:.2f}",
                f"{r['draft_passes_per_step']:.1f}",
                "yes" if r["identical"] else "no",
                source(r),
            ]
            for r in rows_of("strategies", keys)
        ],
    )


TABLES: dict[str, Callable[[], str]] = {
    "acceptance": acceptance,
    "trees": trees,
    "overhead": overhead,
    "memory": memory,
    "strategies": strategies,
}
TABLES |= FLIPS


def main() -> int:
    """Rewrite or check."""
    stale = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        made = BLOCK.sub(lambda m: m[1] + TABLES[m[2]]() + m[3], text)
        if made != text:
            stale = 1
            if "--check" in sys.argv:
                print(f"error: the tables of {page.name} are not those of bench/results; run bench/tables.py")
            else:
                page.write_text(made, encoding="utf-8")
    return stale if "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
