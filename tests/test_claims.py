"""The check of sentences with numbers: what holds is silent, and each way of not holding is a line."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.runner import read_rows
from scripts import claims, ranges
from tests.benchmarks.test_report import row
from tokenswift.loader import embedded

ROOT = Path(__file__).parents[1]
TEXT = {"page": "It is **1.5** times as fast at 200 tokens. So.\n\n```sh\nrun 99\n```\n\nFloat32 is `7`."}
CLAIM: dict[str, Any] = {
    "says": "It is **1.5** times as fast at 200 tokens.",
    "rows": [{"spec": "mine", "where": {"variant": "a"}, "point": 200, "speedup": [1.5, 1.5]}],
}


def faults(text: str = TEXT["page"], **changed: Any) -> list[str]:
    claim = copy.deepcopy(CLAIM)
    claim["rows"][0] |= changed
    rows = [row("a", speedup=0.7), row("a", seed=1, speedup=0.8), row("b", speedup=9.0)]
    return claims.faults({"page": text}, [claim], rows)


def test_what_holds_is_silent() -> None:
    """Twice .7 and .8: a median of 1.5 at 200 tokens."""
    assert faults() == []


@pytest.mark.parametrize(
    "fault, text, changed",
    [
        ("nothing in claims.toml holds 'It is 3 years old.'", TEXT["page"] + " It is 3 years old.", {}),
        ("no page says 'It is **1.5** times", "It is **1.6** times as fast at 200 tokens.", {}),
        ("speedup is 1.5 in a row of mine; said: 1.6 to 1.7", TEXT["page"], {"speedup": [1.6, 1.7]}),
        ("no row holds 1.5", TEXT["page"], {"speedup": [1.4, 1.6]}),
        ("there are no rows of mine with {'variant': 'c'}", TEXT["page"], {"where": {"variant": "c"}}),
        ("there are no rows of mine with {'variant': 'a'} and 300 new", TEXT["page"], {"point": 300}),
        ("speedup is 18.0 in a row of mine", TEXT["page"], {"where": {}}),
        ("d4 is None in a row", TEXT["page"], {"d4": [0.1, 0.2]}),
    ],
)
def test_what_does_not_hold_is_a_line(fault: str, text: str, changed: dict[str, Any]) -> None:
    assert any(fault in line for line in faults(text, **changed)), faults(text, **changed)


def test_names_and_code_are_no_numbers() -> None:
    assert claims.numbers("SmolLM2-135M in bfloat16 (Tables 3, 5, 7) took 1,024 tokens, 0.97 times.") == [
        1024,
        0.97,
    ]
    assert list(claims.sentences(TEXT["page"])) == ["It is **1.5** times as fast at 200 tokens."]


def test_a_range_holds_every_row_and_every_length_in_it() -> None:
    """At 100 tokens .7 and .8, at 200 twice as much; medians are no range."""
    spread = {"each": True, "point": 100, "speedup": [0.7, 0.8]}
    text = "It is 0.7 to 0.8 times as fast at 100 tokens."

    def check(**changed: Any) -> list[str]:
        claim: dict[str, Any] = {
            "says": text,
            "rows": [{"spec": "mine", "where": {"variant": "a"}, **spread}],
        }
        claim["rows"][0] |= changed
        rows = [row("a", speedup=0.7), row("a", seed=1, speedup=0.8, commit="older", date="before")]
        return claims.faults({"page": text}, [claim], rows)

    assert check() == []
    assert "speedup is 0.7 in a row of mine; said: 0.75 to 0.8" in "".join(check(speedup=[0.75, 0.8]))
    assert "is a range; valid: rows with each = true" in "".join(check(each=False))


def drafted(speedup: float, **more: Any) -> dict[str, Any]:
    """A row of adaptive drafting by the default model on prose."""
    given = {"model": embedded.NAME, "strategy": "auto", "reach": "generate", **more.pop("config", {})}
    return row("auto", speedup=speedup, config=given, **{"stored": {"types": ["q4_1"]}, **more})


def test_a_table_of_ranges_holds_every_row_of_its_kind() -> None:
    """Rows of any commit and benchmark, at any length; rows of another kind of text are another line."""
    greedy = {"sampling": {"repetition_penalty": 1.0, "greedy": True}}
    rows = [
        drafted(0.9),
        drafted(0.6, commit="older", date="before"),
        drafted(2.0, config=greedy),
        drafted(1.5, config={"prompts": "list", **greedy}),
        drafted(5.0, stored=None),
        row("auto", speedup=7.0, config={"model": "another", "strategy": "auto"}, stored={"types": []}),
    ]
    made = ranges.table(rows)
    assert [line[:3] for line in made.body] == [
        ["prose, the default sampling", "**0.60 to 1.80 ×**", "1.05"],
        ["prose, other sampling", "**2.00 to 4.00 ×**", "3.00"],
        ["a repetitive list, greedy", "**1.50 to 3.00 ×**", "2.25"],
    ]

    def page(name: str, words: str) -> dict[str, str]:
        return {"page": f"<!-- table: expect -->\n| {name} | **{words} ×** | 1 |\n<!-- end -->"}

    assert ranges.uncovered({"page": f"<!-- table: expect -->\n{made.markdown()}<!-- end -->"}, rows) == []
    (fault,) = ranges.uncovered(page("prose", "0.99 to 1.32"), rows)
    assert fault == "page: 'prose' is said to be 0.99 to 1.32; 5 of 6 are not: 0.6 to 4.0"
    assert "no rows are of the kind 'verse'" in ranges.uncovered(page("verse", "1.00"), rows)[0]


def test_the_ranges_of_the_committed_pages_hold_all_committed_rows() -> None:
    """Prose was 0.99 to 1.32 there while rows had 0.89 and more than 2."""
    rows = read_rows(ROOT / "bench" / "results")
    texts = {page.name: page.read_text("utf-8") for page in claims.PAGES}
    assert any("table: expect" in text for text in texts.values())
    assert ranges.uncovered(texts, rows) == []
    old = "<!-- table: expect -->\n| prose | **0.99 to 1.32 ×** | 1,024 |\n<!-- end -->"
    assert " are not: 0.8" in ranges.uncovered({"README.md": old}, rows)[0]


def test_lines_of_several_commits_are_said_to_be() -> None:
    """Every generated table that names more than one commit."""
    blocks = re.compile(r"<!-- table: ([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
    several = []
    for page in claims.PAGES:
        for name, text in blocks.findall(page.read_text("utf-8")):
            lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
            cells = {line[-1] for line in lines[2:]} if lines and lines[0][-1] == "commit |" else set()
            if len(cells | set(re.findall(r"commit ([0-9a-f]{7}\+?)", text))) > 1:
                several.append(name)
                assert tables.APART in text, name
    assert len(several) > 1
