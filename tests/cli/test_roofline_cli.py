"""``tokenswift roofline``: what it says and writes, from a config.json alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests import eagles
from tests.cli.conftest import Call
from tokenswift import LLM
from tokenswift.cli import roofline
from tokenswift.roofline import machine, timer
from tokenswift.roofline import reckoned as rows
from tokenswift.roofline.cards import CARDS
from tokenswift.roofline.passes import floor, steps
from tokenswift.roofline.reckoned import reckoned
from tokenswift.roofline.sizes import sizes_of

SIZES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A model's folder with nothing but its config.json."""
    AutoConfig.for_model("llama", **SIZES).save_pretrained(tmp_path / "config")
    return tmp_path / "config"


def test_the_record(cli: Call, config: Path) -> None:
    """Every number is that of the library; lengths go as far as the model."""
    done = cli("roofline", "--model", config, "--gpu", "h200", "--json", "-", "--quiet")
    assert done.code == 0 and done.err == "" and done.out.count("\n") == 1
    made = json.loads(done.out)
    card = CARDS["h200"]
    sizes = sizes_of(str(config), machine=card)
    drafts = sizes.in_few_bits("q8_0")
    assert list(made) == ["model", "sizes", "drafts", "rows", "budget", "machine", "steps", "cuda"]
    assert made["model"] == str(config) and (made["rows"], made["budget"]) == (5, 1024)
    assert made["drafts"]["weights"] == dict(drafts.weights) == {"q8_0": sizes.weights["bfloat16"]}
    assert made["sizes"]["weights"] == dict(sizes.weights)
    assert made["sizes"]["limit"] == 8192 and made["sizes"]["windows"] == [0, 0, 0]
    rate = card.arithmetic["bfloat16"]
    assert made["machine"] == {
        "name": card.name,
        "source": card.source,
        "bandwidth": card.bandwidth,
        "arithmetic": [
            {"part": "products", "stored": "bfloat16", "plain": rate, "verify": rate, "draft": None},
            {"part": "products", "stored": "q8_0", "plain": None, "verify": None, "draft": rate},
            {"part": "attention", "plain": rate, "verify": rate, "draft": rate},
        ],
    }
    assert [line["context"] for line in made["steps"]] == [1024, 2048, 4096, 8192]
    for line in made["steps"]:
        found = steps(sizes, drafts, card, line["context"], 5, 1024, [2.0, 3.0, 4.0])
        for name, part in (("plain", found.plain), ("verify", found.verify), ("draft", found.draft)):
            assert line[name] == {
                "nbytes": part.nbytes,
                "operations": part.operations,
                "products": part.products,
                "attention": part.attention,
                "seconds": part.seconds,
            }
        assert [tuple(s.values()) for s in line["speedups"]] == [(a, *s) for a, s in found.speedups.items()]
        assert list(line["speedups"][0]) == ["accepted", "drafts_by_passes", "drafts_for_nothing"]
    assert [(line["weights"], line["rows"]) for line in made["cuda"]] == [
        (weights, rows) for weights in ("bfloat16", "q8_0", "q4_0") for rows in (1, 8, 16, 64)
    ]
    line, found = made["cuda"][1], reckoned(sizes, card, 8, 4096)
    assert found is not None and line["context"] == 4096 and line["measured"] is None
    assert line["floor"] == floor(sizes, card, 8, 4096).seconds and line["reckoned"] == asdict(found)


