"""The tables of docs/drafting.md."""

from __future__ import annotations

from rows import rows_of, source, table


def speed() -> str:
    """Ways to decode against plain decoding, by kind of text and context."""
    keys = ("way", "kind", "text", "context", "dtype", "machine")
    head = "way text type context speed-up range tokens/step nodes identical from".split()
    found = sorted(rows_of("speed", keys), key=lambda r: (r["way"] != "auto", r["dtype"], r["context"]))
    return table(
        head,
        [
            [
                r["way"],
                r["text"] if r["kind"] in ("novel", "rivals") else r["kind"],
                r["dtype"],
                str(r["context"]),
                f"**{r['speedup']:.2f}**",
                f"{r['least']:.2f}–{r['most']:.2f}",
                f"{r['tokens_a_step']:.2f}",
                f"{r['nodes_a_step']:.1f}",
                "yes" if r["identical"] else "no",
                source(r),
            ]
            for r in found
        ],
    )


def speed_peers() -> str:
    """transformers' generate beside plain and automatic decoding."""
    head = ["peer", "type", "context", "plain, times its speed", "automatic, times its speed", "from"]
    return table(
        head,
        [
            [
                r["peer"],
                r["dtype"],
                str(r["context"]),
                f"{r['plain_over_peer']:.1f}",
                f"**{r['auto_over_peer']:.1f}**",
                source(r),
            ]
            for r in rows_of("speed-peers", ("peer", "context", "dtype", "machine"))
        ],
    )


def shares() -> str:
    """Where the time of automatic drafting goes."""
    rows = [r for r in rows_of("speed", ("way", "kind", "text", "context", "dtype")) if r["way"] == "auto"]
    rows = [r for r in rows if "controller_share" in r.get("drafting", {})]
    names = ("draft", "verify", "choose", "commit", "observe")
    lines = [
        [
            r["text"] if r["kind"] in ("novel", "rivals") else r["kind"],
            r["dtype"],
            str(r["context"]),
            *(f"{r['phases'].get(name, 0):.1%}" for name in names),
            f"{r['drafting']['controller_share']:.1%}",
        ]
        for r in sorted(rows, key=lambda r: (r["dtype"], r["context"]))
    ]
    return table(["text", "type", "context", *names, "deciding (in draft and observe)"], lines)


def nodes() -> str:
    """Grown trees against the best fixed tree."""
    head = "nodes,best fixed tree,of,its tokens/step,grown trees' tokens/step,times,from".split(",")
    return table(
        head,
        [
            [
                str(r["nodes"]),
                "[" + ",".join(map(str, r["fixed_tree"])) + "]",
                str(r["fixed_trees_tried"]),
                f"{r['fixed_tokens_a_step']:.2f}",
                f"{r['dynamic_tokens_a_step']:.2f}",
                f"**{r['ratio']:.2f}**",
                source(r),
            ]
            for r in rows_of("draft-nodes", ("nodes", "dtype", "texts"))
        ],
    )


def calibration() -> str:
    """Predicted and observed chances by decile."""
    lines = []
    for r in rows_of("draft-calibration", ("of", "dtype", "texts")):
        for what in ("predicted", "observed"):
            lines.append([f"{r['of']} ({r['count']:,})", what, *(f"{x:.2f}" for x in r[what])])
    return table(["of", "", *(str(i) for i in range(1, 11))], lines)
