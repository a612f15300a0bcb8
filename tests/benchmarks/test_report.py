"""Reports: means and spreads by hand, the published figures beside, and docs/results.md as the rows say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots, prompts, report, settings, specs, tables, words
from benchmarks.specs import Spec
from tokenswift.types import InputError

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
    }
    config |= {"options": {}, "sampling": {"seed": seed, "repetition_penalty": 1.2}, **more.pop("config", {})}
    given: dict[str, Any] = {"spec": "mine", "kind": "decode", "preset": "cpu", "config": config}
    given |= {"dtype": "float32", "device": "cpu", "machine": "a processor", "commit": "abc", "date": "now"}
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
            "rows": [
                ["TokenSwift", 2048, 20_000, 0.64, 1.87],
                ["TokenSwift", 2000, 100, 0.6, 1.8],
                ["TokenSwift", 8192, 150, 0.72, 1.99],
                ["Medusa", 2048, 20_000, 0.35, 1.2],
            ],
        },
    },
)


def test_means_spreads_and_published_figures() -> None:
    """Two seeds of one variant (1 and 3: mean 2, deviation √2), a row of another without published ones."""
    found = [row(speedup=1.0), row(seed=1, speedup=3.0, identical=False), row("other", lossless=False)]
    found.append(row("elsewhere", spec="another"))
    (group,) = tables.groups(SPEC, found)
    cells = [tables.cells(SPEC, line) for line in group.lines]
    assert tables.head(SPEC) == [
        "strategy", "prefill", "new tokens", "α", "×", "published: α / ×", "prompts × seeds",
        "same text as plain", "heads or draft model",
    ]  # fmt: skip
    assert cells == [
        [
            "TokenSwift",
            "2000",
            "100",
            "0.50\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}0.00",
            "2.00\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}1.41",
            "0.60 / 1.80",
            "1 × 2",
            "no",
            "none",
        ],
        [
            "TokenSwift",
            "2000",
            "200",
            "0.50\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}0.00",
            "4.00\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}2.83",
            "0.60 / 1.80 (at 100)",
            "1 × 2",
            "no",
            "none",
        ],
        ["other", "2000", "100", "0.50", "1.00", "–", "1 × 1", "not lossless", "none"],
        ["other", "2000", "200", "0.50", "2.00", "–", "1 × 1", "not lossless", "none"],
    ]
    assert (
        "preset cpu; m; float32; a processor; sampler: θ 1.2; prompts of 2,000 tokens, 100 to 200 new ones; "
        "1 text, 2 seeds; prompts: shipped; lengths reached by generating; commit abc" == group.about
    )


def test_other_conditions_are_another_table() -> None:
    found = [
        row(),
        row(preset="smoke"),
        row(dtype="bfloat16"),
        row(machine="another"),
        row(config={"model": "n"}),
        row(reached="by prefilled text", config={"rope_scaling": "yarn:4"}),
    ]
    about = [group.about for group in tables.groups(SPEC, found)]
    assert len(about) == 6
    assert ["RoPE scaling: yarn:4" in words for words in about] == [False] * 5 + [True]
    assert "lengths reached by prefilled text" in about[-1]
    assert len(tables.groups(SPEC, [row(), row(text=1), row(seed=1)])) == 1
    (group,) = tables.groups(SPEC, [row(), row(config={"options": {"budget": 5}})])
    assert len(group.lines) == 4  # another configuration is another line, whatever the labels


def test_a_caption_names_model_heads_and_sampler() -> None:
    """What was trained on how much text stands in the caption and in the line; of the default model, that its
    weights are those of a Q4_1 file."""
    heads = {"kind": "linear", "count": 3, "file": "a.heads.safetensors", "tokens": 199_420, "steps": 200}
    small = {"name": "small", "tokens": 1000, "steps": 5}
    sampling = {
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "penalty_window": 1024,
    }
    config = {"model": "smollm2-135m", "sampling": sampling}
    found = [row(heads=heads, stored={"file": "f.gguf", "types": ["q4_1", "q8_0"]}, config=config)]
    found.append(row("TriForce", heads=None, draft_model=small, config=config))
    (group,) = tables.groups(SPEC, found)
    words = "SmolLM2-135M-Instruct (weights of a Q4_1 file), read as q4_1 and q8_0; float32; a processor; "
    words += "heads and draft models: 3 linear heads, 199,420 tokens, 200 steps; draft model small, "
    words += "1,000 tokens, 5 steps; "
    words += "sampler: temperature 1, min-p 0.1, θ 1.2 over 1,024 tokens; prompts of 2,000 tokens, "
    assert words in group.about, group.about
    assert [tables.cells(SPEC, line)[-1] for line in group.lines[::2]] == [
        "3 linear heads, 199,420 tokens, 200 steps",
        "draft model small, 1,000 tokens, 5 steps",
    ]


def test_published_figures_stand_beside_each_method_and_its_model() -> None:
    """The paper's TokenSwift beside our four lines of it; of a model that the paper has, its own figures."""
    spec = specs.load("table3")

    def theirs(variant: str, model: str) -> str:
        (line,) = tables.lines(spec, [row(variant, config={"model": model}, figures={"20000": {"alpha": 1}})])
        return tables.cells(spec, line)[-4]

    assert theirs("paper, exact rule", "meta-llama/Llama-3.1-8B") == "0.64 / 1.87 (prefill 2048)"
    assert theirs("paper, exact rule", "NousResearch/Yarn-Llama-2-7b-128k") == "0.73 / 2.11 (prefill 2048)"
    assert theirs("auto", "meta-llama/Llama-3.1-8B") == "0.64 / 1.87 (strategy TokenSwift, prefill 2048)"
    assert theirs("Medusa", "NousResearch/Yarn-Llama-2-7b-128k") == "0.43 / 0.96 (prefill 2048)"
    assert theirs("MagicDec, SnapKV", "meta-llama/Llama-3.1-8B") == "–"


