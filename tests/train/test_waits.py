"""Training says how long it will take before it makes anyone wait, and what makes it shorter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import module_time, tiny_model, tiny_tokenizer
from tests.train.test_train import words
from tokenswift.config import SamplingParams
from tokenswift.loader.identity import base_of
from tokenswift.train import collect, selftext
from tokenswift.train.options import DataOptions
from tokenswift.train.pipeline import gather
from tokenswift.train.selftext import Backbone, continuations
from tokenswift.train.store import HiddenStore

ESTIMATE = "the model writes 768 tokens to learn from: {}; fewer take less time: --tokens"


class Clock:
    """A clock that only model passes move: by a second, and a quarter of one for each token of context."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, whole = 0.0, Backbone.hidden

        def hidden(backbone: Backbone, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
            self.now += 1 + (cache.length if cache is not None else 0) / 4
            return whole(backbone, tokens, cache)

        monkeypatch.setattr(Backbone, "hidden", hidden)
        for module in (collect, selftext):
            monkeypatch.setattr(module, "time", module_time(lambda: self.now))


def gathered(folder: Path, lines: list[str], **options: Any) -> HiddenStore:
    model = tiny_model()
    data = DataOptions(
        **{"source": "self", "tokens": 768, "sequence_length": 32, "write_batch": 12, **options}
    )
    return gather(model, tiny_tokenizer(), data, base_of(model, "tiny"), folder, lines.append)


def test_the_model_writes_as_long_as_it_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = Clock(monkeypatch), list[str]()

    def report(line: str) -> None:
        lines.append(line)
        said.append(clock.now)

    said: list[float] = []
    model = tiny_model()
    data = DataOptions("self", tokens=768, sequence_length=32, write_batch=12)
    gather(model, tiny_tokenizer(), data, base_of(model, "tiny"), tmp_path, report)
    assert lines[0] == "measuring how long the model takes to write 768 tokens"
    assert (tmp_path / "states" / "index.json").exists()
    taken = clock.now - said[1]
    assert taken > 120 and lines[1] == ESTIMATE.format(collect.duration(taken))
    for line, at in zip(lines[2:-1], said[2:-1], strict=True):  # and the time left is right all the way
        if " left" in line:
            assert line.endswith(f", {collect.duration(clock.now - at)} left)"), (line, clock.now - at)


def test_a_finished_store_is_not_waited_for(tmp_path: Path) -> None:
    lines: list[str] = []
    gathered(tmp_path, lines)
    assert any(line.startswith("the model writes") for line in lines)
    lines.clear()
    gathered(tmp_path, lines)
    assert [line.partition(":")[0] for line in lines] == ["hidden states"]


def test_measuring_changes_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered(tmp_path / "one", [])
    monkeypatch.setattr(collect, "pace_of", lambda *given: selftext.Pace(1, 1, 1))
    gathered(tmp_path / "two", [])
    for name in ("tokens.bin", "hidden.bin"):
        assert (tmp_path / "one/states" / name).read_bytes() == (tmp_path / "two/states" / name).read_bytes()


def test_the_first_batch_of_a_text_tells_the_rest(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(words(800))
    lines: list[str] = []
    gathered(tmp_path, lines, source=str(tmp_path / "t.txt"))
    assert lines[0].startswith("hidden states: 96 of 768 tokens (")
    assert lines[0].endswith(" left); fewer take less time: --tokens")
    assert not any("--tokens" in line for line in lines[1:])


@pytest.mark.parametrize("new", [1, 2, 6, 7, 40])
def test_the_pace_of_a_batch(new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model = Clock(monkeypatch), tiny_model()
    backbone, prompts = Backbone(model), torch.tensor([[5, 6, 7], [8, 9, 10]])
    pace = selftext.pace_of(backbone, prompts, new, SamplingParams())
    begun = clock.now
    for done, _ in enumerate(continuations(backbone, prompts, new, SamplingParams(), 0), 1):
        if new > 6:
            assert pace.seconds(done) == pytest.approx(clock.now - begun)
    assert pace.seconds(0) == 0 and pace.seconds(new) == pytest.approx(clock.now - begun, rel=0.6)


def test_times_in_words() -> None:
    said = [collect.duration(seconds) for seconds in (59, 61, 53 * 60, 3 * 3600)]
    assert said == ["less than a minute", "about 1 min", "about 53 min", "about 3.0 hours"]
