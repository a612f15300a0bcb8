"""What rows need beside their model, and what they take on a card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import specs
from benchmarks.estimate import estimate, sizes_for
from benchmarks.needs import METHODS, MODELS, Need, check_needs, heads_place, needs
from benchmarks.roofline import CARDS
from tokenswift.types import InputError

LLAMA = "meta-llama/Llama-3.1-8B"
METHOD = ["paper, published rule", "paper, exact rule", "ours, fixed tree", "auto"]


def config(
    heads: str = "linear", model: str = LLAMA, strategy: str = "tokenswift", **options: Any
) -> dict[str, Any]:
    made = {"model": model, "heads": heads, "strategy": strategy, "options": options, "dtype": "bfloat16"}
    return made | {"rope_scaling": "none", "prefill": 4096, "points": [20_000], "reach": "generate"}


def test_the_methods() -> None:
    """What differs from each to the next; the published one is the paper's method and nothing else."""
    assert list(METHODS) == METHOD
    published, exact, ours, auto = METHODS.values()
    assert published == {**exact, "acceptance": "published"} and auto == {"strategy": "auto"}
    apart = {key for key in exact if exact[key] != ours.get(key)}
    assert apart == {"heads", "candidates", "vocabulary", "cache"}  # the cache is dynamic by default
    rows = specs.load("table3").rows("cpu", {"prefill": 2048, "texts": 1})
    paper = next(row for row in rows if row["variant"] == METHOD[0])
    assert paper["heads"] == "linear" and paper["strategy"] == "tokenswift"
    assert paper["options"] == {
        **{"tree": [1, 3, 3, 3], "ngrams": 20, "budget": 512, "draft": "partial", "cache": "dynamic"},
        **{"candidates": "probability", "vocabulary": "full", "acceptance": "published"},
    }


@pytest.mark.parametrize("name", [name for name in specs.names() if specs.load(name).group == "paper"])
def test_every_table_of_the_method_has_it(name: str) -> None:
    """The paper's method under both rules beside ours; what a table varies reaches all of them."""
    spec = specs.load(name)
    if spec.kind in ("machine", "draft") or not spec.variants:
        return
    assert spec.data["methods"][:3] == METHOD[:3]
    for row in spec.rows("gpu", {"texts": 1}):
        if row["variant"].startswith("paper"):
            assert row["heads"] == "linear" and row["options"]["candidates"] == "probability"
            assert (row["options"].get("acceptance") == "published") is ("published" in row["variant"])
    varied = {"table5": "cache", "table7": "tree", "figure4": "ngrams"}.get(name)
    if varied is not None:
        for method in METHOD[:3]:
            rows = [row for row in spec.rows("gpu", {"texts": 1}) if row["variant"] == method]
            assert len({str(row["options"][varied]) for row in rows}) >= 3


def test_no_row_on_a_card_runs_without_its_heads() -> None:
    """Under the preset gpu heads are named by kind; each model has its sampler and its own draft models."""
    rows = specs.load("table3").rows("gpu", {"texts": 1})
    kinds = {
        (row["variant"], row["heads"]) for row in rows if not row["variant"].startswith(("Magic", "Tri"))
    }
    assert kinds == {
        *((name, "linear") for name in METHOD[:2]),
        *((name, "conditioned") for name in METHOD[2:]),
        ("Medusa", "medusa"),
        ("auto, EAGLE-3", "none"),
    }
    yarn = [row for row in rows if "Yarn" in row["model"]]
    assert len(yarn) == len(rows) / 2 and {row["sampler"] for row in yarn} == {"yarn-llama2-7b-128k"}
    drafts = {
        (row["model"], row["options"]["draft_model"]) for row in rows if "draft_model" in row["options"]
    }
    assert drafts == {
        (LLAMA, "Llama-3.1-8B.draft"),
        (LLAMA, "meta-llama/Llama-3.2-1B"),
        ("NousResearch/Yarn-Llama-2-7b-128k", "JackFram/llama-68m"),
        ("NousResearch/Yarn-Llama-2-7b-128k", "TinyLlama/TinyLlama_v1.1"),
    }
    assert {row["sampler"] for row in specs.load("table12").rows("gpu", {})} == {"top-p", "min-p", "eta"}
    assert {row["model"] for row in specs.load("table4").rows("gpu", {})} == {
        model for model in MODELS if model.startswith("Qwen")
    }
    standalone = [row for row in specs.load("table1").rows("cpu", {}) if "standalone" in row["variant"]]
    assert {row["options"]["draft_model"] for row in standalone} == {"smollm2-135m-draft"}


