"""The two tables of the front page: what a new reader should know of speed."""

from __future__ import annotations

import statistics

from rows import every_row, rows_of, table


def headline() -> str:
    """transformers' generate, plain decoding and TokenSwift: medians over the newest run's texts."""
    found = [
        r
        for r in every_row("speed-peers")
        if (r["peer"], r["dtype"], r["context"]) == ("transformers", "float32", 1024)
    ]
    newest = max(found, key=lambda r: r["date"])["date"]
    last = [r for r in found if r["date"] == newest][-1]
    same = ("date", "command", "machine", "commit")
    rows = [r for r in found if all(r[key] == last[key] for key in same)]
    plain, auto = (statistics.median(r[key] for r in rows) for key in ("plain_over_peer", "auto_over_peer"))
    speed = statistics.median(r["peer_tokens_per_second"] for r in rows)
    made = table(
        ["", "speed"],
        [
            [f"transformers' `generate` ({speed:.0f} tokens a second)", "1.0 ×"],
            ["plain decoding by this engine", f"{plain:.1f} ×"],
            ["**TokenSwift**, the default", f"**{auto:.1f} ×**"],
        ],
    )
    return (
        f"{made}\nSmolLM2-135M, float32, 1,024 tokens of context, one run on {last['machine']}; "
        f"commit {last['commit']}, transformers {last['transformers']}.\n"
    )


#: kinds of text in the benchmark of speed, in words
TEXTS = {
    "novel": "prose",
    "code": "program code, repetitive, greedy",
    "list": "a list, repetitive, greedy",
    "random": "random tokens",
    "hot": "prose at temperature 1.5",
}


def expect() -> str:
    """Automatic drafting over plain decoding by kind of text: range of medians over texts and contexts."""
    rows = rows_of("speed", ("way", "kind", "text", "context", "dtype", "machine"))
    lines = []
    for kind, name in TEXTS.items():
        found = [r for r in rows if (r["way"], r["kind"]) == ("auto", kind)]
        least, most = (f"{pick(r['speedup'] for r in found):.1f}" for pick in (min, max))
        contexts, dtypes = (sorted({r[key] for r in found}) for key in ("context", "dtype"))
        between = " to ".join(f"{n:,}" for n in dict.fromkeys((contexts[0], contexts[-1])))
        speed = least if least == most else f"{least} to {most}"
        lines.append([name, f"**{speed} ×**", f"{between}, {' and '.join(dtypes)}"])
    machines = " and ".join(dict.fromkeys(r["machine"] for r in rows))
    return table(["text", "speed", "context, tokens"], lines) + f"\nOn {machines}, SmolLM2-135M.\n"
