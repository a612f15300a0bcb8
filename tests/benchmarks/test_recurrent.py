"""Files of random weights in the shapes of models with recurrent layers: what they say is what
runs; and the prices of passes over them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import recurrent
from benchmarks.lengths import Speed, Trial, figures
from benchmarks.peers import recurrent_speed
from benchmarks.random_recurrent import SHAPES, write_random
from tests.tiny import tiny_model
from tokenswift import LLM
from tokenswift.models.decoder import NativeTarget
from tokenswift.models.target import make_target
from tools import summaries

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_is_a_model_of_its_sizes(name: str, tmp_path: Path) -> None:
    first = SHAPES[name].attending[0]
    sizes = replace(
        SHAPES[name],
        layers=first + 1,
        attending=(first,),
        hidden=256,
        inner=256,
        vocabulary=64,
    )
    write_random(tmp_path / "model.gguf", sizes)
    target = LLM(tmp_path / "model.gguf", device="cpu", heads="none").target
    assert isinstance(target, NativeTarget)
    recurrence = target.layout.recurrence
    assert recurrence is not None
    assert recurrence.value_heads == sizes.value_heads
    assert target.layers - len(target.windows) == first
    tokens = torch.arange(3, 12)
    hidden = target.forward(tokens, torch.arange(len(tokens)), target.new_cache(16)).hidden
    logits = target.logits(hidden)
    assert logits.isfinite().all()
    assert (logits.argmax(-1) != logits.argmax(-1)[0]).any()


PASSES = {"plain": 20.0, "chain_4": 22.0, "chain_8": 30.0, "tree_8": 31.0, "choice": 0.5}


def test_prices_are_medians_in_plain_passes() -> None:
    slower = {name: ms * 2 for name, ms in PASSES.items()} | {"chain_4": 48.0}
    trials = [Trial(Speed(1, 1, passes=passes), 1.0, 1, "v") for passes in (PASSES, slower)]
    row = recurrent.prices(trials)
    assert (row["plain_ms"], row["choice_ms"]) == (30.0, 0.75)
    assert (row["chain_4"], row["chain_8"], row["tree_8"]) == (1.15, 1.5, 1.55)
    assert recurrent.prices([Trial(Speed(1, 1), 1.0, 1, "v")]) == {}


def test_the_docs_show_the_newest_row_of_a_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = {"model": "m-q4_k", "machine": "cpu", "commit": "c"}
    ours = {**about, "program": "tokenswift", "chain_4": 1.1, "chain_8": 1.4, "tree_8": 1.5}
    rows = [
        {**about, **figures(64, [Trial(Speed(writing, writing), 1.0, 10**9, "1.2 (AVX)")])}
        for writing in (5.0, 7.0)
    ]
    file = tmp_path / "recurrent.jsonl"
    lines = [{**ours, **rows[0]}, {**ours, **rows[1]}, {**rows[0], "program": "llama.cpp"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in lines))
    monkeypatch.setattr(summaries, "RECURRENT", file)
    assert summaries.recurrent().body == [
        ["m", "64", "cpu", "llama.cpp 1.2", "5", "5.0", "", "", "", "1.0"],
        ["m", "64", "cpu", "tokenswift 1.2", "7", "7.0", "1.10", "1.40", "1.50", "1.0"],
    ]
    monkeypatch.setattr(summaries, "RECURRENT", tmp_path / "none.jsonl")
    assert "Not measured yet" in summaries.recurrent().below


def test_drafts_are_priced_on_a_model() -> None:
    target = make_target(tiny_model("qwen3_5"))
    cache = target.new_cache(20)
    target.prefill(list(range(2, 20)), cache)
    prices = recurrent_speed.prices(target, cache, list(range(2, 20)), 2)
    assert list(prices) == ["plain", "chain_4", "chain_8", "tree_8"]
    assert min(prices.values()) > 0
    assert cache.length == 18
