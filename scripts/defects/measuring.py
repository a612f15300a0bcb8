"""Defects of benchmarks: rows that are not of what they say."""

from __future__ import annotations

from defects.defect import Defect

HEADS = "tests/spec/heads/test_heads.py::"
NEEDS = "tests/benchmarks/test_needs.py::"

MEASURING = [
    Defect(
        "a kind of heads names the first shipped ones",
        "spec/heads/resolve.py",
        "shipped = packaged_heads(host, str(spec))",
        "shipped = packaged_heads(host)",
        (HEADS + "test_shipped_heads_by_kind",),
    ),
    Defect(
        "shipped heads fit every model of their sizes",
        "spec/heads/resolve.py",
        "base.distance(identity) <= ROUNDED",
        "base.distance(identity) < 9",
        (HEADS + "test_shipped_heads_of_weights_before_rounding",),
    ),
    Defect(
        "the paper's lines have the exact rule",
        "benchmarks/methods.toml",
        'ngrams = 20\nacceptance = "published"\n',
        "ngrams = 20\n",
        (NEEDS + "test_every_table_of_the_method_has_it",),
    ),
    Defect(
        "what a table varies does not reach the methods",
        "benchmarks/specs.py",
        "{**method, **over}",
        "{**over, **method}",
        (NEEDS + "test_every_table_of_the_method_has_it",),
    ),
    Defect(
        "on a card rows run without heads where none are shipped",
        "benchmarks/needs.py",
        'if made.get("heads", "auto") == "auto" and strategy in HEADS_OF:',
        "if False:",
        (NEEDS + "test_no_row_on_a_card_runs_without_its_heads",),
    ),
    Defect(
        "a row is measured although its heads are missing",
        "benchmarks/row.py",
        "    check_needs(config)\n",
        "",
        (NEEDS + "test_a_row_whose_heads_are_missing_is_not_measured",),
    ),
]
