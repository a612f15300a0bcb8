"""Tables by columns: which rows count, medians by hand, and what stands below a table once."""

from __future__ import annotations

from typing import Any

from benchmarks import plots, report, specs, tables
from benchmarks.specs import Spec
from tests.benchmarks.test_report import row


def spec(**table: Any) -> Spec:
    given = {
        "by": ["variant"],
        "columns": [["a", "{variant}"], ["×", "{speedup:.1f} {least:.1f}–{most:.1f}"]],
    }
    return Spec("mine", {"title": "A test", "group": "ours", "table": {**given, **table}})


def test_medians_over_seeds_and_the_newest_measurement() -> None:
    """Three seeds of the newest commit; an older commit's row does not count."""
    old = row("a", speedup=9.0, commit="old", date="2026-01-01")
    new = [row("a", seed=i, speedup=s, date="2026-01-02") for i, s in enumerate((1.0, 4.0, 2.0))]
    made = tables.table(spec(), [*new, old, row("b", commit="old")])
    assert made.head == ["a", "×"] and made.body == [
        ["a", "4.0 2.0–8.0"],
        ["b", "2.0 2.0–2.0"],
    ]  # at 200 tokens


def test_a_range_over_all_rows_of_the_conditions() -> None:
    """The median is the newest measurement's; an older row is no line of its own, and none is left out."""
    old = row("a", seed=3, speedup=0.5, commit="old", date="2026-01-01")
    new = [row("a", seed=i, speedup=s, date="2026-01-02") for i, s in enumerate((1.0, 4.0, 2.0))]
    rows = [*new, old, row("b", speedup=0.1, commit="old")]
    assert tables.table(spec(range="all"), rows).body[0] == ["a", "4.0 1.0–8.0"]
    assert tables.table(spec(), rows).body[0] == ["a", "4.0 2.0–8.0"]


def test_an_eagle_drafter_without_rows_is_said_to_be_unmeasured() -> None:
    """In tables of our own and of the paper, below what was measured; nothing where nothing was."""
    kinds = {"variants": [{"name": "a"}, {"name": "b", "eagle": "own"}]}
    own = Spec("mine", {**spec().data, **kinds})
    assert tables.table(own, [row("a", speedup=1.0)]).body[1:] == [["b", "not measured"]]
    assert len(tables.table(own, [row("a"), row("b")]).body) == 2 and tables.table(own, []).body == []
    paper = Spec("mine", {"title": "A test", **kinds})
    (group,) = tables.groups(paper, [row("a")])
    made = tables.of_group(paper, group)
    assert made.body[-1] == ["b", "not measured", *["–"] * (len(made.head) - 2)]
    assert all(len(line) == len(made.head) for line in made.body)


def test_rows_of_many_runs_say_their_least_and_most() -> None:
    many = row("a")
    many["figures"] = {"100": {"speedup": 1.5, "least": 1.25, "most": 1.75}}
    assert tables.table(spec(), [many]).body == [["a", "1.5 1.2–1.8"]]


def test_the_best_of_the_options_tried() -> None:
    tried = [row("a", speedup=s, config={"options": {"gamma": g}}) for g, s in ((1, 1.0), (2, 3.0), (4, 2.0))]
    assert tables.table(spec(best="speedup"), tried).body == [["a", "6.0 6.0–6.0"]]


def test_figures_of_a_point_and_what_is_missing() -> None:
    by_point = spec(
        columns=[["100", "{speedup@100:.1f}"], ["300", "{speedup@300:.1f}"], ["prompts", "{texts}"]]
    )
    assert tables.table(by_point, [row()]).body == [["1.0", "–", "1"]]
    assert tables.table(spec(needs="share_draft"), [row()]).body == []


def test_what_all_rows_share_stands_below_a_table_once() -> None:
    def made(*sources: tuple[str, str, str]) -> str:
        rows = [
            row(str(i), machine=machine, dtype=dtype, commit=commit)
            for i, (machine, dtype, commit) in enumerate(sources)
        ]
        table = spec(columns=[["a", "{variant}"]], **{"from": ["machine", "dtype", "commit"]})
        return tables.table(table, rows).markdown()

    one, other = ("M, 2 threads", "float32", "c1"), ("M, 2 threads", "float32", "c2+")
    assert made(one, one) == "| a |\n| --- |\n| 0 |\n| 1 |\n\nm on M, 2 threads, float32, commit c1.\n"
    below = f"\n\nm on M, 2 threads, float32. {tables.APART}\n"
    assert made(one, other) == "| a | commit |\n| --- | --- |\n| 0 | c1 |\n| 1 | c2+ |" + below
    mixed = made(one, ("N", "float32", "c1"))
    assert mixed.splitlines()[2:] == [
        "| 0 | M, 2 threads, float32, commit c1 |",
        "| 1 | N, float32, commit c1 |",
        "",
        "m.",
    ]
    assert tables.APART in made(one, ("N", "float32", "c2"))


def test_a_report_has_them_beside_the_papers() -> None:
    """No claim of a paper; its table, and in HTML as well."""
    made = report.make([spec(), specs.load("table8")], [row()], {}, plots.plot)
    page = report.markdown(made, "Title", None)
    assert "## mine. A test\n\n| a | × |\n" in page and "The paper" not in page.partition("## mine")[2]
    assert '<th scope="row">TokenSwift</th><td>2.0 2.0–2.0</td>' in report.html(made, "Title")


def test_committed_rows_name_the_heads_that_they_used() -> None:
    """Medusa's own heads, and none where a strategy has none."""
    from benchmarks.runner import read_rows
    from tests.benchmarks.test_report import ROOT

    rows = read_rows(ROOT / "bench" / "results")
    used = {
        (r["config"]["strategy"], r["heads"] and (r["heads"]["kind"], r["heads"]["count"]))
        for r in rows
        if r["kind"] == "decode"
    }
    assert {heads for strategy, heads in used if strategy == "medusa"} == {("medusa", 4)}
    assert {heads for strategy, heads in used if strategy in ("magicdec", "triforce")} == {None}