def test_a_measurement_beside_what_is_reckoned(
    cli: Call, config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Floor, reckoning and measurement are columns of one table, for 1, 8, 16 and 64 rows."""
    sizes = sizes_of(str(config), machine=CARDS["h100"])
    row = {"what": "pass", "graphs": True, "context": 4096, "rows": 8, "ms": 12.34}
    row |= {"weight_bytes": sizes.weight_bytes, "token_bytes": sizes.token_bytes}
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    (tmp_path / "h100").mkdir()
    (tmp_path / "h100" / "card.jsonl").write_text(json.dumps(row))
    lines = cli("roofline", "--model", config, "--gpu", "h100").out.splitlines()
    head = next(line for line in lines if line.startswith("weights"))
    assert head.split()[:5] == ["weights", "context", "rows", "floor", "reckoned"]
    assert head.endswith("measured")
    found = [line.split() for line in lines if line.startswith(("bfloat16  ", "q8_0  ", "q4_0  "))][-12:]
    assert [line[2] for line in found] == ["1", "8", "16", "64"] * 3
    assert [line[-1] for line in found] == ["measured", "12.3", *["measured"] * 10]


def test_the_text(cli: Call, config: Path) -> None:
    argv = ("--gpu", "a100", "--length", "1000,8192", "--rows", "3", "--accepted", "1.5", "--budget", "99")
    done = cli("roofline", "--model", config, *argv, "--json", "r.json")
    assert done.code == 0 and done.err == f"reading {config}\n" and done.files == ["r.json"]
    assert "NVIDIA A100 SXM 80 GB, published by NVIDIA: A100 data sheet: 2,039.0 GB/s of memory" in done.out
    assert "drafts by 2 passes over 99 tokens" in done.out and "float32" not in done.out
    head, _, first, last = next(
        lines[at : at + 4]
        for lines in [done.out.splitlines()]
        for at, line in enumerate(lines)
        if line.startswith("context")
    )
    assert head.split() == ["context", "1", "row", "3", "rows", "draft", "tokens/s", "1.5", "tokens"]
    assert first.split()[0] == "1,000" and last.split()[0] == "8,192"
    plain = floor(sizes_of(str(config), machine=CARDS["a100"]), CARDS["a100"], 1, 8192)
    assert last.split()[1] == f"{1000 * plain.seconds:.2f}"
    assert last.split()[4] == f"{1 / plain.seconds:,.1f}"
    assert "to" in last.split()


def test_an_eagle_drafters_passes(cli: Call, tmp_path: Path) -> None:
    """By hand: the layer and the head of 40 tokens in a level, in a step's first pass the features' product
    too, over the drafter's window. Of the files nothing but headers is read."""
    many = {**SIZES, "vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 8}
    AutoConfig.for_model("llama", **many).save_pretrained(tmp_path / "many")
    made = eagles.config(window=64)
    nan = {name: torch.full_like(value, torch.nan) for name, value in eagles.tensors(made).items()}
    maps = {"d2t": eagles.ids(made) - torch.arange(40)}
    folder = eagles.write(tmp_path / "eagle", made, nan, maps, speculators=True)
    argv = ("roofline", "--model", tmp_path / "many", "--gpu", "h100", "--length", "50,4000", "--eagle")
    found = json.loads(cli(*argv, folder, "--json").out)
    layer = 64 * (32 + 2 * 16) + 32 * 32 + 3 * 48 * 32
    assert found["drafts"]["weights"] == {"bfloat16": layer + 40 * 32} and found["budget"] == 64
    assert found["drafts"] == found["eagle"]["level"] and found["drafts"]["windows"] == [64]
    assert found["eagle"]["first"]["weights"] == {"bfloat16": layer + 40 * 32 + 32 * 96}
    assert found["eagle"]["cache_bytes"] == (64 + 512 + 32) * 2 * 2 * 8 * 2 + 64 * 96 * 4
    short, long = found["steps"]
    assert short["draft"]["nbytes"] == 2 * (layer + 40 * 32) + 50 * 64
    assert long["draft"]["nbytes"] == 2 * (layer + 40 * 32) + 64 * 64
    first = long["draft"]["seconds"] + 2 * 32 * 96 / CARDS["h100"].bandwidth
    whole = long["verify"]["seconds"] + first + 3 * long["draft"]["seconds"]
    speedup = long["speedups"][0]
    assert speedup["drafts_by_passes"] == pytest.approx(2 * long["plain"]["seconds"] / whole)
    file = eagles.write_gguf(tmp_path / "eagle.gguf", made, eagles.tensors(made), eagles.ids(made))
    out = cli(*argv, file).out
    assert f"{file}: a pass of it reads 0.000 GB of weights (bfloat16), and a text holds 0.1 MB for it" in out
    refused = cli(*argv, folder, "--budget", "99")
    assert refused.code == 2 and refused.error.startswith("--eagle is '")
    assert refused.error.endswith("and budget 99 is for drafts of the model itself; valid: one of them")
    AutoConfig.for_model("llama", **{**many, "hidden_size": 64}).save_pretrained(tmp_path / "many")
    refused = cli(*argv, folder)
    assert refused.code == 2 and "hidden size 32, the model has 64" in refused.error


def test_on_this_machine(cli: Call, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are in few bits there; what is measured is written down."""
    monkeypatch.setattr(machine, "BLOCK", 1 << 20)
    monkeypatch.setattr(machine, "SECONDS", 0.0)
    argv = ("roofline", "--model", config, "--device", "cpu", "--json", "--length", "100")
    made = json.loads(cli(*argv).out)
    assert made["machine"]["source"] == "measured here" and made["machine"]["name"].startswith("CPU, ")
    assert list(made["sizes"]["weights"]) == ["bfloat16"] and list(made["drafts"]["weights"]) == ["q8_0"]
    stored = [rates.get("stored") for rates in made["machine"]["arithmetic"]]
    assert stored == ["bfloat16", "q8_0", None]
    assert made["machine"]["arithmetic"][0]["draft"] is made["machine"]["arithmetic"][1]["plain"] is None
    assert json.loads(cli(*argv, "--draft-weights", "none").out)["drafts"] == made["sizes"]
    low = (*argv, "--weights", "q4_0", "--rows", "1")
    few = json.loads(cli(*low, "--dtype", "int8").out)
    assert few["sizes"]["keys"] == "int8" and few["sizes"]["dtype"] == "float32"
    earlier = json.loads(cli(*low, "--activations", "int8").out)
    assert {**earlier["sizes"], "keys": "int8", "dtype": "float32"} == few["sizes"]
    assert earlier["sizes"]["keys"] == ""
    assert (
        few["sizes"] == few["drafts"] and few["sizes"]["whole"] and list(few["sizes"]["weights"]) == ["q4_0"]
    )
    assert [s["accepted"] for s in few["steps"][0]["speedups"]] == [1.0]
    shown = cli(*argv[:-3], "--length", "100").out
    assert "GFLOP/s" in shown and "measured here" in shown


def test_measured_beside_the_floor(
    cli: Call, tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is loaded, and its passes stand beside their floors, with the ratio."""
    monkeypatch.setattr(machine, "BLOCK", 1 << 20)
    monkeypatch.setattr(machine, "SECONDS", 0.0)
    monkeypatch.setattr(
        timer, "pass_times", lambda target, context, rows, runs: [1e3 * context + 1e2 * rows] * runs
    )
    argv = ("roofline", "--model", tiny_folder(), "--device", "cpu", "--measure", "--rows", "3")
    done = cli(*argv, "--length", "50,200", "--json", "r.json")
    assert done.code == 0
    made = json.loads(Path("r.json").read_text())
    assert [line["measured"] for line in made["steps"]] == [
        {"plain": n + 0.1, "verify": n + 0.3} for n in (50, 200)
    ]
    line = made["steps"][1]
    assert f"{200_100:.0f} ({200.1 / line['plain']['seconds']:.2f})" in done.out
    assert f"{200_300:.0f} ({200.3 / line['verify']['seconds']:.2f})" in done.out
    assert "measured (over floor)" in done.out
    refused = cli("roofline", "--model", tiny_folder(), "--gpu", "h100", "--measure")
    assert refused.code == 2 and "--gpu is 'h100', and measure is for this machine" in refused.error


def test_a_pass_that_is_measured(tiny_folder: Callable[..., Path]) -> None:
    """Rows over a text of the length, with logits of all of them."""
    seen: list[tuple[int, int, int]] = []
    target = LLM(tiny_folder(), device="cpu", heads="none").target
    run, project = target.forward, target.project
    target.forward = lambda tokens, at, cache, parents=None: (  # type: ignore[method-assign]
        seen.append((len(tokens), cache.length, int(at[-1]))) or run(tokens, at, cache, parents)
    )
    target.project = lambda normed, rows=None: (  # type: ignore[method-assign]
        seen.append((len(normed), 0, 0)) or project(normed, rows)
    )
    found = timer.pass_times(target, 40, 3, roofline.RUNS)
    assert len(found) == roofline.RUNS and min(found) > 0
    assert seen == [(3, 40, 42), (3, 0, 0)] * (roofline.RUNS + 1)


def test_lengths(cli: Call, config: Path, tmp_path: Path) -> None:
    """As far as the model's positions, YaRN's included; a model of fewer has one line."""

    def contexts(*argv: object, model: Path = config) -> list[int]:
        done = cli("roofline", "--model", model, "--gpu", "4090", "--json", *argv)
        return [line["context"] for line in json.loads(done.out)["steps"]]

    assert contexts("--rope-scaling", "yarn")[-1] == 131_072
    assert contexts("--rope-scaling", "yarn:2") == [1024, 2048, 4096, 8192, 16_384]
    assert contexts("--length", "16000", "--rope-scaling", "yarn:2") == [16_000]
    AutoConfig.for_model("llama", **{**SIZES, "max_position_embeddings": 300}).save_pretrained(
        tmp_path / "few"
    )
    assert contexts(model=tmp_path / "few") == [300]
    refused = cli("roofline", "--model", config, "--gpu", "4090", "--length", "8193")
    assert refused.code == 2
    assert refused.error == "--length is 8193; valid: up to 8192 positions, or --rope-scaling yarn"