def test_rows_of_other_specs() -> None:
    """A figure that shows some rows of a table."""
    spec = Spec("figure9", {"title": "t", "rows_of": ["mine"], "where": {"variant": ["b"]}})
    assert [r["config"]["variant"] for r in tables.mine(spec, [row("a"), row("b")])] == ["b"]


def test_markdown_and_page() -> None:
    """Everything is there, nothing of a title or text is taken for markup; what has no rows is named."""
    stretches = [["once <upon> a *time* ", False], ["a time", True]]
    text = row(
        spec="figure5-6", kind="text", stretches=stretches, config={"sampling": {"repetition_penalty": 1.0}}
    )
    chosen = [SPEC, specs.load("figure5-6"), specs.load("table8")]
    made = report.make(chosen, [row(), text], {"mine": "It holds.", "summary": "All holds."}, plots.plot)
    assert sorted(made.pictures) == ["mine-cpu.png", "mine-cpu.svg"]
    assert made.pictures["mine-cpu.png"].startswith(b"\x89PNG") and b"<svg" in made.pictures["mine-cpu.svg"]
    page = report.markdown(made, "Title", "plots", "make it")
    assert page.startswith("<!-- made by `make it`; do not edit -->\n\n# Title\n")
    assert "## mine. A <test>\n" in page and "](plots/mine-cpu.svg)" in page
    assert "| TokenSwift | 2000 | 100 | 0.50 | 1.00 | 0.60 / 1.80 |" in page
    assert "What differs and why: nothing; on a processor" in page
    assert "What it says: It holds.\n" in page and "All holds.\n" in page
    assert (
        "> once \\<upon\\> a \\*time\\* **a time**\n" in page and "without penalty: 22% of it repeats" in page
    )
    assert page.endswith("No rows yet: Table 8.\n")
    shown = report.html(made, "Title")
    assert "A &lt;test&gt;</h2>" in shown and "once &lt;upon&gt; a *time* <mark>a time</mark>" in shown
    assert shown.count("<svg") == 1 and "<script" not in shown and 'id="mine-cpu-' in shown
    assert report.html(made, "Title") == shown


def test_labels_of_a_logarithmic_axis_do_not_touch() -> None:
    """Lengths from 64 to 20,000: 15,000 would stand upon its neighbours."""
    assert plots._apart([64, 256, 512, 5000, 10_000, 15_000, 20_000]) == [64, 256, 512, 5000, 10_000, 20_000]


def test_pictures_are_the_same_again() -> None:
    """Same rows, same bytes: committed pictures change with their rows alone."""
    (group,) = tables.groups(SPEC, [row(), row(seed=1, speedup=2.0)])
    assert plots.plot(SPEC, group) == plots.plot(SPEC, group)


@pytest.mark.slow
def test_every_spec_has_its_plot() -> None:
    """Lines and bars of every shipped spec, from made-up rows."""
    for name in specs.names():
        spec = specs.load(name)
        if "plot" not in spec.data:
            continue
        found = []
        for source in spec.sources:
            for config in specs.load(source).rows("smoke", {"seeds": 2}):
                figures = {figure: 1.0 + config["seed"] for figure in words.NAMES}
                made = {str(point): figures for point in config["points"]}
                found.append(row(spec=source, preset="smoke", config=config, figures=made))
        (group,) = tables.groups(spec, found)
        assert set(plots.plot(spec, group)) == {"svg", "png"}, name


def test_prompts_of_a_folder(tmp_path: Path) -> None:
    """Long texts without their beginnings, short ones passed over, an error that says what is missing."""
    (tmp_path / "a.txt").write_text("short")
    (tmp_path / "b.txt").write_text("title page " * 3000 + "\n\n" + "the story " * 1000)
    (tmp_path / "c.txt").write_text("from the beginning " * 10)
    letters = [ord(c) for c in "the story"]
    found = prompts.prompt(str(tmp_path), lambda text: [ord(c) for c in text], 0, 9)
    assert (found.name, found.ids) == ("b", letters)
    assert prompts.prompt(str(tmp_path), lambda text: [ord(c) for c in text], 1, 9).name == "c"
    with pytest.raises(InputError, match="with 1 text of 300 tokens, 2 are needed"):
        prompts.prompt(str(tmp_path), lambda text: [ord(c) for c in text], 1, 300)
    assert prompts.prompt("shipped", lambda text: [ord(c) for c in text], 3, 500).name == "orchard"


@pytest.mark.parametrize("source", prompts.MADE)
def test_prompts_that_are_made(source: str) -> None:
    """As long as wanted, and the same again."""
    first, again = (prompts.prompt(source, lambda t: [ord(c) for c in t], 0, 9000, 50) for _ in range(2))
    assert len(first.ids) == 9000 and first == again and first.name == source
    assert source != "random" or set(first.ids) == set(range(50))


@pytest.mark.parametrize("file", sorted((ROOT / "bench" / "results").glob("*/*.jsonl")), ids=lambda f: f.stem)
def test_committed_rows_are_found_again(file: Path) -> None:
    """A row whose key is not its configuration's would be measured a second time, beside the first."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    stale = [row["date"] for row in rows if row["key"] != settings.key_of(row["spec"], row["config"])]
    assert not stale
    assert len({(row["key"], row["commit"], row["machine"]) for row in rows}) == len(rows)


def test_results_in_the_docs_are_up_to_date() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "scripts.results", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
