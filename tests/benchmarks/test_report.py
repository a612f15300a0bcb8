"""Reports: means and spreads by hand, the published figures beside, and docs/results.md as the rows
say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import settings, tables
from benchmarks.specs import Spec

ROOT = Path(__file__).parents[2]


def row(variant: str = "TokenSwift", text: int = 0, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A row of a spec with figures at 100 and 200 new tokens."""
    figures = {"alpha": more.pop("alpha", 0.5), "speedup": more.pop("speedup", 1.0)}
    config = {
        "variant": variant,
        "text": text,
        "seed": seed,
        "model": "m",
        "prefill": 2000,
        "prompts": "shipped",
        "sampler": "llama3.1-8b",
    }
    config |= {
        "options": {},
        "sampling": {"seed": seed, "repetition_penalty": 1.2},
        **more.pop("config", {}),
    }
    given: dict[str, Any] = {"spec": "mine", "kind": "decode", "preset": "cpu", "config": config}
    given |= {
        "dtype": "float32",
        "device": "cpu",
        "machine": "a processor",
        "commit": "abc",
        "date": "now",
    }
    given |= {"reached": "by generating", "identical": True, "lossless": True}
    given["figures"] = {"100": figures, "200": {**figures, "speedup": 2 * figures["speedup"]}}
    return {**given, **more}


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


def test_medians_spreads_and_published_figures() -> None:
    """Two seeds of one variant (1 and 3), a row of another, and the paper's own lines."""
    found = [
        row(speedup=1.0),
        row(seed=1, speedup=3.0, identical=False),
        row("other", lossless=False),
    ]
    found.append(row("elsewhere", spec="another"))
    (group,) = tables.groups(SPEC, found)
    made = tables.of_group(SPEC, group)
    assert made.head == [
        "strategy",
        "prefill",
        "new tokens",
        "α",
        "×",
        "prompts × seeds",
        "same text as plain",
        "heads or draft model",
    ]
    assert made.body == [
        ["TokenSwift", "2000", "100", "0.50", "2.00 (1.00–3.00)", "1 × 2", "no", "none"],
        ["TokenSwift", "2000", "200", "0.50", "4.00 (2.00–6.00)", "1 × 2", "no", "none"],
        ["other", "2000", "100", "0.50", "1.00", "1 × 1", "not lossless", "none"],
        ["other", "2000", "200", "0.50", "2.00", "1 × 1", "not lossless", "none"],
    ]
    assert group.about == (
        "preset cpu; m; float32; a processor; sampler llama3.1-8b; prompts shipped; "
        "lengths reached by generating; commit abc"
    )
    theirs = tables.published(SPEC)
    assert theirs is not None and theirs.body[0] == ["TokenSwift", "2048", "20,000", "0.64", "1.87"]


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
