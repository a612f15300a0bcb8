"""A run that is killed on its way: what its rows say, and the table of them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks import long_run
from benchmarks.long_run import Session, parts_of, with_plain_end, write, write_until
from tests.chats import chat_tokenizer
from tests.conftest import tiny_model
from tokenswift import LLM
from tokenswift.runs.folder import load_whole
from tokenswift.runs.records import RunState
from tokenswift.types import RunError
from tools import summaries

TOKENS = 150


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of a tiny model."""
    llm = LLM.from_model(tiny_model("qwen2", max_position_embeddings=512), chat_tokenizer())
    folder = tmp_path / "run"
    llm.generate("Once upon a time", max_new_tokens=TOKENS, run_dir=folder, temperature=0.7)
    return folder


def test_parts_hold_all_tokens_and_the_time_of_their_steps(run: Path) -> None:
    state = load_whole(run)
    state.steps = [(*step[:-1], 10) for step in state.steps]  # of 10 ms each
    parts = parts_of(state, 60)
    ends = [int(str(row["part"])) for row in parts]
    assert ends[-1] == TOKENS
    assert ends == sorted(ends)
    for row in parts:
        assert row["auto"] == pytest.approx(100 * float(str(row["tokens_a_step"])))


def test_parts_end_with_the_step_that_passes_a_multiple(run: Path) -> None:
    state = load_whole(run)
    state.steps = [(7, *state.steps[0][1:-1], 10)] * 21 + [(3, *state.steps[0][1:-1], 10)]
    assert [row["part"] for row in parts_of(state, 50)] == [56, 105, 150]


def test_a_process_is_killed_at_its_place(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_run, "POLL_SECONDS", 0.01)
    sleeping = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    places = iter([0, 0, 40, 130])
    monkeypatch.setattr(long_run, "journal_tokens", lambda folder: next(places, 131))
    session = write_until(sleeping, run, kill_at=100)
    assert (session.tokens_before, session.tokens_after) == (0, 131)
    assert session.is_killed
    assert session.first_token_seconds > 0


def test_a_process_that_fails_ends_the_benchmark(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_run, "POLL_SECONDS", 0.01)
    failing = [sys.executable, "-S", "-c", "raise SystemExit(3)"]
    with pytest.raises(RunError, match="ended with code 3"):
        write_until(failing, run, kill_at=None)


def test_each_kill_is_followed_by_a_resumption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    asked: list[tuple[str, int | None]] = []
    there = 0

    def process(command: list[str], folder: Path, kill_at: int | None) -> Session:
        nonlocal there
        asked.append((command[3], kill_at))
        before, there = there, kill_at or 90
        return Session(before, there, 1.0, 1000, kill_at is not None)

    monkeypatch.setattr(long_run, "write_until", process)
    monkeypatch.setattr(long_run, "journal_tokens", lambda folder: there)
    monkeypatch.setattr(long_run, "has_run", lambda folder: there > 0)
    options = argparse.Namespace(
        tokens=90, kills=2, model="m", folder=tmp_path, rope_scaling="yarn", seed=1
    )
    sessions = write(options, folder)
    assert asked == [("generate", 30), ("resume", 60), ("resume", None)]
    assert [session.tokens_after for session in sessions] == [30, 60, 90]


def test_the_last_tokens_are_written_anew(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []

    def without_them(command: list[str], **options: object) -> None:
        state = load_whole(run.with_name("copy"))
        kept.append(len(state.tokens))
        assert "autoregressive" in command

    monkeypatch.setattr(long_run.subprocess, "run", without_them)
    options = argparse.Namespace(
        tokens=TOKENS, checked=70, model="m", folder=run.parent, rope_scaling="yarn", seed=1
    )
    whole = load_whole(run).tokens
    assert with_plain_end(options, run) == whole[: kept[0]]
    assert kept[0] <= TOKENS - 70


WHOLE = {
    "tokens": 1500,
    "prompt": 4,
    "auto_seconds": 150.0,
    "kills": [500, 1000],
    "first_token_seconds": [3.0, 90.0, 120.0],
    "peak": 2e9,
    "journal_bytes": 3e6,
    "checked": 100,
    "identical": True,
    "litany": 700,
}


def row_of(**figures: object) -> dict[str, object]:
    """A row of a run."""
    about = {
        "model": "m",
        "book": "b",
        "rope_scaling": "yarn",
        "dtype": "int8",
        "machine": "cpu",
        "commit": "c",
    }
    return {**about, "auto": 10.0, "tokens_a_step": 1.5, "distinct_4": 0.5, **figures}


def test_the_docs_show_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row_of(part=7), row_of(**WHOLE), row_of(part=1000), row_of(part=1500), row_of(**WHOLE)]
    file = tmp_path / "long-run.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(summaries, "LONG_RUN", file)
    table = summaries.long_run()
    assert [cells[0] for cells in table.body] == ["to 1,000", "to 1,500", "**all 1,500**"]
    assert "killed at 500 and 1,000" in table.below
    assert "wrote on 1.5 and 2.0 minutes after" in table.below
    assert "2.0 GB" in table.below


def test_a_run_that_was_not_killed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "long-run.jsonl"
    rows = [row_of(part=1500), row_of(**{**WHOLE, "kills": []})]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(summaries, "LONG_RUN", file)
    assert "The process was not killed" in summaries.long_run().below


def test_a_run_not_yet_measured_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summaries, "LONG_RUN", tmp_path / "none.jsonl")
    assert "python -m benchmarks.long_run" in summaries.long_run().below


def test_an_empty_state_has_no_parts(run: Path) -> None:
    state = RunState(load_whole(run).header)
    assert parts_of(state, 10) == []
