"""Progress before the first token: loading, packing and the prompt; on terminals, off them, and in Python."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Stream, on_a_terminal
from tests.conftest import tiny_model, tiny_tokenizer
from tokenswift import LLM
from tokenswift.cli.progress import Progress, Stages, mode_of
from tokenswift.kv.select import OBSERVED
from tokenswift.models.decoder import PREFILL_CHUNK
from tokenswift.models.generic import GenericTarget


def stages_on(monkeypatch: pytest.MonkeyPatch, terminal: bool, quiet: bool = False) -> tuple[Stages, Stream]:
    stream = Stream(terminal)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        return Stages(quiet), stream


def test_a_live_line_with_the_time_left(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    stages, stream = stages_on(monkeypatch, terminal=True)
    stages("prompt", 0, 6120)
    clock[0] += 4
    stages("prompt", 1024, 6120)
    assert re.sub("\x1b\\[[0-9;]*m|[━╸╺]", "", stream.text) == (
        "\r\x1b[2K prefill: 0 of 6,120 tokens, ETA ?\r\x1b[2K prefill: 1,024 of 6,120 tokens, ETA 0:20"
    )
    bars = [line.count("━") + line.count("╸") + line.count("╺") for line in stream.text.split("\r")[1:]]
    assert bars == [16, 16]
    stages("prompt", 6120, 6120)
    assert stream.text.endswith("\r\x1b[K")
    ended = stream.text
    stages.end()
    assert stream.text == ended


def test_a_live_line_moves_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the beginning, and while a stage takes long; it is gone at the end, and before a log line."""
    monkeypatch.setattr("tokenswift.cli.progress.LIVE_SECONDS", 0.01)
    stages, stream = stages_on(monkeypatch, terminal=True)

    def shows(words: str) -> None:
        seen = len(stream.text)
        for _ in range(1000):
            if words in stream.text[seen:]:
                return
            time.sleep(0.01)
        pytest.fail(f"{words} was not shown again: {stream.text[-200:]}")

    with stages:
        shows("working, 0 s")
        stages("load", 3, 9)
        shows("loading: 3 of 9 tensors")
        shows("loading: 3 of 9 tensors")
        logging.getLogger("tokenswift").warning("a line")
    assert stream.text.endswith("\r\x1b[K")
    ended = stream.text
    time.sleep(0.05)
    assert stream.text == ended


def test_plain_lines_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    stages, stream = stages_on(monkeypatch, terminal=False)
    for done in range(0, 31):
        stages("fetch", done * 3_000_000, 93_000_000)
        clock[0] += 1
    assert stream.text.splitlines() == [
        "fetching: 30 of 93 MB, ETA 0:21",
        "fetching: 60 of 93 MB, ETA 0:11",
        "fetching: 90 of 93 MB, ETA 0:01",
    ]
    stages("load", 0, 9)  # a stage that ends within ten seconds says nothing
    stages("load", 9, 9)
    assert stream.text.count("\n") == 3 and "\x1b" not in stream.text


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_stages(monkeypatch: pytest.MonkeyPatch, clock: list[float], terminal: bool) -> None:
    stages, stream = stages_on(monkeypatch, terminal, quiet=True)
    for done in range(5):
        stages("pack", done, 5)
        clock[0] += 20
    assert stream.text == ""


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("NO_COLOR", "1")])
def test_no_escape_codes(monkeypatch: pytest.MonkeyPatch, clock: list[float], name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    both = Stream(True), Stream(True)
    assert mode_of(*both) == "none" and mode_of(Stream(True), Stream(False)) == "plain"  # type: ignore[arg-type]
    stages, stream = stages_on(monkeypatch, terminal=True)
    for done in range(40):
        stages("prompt", done, 40)
        clock[0] += 1
    assert stream.text.count("\n") == 3 and "\x1b" not in stream.text and "\r" not in stream.text
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", both[0])
        patch.setattr(sys, "stdout", both[1])
        progress = Progress(total=100)
    progress.stages("prompt", 1, 2)
    progress.end()
    assert "\x1b" not in both[0].text


def test_the_library_tells_python(tiny_folder: Callable[..., Path]) -> None:
    told: list[tuple[str, int, int]] = []
    folder = tiny_folder(max_position_embeddings=4096)
    llm = LLM(folder, device="cpu", on_progress=lambda *stage: told.append(stage))
    stages = [stage for stage, _, _ in told]
    assert sorted(set(stages)) == ["load", "pack"] and stages == sorted(stages)
    assert told[0][1] == 0 and all(done <= total for _, done, total in told)
    assert [told[i] for i in (stages.index("pack") - 1, -1)] == [
        ("load", told[0][2], told[0][2]),
        ("pack", 2, 2),
    ]
    told.clear()
    prompt = [5] * (2 * PREFILL_CHUNK + 4)
    llm.generate(prompt, 1, on_progress=lambda *stage: told.append(stage))
    total = len(prompt) - 1
    assert told == [("prompt", done, total) for done in (0, PREFILL_CHUNK, total - OBSERVED, total)]


def test_generic_models_tell_too() -> None:
    told: list[int] = []
    model = tiny_model("llama")
    model.config.hidden_act = "relu"  # says no more than that the native decoder does not fit
    llm = LLM.from_model(model, tiny_tokenizer())
    assert isinstance(llm.target, GenericTarget)
    llm.generate([5] * 100, 1, on_progress=lambda stage, done, total: told.append(done))
    assert told[0] == 0 and told[-1] == 99


@pytest.mark.parametrize("term", ["xterm", pytest.param("dumb", marks=pytest.mark.slow)])
def test_on_a_terminal_of_its_own(tiny: Path, term: str) -> None:
    """Standard error on a terminal: live lines for the prompt, gone at the end; none for a dumb one."""
    argv = ["generate", "hello there", "--model", str(tiny), "--max-new-tokens", "4", "--raw", "--ignore-eos"]
    done = on_a_terminal(*argv, streams=(2,), term=term)
    text = done.screen.decode()
    assert done.code == 0 and text.startswith(f"loading {tiny}\n")
    assert ("prefill: 0 of 10 tokens" in text) == ("\x1b" in text) == (term == "xterm")
    assert b"\x1b" not in done.out
    rest = re.sub(r"\r\x1b\[2K[^\r\n]*(?=\r)|\r\x1b\[K", "", text)  # what a live line covers is gone
    assert "\x1b" not in rest and "4 tokens in " in rest.splitlines()[-1]