def test_what_is_missing_has_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = "Llama-3.1-8B.linear.heads.safetensors"
    checkpoint = "tokenswift import-heads --checkpoint TokenSwift/TokenSwift-Llama-3.1-8B"
    command = f"{checkpoint} --model {LLAMA} --out {file}"
    assert needs(config()) == [Need("linear heads", file, command)] and heads_place(config()) == file
    with pytest.raises(InputError, match="linear heads: .* is missing, run: tokenswift import-heads"):
        check_needs(config())
    (tmp_path / file).touch()
    assert needs(config()) == [Need("linear heads", file, "")]
    check_needs(config())
    (medusa,) = needs(config("medusa", strategy="medusa"))
    assert "train-heads --kind medusa --num-heads 4 --model" in medusa.command
    small = config("auto", strategy="triforce", draft_model="Llama-3.1-8B.draft")
    (draft,) = needs(small)
    assert draft.command == (
        f"tokenswift train-draft --model {LLAMA} --data pg19 --continued --layers 2 --out Llama-3.1-8B.draft"
    )
    eagle = config("none") | {"eagle": "Llama-3.1-8B.eagle"}
    (drafter,) = needs(eagle)
    assert drafter.command == (
        f"tokenswift train-eagle --model {LLAMA} --data pg19 --continued --out Llama-3.1-8B.eagle"
    )
    assert needs(eagle | {"eagle": "yuhuili/an-eagle"}) == [Need("EAGLE-3 drafter", "yuhuili/an-eagle", "")]
    assert needs(config("auto", strategy="magicdec")) == needs(config("none")) == []
    assert needs(config(model="smollm2-135m")) == [Need("linear heads", "shipped", "")]
    assert heads_place(config(model="smollm2-135m")) == "linear"
    mine = config("mine.safetensors")
    assert needs(mine) == [Need("heads", heads_place(mine), "")]  # given by name: refused where it is read


def test_a_row_whose_heads_are_missing_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_folder: Callable[..., Path]
) -> None:
    """The paper's models are not fetched first; no other model runs without heads, either."""
    from benchmarks.row import measure

    monkeypatch.chdir(tmp_path)
    rows = specs.load("table3").rows("gpu", {"texts": 1})
    paper = next(row for row in rows if row["variant"] == "paper, exact rule")
    with pytest.raises(InputError, match=r"linear heads: Yarn.* is missing, run: tokenswift import-heads"):
        measure("decode", paper)
    with pytest.raises(
        InputError, match=r"linear heads: .* is missing, run: tokenswift train-heads --kind linear"
    ):
        measure("decode", {**paper, "model": str(tiny_folder()), "dtype": "float32"})


@pytest.mark.parametrize(
    "model, weights, token",
    [
        (LLAMA, 15.0, 131_072),  # the paper's Table 2: 15.0 GB; 2 · 32 layers · 8 heads · 128 · 2 bytes
        ("NousResearch/Yarn-Llama-2-7b-128k", 13.2, 524_288),
        ("Qwen/Qwen2.5-1.5B", 3.09, 28_672),
        ("Qwen/Qwen2.5-14B", 27.98, 196_608),
    ],
)
def test_sizes_of_the_papers_models(model: str, weights: float, token: int) -> None:
    """By hand from their published configs; embeddings that are no LM head are not read."""
    sizes, _ = sizes_for(config(model=model))
    assert (
        round(sizes.weight_bytes / 1e9, 2) == pytest.approx(weights, abs=0.05) and sizes.token_bytes == token
    )


def test_what_a_row_takes_at_the_least() -> None:
    """Llama-3.1-8B, 4,096 + 20,000 tokens on an A100: 16.1 GB of weights, three caches and the draft's; plain
    steps read 15 GB and some 14,000 tokens of keys and values, a step of the tree yields 5 tokens at most."""
    options: dict[str, Any] = {"tree": [1, 3, 3, 3], "budget": 4096, "draft": "partial"}
    nbytes, seconds = estimate(config(**options), CARDS["a100"])
    caches = (4096 + 2 * 24_096 + 4096) * 131_072
    assert nbytes == pytest.approx(16.06e9 + caches, rel=1e-3)
    plain = (15.0e9 + 14_096 * 131_072) / 2.039e12
    step = plain + (15.0e9 + 4096 * 131_072) / 2.039e12
    assert seconds == pytest.approx(20_000 * (plain + step / 5), rel=0.05)
    assert estimate(config(strategy="autoregressive"), CARDS["a100"])[1] == pytest.approx(
        40_000 * plain, rel=0.02
    )
    longer, more = estimate({**config(**options), "points": [100_000]}, CARDS["a100"])
    assert longer - nbytes == 160_000 * 131_072 and more > 5 * seconds


def test_what_a_row_of_another_model_takes(tiny_folder: Callable[..., Path]) -> None:
    """By its config.json: weights and caches are counted, more text takes more."""
    short = config("none", str(tiny_folder())) | {"dtype": "float32", "prefill": 10, "points": [20]}
    longer = short | {"points": [40]}
    (few, soon), (more, later) = (estimate(one, CARDS["h100"]) for one in (short, longer))
    sizes, _ = sizes_for(short)
    assert more - few == 40 * sizes.token_bytes and few > sizes.weight_bytes and later > soon > 0
