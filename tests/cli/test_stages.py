"""Progress before the first token: loading, packing and the prompt; on terminals, off them, and in Python."""

from __future__ import annotations

import logging
import re
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Stream, on_a_terminal
from tokenswift.cli.progress import Progress, Stages, mode_of


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
