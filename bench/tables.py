"""Make the tables of the docs from the rows in bench/results.

    python bench/tables.py           rewrite the tables in README.md and docs/
    python bench/tables.py --check   exit 1 if a table is not what the rows say

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. For every set of equal conditions
the newest row counts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from drafting_tables import calibration, nodes, shares, speed, speed_peers
from front import expect, headline
from rows import Row, rows_of, source, table

ROOT = Path(__file__).parents[1]
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("index.md", "benchmarks.md", "drafting.md", "strategies.md")),
)
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def tree_name(options: Row | None) -> str:
    """``1,3,3,3 + 20 n-grams, partial``."""
    if not options or "tree" not in options:
        return "default"
    tree = ",".join(map(str, options["tree"]))
    grams = f" + {options['ngrams']} n-grams" if options.get("ngrams") else ""
    return f"[{tree}]{grams}, {options.get('draft', 'auto')}"


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


def decoding() -> str:
    """Plain decoding against transformers' generate."""
    rows = rows_of("engine-decoding", ("context", "cache", "dtype", "machine"))
    head = ["dtype", "context", "ms a token", "transformers, its cache", "ms a token", "times faster", "from"]
    return table(
        head,
        [
            [
                r["dtype"],
                str(r["context"]),
                f"{r['plain_ms']:.1f}",
                r["cache"],
                f"{r['transformers_ms']:.1f}",
                f"**{r['speedup']:.1f}**",
                source(r),
            ]
            for r in rows
        ],
    )


def prefill() -> str:
    """Prefill against transformers'."""
    rows = rows_of("engine-prefill", ("tokens", "dtype", "machine"))
    head = ["dtype", "prompt, tokens", "seconds", "transformers", "times faster", "from"]
    return table(
        head,
        [
            [
                r["dtype"],
                str(r["tokens"]),
                f"{r['seconds']:.2f}",
                f"{r['transformers_seconds']:.2f}",
                f"**{r['speedup']:.2f}**",
                source(r),
            ]
            for r in rows
        ],
    )


def passes() -> str:
    """Time of a pass by rows and context."""
    rows = rows_of("engine-passes", ("rows", "context", "dtype", "machine"))
    shown = (1, 2, 4, 5, 8, 16, 41, 64)
    head = ["dtype", "context", *(f"{n}" for n in shown), "from"]
    lines = []
    for dtype, context, machine in dict.fromkeys((r["dtype"], r["context"], r["machine"]) for r in rows):
        here = {
            r["rows"]: r
            for r in rows
            if (r["dtype"], r["context"], r["machine"]) == (dtype, context, machine)
        }
        cells = [
            f"{here[n]['body_ms'] + here[n]['head_ms']:.1f} ({here[n]['over_one_row']:.2f})"
            if n in here
            else "–"
            for n in shown
        ]
        lines.append([dtype, str(context), *cells, source(here[1])])
    return table(head, lines)


def attention() -> str:
    """Attention alone, one row, against the read bandwidth."""
    rows = rows_of("engine-passes", ("rows", "context", "dtype", "machine"))
    head = ["dtype", "context", "ms a layer", "GB/s", "read bandwidth, GB/s", "share", "5 rows, ms", "from"]
    lines = []
    for r in rows:
        if r["rows"] != 1:
            continue
        same = ("context", "dtype", "machine")
        five = next((x for x in rows if x["rows"] == 5 and all(x[k] == r[k] for k in same)), None)
        lines.append(
            [
                r["dtype"],
                str(r["context"]),
                f"{r['attention_ms_a_layer']:.3f}",
                f"{r['attention_gb_s']:.1f}",
                f"{r['bandwidth_gb_s']:.1f}",
                f"**{100 * r['share_of_bandwidth']:.0f}%**",
                f"{five['attention_ms_a_layer']:.3f}" if five else "–",
                source(r),
            ]
        )
    return table(head, lines)


def memory() -> str:
    """Peak memory over weights and caches."""
    rows = rows_of("engine-memory", ("strategy", "context", "dtype", "machine"))
    head = ["dtype", "strategy", "context", "weights, MB", "caches, MB", "peak, MB", "over both", "from"]
    return table(
        head,
        [
            [
                r["dtype"],
                r["strategy"],
                str(r["context"]),
                str(r["weights_mb"]),
                str(r["caches_mb"]),
                str(r["peak_mb"]),
                f"**{r['over_weights_and_caches']:.2f}**",
                source(r),
            ]
            for r in rows
        ],
    )


def bookkeeping() -> str:
    """Time of a step outside the model's passes, short and long context."""
    rows = rows_of("engine-bookkeeping", ("strategy", "dtype", "machine"))
    head = ["dtype", "strategy", "ms a step at 1K", "at 64K", "ratio", "from"]
    return table(
        head,
        [
            [
                r["dtype"],
                r["strategy"],
                f"{r['ms_at_1k']:.2f}",
                f"{r['ms_at_64k']:.2f}",
                f"**{r['ratio']:.2f}**",
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
    "memory": memory,
    "strategies": strategies,
    "decoding": decoding,
    "prefill": prefill,
    "passes": passes,
    "attention": attention,
    "bookkeeping": bookkeeping,
    "speed": speed,
    "speed-peers": speed_peers,
    "speed-shares": shares,
    "draft-nodes": nodes,
    "draft-calibration": calibration,
    "headline": headline,
    "expect": expect,
}


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
