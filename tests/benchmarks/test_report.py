"""Reports: means and spreads by hand, the published figures beside, and docs/results.md as the rows
say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import settings, tables
from benchmarks.specs import Spec
from benchmarks.tables import Group
from benchmarks.words import Row

ROOT = Path(__file__).parents[2]


def row(variant: str = "TokenSwift", seed: int = 0, speedup: float = 1.0, **fields: object) -> Row:
    """A row of a spec with figures at 100 and 200 new tokens."""
    config = {
        "variant": variant,
        "text": 0,
        "seed": seed,
        "model": "m",
        "prefill": 2000,
        "prompts": "shipped",
        "sampler": "llama3.1-8b",
        "options": {},
        "sampling": {"seed": seed, "repetition_penalty": 1.2},
    }
    return {
        "spec": "mine",
        "kind": "decode",
        "preset": "cpu",
        "config": config,
        "dtype": "float32",
        "device": "cpu",
        "machine": "a processor",
        "commit": "abc",
        "date": "now",
        "reached": "by generating",
        "identical": True,
        "lossless": True,
        "figures": {
            "100": {"alpha": 0.5, "speedup": speedup},
            "200": {"alpha": 0.5, "speedup": 2 * speedup},
        },
        **fields,
    }


SPEC = Spec(
    "mine",
    {
        "title": "A <test>",
        "claim": "it | holds",
        "differs": "nothing",
        "table": {"by": ["variant", "prefill"], "figures": ["alpha", "speedup"]},
        "plot": {"x": "point", "y": ["alpha", "speedup"], "series": ["variant"]},
        "published": {
            "note": "a paper",
            "columns": ["variant", "prefill", "point", "alpha", "speedup"],
            "rows": [["TokenSwift", 2048, 20_000, 0.64, 1.87]],
        },
    },
)


@pytest.fixture
def group() -> Group:
    """Two seeds of one variant (1 and 3), and a row of another; that of another spec is not in."""
    rows = [
        row(speedup=1.0),
        row(seed=1, speedup=3.0, identical=False),
        row("other", lossless=False),
        row("elsewhere", spec="another"),
    ]
    (group,) = tables.groups(SPEC, rows)
    return group


def test_medians_and_spreads(group: Group) -> None:
    table = tables.of_group(SPEC, group)
    assert table.head == [
        "strategy",
        "prefill",
        "new tokens",
        "α",
        "×",
        "prompts × seeds",
        "same text as plain",
        "heads or draft model",
    ]
    assert table.body == [
        ["TokenSwift", "2000", "100", "0.50", "2.00 (1.00–3.00)", "1 × 2", "no", "none"],
        ["TokenSwift", "2000", "200", "0.50", "4.00 (2.00–6.00)", "1 × 2", "no", "none"],
        ["other", "2000", "100", "0.50", "1.00", "1 × 1", "not lossless", "none"],
        ["other", "2000", "200", "0.50", "2.00", "1 × 1", "not lossless", "none"],
    ]


def test_a_group_says_its_conditions(group: Group) -> None:
    assert group.about == (
        "preset cpu; m; float32; a processor; sampler llama3.1-8b; prompts shipped; "
        "lengths reached by generating; commit abc"
    )


def test_the_published_figures_are_a_table_of_their_own() -> None:
    theirs = tables.published(SPEC)
    assert theirs is not None
    assert theirs.body[0] == ["TokenSwift", "2048", "20,000", "0.64", "1.87"]


@pytest.mark.parametrize(
    "file", sorted((ROOT / "benchmarks" / "results").glob("*/*.jsonl")), ids=lambda f: f.stem
)
def test_committed_rows_are_found_again(file: Path) -> None:
    """A row whose key is not its configuration's would be measured a second time, beside the
    first."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    stale = [
        row["date"] for row in rows if row["key"] != settings.key_of(row["spec"], row["config"])
    ]
    assert not stale
    assert len({(row["key"], row["commit"], row["machine"]) for row in rows}) == len(rows)


def test_results_in_the_docs_are_up_to_date() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "tools.results", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
