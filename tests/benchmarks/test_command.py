"""``python -m benchmarks``: what it lists, what it refuses before anything runs, and a whole round."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import specs, tables
from benchmarks.runner import read_rows
from tests import eagles
from tests.cli.conftest import Call

RUN = ("run", "table5")


@pytest.mark.parametrize(
    "words, line",
    [
        (("runn",), "unknown command runn; valid: list, run, report; did you mean run?"),
        (("run", "table9"), "spec is 'table9'; valid: table1, table2"),
        (("run", "none.toml"), "spec none.toml cannot be read"),
        ((*RUN, "--preset", "huge"), "--preset is 'huge'; valid: smoke, cpu, gpu"),
        ((*RUN, "--set", "strategy=fast"), "strategy is 'fast'; valid: auto, autoregressive, tokenswift"),
        ((*RUN, "--set", "nonsense=1"), "--set: 'nonsense' is not a setting; valid: model"),
        ((*RUN, "--set", "budget=8"), "budget is 8; valid: more than the 16 sink tokens"),
        ((*RUN, "--model", "no-such-model"), "--model is 'no-such-model': unknown name; valid: smollm2-135m"),
        ((*RUN, "--dtype", "float7"), "--dtype is 'float7'; valid: auto, float32"),
        ((*RUN, "--device", "cuda:77"), "--device is 'cuda:77'"),
        ((*RUN, "--heads", "none.safetensors"), "--heads is 'none.safetensors': no such file"),
        ((*RUN, "--threads", "0"), "--threads is 0; valid: an integer of at least 1"),
        ((*RUN, "--prompts", "no-folder"), "--prompts is 'no-folder'; valid: shipped, pg19, or a folder"),
        ((*RUN, "--variant", "Medusa"), "--variant is 'Medusa'; valid: ours, fixed tree"),
        (("report",), "--results is 'bench-results': no such folder"),
    ],
)
def test_one_line_before_anything_runs(bench: Call, words: tuple[str, ...], line: str) -> None:
    done = bench(*words)
    assert done.code == 2 and done.error.startswith(line), done.err
    assert done.out == "" and done.files == []


def test_pg19_without_the_hub(bench: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = bench(*RUN, "--prompts", "pg19")
    assert done.code == 2 and done.files == []
    assert done.error == (
        "--prompts is 'pg19', which cannot be had (HF_HUB_OFFLINE is set); valid here: shipped, or a folder "
        "with .txt files"
    )


def test_the_list(bench: Call) -> None:
    shown = bench("list").out
    assert "\ntable7        Shapes of the tree" in shown and "rows of table15" in shown
    found = {entry["name"]: entry for entry in json.loads(bench("list", "--json").out)}
    assert len(found) == 40 and found["table7"]["rows"]["smoke"] == 3


def test_measured_and_reported(bench: Call, tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """A table of a tiny model, its report, and nothing measured twice."""
    words = (
        *RUN,
        "--model",
        tiny_folder(),
        "--set",
        "prefill=40",
        "--set",
        "points=24",
        "--set",
        "budget=32",
    )
    there = bench(*words, "--dry-run")
    assert (
        there.code == 0
        and there.out.count("to do  table5: ours, fixed tree, cache") == 3
        and there.files == []
    )
    done = bench(*words)
    assert done.code == 0 and "3 rows measured, 0 were there: bench-results" in done.err, done.err
    assert "[1/3] table5: ours, fixed tree, cache full, text 1, seed 0: done" in done.err
    assert "0 rows measured, 3 were there" in bench(*words).err
    assert bench(*words, "--dry-run").out.count("there  table5") == 3
    made = bench("report", "--title", "Tiny")
    assert made.out.split() == ["bench-results/report.md", "bench-results/report.html"]
    assert {"table5-smoke.svg", "table5-smoke.png", "report.md", "report.html"} <= set(made.files)
    text = (Path.cwd() / "bench-results" / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# Tiny\n") and text.count("| 24 |") == 3 and text.count("| yes |") == 3


def test_what_does_not_fit_is_left_out(bench: Call, tiny_folder: Callable[..., Path]) -> None:
    """A tiny model has no heads of kind medusa: a line says so, the other rows are measured."""
    words = ("run", "table3", "--model", tiny_folder(), "--set", "points=8", "--set", "prefill=20")
    done = bench(*words, "--set", "strategy=medusa")
    assert done.code == 0 and "left out: strategy medusa needs heads" in done.err
    assert "left out: linear heads: " in done.err
    assert (
        ".linear.heads.safetensors is missing, run: tokenswift train-heads --kind linear --model" in done.err
    )
    assert "0 rows measured, 0 were there, 10 left out" in done.err


def test_a_row_of_an_eagle_drafter(bench: Call, tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Measured with the drafter that is given, and named after it; one that is not there is refused."""
    made = eagles.config(vocab=260, feature_layers=(0, 1, 2))
    layers: Any = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": made.feature_layers}}
    maps = {"d2t": eagles.ids(made) - torch.arange(40)}
    folder = eagles.write(tmp_path / "eagle", made, eagles.tensors(made), maps, **layers)
    words = ("run", "table3", "--model", tiny_folder(), "--variant", "auto, EAGLE-3")
    words = (*words, "--set", "points=8", "--set", "prefill=20")
    missing = bench(*words)
    assert missing.code == 0 and ".eagle is missing, run: tokenswift train-eagle --model" in missing.err
    done = bench(*words, "--set", f"eagle={folder}")
    assert done.code == 0, done.err
    (row,) = read_rows(Path("bench-results"))
    assert row["eagle"]["name"] == "eagle" and len(row["eagle"]["weights"]) == 32 and row["identical"]
    assert row["config"]["eagle"].startswith("eagle (") and row["heads"] is None
    assert row["drafts"].endswith("EAGLE-3 drafter eagle")
    (group,) = tables.groups(specs.load("table3"), [row])
    assert tables.of_group(specs.load("table3"), group).body[0][-1] == "EAGLE-3 drafter eagle"
    refused = bench(*words, "--set", "eagle=no/such/place")
    assert refused.code == 2 and "eagle is 'no/such/place': no such folder or file" in refused.error


