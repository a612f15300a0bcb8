"""Specs: every table and figure is there, every row of every preset is a valid configuration."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import specs
from benchmarks.prompts import MADE
from benchmarks.settings import key_of
from benchmarks.specs import PRESETS, Spec
from benchmarks.words import NAMES


@pytest.mark.parametrize("name", specs.names())
def test_a_spec(name: str) -> None:
    """Rows for every preset, each once; figures and published columns that exist."""
    spec = specs.load(name)
    assert spec.title and spec.of_paper is name.startswith(("table", "figure"))
    for preset in PRESETS:
        rows = [config for source in spec.sources for config in specs.load(source).rows(preset, {})]
        assert rows and len({key_of(name, config) for config in rows}) == len(rows)
        for config in rows:
            assert config["prompts"] in ("shipped", "pg19", *MADE)
            most = 500 if spec.of_paper else 1256
            if preset == "smoke" and (spec.kind == "decode" or not spec.of_paper):
                assert config["prefill"] + config["points"][-1] <= most
    for group in ("table", "plot"):
        part = spec.data.get(group, {})
        assert set(part.get("figures", part.get("y", ()))) <= set(NAMES)
    if published := spec.data.get("published"):
        assert all(len(row) == len(published["columns"]) for row in published["rows"])


SPEC: dict[str, Any] = {
    "title": "A test",
    "settings": {"budget": 99, "prefill": 50, "points": [10, 20], "ngrams": 3},
    "variants": [
        {"name": "one", "strategy": "tokenswift", "tree": "1,2", "ngrams": 4},
        {"name": "two", "strategy": "medusa", "min_p": [0.0, 0.5]},
    ],
    "presets": {
        "smoke": {"prefill": 60, "variants": {"two": {"prefill": 70}}},
        "cpu": {"only": ["one"], "texts": 2},
    },
}


def rows(preset: str = "smoke", **given: Any) -> list[dict[str, Any]]:
    return Spec("mine", SPEC).rows(preset, given)


def test_what_is_said_later_goes_over_what_is_said_before() -> None:
    """Settings, then the variant, the preset, the preset's variant and the command; a list makes
    rows."""
    one, *two = rows()
    assert one["options"] == {"tree": [1, 2], "budget": 99, "ngrams": 4} and one["prefill"] == 60
    assert [row["prefill"] for row in two] == [70, 70]
    assert [row["sampling"]["min_p"] for row in two] == [0.0, 0.5]
    assert "budget" not in two[0]["options"]  # medusa has none
    assert [row["text"] for row in rows("cpu")] == [0, 1]
    assert [row["options"]["budget"] for row in rows("cpu", texts=1, budget=[70, 80])] == [70, 80]
