"""Specs: every table and figure is there, every row of every preset is a valid configuration."""

from __future__ import annotations

import pytest

from benchmarks import specs
from benchmarks.prompts import GENERATED
from benchmarks.settings import Config, key_of
from benchmarks.specs import PRESETS, REAL, Spec
from benchmarks.words import NAMES


@pytest.mark.parametrize("name", specs.names())
def test_a_table_or_figure_is_the_papers(name: str) -> None:
    spec = specs.load(name)
    assert spec.title
    assert spec.of_paper is name.startswith(("table", "figure"))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", specs.names())
def test_a_preset_has_each_row_once(name: str, preset: str) -> None:
    configs = configs_of(name, preset)
    assert configs or preset == REAL
    assert len({key_of(name, config) for config in configs}) == len(configs)
    assert {config["prompts"] for config in configs} <= {"shipped", "pg19", *GENERATED}


@pytest.mark.parametrize("name", specs.names())
def test_the_preset_smoke_is_short(name: str) -> None:
    spec = specs.load(name)
    if spec.kind != "decode" and spec.of_paper:
        return
    most = 500 if spec.of_paper else 1256
    for config in configs_of(name, "smoke"):
        assert config["prefill"] + config["points"][-1] <= most


@pytest.mark.parametrize("name", specs.names())
def test_figures_and_published_columns_exist(name: str) -> None:
    data = specs.load(name).data
    assert set(data.get("table", {}).get("figures", ())) <= set(NAMES)
    assert set(data.get("plot", {}).get("y", ())) <= set(NAMES)
    published = data.get("published", {"columns": [], "rows": []})
    for row in published["rows"]:
        assert len(row) == len(published["columns"])


def configs_of(name: str, preset: str) -> list[Config]:
    """The rows that a spec shows."""
    sources = [specs.load(source) for source in specs.load(name).sources]
    return [config for source in sources for config in source.rows(preset, {})]


SPEC = {
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


@pytest.mark.parametrize("name", ["table3", "table4", "table12", "table13"])
def test_real_models_have_their_own_rows_with_the_drafter_that_is_shipped(name: str) -> None:
    configs = configs_of(name, REAL)
    assert {config["model"] for config in configs} == {"qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"}
    eagles = {config["variant"]: config.get("eagle") for config in configs}
    assert eagles["auto"] == "auto"
    assert eagles["paper, exact rule"] is None


def rows(preset: str = "smoke", **overrides: object) -> list[Config]:
    return Spec("mine", SPEC).rows(preset, overrides)


def test_a_variant_goes_over_the_settings_and_a_preset_over_both() -> None:
    one = rows()[0]
    assert one["options"] == {"tree": [1, 2], "budget": 99, "ngrams": 4}
    assert one["prefill"] == 60


def test_several_values_of_a_setting_make_rows() -> None:
    two = rows()[1:]
    assert [row["sampling"]["min_p"] for row in two] == [0.0, 0.5]
    assert [row["prefill"] for row in two] == [70, 70]


def test_options_that_a_strategy_lacks_are_left_out() -> None:
    assert "budget" not in rows()[1]["options"]  # medusa has none


def test_a_spec_that_names_no_real_models_has_no_rows_of_them() -> None:
    assert rows(REAL) == []


def test_rows_that_are_not_timed_say_so() -> None:
    assert rows(timed=False)[0].get("timed") is False
    assert "timed" not in rows(timed=True)[0]


def test_the_command_goes_over_all() -> None:
    assert [row["text"] for row in rows("cpu")] == [0, 1]
    budgets = [row["options"]["budget"] for row in rows("cpu", texts=1, budget=[70, 80])]
    assert budgets == [70, 80]
