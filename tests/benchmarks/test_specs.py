"""Specs: every table and figure is there, every row of every preset is a valid configuration."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import specs
from benchmarks.prompts import MADE
from benchmarks.settings import key_of, parse, public, value_of
from benchmarks.specs import PRESETS, Spec
from benchmarks.words import NAMES
from tokenswift.config import SamplingParams
from tokenswift.sampling.presets import SAMPLERS, sampler
from tokenswift.types import InputError

PAPER = [*(f"table{n}" for n in (*range(1, 9), *range(10, 17))), "figure1", "figure3", "figure4", "figure5-6"]

OURS = [
    *(
        "ablation",
        "acceptance",
        "attention",
        "bookkeeping",
        "calibration",
        "floats",
        "json",
        "llama",
        "memory",
    ),
    *(
        "passes",
        "quality",
        "rates",
        "rivals",
        "samplers",
        "shape",
        "shares",
        "speed",
        "strategies",
        "texts",
        "trees",
        "weights",
    ),
]


def test_every_table_and_figure_is_there() -> None:
    assert specs.names() == [*PAPER, *OURS]
    assert [spec.name for spec in specs.chosen(())] == PAPER
    assert [spec.name for spec in specs.chosen(["quality", "table3"])] == ["quality", "table3"]
    assert len(specs.chosen(["engine"])) == 7
    assert specs.load("figure5-6").label == "Figures 5 and 6" and specs.load("table12").label == "Table 12"


@pytest.mark.parametrize("name", PAPER)
def test_a_spec(name: str) -> None:
    """Rows for every preset, each once; figures and published columns that exist."""
    spec = specs.load(name)
    assert spec.title and spec.data["claim"] and spec.data["differs"]
    for preset in PRESETS:
        rows = [config for source in spec.sources for config in specs.load(source).rows(preset, {})]
        assert rows and len({key_of(name, config) for config in rows}) == len(rows)
        for config in rows:
            assert all(
                value_of(config, key) is not None or key in ("tree", "model", "ngrams") for key in spec.by
            ), config
            if spec.kind == "decode" and preset == "smoke":
                assert config["prefill"] + config["points"][-1] <= 500 and config["prompts"] == "shipped"
    for group in ("table", "plot"):
        part = spec.data.get(group, {})
        assert set(part.get("figures", part.get("y", ()))) <= set(NAMES)
    if published := spec.data.get("published"):
        assert all(len(row) == len(published["columns"]) for row in published["rows"])


@pytest.mark.parametrize("name", OURS)
def test_a_spec_of_our_own(name: str) -> None:
    """Rows for every preset, each once, told apart by what its table has lines for."""
    spec = specs.load(name)
    assert spec.title and not spec.of_paper and spec.group != "paper"
    for preset in PRESETS:
        rows = spec.rows(preset, {})
        assert len({key_of(name, config) for config in rows}) == len(rows)
        assert bool(rows) is not bool(spec.data.get("rows_of"))
        for config in rows:
            assert config["prompts"] in ("shipped", "pg19", *MADE)
            assert preset != "smoke" or config["prefill"] + config["points"][-1] <= 1256


def test_settings_of_a_kind_of_measurement() -> None:
    """Rounds belong to passes; a row of decoding has none; a setting that is no number of them is refused."""
    (passes,) = specs.load("passes").rows("smoke", {})
    assert passes["rounds"] == 1 and "rounds" not in specs.load("speed").rows("smoke", {})[0]
    with pytest.raises(InputError, match="rounds is 0; valid: an integer of at least 1"):
        specs.load("passes").rows("smoke", {"rounds": 0})
    first, every = specs.load("calibration").rows("cpu", {})  # a row of all texts and seeds for each
    assert first["texts"] == first["seeds"] == every["texts"] == 2


@pytest.mark.parametrize("name", ["table3", "rivals"])
def test_a_line_for_an_eagle_drafter(name: str) -> None:
    """That line alone has it, by default the shipped one; rows of the others keep their names."""
    spec = specs.load(name)
    usual, given = spec.rows("cpu", {}), spec.rows("cpu", {"eagle": "some/drafter"})
    assert {row["eagle"] for row in usual if "eagle" in row} == {"shipped"}
    assert {row["eagle"] for row in given if "eagle" in row} == {"some/drafter"}
    for one, other in zip(usual, given, strict=True):
        assert ("eagle" in one) is ("eagle" in other) is (one["variant"] == "auto, EAGLE-3")
        assert (key_of(name, one) == key_of(name, other)) is ("eagle" not in one)
    others = specs.load("speed").rows("smoke", {"eagle": "some/drafter"})
    assert {row["strategy"] for row in others if "eagle" in row} == {"auto"}


def test_figures_of_the_paper_as_published() -> None:
    """Numbers picked from the tables by hand."""

    def find(name: str, **wanted: Any) -> dict[str, Any]:
        table = specs.load(name).data["published"]
        entries = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
        return next(entry for entry in entries if wanted.items() <= entry.items())

    assert (
        find("table3", variant="TokenSwift", model="LLaMA3.1-8b", prefill=4096, point=100_000)["speedup"]
        == 3.27
    )
    assert (
        find("table3", variant="Medusa", model="YaRN-LLaMA2-7b-128k", prefill=2048, point=20_000)["alpha"]
        == 0.43
    )
    assert find("table4", model="Qwen2.5-14B", point=100_000)["plain_minutes"] == 474.6
    assert find("table5", cache="partial", point=40_000) == {
        "cache": "partial", "point": 40_000, "alpha": 0.16, "speedup": 1.03
    }  # fmt: skip
    assert find("table6", sampler="min-p", repetition_penalty=1.0)["speedup"] == 3.58
    assert find("table7", tree=[1, 9, 9, 9], point=20_000)["speedup"] == 0.53
    assert find("table8", repetition_penalty=1.2)["d4"] == 0.82
    assert find("table12", sampler="eta", point=20_000)["alpha"] == 0.56


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


def test_what_goes_over_what() -> None:
    """Spec, variant, preset, its variant, command line; an option reaches the strategies that have it."""
    one, *two = rows()
    assert one["options"] == {"tree": [1, 2], "ngrams": 4, "budget": 99} and one["prefill"] == 60
    assert [config["prefill"] for config in two] == [70, 70]
    assert [config["sampling"]["min_p"] for config in two] == [0.0, 0.5] and two[0]["options"] == {}
    assert [(config["text"], config["seed"]) for config in rows("cpu", seeds=2)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert {config["sampling"]["seed"] for config in rows("cpu", seeds=2)} == {0, 1}
    assert [config["prefill"] for config in rows(prefill=5)] == [5, 5, 5]
    assert [config["options"]["budget"] for config in rows("gpu", budget=[20, 30])[:2]] == [20, 30]


def test_lengths_reached_by_text_are_rows_of_their_own() -> None:
    made = rows("cpu", texts=1, reach="text", measured=4)
    assert [config["points"] for config in made] == [[10], [20]]
    assert all(config["measured"] == 4 for config in made) and "measured" not in rows()[0]


def test_settings_of_the_command_line() -> None:
    assert parse("texts=2") == ("texts", 2) and parse("min_p=0.1,0.2") == ("min_p", [0.1, 0.2])
    assert parse("tree=1,3,3") == ("tree", "1,3,3") and parse("points=5") == ("points", [5])
    assert parse("cache=full,partial") == ("cache", ["full", "partial"]) and parse("greedy=true") == (
        "greedy",
        True,
    )
    assert parse("model=a/b") == ("model", "a/b") and parse("ngrams=0,20") == ("ngrams", [0, 20])
    for text, line in (
        ("texts", "set is 'texts'; valid: KEY=VALUE"),
        ("txts=2", "set: 'txts' is not a setting; valid: model, dtype"),
        ("texts=two", "texts is 'two'; valid: an integer"),
        ("greedy=yes", "greedy is 'yes'; valid: true, false"),
    ):
        with pytest.raises(InputError) as error:
            parse(text)
        assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    "given, line",
    [
        ({"strategy": "fast"}, "strategy is 'fast'; valid: auto, autoregressive, tokenswift"),
        ({"sampler": "none"}, "preset is 'none'; valid: llama3.1-8b"),
        ({"min_p": 2.0}, "min_p is 2.0; valid: in [0, 1)"),
        ({"points": [20, 10]}, "points is [20, 10]; valid: rising numbers"),
        ({"points": [0]}, "points is 0; valid: an integer of at least 1"),
        ({"texts": 0}, "texts is 0; valid: an integer of at least 1"),
        ({"budget": 3}, "budget is 3; valid: more than the 16 sink tokens"),
        ({"tree": "a"}, "tree is 'a'; valid: "),
        ({"reach": "jump"}, "reach is 'jump'; valid: generate, text"),
    ],
)
def test_what_is_refused(given: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as error:
        rows("cpu", **given)
    assert str(error.value).startswith(line)


def test_places_of_files_are_in_no_row(tmp_path: Path) -> None:
    """Names and what tells folders apart, and not where they are."""
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (config, *_) = rows("cpu", prompts=str(folder), model=str(folder))
    shown = public(config)
    assert str(tmp_path) not in repr(shown)
    assert shown["prompts"].startswith("books (") and shown["model"].startswith("books (")
    before = key_of("mine", config)
    (folder / "b.txt").write_text("b")
    assert key_of("mine", config) != before


def test_a_kind_of_text_stays(tmp_path: Path) -> None:
    """A line about lists is measured on lists, whatever texts the preset or the user gives the others."""
    (tmp_path / "a.txt").write_text("a")
    for name, preset, given in product(("figure4", "speed"), PRESETS, ({}, {"prompts": str(tmp_path)})):
        spec = specs.load(name)
        kinds = {one["name"]: one["prompts"] for one in spec.variants if "prompts" in one}
        assert kinds
        for config in spec.rows(preset, given):
            if config["variant"] in kinds:
                assert config["prompts"] == kinds[config["variant"]]
            elif given:
                assert config["prompts"] == str(tmp_path)


def test_samplers_of_the_paper() -> None:
    """Table 10, by hand."""
    assert SamplingParams(**sampler("llama3.1-8b")) == SamplingParams()
    assert (SAMPLERS["qwen2.5-14b"]["min_p"], SAMPLERS["qwen2.5-14b"]["repetition_penalty"]) == (0.05, 1.13)
    nucleus = SamplingParams(**sampler("yarn-llama2-7b-128k"))
    assert (nucleus.top_p, nucleus.min_p, nucleus.repetition_penalty) == (0.9, 0.0, 1.15)
    assert SAMPLERS["eta"]["eta_cutoff"] == 2e-4 and SAMPLERS["eta"]["min_p"] == 0.0
    for name in SAMPLERS:
        assert sampler(name)["temperature"] == 1.0 and sampler(name)["penalty_window"] == 1024