def test_ahead_of_a_card(bench: Call) -> None:
    """Every row of Tables 3 and 4 names its heads or the command for them, memory and time; a row whose heads
    are there is to do."""
    words = ("run", "table3", "table4", "--preset", "gpu", "--set", "texts=1", "--dry-run")
    (Path.cwd() / "Llama-3.1-8B.linear.heads.safetensors").touch()
    done = bench(*words)
    lines = done.out.splitlines()
    assert done.code == 0 and len(lines) == 10 * 2 * 3 + 4 * 3, done.err
    for line in lines:
        drafts = "MagicDec" not in line or "standalone" in line
        assert not drafts or "heads: " in line or "draft model: " in line or "EAGLE-3 drafter: " in line, line
        assert ("unfit" in line) is ("is missing, run: tokenswift " in line) and " GB and " in line, line
        assert " hours on NVIDIA A100 SXM 80 GB  {" in line
    llama = [
        line
        for line in lines
        if "model meta-llama/Llama-3.1-8B, text 1" in line and "paper, exact rule" in line
    ]
    assert len(llama) == 3 and all(line.startswith("to do") for line in llama)
    command = (
        "tokenswift import-heads --checkpoint TokenSwift/TokenSwift-Yarn-Llama-2-7b-128k --model "
        "NousResearch/Yarn-Llama-2-7b-128k --out Yarn-Llama-2-7b-128k.linear.heads.safetensors"
    )
    assert sum(command in line for line in lines) == 6  # two rules, three prefills
    assert "--card is 'b200'; valid: h100" in bench(*words, "--card", "b200").error
